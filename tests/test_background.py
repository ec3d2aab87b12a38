"""Collectives on a second thread: the same results, in order, and never each other's bytes.

The foreground and the lanes use equal groups, shapes and dtypes here and differ only in values,
so messages that were matched by anything less than the lane would show as wrong sums.
"""

import random
import threading
import time

import pytest
import torch

from s2s_lib import (
    Cluster,
    RankError,
    all_gather,
    all_reduce,
    all_to_all,
    background,
    barrier,
    broadcast,
    gather,
    launch,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)


def test_every_collective_gives_in_the_background_what_it_gives_in_front():
    calls = [
        (broadcast, {"root": 1}),
        (reduce, {"root": 1, "op": "max"}),
        (all_reduce, {"algorithm": "hierarchical"}),
        (reduce_scatter, {"op": "avg"}),
        (all_gather, {"sizes": "exchange"}),
        (gather, {}),
        (scatter, {"root": 3}),
        (all_to_all, {}),
    ]

    def work(world):
        x = torch.arange(8.0).view(4, 2) + 10 * world.rank
        for function, kwargs in calls:
            expected = function(x, world, **kwargs)
            got = background(function, x, world, **kwargs).wait()
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)
        assert background(barrier, world).wait() is None
        assert torch.equal(x, torch.arange(8.0).view(4, 2) + 10 * world.rank)

    launch(work, ranks=4, cluster=Cluster(2, 2))


def test_it_returns_at_once_and_done_says_when_there_is_something():
    def work(world):
        gate = threading.Event()

        def later(x):
            gate.wait()
            return all_reduce(x, world)

        task = background(later, torch.ones(2))
        assert not task.done()
        gate.set()
        assert task.wait().tolist() == [2.0, 2.0]
        assert task.done()
        # Asking again costs nothing and gives the same.
        assert task.wait() is task.wait()

    launch(work, ranks=2)


def test_tasks_of_a_lane_run_one_at_a_time_in_the_order_given():
    def work(world):
        order = []

        def note(number):
            order.append(("begins", number))
            time.sleep(random.random() * 1e-3)
            order.append(("ends", number))

        tasks = [background(note, number) for number in range(20)]
        tasks[-1].wait()
        return order

    expected = [(what, number) for number in range(20) for what in ("begins", "ends")]
    assert launch(work, ranks=2) == [expected] * 2


def test_a_lane_that_is_stuck_does_not_hold_up_another():
    def work(world):
        gate = threading.Event()
        stuck = background(gate.wait)
        free = background(all_reduce, torch.ones(3), world, lane=1)
        result = free.wait().tolist()
        assert not stuck.done()
        gate.set()
        stuck.wait()
        return result

    assert launch(work, ranks=2) == [[2.0] * 3] * 2


def everything_at_once(world):
    # The same seed on no two ranks, so each starts and waits at moments of its own.
    moments = random.Random(world.rank)
    expected, tasks = [], []
    for number in range(60):
        x = torch.full((50,), float(number + 1000 * world.rank))
        total = world.size * number + 1000 * sum(range(world.size))
        if moments.random() < 0.2:
            time.sleep(moments.random() * 2e-3)
        if number % 3 == 2:
            assert all_reduce(x, world).tolist() == [float(total)] * 50, number
        else:
            tasks.append(background(all_reduce, x, world, lane=number % 3))
            expected.append([float(total)] * 50)
        if moments.random() < 0.2:
            tasks[-1].wait()
    assert [task.wait().tolist() for task in tasks] == expected


@pytest.mark.parametrize("size", [2, 4])
def test_lanes_and_foreground_on_one_group_and_shape_never_take_each_others_bytes(size):
    launch(everything_at_once, ranks=size)


def test_ranks_may_start_a_lane_and_work_in_front_in_different_orders():
    def work(world):
        x = torch.full((4,), 1.0 + world.rank)
        if world.rank == 0:
            front = all_reduce(x, world)
            back = background(all_reduce, 10 * x, world).wait()
        else:
            task = background(all_reduce, 10 * x, world)
            front = all_reduce(x, world)
            back = task.wait()
        return front[0].item(), back[0].item()

    assert launch(work, ranks=3) == [(6.0, 60.0)] * 3


