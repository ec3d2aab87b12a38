"""The checks of lesson 02: ZeRO."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from s2s_lib.course.check.answers import (
    Wrong,
    attempted,
    rounded_to,
    run,
    same_number,
    same_tensor,
)
from s2s_lib.course.reference import gradients
from s2s_lib.meters.bill import bill
from s2s_lib.meters.memory import memory
from s2s_lib.meters.timeline import timeline
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.zero import ZeRO


def zero_of_eight(held, sent, accumulated):
    """Your guess for `nn.Linear(1000, 1000, bias=False)` in float32 and AdamW on 8 ranks: bytes
    held at stage 2, sent in a step at stage 3, sent for four micro-batches at stage 2."""
    if not attempted(held, sent, accumulated):
        return
    counted = launch(_count_zero_steps, ranks=8)[0]
    same_number("bytes that each rank holds at stage 2", held, counted[0])
    same_number("bytes that each rank sends in a step at stage 3", sent, counted[1])
    same_number("bytes that each rank sends for four micro-batches", accumulated, counted[2])
    print("right: {:,} bytes held, {:,} sent at stage 3, {:,} for four".format(*counted))


def _count_zero_steps(world):
    held, accumulated = _count(world, stage=2, micro_batches=4)
    _, sent = _count(world, stage=3, micro_batches=1)
    return held, sent, accumulated


def _count(world, stage, micro_batches):
    """What is held after the second of two steps (without AdamW's step counter), and sent in it."""
    model = ZeRO(nn.Linear(1000, 1000, bias=False), world, stage)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with bill() as sent:
            for _ in range(micro_batches):
                model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
    with memory(model, optimizer) as found:
        pass
    counter = sum(state["step"].nbytes for state in optimizer.state.values())
    return found.live_total - counter, sent.bytes


def sharded_adamw_step(yours):
    """`yours(weights, gradient, world)`: the weights after `torch.optim.AdamW`'s first step with
    the mean gradient, of which each rank steps its part; any number of weights."""
    # Large enough that no algorithm sends more than it must to save messages.
    for size, numel in ((2, 40_000), (3, 40_000), (4, 40_002)):
        # As small as AdamW's eps: its first step hardly depends on the size of a larger gradient.
        inputs = [torch.linspace(1, 9, numel).double() * 1e-9 * 2**rank for rank in range(size)]
        ran = run(lambda mine, world: _stepped(yours, mine, world), inputs)
        if ran is None or _untouched((one.result[0], one.messages) for one in ran):
            return
        whole = nn.Parameter(_start(numel))
        whole.grad = sum(inputs) / size
        torch.optim.AdamW([whole]).step()
        part = -(-numel // size)
        for rank, one in enumerate(ran):
            where, (got, stepped) = f"on {size} ranks, rank {rank}", one.result
            same_tensor(where, rounded_to(got, whole.detach()), whole.detach())
            if stepped > part:
                raise Wrong(
                    f"{where}: its optimizer steps {stepped} of {numel} weights; {part} are enough"
                )
            # Padding travels too, so up to a number for each piece more than 2(W-1)/W.
            most = 2 * (size - 1) * part * 8
            if one.bytes > most:
                raise Wrong(
                    f"{where}: it sent {one.bytes:,} bytes; 2(W-1)/W of all are {most:,}, padding "
                    "included, and an all_reduce alone sends that"
                )
    print("right on 2, 3 and 4 ranks: one process's weights, each rank stepped its part")


def _start(numel):
    return torch.linspace(-1, 1, numel, dtype=torch.float64)


def _stepped(yours, mine, world):
    """What `yours` returns, and how many numbers the optimizers in it stepped."""
    sizes = []
    hook = register_optimizer_step_post_hook(
        lambda optimizer, *_: sizes.extend(
            p.numel() for group in optimizer.param_groups for p in group["params"]
        )
    )
    try:
        return yours(_start(len(mine)), mine, world), sum(sizes)
    finally:
        hook.remove()


def clip_shards(yours):
    """`yours(model, max_norm)`: scales the gradients of a ZeRO, at any stage, so that their norm
    is at most `max_norm`, and returns the norm before, the same on all ranks."""
    for size in (2, 3):
        inputs = [torch.tensor(rank) for rank in range(size)]
        ran = run(lambda mine, world: _clipped(yours, world), inputs)
        if ran is None or _untouched(case[::2] for one in ran for case in one.result.values()):
            return
        for max_norm in (1.0, 100.0):
            plain = _odd_layers()
            plain(_rows(size)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            for stage in (0, 1, 3):
                for rank, one in enumerate(ran):
                    where = f"on {size} ranks, rank {rank}, stage {stage}, max_norm={max_norm:g}"
                    _same_clip(where, one.result[stage, max_norm], norm, gradients(plain))
    print("right on 2 and 3 ranks, at stages 0, 1 and 3: one process's norm and gradients")


def _clipped(yours, world):
    """By stage and limit: the norm, this rank's gradients gathered, and the collectives called."""
    found = {}
    for stage in (0, 1, 3):
        for max_norm in (1.0, 100.0):
            model = ZeRO(_odd_layers(), world, stage)
            model(_rows(world.size).chunk(world.size)[world.rank]).square().mean().backward()
            with timeline() as line:
                norm = yours(model, max_norm)
            found[stage, max_norm] = norm, _whole_gradients(model), len(line.operations)
    return found


def _whole_gradients(model):
    """Each rank's shards put together, by parameter name."""
    whole = {}
    for unit in model.units:
        for flat in unit.trainable:
            piece = torch.zeros(flat.piece, dtype=flat.dtype)
            for i, parameter in enumerate(flat.parameters):
                if parameter.grad is not None:
                    flat.shard(piece, i).copy_(parameter.grad)
            whole |= zip(flat.names, flat.gather_vectors(piece), strict=True)
    return whole


def _same_clip(where, clipped, norm, expected):
    got, found, collectives = clipped
    if got is not None:
        got = torch.as_tensor(got, dtype=torch.float64).reshape(())
    same_tensor(f"{where}, norm", rounded_to(got, norm), norm)
    for name, right in expected.items():
        same_tensor(f"{where}, gradient of {name}", rounded_to(found[name], right), right)
    if collectives > 1:
        raise Wrong(f"{where}: it called {collectives} collectives; one number is enough")


def _odd_layers():
    """Seven and three outputs, so that shards are unequal and, on three ranks, padded."""
    layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)).double()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.linspace(-1, 2, parameter.numel()).view(parameter.shape))
    return layers


def _rows(size):
    return torch.linspace(-1, 1, 10 * size).double().view(2 * size, 5)


def _untouched(cases):
    """Whether every case returned None and sent nothing; says "not attempted" if so."""
    untouched = all(result is None and not sent for result, sent in cases)
    return untouched and not attempted(None)
