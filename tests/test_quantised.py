"""The quantised all_reduce: the same bits on all ranks, errors within the bound, nothing lost.

`ring` below does the same in one process, block by block with one number a code, and the results
and residuals are compared with it bit for bit: a wrong neighbour, piece, block, nibble or order of
adding shows there. Encoding a complete piece twice, or an owner that keeps its exact sum, shows as
ranks that differ. A rounding that is forgotten in a residual, or counted twice, shows where sums
and residuals must add up to the truth; a scale that leaves float32's range, where a number comes
out that was never sent; bytes beyond codes and scales, on the bill.
"""

import zlib

import pytest
import torch

from s2s_lib import background, bill, launch, quantised_all_reduce
from s2s_lib.collectives.codes import Codes
from s2s_lib.ranks.wire import ConnectionLost, WaitTimeout

LEVELS = {8: 127, 4: 7}
SHAPES = [(), (1,), (0,), (5,), (7, 3), (1000,), (2, 1777)]


def drawn(*seed, shape, dtype=torch.float32):
    """Normal numbers, another size in every block, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x.view(-1) * sizes(x.numel())).view(shape).to(dtype)


def sizes(numel):
    return 10.0 ** (torch.arange(numel) // 256 % 5 - 2)


def rounded(x, bits):
    """What comes out when the flat `x` is sent once."""
    blocks = []
    for block in x.split(256):
        scale = (block.abs().max() / LEVELS[bits]).float().clamp(min=2.0**-126)
        blocks.append((block / scale).round() * scale.to(x.dtype))
    return torch.cat(blocks)


def ring(tensors, bits, op, residuals=None):
    """The result of all, and everyone's new residual, in one process."""
    size, like = len(tensors), tensors[0]
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = [x.reshape(-1).to(wide) for x in tensors]
    if residuals is not None:
        rows = [x + r.reshape(-1) for x, r in zip(rows, residuals, strict=True)]
    result, left = torch.empty_like(rows[0]), [torch.empty_like(x) for x in rows]
    numel = like.numel()
    for place in range(size):
        part = slice(numel * place // size, numel * (place + 1) // size)
        sent = torch.zeros_like(rows[0][part])
        for rank in [(place + 1 + step) % size for step in range(size)]:
            total = rows[rank][part] + sent
            sent = rounded(total, bits) if total.numel() else total
            left[rank][part] = total - sent
        result[part] = sent / (size if op == "avg" else 1)
    return result.view(like.shape).to(like.dtype), [x.view(like.shape) for x in left]


def same(got, expected, *what):
    """Equal bit for bit, and of the same shape and dtype; nans are alike."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (what, got, expected)
    assert torch.equal(got.isnan(), expected.isnan()), (what, got, expected)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num()), (what, got, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_results_and_residuals_are_those_of_the_ring_in_one_process(size):
    def work(world):
        for shape in SHAPES:
            for bits, op in ((8, "avg"), (8, "sum"), (4, "avg"), (4, "sum")):
                tensors = [drawn(rank, bits, shape=shape) for rank in range(size)]
                x = tensors[world.rank].clone()
                plain, _ = ring(tensors, bits, op)
                same(quantised_all_reduce(x, world, op, bits), plain, shape, bits, op)
                same(x, tensors[world.rank])
                olds = [drawn(rank, "old", shape=shape) / 50 for rank in range(size)]
                fed, news = ring(tensors, bits, op, olds)
                mine = olds[world.rank].clone()
                # The argument may be where the result goes.
                got = quantised_all_reduce(x, world, op, bits, mine, out=x)
                assert got is x
                same(got, fed, shape, bits, op)
                same(mine, news[world.rank], shape, bits, op)

    launch(work, ranks=size)


def test_any_dtype_strides_and_order_of_a_group():
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]

    def work(world):
        group = world.subgroup([3, 1, 4])
        if group is None:
            return
        for dtype in dtypes:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            for bits in (8, 4):
                tensors = [drawn(rank, shape=(40, 70), dtype=dtype) for rank in range(3)]
                x = tensors[group.rank]
                expected, lefts = ring(tensors, bits, "avg", [torch.zeros(40, 70, dtype=wide)] * 3)
                expected, left = expected.float(), lefts[group.rank]
                lain = x.t().contiguous().t()
                for given in (x, lain, torch.stack((x, x), 2)[..., 1]):
                    # As strided as the tensor itself.
                    residual = torch.zeros_like(given, dtype=wide)
                    out = torch.zeros(70, 40, dtype=dtype).t()
                    got = quantised_all_reduce(given, group, bits=bits, residual=residual, out=out)
                    assert got is out and got.dtype == dtype
                    same(got.float(), expected, dtype, bits)
                    same(residual, left, dtype, bits)

    launch(work, ranks=5)


def test_errors_stay_within_the_bound_and_can_come_near_it():
    def work(world):
        size, shares = world.size, {}
        for bits, levels in LEVELS.items():
            # A piece for each rank, of one block, whose largest number is 1 on all ranks. The
            # others lie just below the middle between zero and the first code of the sum so far,
            # so at every hop all of it is lost.
            order = (world.rank - torch.arange(size) - 1) % size + 1
            worst = (order * 0.4995 / levels)[:, None].repeat(1, 256).double()
            worst[:, 0] = 1
            for name, x in (
                ("worst", worst),
                ("drawn", drawn(world.rank, shape=(size, 256), dtype=torch.float64)),
                ("outlier", drawn(world.rank, shape=(size, 256), dtype=torch.float64) ** 9),
            ):
                values = torch.stack(all_values(x, world))
                m = values.abs().amax(dim=(0, 2))
                for op, divisor in (("sum", 1), ("avg", size)):
                    got = quantised_all_reduce(x, world, op, bits)
                    off = (got - values.sum(0) / divisor).abs().amax(dim=1)
                    bound = m * size * (size + 1) / (4 * levels) / divisor
                    shares[name, bits, op] = (off / bound).max().item()
        return shares

    for size in (1, 2, 4):
        shares = launch(work, ranks=size)[0]
        assert max(shares.values()) <= 1 + 1e-5, shares
        assert all(share > 0.99 for (name, *_), share in shares.items() if name == "worst"), shares


def all_values(x, world):
    from s2s_lib import all_gather

    return list(all_gather(x[None], world))


def test_zeros_stay_zero_constants_exact_and_minus_x_gives_minus_the_result():
    def work(world):
        for bits in (8, 4):
            zeros = torch.zeros(1000)
            assert not quantised_all_reduce(zeros, world, bits=bits, residual=zeros.clone()).any()
            x = drawn(world.rank, shape=(1000,))
            x[::3] = 0
            got = quantised_all_reduce(x, world, bits=bits)
            assert not got[::3].any() and got[1::3].any()
            assert torch.equal(quantised_all_reduce(-x, world, bits=bits), -got)
            for constant in (1.0, -0.1, 3e5, 1e-30):
                for dtype in (torch.float32, torch.float64):
                    x = torch.full((1000,), constant, dtype=dtype)
                    got = quantised_all_reduce(x, world, bits=bits)
                    torch.testing.assert_close(got, x, rtol=3e-7, atol=0)

    launch(work, ranks=3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_number_that_is_not_finite_is_nan_on_all_ranks_and_no_other(bad):
    def work(world):
        for bits in (8, 4):
            for rank in range(world.size):
                x = torch.ones(4000)
                if world.rank == rank:
                    # In the second block of the second piece, and in the short last one.
                    x[1333 + 300] = x[-1] = bad
                residual = torch.zeros(4000)
                got = quantised_all_reduce(x, world, bits=bits, residual=residual)
                nan = torch.zeros(4000, dtype=torch.bool)
                nan[1333 + 256 : 1333 + 512] = nan[2666 + 5 * 256 :] = True
                assert torch.equal(got.isnan(), nan), (bits, rank)
                torch.testing.assert_close(got[~nan], torch.ones(4000)[~nan])
                assert residual[~nan].abs().max() < 1e-6

    launch(work, ranks=3)


def test_at_the_ends_of_float32_values_vanish_or_turn_nan_but_are_never_wrong():
    def work(world):
        for bits, levels in LEVELS.items():
            # Below the smallest scale: off by at most half of it for each rounding.
            for size in (1e-300, 1e-60, 1e-45, 1e-42, 2.0**-127, 3e-38, 1e-36):
                for dtype in (torch.float32, torch.float64):
                    x = drawn(world.rank, shape=(700,), dtype=torch.float64).mul(size).to(dtype)
                    values = torch.stack(all_values(x, world)).double()
                    scale = max(2.0**-126, 2 * values.abs().max().item() / levels)
                    off = quantised_all_reduce(x, world, "sum", bits).double() - values.sum(0)
                    assert off.abs().max() <= world.size * scale / 2 * (1 + 1e-6), (bits, size)
            # Below half of it all become zeros, not codes of a scale that has lost its digits.
            for tiny in (1e-60, 1e-42, 2.0**-128):
                for dtype in (torch.float32, torch.float64):
                    x = torch.full((300,), tiny, dtype=dtype)
                    assert not quantised_all_reduce(x, world, "avg", bits).any()
            # Beyond the largest scale, alone or only as a sum.
            for large in (1e300, 2.0**127 * levels):
                x = torch.full((300,), large, dtype=torch.float64)
                assert quantised_all_reduce(x, world, bits=bits).isnan().all()
            x = torch.full((300,), 2.0**126 * levels, dtype=torch.float64)
            torch.testing.assert_close(quantised_all_reduce(x / 2, world, bits=bits), x / 2)
            # In float32 the sum itself overflows.
            assert quantised_all_reduce(torch.full((300,), 3e38), world, bits=bits).isnan().all()
            x = torch.full((300,), 1e38)
            torch.testing.assert_close(quantised_all_reduce(x, world, bits=bits), x)

    launch(work, ranks=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_and_residuals_add_up_to_the_true_sums(dtype):
    numel = 3 * 512

    def work(world):
        sums = {}
        for bits in (8, 4):
            for op, factor in (("sum", 1), ("avg", world.size)):
                residual, got, given = torch.zeros(numel, dtype=dtype), 0, 0
                for number in range(6):
                    x = drawn(number, world.rank, shape=(numel,), dtype=dtype)
                    given = given + x.double()
                    result = quantised_all_reduce(x, world, op, bits, residual)
                    got = got + factor * result.double()
                sums[bits, op] = got, given, residual.double()
        return sums

    ranks = launch(work, ranks=3)
    for case in ranks[0]:
        got, given, residuals = map(torch.stack, zip(*(r[case] for r in ranks), strict=True))
        lost = (got[0] - given.sum(0)) / sizes(numel)
        off = lost + residuals.sum(0) / sizes(numel)
        assert off.abs().max() < (1e-13 if dtype == torch.float64 else 2e-5), case
        assert lost.abs().max() > 1e-2, case


def test_the_mean_of_many_rounds_is_right_with_a_residual_and_stays_wrong_without():
    def work(world):
        off = {}
        x = drawn(world.rank, shape=(600,), dtype=torch.float64)
        truth = sum(all_values(x, world)) / world.size
        for bits in (8, 4):
            residual, fed, plain = torch.zeros_like(x), 0, 0
            for number in range(1, 65):
                fed = fed + quantised_all_reduce(x, world, "avg", bits, residual)
                plain = plain + quantised_all_reduce(x, world, "avg", bits)
                off[bits, number] = [(s / number - truth).norm().item() for s in (fed, plain)]
        return off

    off = launch(work, ranks=3)[0]
    for bits in (8, 4):
        assert off[bits, 64][0] < off[bits, 1][0] / 30
        assert off[bits, 64][1] == pytest.approx(off[bits, 1][1])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_bytes_sent_are_those_of_codes_and_scales(size):
    def work(world):
        sent = {}
        for numel in (0, 1, 4, 1000, 256 * size * 2, 12_345):
            for bits in (8, 4):
                with bill() as b:
                    quantised_all_reduce(torch.ones(numel), world, bits=bits)
                sent[numel, bits] = b.by("collective").get("quantised_all_reduce", 0), b.messages
        return sent

    for rank, sent in enumerate(launch(work, ranks=size)):
        for (numel, bits), (nbytes, messages) in sent.items():
            pieces = [numel * (i + 1) // size - numel * i // size for i in range(size)]
            costs = [-(-n * bits // 8) + 4 * -(-n // 256) for n in pieces]
            assert nbytes == 2 * sum(costs) - costs[rank] - costs[(rank + 1) % size]
            assert messages == 2 * (size - 1) or numel < size
            if numel % (512 * size) == 0:
                # Where all is even: a quarter or an eighth of float32's bytes, and the scales.
                plain = 2 * (size - 1) * numel * 4 // size
                assert nbytes == plain * bits // 32 + plain // 256


def test_two_at_once_on_lanes_of_their_own_do_not_mix():
    def work(world):
        for number in range(10):
            a, b = (drawn(number, name, world.rank, shape=(3000,)) for name in "ab")
            tasks = [
                background(quantised_all_reduce, x, world, label=label, lane=lane)
                for lane, (x, label) in enumerate(((a, "a"), (b, "b")))
            ]
            front = quantised_all_reduce(a + b, world)
            both = [task.wait() for task in tasks]
            for x, got in zip((a, b, a + b), (*both, front), strict=True):
                assert torch.equal(got, quantised_all_reduce(x, world))

    launch(work, ranks=3)


def test_other_labels_or_bits_do_not_meet_and_a_failed_call_leaves_the_residual():
    def work(world, options):
        residual = torch.full((1000,), 0.01)
        with pytest.raises((WaitTimeout, ConnectionLost), match="quantised_all_reduce number 1"):
            quantised_all_reduce(
                drawn(world.rank, shape=(1000,)), world, residual=residual, **options[world.rank]
            )
        assert torch.equal(residual, torch.full((1000,), 0.01))

    for options in ([{"label": "a"}, {"label": "b"}], [{"bits": 8}, {"bits": 4}]):
        launch(work, options, ranks=2, timeout=0.5)


def test_what_it_cannot_do_is_refused_before_a_byte_moves():
    def work(world):
        x = torch.ones(3)

        def refused(error, words, *args, **kwargs):
            with bill() as b, pytest.raises(error) as caught:
                quantised_all_reduce(*args, **kwargs)
            assert words in str(caught.value), (words, str(caught.value))
            assert b.messages == 0

        for bits in (16, 1, 0, None, "8"):
            refused(ValueError, f"no codes of {bits!r} bits: choose 8 or 4", x, world, bits=bits)
        for op in ("max", "mean", None):
            refused(ValueError, f"no quantised reduction {op!r}: choose sum or avg", x, world, op)
        for dtype in (torch.int64, torch.uint8, torch.bool):
            refused(TypeError, f"got {dtype}: pass tensor.float()", x.to(dtype), world, "sum")
        refused(TypeError, "torch.view_as_real", x.to(torch.complex64), world)
        refused(TypeError, "wrap it", [1.0], world)
        refused(TypeError, "expected a Group", x, [0, 1])
        refused(ValueError, "detach()", x.clone().requires_grad_(), world)
        refused(ValueError, "out is (4,)", x, world, out=torch.ones(4))
        refused(TypeError, "kept from call to call, got True", x, world, residual=True)
        for tensor, residual, right in (
            (x, torch.zeros(4), "(3,) torch.float32"),
            (x, torch.zeros(3, 1), "(3,) torch.float32"),
            (x, torch.zeros(3, dtype=torch.float64), "(3,) torch.float32"),
            (x.double(), torch.zeros(3), "(3,) torch.float64"),
            (x.bfloat16(), torch.zeros(3, dtype=torch.bfloat16), "(3,) torch.float32"),
        ):
            refused(ValueError, f"it must be {right}", tensor, world, residual=residual)
        with torch.no_grad():
            parameter = x.clone().requires_grad_()
            assert torch.equal(quantised_all_reduce(parameter, world), x)

    launch(work, ranks=2)


def test_codes_take_the_bytes_they_say_and_come_back():
    for dtype in (torch.float32, torch.float64):
        for bits, levels in LEVELS.items():
            codes = Codes(bits, dtype)
            for numel in (0, 1, 2, 255, 256, 257, 1025):
                whole = (torch.arange(numel) % (2 * levels + 1) - levels).to(dtype)
                whole[::256] = -levels
                data = codes.encode(whole)
                assert data.dtype == torch.uint8 and data.shape == (codes.nbytes(numel),)
                assert codes.nbytes(numel) == -(-numel * bits // 8) + 4 * -(-numel // 256)
                # Whole numbers in a block that holds the largest: every code there is, exactly.
                same(codes.decode(data, numel), whole, bits, numel)
            large = torch.full((257,), torch.inf, dtype=dtype)
            scales = codes.encode(large)[:8].view(torch.float32)
            assert scales.isnan().all() and codes.decode(codes.encode(large), 257).isnan().all()
