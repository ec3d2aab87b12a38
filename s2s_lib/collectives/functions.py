"""The collectives: what every rank of a group calls together.

They return, and never change their argument; `out=` reuses memory (it may be the argument
itself). Each takes tensors of any shape, strides and dtype that torch has, empty ones included;
a group of one is the same code with nobody to send to. `algorithm` names one of `ALGORITHMS` (the
default chooses, see `choose`). all_reduce, reduce_scatter and all_gather take a
`label`, which keeps a call apart from others of the same shape: ranks
that give different ones do not take each other's bytes. Where the input requires a gradient the
result carries it (autograd.py). All ranks must pass the same shape, dtype and options; where they
do not, the messages find no partner and the launch ends at its timeout with a table, or at once
with `launch(..., check=True)`.
"""

import functools

import torch

from s2s_lib.collectives import direct, doubling, framework, hierarchical, naive, ring, tree
from s2s_lib.collectives.autograd import linear, wants_gradient
from s2s_lib.collectives.choose import choose
from s2s_lib.collectives.contract import (
    Result,
    check,
    check_sizes,
    flat,
    flat_cuts,
    refuse_gradient,
    rows_for,
)
from s2s_lib.collectives.reduction import reduction_of
from s2s_lib.ranks.group import Group, check_group
from s2s_lib.ranks.wire import DTYPE_CODE, DTYPES, Operation

ALGORITHMS = {
    "broadcast": {
        "naive": naive.broadcast,
        "tree": tree.broadcast,
        "torch": framework.broadcast,
    },
    "reduce": {"naive": naive.reduce, "tree": tree.reduce, "torch": framework.reduce},
    "all_reduce": {
        "naive": naive.all_reduce,
        "tree": tree.all_reduce,
        "ring": ring.all_reduce,
        "doubling": doubling.all_reduce,
        "halving_doubling": doubling.halving_all_reduce,
        "direct": direct.all_reduce,
        "direct_ring": direct.ring_all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "torch": framework.all_reduce,
    },
    "reduce_scatter": {
        "naive": naive.reduce_scatter,
        "tree": tree.reduce_scatter,
        "ring": ring.reduce_scatter,
        "doubling": doubling.reduce_scatter,
        "direct": direct.reduce_scatter,
        "torch": framework.reduce_scatter,
    },
    "all_gather": {
        "naive": naive.all_gather,
        "tree": tree.all_gather,
        "ring": ring.all_gather,
        "doubling": doubling.all_gather,
        "direct": direct.all_gather,
        "torch": framework.all_gather,
    },
}


def broadcast(tensor, group: Group, root: int = 0, algorithm: str = "auto", out=None):
    """Every rank gets the root's tensor.

    All pass a tensor of the same shape and dtype; only the root's values count.
    """
    check(tensor, group)
    group.check_member(root, "root")
    if wants_gradient(tensor, out):

        def sum_at_root(grad):
            total = reduce(grad, group, root)
            return torch.zeros_like(grad) if total is None else total

        return linear(tensor, lambda x: broadcast(x, group, root, algorithm), sum_at_root)
    run, name = pick("broadcast", algorithm, tensor.nbytes, group)
    result = Result(out, tensor.shape, tensor)
    if group.rank == root and not (tensor is out and result.dense):
        result.flat.copy_(flat(tensor))
    with Operation("broadcast", group, tensor.shape, tensor.dtype, (root, name)) as operation:
        run(operation, result.flat, root)
    return result.done()


def reduce(tensor, group: Group, root: int = 0, op: str = "sum", algorithm="auto", out=None):
    """The root gets the reduction of all ranks' tensors; the others get None.

    None rather than a half-done sum, so that a decision taken from it fails at once instead of
    differing between ranks: decide on an `all_reduce`.
    """
    check(tensor, group)
    group.check_member(root, "root")
    refuse_gradient(tensor, "reduce", "all_reduce")
    reduction = reduction_of(op, tensor.dtype, group.size)
    run, name = pick("reduce", algorithm, tensor.nbytes, group)
    x = flat(tensor)
    wide = x.to(reduction.dtype)
    result = total = None
    if group.rank == root:
        result = Result(out, tensor.shape, tensor)
        total = torch.empty_like(wide) if reduction.widens else result.flat
    with Operation("reduce", group, tensor.shape, tensor.dtype, (op, root, name)) as operation:
        run(operation, wide, total, root, reduction)
    if result is None:
        return None
    if reduction.widens:
        result.flat.copy_(total)
    return result.done()


