"""The checks of lesson 03: hybrid shard."""

import functools

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.course.check.answers import (
    Wrong,
    attempted,
    digits,
    run,
    same_number,
    same_tensor,
)
from s2s_lib.course.reference import adamw, tiny_gpt
from s2s_lib.meters.bill import bill
from s2s_lib.ranks.group import Mesh
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.zero import ZeRO

# Exercise 3: what the slow link may carry, in bytes for each rank and step.
MOST = 60_000


def hybrid_of_eight(slow, fast, held):
    """Your guess for `nn.Linear(1000, 1000, bias=False)` in float32 and AdamW under hybrid shard on
    two nodes of four ranks."""
    if not attempted(slow, fast, held):
        return
    counted = _counted_on_eight()
    same_number("bytes that each rank sends between nodes", slow, counted[0])
    same_number("bytes that each rank sends inside its node", fast, counted[1])
    same_number("bytes that each rank holds", held, counted[2])
    print("right: bill() counts {:,} bytes between, {:,} inside, {:,} held".format(*counted))


@functools.cache
def _counted_on_eight():
    """Bytes that a rank sends between nodes, sends inside its node, and holds."""
    return launch(_count_a_step, ranks=8)[0]


def _count_a_step(world):
    mesh = Mesh(world, replicate=2, shard=4)
    layer = torch.nn.Linear(1000, 1000, bias=False)
    model = ZeRO(layer, mesh["shard"], 3, replicate=mesh["replicate"])
    optimizer = adamw(model)
    with bill() as sent:
        model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    averages = [x for x in optimizer.state[layer.weight].values() if x.shape == layer.weight.shape]
    held = sum(tensor.nbytes for tensor in [layer.weight, layer.weight.grad, *averages])
    by_group = sent.by("group")
    return by_group[mesh["replicate"].ranks], by_group[mesh["shard"].ranks], held


def hybrid_all_reduce(yours):
    """`yours(tensor, mesh)`: the sum over all ranks, on each, by which the ranks along
    mesh["replicate"] send each other only shards."""
    for replicate, shard in ((2, 2), (3, 2), (2, 4)):
        size = replicate * shard
        inputs = digits(size, 8)
        ran = run(functools.partial(_on_mesh, yours, replicate, shard), inputs)
        if ran is None or not any(one.messages for one in ran) and not attempted(None):
            return
        where = f"replicate={replicate}, shard={shard}"
        between = 0
        for rank, one in enumerate(ran):
            result, kept, slow, flat = one.result
            same_tensor(f"{where}, rank {rank}", result, sum(inputs))
            if not kept:
                raise Wrong(f"{where}, rank {rank}: it changed its argument; clone() it")
            if flat:
                raise Wrong(
                    f"{where}, rank {rank}: it sends {flat:,} bytes in groups other than "
                    'mesh["shard"] and mesh["replicate"]'
                )
            between += slow
        right = 2 * (replicate - 1) * inputs[0].nbytes
        same_number(f"{where}: bytes that all ranks send between replicas", between, right)
    print("right for 2 x 2, 3 x 2 and 2 x 4 ranks, and only shards travel between replicas")


def _on_mesh(yours, replicate, shard, mine, world):
    mesh, before = Mesh(world, replicate=replicate, shard=shard), mine.clone()
    with bill() as sent:
        result = yours(mine, mesh)
    by_group = sent.by("group")
    slow = by_group.pop(mesh["replicate"].ranks, 0)
    by_group.pop(mesh["shard"].ranks, None)
    return result, torch.equal(mine, before), slow, sum(by_group.values())


def local_sgd(k, drift):
    """`k`: the smallest `sync_every` with which `nn.Linear(1000, 1000, bias=False)` in float32 on 2
    nodes of 4 ranks sends at most 60,000 bytes between nodes for each rank and step, on average.
    `drift(model, mesh)`: the distance of this copy's weights from the mean of all copies."""
    if not attempted(k, drift):
        return
    each, _, _ = _counted_on_eight()
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise Wrong(f"k is {k!r}: give a whole number of at least 1")
    if each / k > MOST:
        raise Wrong(f"k={k}: {each:,} bytes every {k} steps are {each / k:,.0f} a step: too many")
    if k > 1 and each / (k - 1) <= MOST:
        raise Wrong(f"k={k} is enough, and so is {k - 1}")
    ran = run(lambda mine, world: _drifted(drift, world), [torch.tensor(r) for r in range(4)])
    if ran is None or not any(one.result[0] is not None for one in ran) and not attempted(None):
        return
    for rank, one in enumerate(ran):
        got, right = one.result
        if not isinstance(got, (float, torch.Tensor)) or abs(float(got) - right) > 1e-9 * right:
            raise Wrong(f"rank {rank}: the drift is {got}, expected {right}")
    print(f"right: {each:,} bytes every {k} steps, and the drift is the same on every rank")


def _drifted(yours, world):
    """Two copies whose every weight differs by known numbers; all of it, and what `yours` finds."""
    mesh = Mesh(world, replicate=2, shard=2)
    model = ZeRO(tiny_gpt(layers=1), mesh["shard"], 3, mesh["replicate"], sync_every=1000)
    torch.manual_seed(world.rank)
    square = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.randn_like(parameter)
            parameter += step
            mean = all_reduce(step, mesh["replicate"], "avg")
            square += ((step - mean) ** 2).sum()
    right = all_reduce(torch.as_tensor(square, dtype=torch.float64), mesh["shard"]).sqrt().item()
    return yours(model, mesh), right