def test_two_subgroups_and_the_world_in_the_background_at_once():
    def work(world):
        pair = world.subgroup([3, 0]) or world.subgroup([1, 2])
        x = torch.tensor([float(world.rank)])
        tasks = [background(all_reduce, x, group, lane=i) for i, group in enumerate((pair, world))]
        front = all_gather(x, pair)
        return front.tolist(), [task.wait().item() for task in tasks]

    assert launch(work, ranks=4) == [
        ([3.0, 0.0], [3.0, 6.0]),
        ([1.0, 2.0], [3.0, 6.0]),
        ([1.0, 2.0], [3.0, 6.0]),
        ([3.0, 0.0], [3.0, 6.0]),
    ]


def test_a_hundred_tasks_may_wait_in_line_and_nobody_need_keep_their_tensors():
    def work(world):
        tasks = [background(all_reduce, torch.full((100,), 1.0 * i), world) for i in range(100)]
        return [task.wait()[-1].item() for task in reversed(tasks)]

    assert launch(work, ranks=2) == [[2.0 * i for i in reversed(range(100))]] * 2


def test_send_and_recv_in_the_background_do_not_meet_those_in_front():
    def work(world):
        x = torch.full((3,), 1.0 + world.rank)
        if world.rank == 0:
            task = background(send, 10 * x, 1, world)
            send(x, 1, world)
            return task.wait()
        task = background(recv, torch.empty(3), 0, world)
        return recv(torch.empty(3), 0, world).tolist(), task.wait().tolist()

    assert launch(work, ranks=2) == [None, ([1.0] * 3, [10.0] * 3)]


def test_an_error_is_raised_by_wait_and_the_lane_goes_on():
    def work(world):
        bad = background(all_reduce, torch.ones(2), world, op="mean")
        good = background(all_reduce, torch.ones(2), world)
        for _ in range(2):
            with pytest.raises(ValueError, match="choose one of"):
                bad.wait()
        return good.wait().tolist()

    assert launch(work, ranks=2) == [[2.0, 2.0]] * 2


def test_an_error_that_nobody_waits_for_ends_the_launch():
    def work(world):
        task = background(all_reduce, torch.ones(2), world, op="median")
        while not task.done():
            time.sleep(0.01)

    with pytest.raises(RankError, match="no reduction 'median'"):
        launch(work, ranks=2)


def test_what_nobody_joins_times_out_and_the_table_names_it():
    def work(world):
        if world.rank == 0:
            background(all_reduce, torch.ones(2), world).wait()
        else:
            time.sleep(3)

    with pytest.raises(RankError, match="longer than 1 s") as caught:
        launch(work, ranks=2, timeout=1)
    assert "all_reduce number 1, (2,) float32, sum" in str(caught.value)


def test_no_gradient_is_recorded_and_none_is_refused():
    def work(world):
        x = torch.ones(2, requires_grad=True)
        total = background(all_reduce, x, world).wait()
        highest = background(all_reduce, x, world, op="max").wait()
        # The foreground still records.
        assert all_reduce(x, world).requires_grad
        return total.requires_grad, highest.requires_grad

    assert launch(work, ranks=2) == [(False, False)] * 2


def test_out_is_filled_in_the_background():
    def work(world):
        out = torch.empty(3)
        assert background(all_reduce, torch.ones(3), world, out=out).wait() is out
        return out.tolist()

    assert launch(work, ranks=2) == [[2.0] * 3] * 2


def test_a_rank_that_returns_without_waiting_still_serves_the_others():
    def work(world):
        task = background(all_reduce, torch.full((200_000,), 1.0 + world.rank), world)
        return task.wait()[-1].item() if world.rank == 1 else "gone"

    assert launch(work, ranks=3) == ["gone", 6.0, "gone"]


def test_a_launch_ends_though_nobody_waits():
    def work(world):
        background(all_reduce, torch.ones(10), world)
        if world.rank == 0:
            background(time.sleep, 30, lane=1)
        return world.rank

    began = time.monotonic()
    assert launch(work, ranks=2) == [0, 1]
    assert time.monotonic() - began < 15


def test_the_check_compares_each_lane_with_the_same_lane():
    def work(world):
        x = torch.ones(2)
        tasks = [
            background(all_reduce, x, world, op=op, lane=i) for i, op in enumerate(("sum", "max"))
        ]
        broadcast(x, world)
        return [task.wait().tolist() for task in tasks]

    assert launch(work, ranks=2, check=True) == [[[2.0, 2.0], [1.0, 1.0]]] * 2
