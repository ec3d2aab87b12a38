"""What a hostile, or an unlucky, user does: each is served rightly or told at once.

Each of these once gave a wrong value, a wait without end, or an error that named nothing.
"""

import time

import numpy as np
import pytest
import torch
from torch import nn

from s2s_lib import (
    DDP,
    Cluster,
    Link,
    Mesh,
    RankError,
    all_gather,
    all_reduce,
    background,
    barrier,
    bill,
    broadcast,
    launch,
    recv,
    reduce_scatter,
    send,
    timeline,
)


def test_a_collective_under_inference_mode_spoils_none_after_it():
    def work(world):
        with torch.inference_mode():
            all_reduce(torch.ones(100), world)
        return all_reduce(torch.ones(100), world).sum().item()

    assert launch(work, ranks=2) == [200.0] * 2


def test_collectives_work_under_another_default_device_and_dtype():
    def work(world):
        x = torch.arange(6.0)
        with torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            results = [
                all_reduce(x, world),
                reduce_scatter(x, world),
                all_gather(x, world, sizes="exchange"),
            ]
            barrier(world)
        return [result.sum().item() for result in results]

    first, second = launch(work, ranks=2, timeout=10)
    assert first == [30.0, 6.0, 30.0] and second == [30.0, 24.0, 30.0]


def test_lanes_are_numbers_and_functions_are_functions():
    def work(world):
        for lane in ("x", -1, True):
            with pytest.raises(ValueError, match="lanes are numbered"):
                background(barrier, world, lane=lane)
        with pytest.raises(TypeError, match="needs a function"):
            background("barrier", world)

    launch(work, ranks=1)


def test_a_task_that_waits_for_its_own_lane_is_told_so():
    def work(world):
        def outer():
            return background(all_reduce, torch.ones(1), world).wait()

        with pytest.raises(RuntimeError, match="use another lane"):
            background(outer).wait()
        return background(
            lambda: background(all_reduce, torch.ones(1), world, lane=1).wait()
        ).wait()

    assert launch(work, ranks=2) == [torch.full((1,), 2.0)] * 2


def test_a_message_that_an_emulated_link_delays_past_the_timeout_is_a_timeout():
    def work(world):
        if world.rank == 0:
            send(torch.ones(250_000), 1, world)
        else:
            recv(torch.empty(250_000), 0, world)

    cluster = Cluster(nodes=2, gpus_per_node=1, inter=Link(gbit_s=0.001))
    began = time.monotonic()
    with pytest.raises(RankError, match="longer than 1 s") as caught:
        launch(work, ranks=2, cluster=cluster, timeout=1)
    assert time.monotonic() - began < 6
    assert any("receive from rank 0" in what for _, what, _ in caught.value.waits)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_what_torch_cannot_add_is_refused_before_a_byte_moves(dtype):
    def work(world):
        x = torch.ones(3).to(dtype)
        with pytest.raises(TypeError, match="convert to another dtype"):
            all_reduce(x, world)
        return torch.equal(broadcast(x, world), x)

    assert launch(work, ranks=2) == [True] * 2


def test_numbers_of_numpy_are_numbers():
    def work(world):
        root, sizes = np.int64(1), [np.int64(1), np.int64(2)]
        x = torch.arange(3) + world.rank
        return broadcast(x, world, root).tolist(), reduce_scatter(x, world, sizes=sizes).tolist()

    result = launch(work, ranks=np.int64(2), timeout=np.float32(20))
    assert result == [([1, 2, 3], [1]), ([1, 2, 3], [3, 5])]


def test_everything_at_once_on_a_mesh_with_links_and_the_check():
    """Two pairs on a slow mesh, each with its own DDP, meters and background work."""

    def work(world):
        group = Mesh(world.subgroup([2, 0, 3, 1]), replica=2, shard=2)["shard"]
        torch.manual_seed(world.rank)
        model = DDP(nn.Linear(5, 3).double(), group, bucket_mb=1e-4)
        x = torch.arange(10.0, dtype=torch.float64).view(2, 5) + group.rank
        with bill() as sent, timeline() as line:
            aside = background(all_reduce, torch.ones(4), group, lane=3)
            for _ in range(3):
                model.zero_grad()
                model(x).square().sum().backward()
            together = aside.wait()
        assert sent.by("collective").keys() == {"all_reduce"} and len(line.tracks()) == 3
        return group.ranks, together.tolist(), model.module.weight.grad

    cluster = Cluster(nodes=2, gpus_per_node=2, inter=Link(gbit_s=1, latency_us=500))
    results = launch(work, ranks=4, cluster=cluster, check=True)
    for ranks, together, gradient in results:
        assert together == [2.0] * 4
        assert all(torch.equal(results[rank][2], gradient) for rank in ranks)
    assert not torch.equal(results[0][2], results[1][2])


def test_a_module_that_changes_its_dtype_after_ddp_was_built_is_refused():
    def work(world):
        model = DDP(nn.Linear(2, 1), world)
        model.to(torch.float64)
        with pytest.raises(RuntimeError, match="convert the module first"):
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()

    launch(work, ranks=2)


def test_an_exception_that_cannot_be_described_still_names_its_rank():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError("no words")

        def __getattr__(self, name):
            raise RuntimeError("no attributes")

    def work(world):
        raise Broken

    with pytest.raises(RankError, match="rank 0 of 2 raised .*Broken"):
        launch(work, ranks=2)


def test_a_huge_message_of_an_error_does_not_fill_the_summary():
    def work(world):
        raise ValueError("x" * 1_000_000)

    with pytest.raises(RankError) as caught:
        launch(work, ranks=1)
    assert len(caught.value.summary) < 1000