def all_reduce(
    tensor, group: Group, op: str = "sum", algorithm: str = "auto", out=None, label: str = ""
):
    """Every rank gets the reduction of all ranks' tensors, bit for bit the same.

    `op` is sum, avg, max, min or prod; 16-bit floats are added in float32 and rounded once. Each
    rank sends 2(W-1)/W of the tensor's bytes by any algorithm but naive, tree and doubling; sums of
    16-bit floats travel as float32 except by direct and direct_ring.
    """
    check(tensor, group)
    if wants_gradient(tensor, out, op):
        return linear(
            tensor,
            run=lambda x: all_reduce(x, group, op, algorithm, label=label),
            transpose=lambda g: all_reduce(g, group, op, algorithm, label=label),
        )
    reduction = reduction_of(op, tensor.dtype, group.size)
    run, name = pick("all_reduce", algorithm, tensor.nbytes, group, reduction.widens)
    x = flat(tensor)
    result = Result(out, tensor.shape, tensor)
    detail = (op, name, label) if label else (op, name)
    with Operation("all_reduce", group, tensor.shape, tensor.dtype, detail) as operation:
        if reduction.widens and name not in ("direct", "direct_ring"):
            wide = x.to(reduction.dtype)
            run(operation, wide, wide, reduction)
            result.flat.copy_(wide)
        else:
            run(operation, x, result.flat, reduction)
    return result.done()


def reduce_scatter(
    tensor, group: Group, op="sum", algorithm="auto", out=None, sizes=None, label: str = ""
):
    """The reduction of all ranks' tensors, of which rank i gets the i-th part along dim 0.

    The parts are equal unless `sizes` lists the rows for each rank. Each rank sends (W-1)/W of
    the tensor's bytes by any algorithm but naive and tree; sums of 16-bit floats travel as float32
    except by direct.
    """
    check(tensor, group)
    rows = rows_for(tensor, group, sizes)
    if wants_gradient(tensor, out, op):

        def gather_parts(grad):
            whole = all_gather(grad, group, sizes=rows, label=label)
            return whole.div_(group.size) if op == "avg" else whole

        return linear(
            tensor,
            lambda x: reduce_scatter(x, group, op, algorithm, sizes=sizes, label=label),
            gather_parts,
        )
    reduction = reduction_of(op, tensor.dtype, group.size)
    run, name = pick("reduce_scatter", algorithm, tensor.nbytes, group, reduction.widens)
    x = flat(tensor)
    cuts = flat_cuts(rows, tensor.shape)
    result = Result(out, (rows[group.rank], *tensor.shape[1:]), tensor)
    detail = (op, name, *([] if sizes is None else [rows]), *([label] if label else []))
    with Operation("reduce_scatter", group, tensor.shape, tensor.dtype, detail) as operation:
        if reduction.widens and name != "direct":
            total = result.flat.new_empty(result.flat.numel(), dtype=reduction.dtype)
            run(operation, x.to(reduction.dtype), total, cuts, reduction)
            result.flat.copy_(total)
        else:
            run(operation, x, result.flat, cuts, reduction)
    return result.done()


def all_gather(
    tensor, group: Group, algorithm: str = "auto", out=None, sizes=None, label: str = ""
):
    """All ranks' tensors, one after the other along dim 0, on every rank.

    They have the same shape unless `sizes` lists the rows of each rank, or is "exchange": then
    the ranks first tell each other (8 bytes each). Numbers (0-dim) make a vector. `out` may be
    of shape (W * n, ...) or (W, n, ...). Each rank sends (W-1)/W of the result's bytes by any
    algorithm but naive and tree.
    """
    check(tensor, group)
    rows = gathered_rows(tensor, group, sizes)
    if wants_gradient(tensor, out):
        return linear(
            tensor,
            run=lambda x: all_gather(x, group, algorithm, sizes=rows, label=label),
            transpose=lambda g: reduce_scatter(g, group, sizes=rows, label=label).view(
                tensor.shape
            ),
        )
    x = flat(tensor)
    shape, other_shape, said, detail, cuts = gathered_layout(tensor.shape, rows)
    result = Result(out, shape, tensor, other_shape)
    run, name = pick("all_gather", algorithm, result.flat.nbytes, group)
    detail = (name, *detail, label) if label else (name, *detail)
    with Operation("all_gather", group, said, tensor.dtype, detail) as operation:
        run(operation, x, result.flat, cuts)
    return result.done()


def gather(tensor, group: Group, root: int = 0, sizes=None):
    """All ranks' tensors, one after the other along dim 0, at the root; None elsewhere.

    `sizes` as for `all_gather`. Every other rank sends its tensor once.
    """
    check(tensor, group)
    group.check_member(root, "root")
    refuse_gradient(tensor, "gather", "all_gather")
    rows = gathered_rows(tensor, group, sizes)
    shape, _, said, detail, cuts = gathered_layout(tensor.shape, rows)
    result = Result(None, shape, tensor) if group.rank == root else None
    with Operation("gather", group, said, tensor.dtype, (root, *detail)) as operation:
        whole = result.flat if result else None
        naive.gather(operation, flat(tensor), whole, cuts, root)
    return result.done() if result else None


