"""What all checks share: run an answer on real ranks, compare, and say where it is wrong."""

from typing import Any, NamedTuple

import torch

from s2s_lib.meters.bill import bill
from s2s_lib.ranks.failure import RankError
from s2s_lib.ranks.launch import launch

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


def rounded_to(got, right: torch.Tensor):
    """`got` with what differs from `right` by rounding only set to it: that is not wrong."""
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (right.shape, right.dtype):
        return got
    return torch.where(torch.isclose(got, right, rtol=1e-6, atol=1e-10), right, got)


def same_number(what: str, got, expected):
    """Wrong unless they are equal; an expected None is not compared."""
    if expected is not None and got != expected:
        raise Wrong(f"{what}: got {got:,}, expected {expected:,}")


def digits(size: int, elements: int) -> list[torch.Tensor]:
    """(1, 2, ..., elements) times 10^r for each rank r; at most 9 elements, so no digit carries."""
    return [torch.arange(1, elements + 1) * 10**rank for rank in range(size)]
