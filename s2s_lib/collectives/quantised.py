"""An all_reduce that sends codes of 8 or 4 bits: for sums that may be a little wrong.

DiLoCo's outer gradients are such sums: INTELLECT-1 sends them as int8 round a ring
(arXiv:2412.01152), Streaming DiLoCo as numbers of 4 bits (arXiv:2501.18512). The ring is that of
`ring.py`, and only what travels differs:

    reduce-scatter   decode what the left neighbour sent, add the own part, encode the new sum
    all-gather       the owner of a complete piece encodes it once; its bytes go round unchanged

All ranks, the owner too, decode the same bytes of each piece, so the results are equal bit for
bit. Each rank encodes each piece exactly once, W-1 of them as sums on their way and its own when
complete. So an element is rounded W times, once by each rank, and what a rank's roundings have
left out fits in one tensor of the input's shape. Added to that rank's input of the next call it
is not lost but late: error feedback (Seide et al., 2014; Karimireddy et al., arXiv:1901.09847).

The grown-ups differ in the codes: INTELLECT-1 spreads 256 levels over six standard deviations
either side of the mean, Streaming DiLoCo's 4 bits are a sign and an exponent.
"""

import torch

from s2s_lib.collectives.codes import LEVELS, Codes
from s2s_lib.collectives.contract import Result, check, flat, refuse_gradient
from s2s_lib.collectives.pieces import even_cuts, piece, scratch
from s2s_lib.collectives.reduction import reduction_of
from s2s_lib.ranks.group import Group
from s2s_lib.ranks.wire import Operation


def quantised_all_reduce(
    tensor,
    group: Group,
    op: str = "avg",
    bits: int = 8,
    residual: torch.Tensor | None = None,
    out=None,
    label: str = "",
):
    """Every rank gets nearly the average (or sum) of all ranks' tensors, bit for bit the same.

    Sums are taken in float32 (of float64 in float64) and sent as codes of `bits` 8 or 4, with a
    float32 scale for each block of 256 (`codes.py`, which says what becomes of inf, nan and values
    at the ends of float32's range).

    Bytes: the flat tensor is cut into W pieces as even as possible; one of n elements takes
    ceil(n * bits / 8) + 4 * ceil(n / 256). Rank r sends all of them but piece r, then all but
    piece r + 1, in 2(W-1) messages: 2(W-1)/W of a quarter (an eighth) of float32's bytes, and the
    scales.

    Error: an element of the sum is off by at most half a scale for each of its W roundings. If
    nobody's |x| is above m in an element's block, the k-th partial sum is at most k m, and so the
    error is at most m W(W+1) / (4 levels), with 127 or 7 levels; that of the average is
    m (W+1) / (4 levels). To these come the roundings of float32, and of the result to its dtype.

    `residual` is this rank's own, zeros at first, kept by the caller from call to call: of the
    tensor's shape, float32 (float64 for a float64 tensor). It is added to what this rank brings,
    and changed in place to what this call's codes have left out on this rank, in units of the
    sum for avg too. Over any number of calls, the sums returned (W times the averages) and all
    ranks' residuals at the end add up to the true sums, but for those roundings. A call that
    raises leaves it as it was. Where a result is nan it may be nan too, and has to be zeroed.
    """
    check(tensor, group)
    refuse_gradient(tensor, "quantised_all_reduce", "all_reduce")
    check_numbers(tensor, op, bits)
    codes = Codes(bits, reduction_of(op, tensor.dtype, group.size).dtype)
    old = left_out = None
    if residual is not None:
        check_residual(residual, tensor, codes.dtype)
        old = flat(residual)
        left_out = torch.empty_like(old)
    x = flat(tensor)
    result = Result(out, tensor.shape, tensor)
    detail = (op, f"{bits} bits", *([label] if label else []))
    with Operation("quantised_all_reduce", group, tensor.shape, tensor.dtype, detail) as operation:
        run(operation, x, result.flat, codes, op, old, left_out)
    if residual is not None:
        with torch.no_grad():
            residual.copy_(left_out.view(residual.shape))
    return result.done()


def run(operation, x, out, codes, op, old, left_out):
    rank, size = operation.group.rank, operation.group.size
    cuts = even_cuts(x.numel(), size)
    # All receives are asked for first: a message that nobody expects yet has to wait.
    sums = ask(operation, codes, cuts, rank - 2, 0)
    pieces = ask(operation, codes, cuts, rank - 1, size)
    data = add_up(operation, x, codes, cuts, sums, old, left_out)
    share(operation, data, out, codes, cuts, pieces, divisor=size if op == "avg" else 1)


def ask(operation, codes, cuts, first, first_step):
    """Ask the left neighbour for the codes of W-1 pieces: `first`, the one before it, and so on."""
    rank, size = operation.group.rank, operation.group.size
    arrivals = []
    for step in range(size - 1):
        index = (first - step) % size
        nbytes = codes.nbytes(cuts[index + 1] - cuts[index])
        data = scratch(first_step + step, nbytes, torch.uint8)
        arrivals.append(operation.receive(data, (rank - 1) % size, first_step + step))
    return arrivals


def add_up(operation, x, codes, cuts, arrivals, old, left_out):
    """Every piece once round the ring; returns the codes of this rank's own, complete."""
    rank, size = operation.group.rank, operation.group.size
    for step in range(size):
        index = (rank - 1 - step) % size
        total = piece(x, cuts, index).to(codes.dtype)
        if old is not None:
            total = total + piece(old, cuts, index)
        if step > 0:
            total = total + codes.decode(arrivals[step - 1].wait(), total.numel())
        data = codes.encode(total)
        if step < size - 1:
            operation.send(data, (rank + 1) % size, step)
        if left_out is not None:
            sent = codes.decode(data, total.numel())
            torch.sub(total, sent, out=piece(left_out, cuts, index))
    return data


def share(operation, data, out, codes, cuts, arrivals, divisor):
    """The codes of every complete piece once round the ring, and their numbers into `out`."""
    rank, size = operation.group.rank, operation.group.size
    for step in range(size):
        if step > 0:
            data = arrivals[step - 1].wait()
        if step < size - 1:
            operation.send(data, (rank + 1) % size, size + step)
        mine = piece(out, cuts, (rank - step) % size)
        mine.copy_(codes.decode(data, mine.numel()).div_(divisor))


def check_numbers(tensor, op, bits):
    dtype = tensor.dtype
    if not dtype.is_floating_point:
        way_out = "torch.view_as_real(tensor)" if dtype.is_complex else "tensor.float()"
        raise TypeError(
            f"codes stand for real numbers that may be rounded, got {dtype}: pass {way_out}, "
            "or use all_reduce, which is exact"
        )
    if op not in ("sum", "avg"):
        raise ValueError(f"no quantised reduction {op!r}: choose sum or avg, or use all_reduce")
    if type(bits) is not int or bits not in LEVELS:
        raise ValueError(f"no codes of {bits!r} bits: choose {' or '.join(map(str, LEVELS))}")


def check_residual(residual, tensor, dtype):
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual is a tensor that is kept from call to call, got {residual!r}")
    if residual.shape != tensor.shape or residual.dtype is not dtype or not residual.is_cpu:
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype} on {residual.device}, for this "
            f"tensor it must be {tuple(tensor.shape)} {dtype} on cpu: "
            f"torch.zeros_like(tensor, dtype={dtype})"
        )