def scatter(tensor, group: Group, root: int = 0, sizes=None):
    """Rank i gets the i-th part, along dim 0, of the root's tensor; the others pass None.

    The parts are equal unless the root's `sizes` lists the rows for each. The root sends each
    other rank a header of 80 bytes and its part.
    """
    check_group(group)
    group.check_member(root, "root")
    rows = None
    if group.rank == root:
        check(tensor, group)
        refuse_gradient(tensor, "scatter", "broadcast")
        rows = rows_for(tensor, group, sizes)
    with Operation("scatter", group, detail=(root,)) as operation:
        shape, dtype = tell_shapes(operation, tensor, rows, root)
        result = torch.empty(shape, dtype=dtype, device="cpu")
        whole = cuts = None
        if group.rank == root:
            whole, cuts = flat(tensor), flat_cuts(rows, tensor.shape)
        naive.scatter(operation, whole, result.view(-1), cuts, root)
    return result


def tell_shapes(operation, tensor, rows, root):
    """The root tells every rank the shape and dtype of its part."""
    header = torch.zeros(10, dtype=torch.int64, device="cpu")
    if operation.group.rank != root:
        code, dims, *shape = operation.receive(header, root).wait().tolist()
        return tuple(shape[:dims]), DTYPES[code]
    if tensor.dim() > 8:
        raise ValueError(f"scatter takes at most 8 dims, got {tensor.dim()}; flatten some")
    for rank, count in enumerate(rows):
        shape = (count, *tensor.shape[1:])
        told = [DTYPE_CODE[tensor.dtype], len(shape), *shape]
        if rank == root:
            mine = shape
        else:
            operation.send(torch.tensor(told + [0] * (10 - len(told)), device="cpu"), rank)
    return mine, tensor.dtype


def all_to_all(tensor, group: Group, sizes=None):
    """Part j of every rank's tensor goes to rank j; what comes back lies in rank order.

    Parts are cut along dim 0, equal unless `sizes` lists this rank's rows for each other rank
    (the ranks then first exchange 8 bytes each). Each rank sends all but its own part.
    """
    check(tensor, group)
    rows = coming = rows_for(tensor, group, sizes)
    if sizes is not None:
        coming = tuple(all_to_all(torch.tensor(rows, device="cpu"), group).tolist())
    if wants_gradient(tensor, None):
        return linear(
            tensor,
            run=lambda x: exchange_parts(x, group, rows, coming, sizes is None),
            transpose=lambda g: exchange_parts(g, group, coming, rows, sizes is None),
        )
    return exchange_parts(tensor, group, rows, coming, sizes is None)


def exchange_parts(tensor, group, rows, coming, even):
    """The all_to_all of `rows[j]` rows to rank j and `coming[i]` rows from rank i."""
    result = tensor.new_empty((sum(coming), *tensor.shape[1:]))
    # With uneven parts each rank's shape is its own, and the ranks have told each other the rows.
    said = tensor.shape if even else tensor.shape[1:]
    with Operation("all_to_all", group, said, tensor.dtype) as operation:
        direct.all_to_all(
            operation,
            flat(tensor),
            result.view(-1),
            flat_cuts(rows, tensor.shape),
            flat_cuts(coming, tensor.shape),
        )
    return result


def barrier(group: Group):
    """Return when every rank of the group has come here (2(W-1) messages of one byte)."""
    check_group(group)
    token = torch.zeros(1, dtype=torch.uint8, device="cpu")
    with Operation("barrier", group) as operation:
        tree.all_reduce(operation, token, token, reduction_of("max", token.dtype, group.size))


def gathered_rows(tensor, group, sizes):
    """How many rows each rank brings to a gather."""
    mine = tensor.shape[0] if tensor.dim() else 1
    if sizes is None:
        return (mine,) * group.size
    if isinstance(sizes, str) and sizes == "exchange":
        return tuple(all_gather(torch.tensor([mine], device="cpu"), group).tolist())
    check_sizes(sizes, group)
    if sizes[group.rank] != mine:
        raise ValueError(
            f"sizes says {sizes[group.rank]} rows for rank {group.rank}, its tensor has {mine}"
        )
    return tuple(sizes)


@functools.lru_cache(maxsize=4096)
def gathered_layout(shape, rows):
    """Of a gather of `rows[i]` rows from rank i, on a rank whose tensor has this shape.

    The shape of the result and another that `out` may have, the shape and details that all ranks
    say alike, and the cuts of the flat result.
    """
    whole, cuts = (sum(rows), *shape[1:]), flat_cuts(rows, shape)
    if len(set(rows)) == 1:
        return whole, (len(rows), *shape), shape, (), cuts
    return whole, whole, whole, (rows,), cuts


def pick(collective, algorithm, nbytes, group, narrow=False):
    """The function of an algorithm and its name; ValueError for a name that does not exist."""
    table = ALGORITHMS[collective]
    if algorithm == "auto":
        algorithm = choose(collective, nbytes, group, narrow)
    if not isinstance(algorithm, str) or algorithm not in table:
        raise ValueError(f"{collective} has no algorithm {algorithm!r}: one of {', '.join(table)}")
    return table[algorithm], algorithm
