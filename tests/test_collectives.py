"""Every collective against the plain answer, computed with torch on one process.

Values differ between ranks and between elements, so that a piece in the wrong place shows, and
are small whole numbers (with a tail in the wide dtypes, so that a detour over a narrow one shows):
their sums are exact in any order, and results are compared bit by bit. Tests of rounding use
other values and say which.
"""

import functools
import itertools
import time

import pytest
import torch

from s2s_lib import (
    Cluster,
    Link,
    RankError,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    bill,
    broadcast,
    gather,
    isend,
    launch,
    recv,
    reduce,
    reduce_scatter,
    scatter,
)
from s2s_lib.collectives.functions import ALGORITHMS
from s2s_lib.ranks import connection

WIDE = [torch.float64, torch.int64, torch.complex128]
NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [
    *WIDE,
    *NARROW,
    torch.float32,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
]
OPS = ["sum", "avg", "max", "min", "prod"]
# What torch's gloo does not move at all, or not reduce.
TORCH_CANNOT = [torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]


def allowed(op, dtype):
    if dtype.is_complex:
        return op not in ("max", "min")
    if dtype == torch.bool:
        return op not in ("sum", "avg")
    return op != "avg" or dtype.is_floating_point


def values(rank, shape, dtype=torch.float32, op="sum"):
    """This rank's tensor: others on every rank, and in every place as far as the dtype allows."""
    place = torch.arange(torch.Size(shape).numel()).view(shape)
    if op == "prod":
        return factors(rank, place, dtype)
    number = place * 8 + rank
    if dtype == torch.bool:
        return number * 5 % 7 < 3
    if dtype == torch.int64:
        return number + number * 2**30
    if dtype in WIDE:
        number = number + number.double() / 2**30
        return torch.complex(number, number * 7 % 31) if dtype.is_complex else number
    span = {1: 16 if dtype.is_floating_point else 120, 2: 251}.get(dtype.itemsize, 10_000)
    lowest = 0 if dtype == torch.uint8 else -(span // 2)
    return (number * 37 % span + lowest).to(dtype)


def factors(rank, place, dtype):
    """Numbers so small that a product of eight is exact in float32."""
    small = torch.tensor([1, 2, -1, 3, -2])[(place + rank * (place // 5 + 1)) % 5]
    if dtype == torch.bool:
        return small.abs() != 3
    # No power of 2 + i is real or imaginary, so no part of a product is a zero of either sign.
    return (small * (2 + 1j) if dtype.is_complex else small).to(dtype)


def plain(op, tensors):
    """The reduction of these tensors; 16- and 8-bit floats in float32, rounded once."""
    dtype = tensors[0].dtype
    if dtype in NARROW:
        tensors = [t.float() for t in tensors]
    function = {"max": torch.maximum, "min": torch.minimum, "prod": torch.mul}.get(op, torch.add)
    total = functools.reduce(function, tensors)
    return (total / len(tensors) if op == "avg" else total).to(dtype)


def bits(tensor):
    dense = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return dense.view(-1).view(torch.uint8)


def same(got, expected, *what):
    """Assert that two tensors are equal bit for bit, in shape and in dtype."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (what, got, expected)
    assert torch.equal(bits(got), bits(expected)), (what, got, expected)


def algorithms(collective, group, dtype=torch.float32, op="sum"):
    """The names that can run here, and auto."""
    power = group.size & (group.size - 1) == 0
    cluster = connection.current().cluster
    for name in ["auto", *ALGORITHMS[collective]]:
        if name == "halving_doubling" or (name == "doubling" and collective != "all_reduce"):
            runs = power
        elif name == "hierarchical":
            per_node = [] if cluster is None else [cluster.node(rank) for rank in group.ranks]
            runs = len({per_node.count(node) for node in per_node}) == 1
        elif name == "torch":
            raw = dtype in TORCH_CANNOT and (collective in ("broadcast", "all_gather"))
            runs = not raw and dtype != torch.int16 and not (dtype.is_complex and op == "prod")
        else:
            runs = True
        if runs:
            yield name


def parts(rows, group):
    """How many rows for each rank: equal if possible, else unequal, some perhaps empty."""
    cuts = [rows * i // group.size for i in range(group.size + 1)]
    sizes = [after - before for before, after in zip(cuts, cuts[1:], strict=False)]
    return None if rows % group.size == 0 else sizes[::-1]


def check_reductions(group, tensors, op, root, *what):
    """all_reduce, reduce and reduce_scatter by every algorithm."""
    x, dtype = tensors[group.rank], tensors[0].dtype
    before, answer = x.clone(), plain(op, tensors)
    for name in algorithms("all_reduce", group, dtype, op):
        same(all_reduce(x, group, op, name), answer, "all_reduce", name, op, *what)
    for name in algorithms("reduce", group, dtype, op):
        got = reduce(x, group, root, op, name)
        if group.rank == root:
            same(got, answer, "reduce", name, op, *what)
        else:
            assert got is None
    if x.dim():
        sizes = parts(len(x), group)
        mine = answer.split(sizes or len(x) // group.size or 1)
        mine = mine[group.rank] if len(mine) > group.rank else answer[:0]
        for name in algorithms("reduce_scatter", group, dtype, op):
            if name != "torch" or sizes is None:
                got = reduce_scatter(x, group, op, name, sizes=sizes)
                same(got, mine, "reduce_scatter", name, op, *what)
    same(x, before, "argument", op, *what)


def check_moves(group, tensors, root, *what):
    """What only moves values: broadcast, all_gather, gather, scatter, all_to_all."""
    x, dtype = tensors[group.rank], tensors[0].dtype
    before = x.clone()
    for name in algorithms("broadcast", group, dtype):
        same(broadcast(x, group, root, name), tensors[root], "broadcast", name, *what)
    rows = [t.unsqueeze(0) if t.dim() == 0 else t for t in tensors]
    whole = torch.cat([t.resolve_conj() for t in rows])
    for name in algorithms("all_gather", group, dtype):
        same(all_gather(x, group, name), whole, "all_gather", name, *what)
    got = gather(x, group, root)
    assert (got is None) == (group.rank != root)
    if got is not None:
        same(got, whole, "gather", *what)
    if x.dim():
        sizes = parts(len(x), group)
        lengths = sizes or [len(x) // group.size] * group.size
        got = scatter(x if group.rank == root else None, group, root, sizes=sizes)
        same(got, tensors[root].split(lengths)[group.rank], "scatter", *what)
        got = all_to_all(x, group, sizes=sizes)
        same(got, torch.cat([t.split(lengths)[group.rank] for t in tensors]), "all_to_all", *what)
    same(x, before, "argument", *what)


def every_dtype_and_op(world):
    shapes = itertools.cycle([(2 * world.size, 3), (7,), (world.size,), (5, 3, 2), (1,)])
    roots = itertools.cycle(range(world.size))
    for dtype in DTYPES:
        for op in OPS:
            if allowed(op, dtype):
                shape = next(shapes)
                tensors = [values(rank, shape, dtype, op) for rank in range(world.size)]
                check_reductions(world, tensors, op, next(roots), dtype, shape)
        for shape in ((2 * world.size, 3), (3,)):
            tensors = [values(rank, shape, dtype) for rank in range(world.size)]
            check_moves(world, tensors, next(roots), dtype, shape)


CLUSTERS = {4: Cluster(2, 2), 8: Cluster(2, 4)}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_algorithm_gives_the_plain_answer_in_every_dtype_and_op(size):
    launch(every_dtype_and_op, ranks=size, cluster=CLUSTERS.get(size))


# Shapes and strides, each as a function of a rank's contiguous tensor of 8 x 6.
FORMS = {
    "number": lambda t: t[2, 3],
    "empty": lambda t: t[:0],
    "no columns": lambda t: t.view(3, 16)[:, :0],
    "one": lambda t: t[3, 3:4],
    "fewer than ranks": lambda t: t[0, :2],
    "five": lambda t: t[0, :5],
    "seven": lambda t: t[:7, 0],
    "3-D": lambda t: t.view(8, 3, 2),
    "transposed, every other": lambda t: t.t()[::2],
    "column": lambda t: t[:, 1],
    "offset": lambda t: t.view(-1)[5:21],
    "expanded": lambda t: t[:1].expand(8, 6),
    "stretched number": lambda t: t[1, 1].expand(8),
    "overlapping windows": lambda t: t.view(-1)[:10].unfold(0, 3, 1),
    "permuted 3-D": lambda t: t.view(2, 4, 6).permute(2, 0, 1),
    "conjugate": lambda t: torch.complex(t, t + 0.5).conj(),
    "conjugate, transposed": lambda t: torch.complex(t, t + 0.5).mH[::2],
    "negative view": lambda t: torch.complex(t, t + 0.5).conj().imag,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


def every_form(world):
    for number, (name, form) in enumerate(FORMS.items()):
        tensors = [form(values(rank, (8, 6))) for rank in range(world.size)]
        root = number % world.size
        check_reductions(world, tensors, "sum", root, name)
        check_moves(world, tensors, root, name)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_any_shape_and_strides_give_the_plain_answer_and_the_argument_stays(size):
    launch(every_form, ranks=size, cluster=CLUSTERS.get(size))


def check_group(group):
    """A few checks of every collective and algorithm, with values of the *world* ranks."""
    if group is None:
        return
    for shape in ((3 * group.size,), (5, 2)):
        tensors = [values(rank, shape) for rank in group.ranks]
        for root in {0, group.size - 1}:
            check_reductions(group, tensors, "avg", root, group)
            check_moves(group, tensors, root, group)
    barrier(group)


def groups_of_eight(world):
    # Each rank makes its own group only; both halves work at the same time.
    check_group(world.subgroup([0, 3, 5, 6]) or world.subgroup([7, 2, 4, 1]))
    # One after the other, with common members.
    check_group(world.subgroup([4, 1, 2]))
    check_group(world.subgroup([2, 6, 7, 1, 5]))
    check_group(world.subgroup([7]))
    check_group(world.subgroup(range(7, -1, -1)))
    # Groups of groups count in places of the outer one.
    outer = world.subgroup([6, 4, 2, 0])
    if outer is not None:
        inner = outer.subgroup([3, 1])
        assert inner is None or inner.ranks == (0, 4)
        check_group(inner)


def test_groups_without_rank_0_unsorted_disjoint_at_once_and_overlapping_in_turn():
    launch(groups_of_eight, ranks=8, timeout=10)


@pytest.mark.parametrize("size, nodes", [(4, 2), (6, 3)])
def test_emulated_links_change_no_value(size, nodes):
    fast = {"intra": Link(gbit_s=10_000), "inter": Link(gbit_s=1000, latency_us=1)}
    launch(check_group, ranks=size, cluster=Cluster(nodes, size // nodes, **fast))


def test_a_rank_needs_to_make_only_the_group_that_it_is_in():
    def work(world):
        mine = world.subgroup([0, 3] if world.rank in (0, 3) else [2, 1])
        x = torch.tensor([10.0**world.rank])
        return [all_reduce(x, mine, algorithm=name).item() for name in ("auto", "ring", "torch")]

    assert launch(work, ranks=4) == [[1001.0] * 3, [110.0] * 3, [110.0] * 3, [1001.0] * 3]


def test_gathered_values_lie_in_the_order_of_the_group_not_of_the_world():
    def work(world):
        group = world.subgroup([2, 0, 3, 1])
        x = torch.tensor([float(world.rank)])
        return [all_gather(x, group, name).tolist() for name in algorithms("all_gather", group)]

    assert all(order == [2, 0, 3, 1] for rank in launch(work, ranks=4) for order in rank)


def gap(shape, dtype=torch.float32):
    """A tensor of this shape with unused memory between its columns, all of it -1."""
    wide = torch.full((*shape[:-1], 2 * shape[-1]), -1, dtype=dtype)
    return wide, wide[..., ::2]


def into_out(world):
    size, rank = world.size, world.rank
    tensors = [values(r, (2 * size, 3)) for r in range(size)]
    x, total = tensors[rank], plain("sum", tensors)
    mine, whole = total[2 * rank : 2 * rank + 2], torch.cat(tensors)
    root = size - 1
    cases = {
        "broadcast": (functools.partial(broadcast, root=root), tensors[root]),
        "reduce": (functools.partial(reduce, root=root), total),
        "all_reduce": (all_reduce, total),
        "reduce_scatter": (reduce_scatter, mine),
        "all_gather": (all_gather, whole),
    }
    for collective, (function, answer) in cases.items():
        for name in algorithms(collective, world):
            what = (collective, name)
            has_result = collective != "reduce" or rank == root
            out = torch.empty(answer.shape)
            got = function(x, world, algorithm=name, out=out)
            assert got is (out if has_result else None), what
            if has_result:
                same(out, answer, *what, "out")
            memory, out = gap(answer.shape)
            got = function(x, world, algorithm=name, out=out)
            if has_result:
                same(out, answer, *what, "out with gaps")
                assert got is out and (memory[..., 1::2] == -1).all(), what
            if answer.shape == x.shape:
                for same_place in (x.clone(), gap(x.shape)[1].copy_(x), x.t().contiguous().t()):
                    got = function(same_place, world, algorithm=name, out=same_place)
                    if has_result:
                        assert got is same_place
                        same(got, answer, *what, "in place", same_place.stride())
    for name in algorithms("all_gather", world):
        for stacked in (torch.empty(size, 2 * size, 3), gap((size, 2 * size, 3))[1]):
            all_gather(x, world, name, out=stacked)
            same(stacked.reshape(-1, 3), whole, name, "stacked")
        # A rank's part may already lie in its place.
        stacked = torch.full((size, 2 * size, 3), -1.0)
        stacked[rank] = x
        same(all_gather(stacked[rank], world, name, out=stacked).view(-1, 3), whole, name)
    for name in algorithms("reduce_scatter", world):
        part = (copy := x.clone())[2 * rank : 2 * rank + 2]
        same(reduce_scatter(copy, world, algorithm=name, out=part), mine, name, "own part")
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()
    z = torch.full((3,), 1j + rank, dtype=torch.complex64)
    all_reduce(z, world, out=conjugate)
    same(conjugate, torch.full((3,), size * 1j + sum(range(size)), dtype=torch.complex64), "conj")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_out_is_filled_and_returned_in_place_stacked_or_with_gaps(size):
    launch(into_out, ranks=size, cluster=CLUSTERS.get(size))


def test_a_group_of_one_gives_a_copy_that_avg_and_prod_leave_as_it_is():
    def work(world):
        x = torch.tensor([[1.5, -2.0, 4.0]])
        results = [all_reduce(x, world, op) for op in OPS]
        results += [reduce(x, world, op=op) for op in OPS]
        results += [reduce_scatter(x, world, op) for op in OPS]
        results += [broadcast(x, world), all_gather(x, world), gather(x, world)]
        results += [scatter(x, world), all_to_all(x, world)]
        for result in results:
            same(result, x)
            assert result.data_ptr() != x.data_ptr()

    launch(work, ranks=1)


def test_only_the_root_of_a_reduce_has_something_to_decide_on():
    def work(world):
        return reduce(torch.tensor(float(world.rank)), world, root=1)

    assert launch(work, ranks=3) == [None, torch.tensor(3.0), None]


def test_the_average_of_1_1_1_and_3_3_3_is_2_2_2_in_place_too():
    def work(world):
        x = torch.full((3,), 1.0 + 2 * world.rank)
        assert all_reduce(x, world, "avg").tolist() == [2.0] * 3
        assert all_reduce(x, world, "avg", out=x) is x
        return x.tolist()

    assert launch(work, ranks=2) == [[2.0] * 3] * 2


def uneven_gathers(world):
    rows = [3, 0, 1, 0, 2][: world.size]
    for columns in ((), (2,), (0,)):
        tensors = [values(rank, (n, *columns)) for rank, n in enumerate(rows)]
        x, whole = tensors[world.rank], torch.cat(tensors)
        for sizes in (rows, tuple(rows), "exchange"):
            for name in algorithms("all_gather", world):
                if name != "torch":
                    same(all_gather(x, world, name, sizes=sizes), whole, name, sizes)
                    out = torch.empty(whole.shape)
                    assert all_gather(x, world, name, sizes=sizes, out=out) is out
                    same(out, whole, name, sizes, "out")
            got = gather(x, world, root=1, sizes=sizes)
            assert (got is None) == (world.rank != 1)
            if got is not None:
                same(got, whole, "gather", sizes)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_ranks_may_bring_different_numbers_of_rows_to_a_gather(size):
    launch(uneven_gathers, ranks=size)


def uneven_parts(world):
    size, rank = world.size, world.rank
    rows = [3, 0, 1, 0][:size]
    for op in OPS:
        tensors = [values(r, (sum(rows), 2), op=op) for r in range(size)]
        x = tensors[rank]
        answer = plain(op, tensors).split(rows)[rank]
        for name in algorithms("reduce_scatter", world):
            if name != "torch":
                same(reduce_scatter(x, world, op, name, sizes=rows), answer, name, op)
    for root in range(size):
        got = scatter(x if rank == root else None, world, root, sizes=rows)
        same(got, tensors[root].split(rows)[rank], "scatter", root)
    # Rank i gives rank j (i + j) % 3 rows.
    shares = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    tensors = [values(i, (sum(share), 2)) for i, share in enumerate(shares)]
    got = all_to_all(tensors[rank], world, sizes=shares[rank])
    coming = [t.split(share)[rank] for t, share in zip(tensors, shares, strict=True)]
    same(got, torch.cat(coming), "all_to_all")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_may_have_different_numbers_of_rows(size):
    launch(uneven_parts, ranks=size)


def spread(seed, dtype):
    """Random values between 2^-6 and 8: their sums over 8 ranks need at most 23 bits."""
    torch.manual_seed(seed)
    x = torch.randn(401).clamp(-8, 8)
    return torch.where(x.abs() < 2**-6, 2**-6, x).to(dtype)


def sums_of_16_bits(world):
    for dtype, op in itertools.product([torch.bfloat16, torch.float16], ["sum", "avg"]):
        tensors = [spread(100 + rank, dtype) for rank in range(world.size)]
        x, answer = tensors[world.rank], plain(op, tensors)
        assert (functools.reduce(torch.add, tensors) != plain("sum", tensors)).any()
        for name in algorithms("all_reduce", world, dtype, op):
            same(all_reduce(x, world, op, name), answer, "all_reduce", name, op)
        for name in algorithms("reduce", world, dtype, op):
            got = reduce(x, world, 0, op, name)
            assert world.rank or torch.equal(got, answer), (name, op)
        rows = [50] * (world.size - 1) + [401 - 50 * (world.size - 1)]
        for name in algorithms("reduce_scatter", world, dtype, op):
            if name != "torch":
                got = reduce_scatter(x, world, op, name, sizes=rows)
                same(got, answer.split(rows)[world.rank], "reduce_scatter", name, op)


def test_sums_of_16_bit_floats_are_the_float32_sum_rounded_once():
    launch(sums_of_16_bits, ranks=8, cluster=CLUSTERS[8])


def random_reductions(world):
    torch.manual_seed(300 + world.rank)
    tensors = [torch.randn(333, dtype=d) for d in (torch.float32, torch.float16, torch.complex64)]
    signs = torch.tensor([0.0, -0.0, 1.0, float("nan"), float("-nan")])
    tensors.append(signs if world.rank % 2 else -signs)
    # NaNs that say which rank they come from.
    tensors.append(
        (torch.full((3,), 0x7FC00000, dtype=torch.int32) + world.rank).view(torch.float32)
    )
    return {
        (name, op, number): bytes(bits(all_reduce(x, world, op, name)).tolist())
        for number, x in enumerate(tensors)
        for op in OPS
        if allowed(op, x.dtype)
        for name in algorithms("all_reduce", world, x.dtype, op)
    }


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_all_ranks_get_the_same_bits_whatever_the_rounding_signs_and_nans(size):
    cluster = Cluster(2, size // 2) if size % 2 == 0 else None
    first, *others = launch(random_reductions, ranks=size, cluster=cluster)
    for other in others:
        assert [key for key in first if first[key] != other[key]] == []


def signed_zeros(world):
    for dtype, op in itertools.product([torch.float32, torch.bfloat16], ["sum", "avg"]):
        x = torch.full((2 * world.size,), -0.0, dtype=dtype)
        mixed = x.clone()
        if world.rank == world.size - 1:
            mixed[::2] = 0.0
        for tensor, negative in ((x, [True, True]), (mixed, [False, True])):
            expected = negative * world.size
            for name in algorithms("all_reduce", world, dtype, op):
                got = all_reduce(tensor, world, op, name)
                assert got.signbit().tolist() == expected, ("all_reduce", name, op, dtype, got)
            for name in algorithms("reduce_scatter", world, dtype, op):
                got = reduce_scatter(tensor, world, op, name)
                assert got.signbit().tolist() == negative, ("reduce_scatter", name, op, dtype)
            for name in algorithms("reduce", world, dtype, op):
                got = reduce(tensor, world, 0, op, name)
                assert world.rank or got.signbit().tolist() == expected, ("reduce", name, op)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_minus_zero_survives_a_sum_unless_one_rank_holds_plus_zero(size):
    launch(signed_zeros, ranks=size, cluster=CLUSTERS.get(size))


def strange_values(world):
    nan, inf = float("nan"), float("inf")
    # Columns: one NaN, opposite infinities, one infinity.
    x = torch.tensor([float(world.rank), 1.0, 2.0])
    if world.rank == 1:
        x = torch.tensor([nan, inf, inf])
    elif world.rank == 2:
        x[1] = -inf
    expected = {
        "sum": [nan, nan, inf],
        "avg": [nan, nan, inf],
        "max": [nan, inf, inf],
        "min": [nan, -inf, 2.0],
        "prod": [nan, -inf, inf],
    }
    for dtype, (op, row) in itertools.product([torch.float32, torch.float16], expected.items()):
        for name in algorithms("all_reduce", world):
            # gloo's own max and min drop a NaN or keep it by the order of ranks.
            if name != "torch" or op not in ("max", "min"):
                got = all_reduce(x.to(dtype), world, op, name)
                wanted = torch.tensor(row, dtype=dtype)
                assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7)), (name, op, got)


def test_nan_and_infinity_on_one_rank_reach_all():
    launch(strange_values, ranks=4, cluster=CLUSTERS[4])


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_tensors_travel_in_blocks(ranks):
    def work(world):
        # 2.5 blocks of 16 MiB, 1.2 of 32 MiB.
        x = torch.arange(10_000_001, dtype=torch.float32) % 1001 + world.rank
        expected = (x - world.rank) * ranks + sum(range(ranks))
        for name in ("ring", "direct", "direct_ring", "auto"):
            assert torch.equal(all_reduce(x, world, algorithm=name), expected), name
            assert torch.equal(all_reduce(x, world, algorithm=name, out=x), expected), name
            x = torch.arange(10_000_001, dtype=torch.float32) % 1001 + world.rank
        with bill() as sent:
            all_reduce(x, world, algorithm="direct")
        # Two blocks, each there and back.
        assert sent.messages == 4 * (ranks - 1)

    launch(work, ranks=ranks)


def test_nobody_passes_a_barrier_before_the_last_has_come():
    def work(world):
        time.sleep(0.1 * world.rank)
        came = time.monotonic()
        barrier(world)
        return came, time.monotonic()

    came, passed = zip(*launch(work, ranks=3), strict=True)
    assert max(came) <= min(passed)


def test_a_send_that_nobody_waits_for_still_arrives():
    def work(world):
        if world.rank == 0:
            isend(torch.arange(300_000.0), 1, world)
            return None
        return recv(torch.empty(300_000), 0, world)[-1].item()

    assert launch(work, ranks=2) == [None, 299_999.0]


def differ(world, collective):
    x = torch.ones((2, 3) if world.rank == 0 else (3, 2))
    more = torch.ones(2 + 2 * world.rank)
    {
        "all_reduce": lambda: all_reduce(x, world),
        "broadcast": lambda: broadcast(x, world),
        "reduce": lambda: reduce(x, world),
        "reduce_scatter": lambda: reduce_scatter(x.view(-1).view(x.shape[::-1])[:2], world),
        "all_gather": lambda: all_gather(more, world),
        "gather": lambda: gather(more, world),
        "all_to_all": lambda: all_to_all(more, world),
    }[collective]()


@pytest.mark.parametrize(
    "collective",
    ["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather", "all_to_all"],
)
def test_the_check_shows_both_shapes_where_they_differ_though_bytes_may_not(collective):
    with pytest.raises(RankError) as caught:
        launch(differ, collective, ranks=2, check=True)
    assert "and so did rank" in caught.value.summary
    for rank, shape in enumerate(("(2, 3)", "(3, 2)")):
        if collective == "reduce_scatter":
            shape = ("(2, 2)", "(2, 3)")[rank]
        elif collective.endswith("gather") or collective == "all_to_all":
            shape = ("(2,)", "(4,)")[rank]
        assert f"rank {rank}: {collective} number 1, {shape} float32" in str(caught.value)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "gather", "all_to_all"])
def test_without_the_check_different_shapes_find_no_partner_rather_than_garbage(collective):
    with pytest.raises(RankError, match="ranks waited for each other longer than 1 s"):
        launch(differ, collective, ranks=2, timeout=1)


def test_by_levels_a_sum_does_not_take_part_in_a_max():
    def work(world):
        op = "max" if world.rank == 3 else "sum"
        all_reduce(torch.ones(4), world, op, algorithm="hierarchical")

    with pytest.raises(RankError, match="ranks waited for each other longer than 1 s"):
        launch(work, ranks=4, cluster=CLUSTERS[4], timeout=1)


def test_lists_of_sizes_that_differ_between_ranks_are_noticed():
    def work(world):
        sizes = [3, 1] if world.rank == 0 else [1, 3]
        all_gather(torch.ones(3), world, sizes=sizes)

    with pytest.raises(RankError) as caught:
        launch(work, ranks=2, check=True)
    assert "(3, 1)" in str(caught.value) and "(1, 3)" in str(caught.value)
