"""The checks of lesson 01: data parallelism."""

import torch

from s2s_lib.course.check.answers import (
    Wrong,
    attempted,
    digits,
    rounded_to,
    run,
    same_number,
    same_tensor,
)
from s2s_lib.course.model import next_token_loss
from s2s_lib.course.reference import gradients, tiny_gpt
from s2s_lib.meters.bill import bill
from s2s_lib.meters.timeline import timeline
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.ddp import DDP


def ddp_of_eight(sent, held, accumulated):
    """Your guess for `nn.Linear(1000, 1000, bias=False)` in float32, AdamW and DDP on 8 ranks."""
    if not attempted(sent, held, accumulated):
        return
    counted = launch(_count_ddp_step, ranks=8)[0]
    same_number("bytes that each rank sends in a step", sent, counted[0])
    same_number("bytes that each rank holds", held, counted[1])
    same_number("bytes that each rank sends for five micro-batches", accumulated, counted[2])
    print("right: bill() counts {:,} bytes sent, {:,} held, {:,} sent for five".format(*counted))


def _count_ddp_step(world):
    layer = torch.nn.Linear(1000, 1000, bias=False)
    model, optimizer = DDP(layer, world), torch.optim.AdamW(layer.parameters())
    with bill() as one:
        model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    averages = [x for x in optimizer.state[layer.weight].values() if x.shape == layer.weight.shape]
    held = sum(tensor.nbytes for tensor in [layer.weight, layer.weight.grad, *averages])
    with bill() as five:
        with model.no_sync():
            for _ in range(4):
                model(torch.ones(1, 1000)).sum().backward()
        model(torch.ones(1, 1000)).sum().backward()
    return one.bytes, held, five.bytes


def average_gradients(yours):
    """`yours(model, world)`: each trainable parameter's `.grad` becomes the mean over the ranks, by
    one all_reduce; one that is None on some rank counts as zero there. Frozen ones keep None."""
    for size in (2, 4):
        inputs = [digits(size, 6)[rank].double() for rank in range(size)]
        ran = run(lambda mine, world: _averaged(yours, mine, world), inputs)
        if ran is None or not any(one.messages for one in ran) and not attempted(None):
            return
        last = inputs[size - 1][:3]
        expected = {"0.weight": sum(inputs).view(2, 3) / size, "1.weight": last.view(1, 3) / size}
        for rank, one in enumerate(ran):
            where, (gradients, collectives) = f"on {size} ranks, rank {rank}", one.result
            for name, right in expected.items():
                same_tensor(f"{where}, gradient of {name}", gradients[name], right)
            if gradients["2.weight"] is not None:
                raise Wrong(f"{where}: the frozen 2.weight has a gradient; it must stay None")
            if collectives != ["all_reduce"]:
                raise Wrong(f"{where}: it called {collectives}; one all_reduce is enough")
    print("right on 2 and 4 ranks: one all_reduce, the missing gradient counted as zero")


def _averaged(yours, mine, world):
    """What `yours` makes of gradients of which the second exists on the last rank only."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, out, bias=False) for out in (2, 1, 1)))
    model.double()[2].weight.requires_grad = False
    model[0].weight.grad = mine.view(2, 3).clone()
    if world.rank == world.size - 1:
        model[1].weight.grad = mine[:3].view(1, 3).clone()
    with timeline() as line:
        yours(model, world)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, [operation.name for operation in line.operations]


def accumulate(yours):
    """`yours(model, micro_batches, world)`: leaves in the DDP model the gradient of the mean loss
    over all counted targets of all ranks, and sends the gradients once."""
    size = 2
    inputs = [torch.tensor(rank) for rank in range(size)]
    ran = run(lambda mine, world: _accumulated(yours, world), inputs)
    if ran is None or not any(one.result[0] for one in ran) and not attempted(None):
        return
    model = tiny_gpt(layers=1)
    tokens, targets = map(torch.cat, zip(*_uneven(0), *_uneven(1), strict=True))
    next_token_loss(model(tokens), targets).backward()
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for rank, one in enumerate(ran):
        where, (found, sent) = f"on {size} ranks, rank {rank}", one.result
        for name, parameter in model.named_parameters():
            right = parameter.grad
            # In float32, for example, W / total is rounded.
            got = rounded_to(found.get(name), right)
            same_tensor(f"{where}, gradient of {name}", got, right)
        if sent > gradient_bytes + 1000:
            raise Wrong(
                f"{where}: it sent {sent:,} bytes, and the gradients once are "
                f"{gradient_bytes:,}; which backward passes belong under no_sync()?"
            )
    print("right: the gradient of one process on all counted tokens, sent once")


def _accumulated(yours, world):
    model = DDP(tiny_gpt(layers=1), world)
    with bill() as sent:
        yours(model, _uneven(world.rank), world)
    return gradients(model.module), sent.bytes


def _uneven(rank):
    """Three micro-batches of two rows in which rank 0 has many targets that count, rank 1 few."""
    random = torch.Generator().manual_seed(rank)
    found = []
    for counted in (16, 9, 12) if rank == 0 else (3, 0, 1):
        tokens, targets = torch.randint(256, (2, 2, 16), generator=random)
        targets[:, counted:] = -100
        found.append((tokens, targets))
    return found
