"""The checks of the exercises: `check.NAME(yours)` says that yours is right, or where it is not.

What you wrote runs on real ranks. Every rank's result is compared, element by element, with what
it must be, then what it sent. An exercise that is still `...` prints "not attempted"; a wrong
answer raises `Wrong`, which a notebook shows as one sentence.

An input of the checks is (1, 2, 3, ...) times 10^r on rank r, so in a sum the digit at 10^r is
rank r's part: 1011 where 1111 should be lacks what rank 2 has.
"""

from typing import Any, NamedTuple

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.course.model import next_token_loss
from s2s_lib.course.reference import gradients, tiny_gpt
from s2s_lib.meters.bill import bill
from s2s_lib.meters.timeline import timeline
from s2s_lib.ranks.failure import RankError
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.ddp import DDP

# How long a message of an exercise may take: long enough for a busy machine to start the ranks.
PATIENCE = 5
NOT_ATTEMPTED = "not attempted"


class Wrong(AssertionError):
    """An answer that is not right; the message says where, what came and what was expected."""

    def _render_traceback_(self):
        # What IPython shows instead of a traceback through this file.
        return [f"Wrong: {self}"]


class Ran(NamedTuple):
    """What an exercise did on one rank."""

    result: Any
    kept_its_argument: bool
    messages: int
    bytes: int


def attempted(*answers) -> bool:
    """Whether there is an answer in every place; says so where not."""
    done = all(answer is not None and answer is not ... for answer in answers)
    if not done:
        print(NOT_ATTEMPTED)
    return done


def run(yours, inputs) -> list[Ran] | None:
    """Call `yours(input, world)` on as many ranks as there are inputs, input r on rank r.

    None, after "not attempted", where every rank returns None or raises a bare
    NotImplementedError; Wrong, with the rank's own traceback, where one fails.
    """
    try:
        ran = launch(_run_on_rank, yours, inputs, ranks=len(inputs), timeout=PATIENCE)
    except RankError as error:
        raised, _, message = error.summary.partition("NotImplementedError")
        if not raised.endswith(" raised ") or message.startswith(":"):
            raise Wrong(f"on {len(inputs)} ranks: {error}") from None
        ran = []
    if any(one.result is not None for one in ran):
        return ran
    if any(one.messages for one in ran):
        where = f"on {len(inputs)} ranks"
        raise Wrong(f"{where}: it sends messages but returns None; is a return missing?")
    print(NOT_ATTEMPTED)
    return None


def _run_on_rank(world, yours, inputs):
    mine = inputs[world.rank].clone()
    with bill() as sent:
        result = yours(mine, world)
    return Ran(result, torch.equal(mine, inputs[world.rank]), sent.messages, sent.bytes)


def compare(ran: list[Ran], expected, messages: int | None = None, nbytes: int | None = None):
    """Wrong unless rank r's result is `expected[r]`, its argument is as it was, and each rank sent
    so many messages and bytes, where these are given."""
    for rank, (one, right) in enumerate(zip(ran, expected, strict=True)):
        where = f"on {len(ran)} ranks, rank {rank}"
        same_tensor(where, one.result, right)
        if not one.kept_its_argument:
            raise Wrong(f"{where}: the result is right, but it changed its argument; clone() it")
        same_number(f"{where}: messages sent", one.messages, messages)
        same_number(f"{where}: bytes sent", one.bytes, nbytes)


def same_tensor(where: str, got, expected: torch.Tensor):
    """Wrong at the first element that differs; shape and dtype count too."""
    said = f"a tensor of shape {tuple(expected.shape)} and {expected.dtype}"
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{where}: got a {type(got).__name__}, expected {said}")
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        raise Wrong(f"{where}: got shape {tuple(got.shape)} and {got.dtype}, expected {said}")
    differing = (got != expected).nonzero()
    if len(differing):
        place = tuple(differing[0].tolist())
        raise Wrong(
            f"{where}, element {', '.join(map(str, place))}: got {got[place].item()}, expected "
            f"{expected[place].item()} ({len(differing)} of {got.numel()} elements differ)"
        )


def same_number(what: str, got, expected):
    """Wrong unless they are equal; an expected None is not compared."""
    if expected is not None and got != expected:
        raise Wrong(f"{what}: got {got:,}, expected {expected:,}")


def digits(size: int, elements: int) -> list[torch.Tensor]:
    """(1, 2, ..., elements) times 10^r for each rank r; at most 9 elements, so no digit carries."""
    return [torch.arange(1, elements + 1) * 10**rank for rank in range(size)]


# Lesson 00: ranks and collectives


def ring_of_eight(messages, nbytes):
    """Your guess of what each of 8 ranks sends when a ring all_reduces 4,000,000 bytes."""
    if not attempted(messages, nbytes):
        return
    counted, sent = launch(_what_a_ring_sends, ranks=8)[0]
    same_number("messages that each rank sends", messages, counted)
    same_number("bytes that each rank sends", nbytes, sent)
    print(f"right: bill() counts {counted} messages and {sent:,} bytes on each rank")


def _what_a_ring_sends(world):
    with bill() as sent:
        all_reduce(torch.ones(1_000_000), world, algorithm="ring")
    return sent.messages, sent.bytes


def reduce_scatter(yours):
    """`yours(tensor, world)`: the sum of all ranks' tensors, of which rank r returns piece r."""
    for size in (2, 3, 4):
        inputs = digits(size, 2 * size)
        ran = run(yours, inputs)
        if ran is None:
            return
        share = inputs[0].nbytes // size * (size - 1)
        compare(ran, sum(inputs).chunk(size), messages=size - 1, nbytes=share)
    print("right on 2, 3 and 4 ranks, and each rank sends (W-1)/W of its tensor in W-1 messages")


def all_gather_by_doubling(yours):
    """`yours(piece, world)`: all ranks' pieces in rank order, on each, after log2(W) exchanges."""
    for size in (2, 4, 8):
        inputs = [part.clone() for part in torch.arange(1, 2 * size + 1).chunk(size)]
        ran = run(yours, inputs)
        if ran is None:
            return
        others = inputs[0].nbytes * (size - 1)
        compare(ran, [torch.cat(inputs)] * size, messages=size.bit_length() - 1, nbytes=others)
    print("right on 2, 4 and 8 ranks, and each rank sends log2(W) messages")


# Lesson 01: data parallelism


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
            got, right = found.get(name), parameter.grad
            if isinstance(got, torch.Tensor) and got.shape == right.shape:
                # What differs by rounding only, of W / total in float32 for example, is not wrong.
                got = torch.where(torch.isclose(got, right, rtol=1e-6, atol=1e-10), right, got)
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
