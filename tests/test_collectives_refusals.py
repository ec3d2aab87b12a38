"""What no collective can do is refused on every rank before a byte moves, in words that help.

Each rank makes the same wrong call; the all_reduce after it shows that nobody was left waiting
and nothing was left on the wire.
"""

import numpy
import pytest
import torch

from s2s_lib import (
    Cluster,
    Group,
    RankError,
    all_gather,
    all_reduce,
    all_to_all,
    background,
    barrier,
    broadcast,
    gather,
    launch,
    reduce,
    reduce_scatter,
    scatter,
)

EVERY = {
    "broadcast": broadcast,
    "reduce": reduce,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "gather": gather,
    "all_to_all": all_to_all,
    "scatter": scatter,
}
REDUCTIONS = (all_reduce, reduce, reduce_scatter)


def refused(error, words, world, function, *args, **kwargs):
    """Assert that the call raises `error` with these words, and that the ranks still work."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert words in str(caught.value), (words, str(caught.value))
    assert all_reduce(torch.ones(1), world).item() == world.size


def run(work, **kwargs):
    launch(work, **{"ranks": 3, "timeout": 20} | kwargs)


def test_groups_that_are_none_or_no_group():
    def work(world):
        x = torch.ones(3)
        mine = world.subgroup([0, 1])
        if world.rank == 2:
            for function in EVERY.values():
                with pytest.raises(TypeError, match="this rank is not in the subgroup"):
                    function(x, mine)
            with pytest.raises(TypeError, match="not in the subgroup"):
                barrier(mine)
        for function in EVERY.values():
            refused(TypeError, "expected a Group", world, function, x, [0, 1, 2])

    run(work)


def test_roots_that_are_no_place_in_the_group():
    def work(world):
        words = "give its place in the group, 0..2"
        for root in (3, -1, 1.0, "0", None, True):
            for function in (broadcast, reduce, gather, scatter):
                refused(ValueError, words, world, function, torch.ones(3), world, root=root)

    run(work)


def test_what_is_no_dense_tensor_on_the_cpu():
    cases = [
        (TypeError, "wrap it: torch.tensor", lambda: 1.5),
        (TypeError, "wrap it: torch.tensor", lambda: [1.0, 2.0]),
        (TypeError, "wrap it: torch.tensor", lambda: numpy.ones(3)),
        (TypeError, "wrap it: torch.tensor", lambda: None),
        (TypeError, "make it dense", lambda: torch.eye(3).to_sparse()),
        (TypeError, "make it dense", lambda: torch.eye(3).to_sparse_csr()),
        (ValueError, "on meta", lambda: torch.ones(3, device="meta")),
    ]

    def work(world):
        for function in EVERY.values():
            if function is scatter:
                # Only the root's tensor counts, so only the root can refuse it.
                continue
            for error, words, make in cases:
                refused(error, words, world, function, make(), world)

    run(work)


@pytest.mark.parametrize("tensor", [None, 2.0, torch.tensor(2.0), torch.ones(7)])
def test_what_a_root_cannot_scatter_ends_the_launch_with_its_words(tensor):
    with pytest.raises(RankError, match="rank 1 of 3 raised (Type|Value)Error"):
        run(lambda world: scatter(tensor, world, root=1))


def test_reductions_whose_result_would_not_be_of_the_dtype():
    def work(world):
        for function in REDUCTIONS:
            for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
                x = torch.ones(3, dtype=dtype)
                refused(TypeError, "convert to float, or sum", world, function, x, world, op="avg")
            for op, words in (("sum", "use max for 'any'"), ("avg", "average of torch.bool")):
                x = torch.ones(3, dtype=torch.bool)
                refused(TypeError, words, world, function, x, world, op=op)
            for op in ("max", "min"):
                for dtype in (torch.complex64, torch.complex128):
                    x = torch.ones(3, dtype=dtype)
                    refused(TypeError, "no order", world, function, x, world, op=op)
            refused(
                ValueError,
                "choose one of sum, avg, max, min, prod",
                world,
                function,
                torch.ones(3),
                world,
                op="mean",
            )

    run(work)


def test_algorithms_that_do_not_exist_or_not_for_this_group():
    def work(world):
        x = torch.ones(3)
        for name in ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather"):
            words = f"{name} has no algorithm 'best': one of naive, tree"
            refused(ValueError, words, world, EVERY[name], x, world, algorithm="best")
        for function, name in (
            (all_reduce, "halving_doubling"),
            (reduce_scatter, "doubling"),
            (all_gather, "doubling"),
        ):
            words = "a group of 3 is not a power of two; use ring, tree or direct"
            refused(ValueError, words, world, function, x, world, algorithm=name)
        words = "pieces of one size, got [1, 2, 0]"
        for function in (reduce_scatter, all_gather):
            mine = x if function is reduce_scatter else x[: [1, 2, 0][world.rank]]
            refused(
                ValueError, words, world, function, mine, world, algorithm="torch", sizes=[1, 2, 0]
            )
        words = "needs launch(..., cluster=...)"
        refused(ValueError, words, world, all_reduce, x, world, algorithm="hierarchical")

    run(work)


def test_levels_on_nodes_that_hold_different_numbers_of_ranks():
    def work(world):
        three = world.subgroup([0, 1, 2])
        if three is not None:
            words = "needs equal nodes, got ranks per node {0: 2, 1: 1}"
            refused(
                ValueError, words, three, all_reduce, torch.ones(3), three, algorithm="hierarchical"
            )

    run(work, ranks=4, cluster=Cluster(2, 2))


def test_rows_that_cannot_be_cut_so():
    def work(world):
        x = torch.ones(5, 2)
        for function in (reduce_scatter, all_to_all):
            words = "cannot cut 5 rows into 3 equal parts: pad first, or give sizes"
            refused(ValueError, words, world, function, x, world)
            refused(ValueError, "cannot cut a number", world, function, torch.tensor(1.0), world)
            words = "sizes [1, 1, 1] add up to 3, the tensor has 5 rows"
            refused(ValueError, words, world, function, x, world, sizes=[1, 1, 1])
        for function in (reduce_scatter, all_to_all, all_gather, gather):
            for sizes in ([5], [2, 2, 2, -1], [6, 0, -1], [2.0, 2, 1], 5, "all", {5: 1}):
                words = "sizes are 3 numbers of rows, one for each rank; got "
                refused(ValueError, words, world, function, x, world, sizes=sizes)
        for function in (all_gather, gather):
            words = f"sizes says 4 rows for rank {world.rank}, its tensor has 5"
            refused(ValueError, words, world, function, x, world, sizes=[4, 4, 4])

    run(work)


def test_nine_dims_are_too_many_for_the_header_of_a_scatter():
    def work(world):
        with pytest.raises(ValueError, match="at most 8 dims, got 9"):
            scatter(torch.ones(*[1] * 9), world)
        return scatter(torch.ones(*[1] * 8), world).shape

    assert launch(work, ranks=1) == [torch.Size([1] * 8)]


def test_an_out_of_another_shape_or_dtype():
    def work(world):
        x = torch.ones(6, 2)
        wrong = {
            broadcast: (6, 3),
            all_reduce: (12,),
            reduce_scatter: (6, 2),
            all_gather: (3, 12),
        }
        for function, shape in wrong.items():
            words = f"out is {shape} torch.float32 on cpu, the result is "
            refused(ValueError, words, world, function, x, world, out=torch.empty(shape))
        right = {broadcast: (6, 2), all_reduce: (6, 2), reduce_scatter: (2, 2), all_gather: (18, 2)}
        for function, shape in right.items():
            out = torch.empty(shape, dtype=torch.float64)
            refused(ValueError, "torch.float64", world, function, x, world, out=out)
            out = torch.empty(shape, device="meta")
            refused(ValueError, "on meta", world, function, x, world, out=out)
        # Uneven parts cannot be stacked.
        x = x[: [3, 0, 1][world.rank]]
        out = torch.empty(3, 3, 2)
        refused(ValueError, "(4, 2)", world, all_gather, x, world, out=out, sizes=[3, 0, 1])

    run(work)


def test_gradients_where_none_is_defined():
    def work(world):
        x = torch.ones(3, requires_grad=True)
        for function in (all_reduce, reduce_scatter):
            for op in ("max", "min", "prod"):
                words = f"no gradient is defined through {op}: detach()"
                refused(ValueError, words, world, function, x, world, op=op)
        for function, instead in ((reduce, "all_reduce"), (gather, "all_gather")):
            words = f"no gradient is defined through {function.__name__}: use {instead}"
            refused(ValueError, words, world, function, x, world)
        if world.rank == 0:
            with pytest.raises(ValueError, match="through scatter: use broadcast"):
                scatter(x, world)
        for function, shape in (
            (broadcast, 3),
            (all_reduce, 3),
            (reduce_scatter, 1),
            (all_gather, 9),
        ):
            words = "leave it out, or detach()"
            refused(ValueError, words, world, function, x, world, out=torch.empty(shape))
        # Without gradients all of these work.
        with torch.no_grad():
            assert all_reduce(x, world, "max").tolist() == [1.0] * 3
            all_reduce(x, world, out=torch.empty(3))
            gather(x, world)
            reduce(x, world)
            scatter(x, world)

    run(work)


def test_outside_of_a_launch_there_are_no_ranks():
    for call in (all_reduce, broadcast, all_gather):
        with pytest.raises(RuntimeError, match="inside a function given to launch"):
            call(torch.ones(3), Group((0,), 0))


def test_an_error_in_the_background_is_raised_by_wait():
    def work(world):
        task = background(all_reduce, torch.ones(3, dtype=torch.int64), world, op="avg")
        refused(TypeError, "convert to float", world, task.wait)

    run(work)
