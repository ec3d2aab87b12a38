"""One rank's part of a schedule, with the messages that it implies.

A schedule says only what is computed. What has to be sent follows: the output of a forward to the
rank of the next stage, the gradient of a stage's input to the rank of the stage before. A message
is named by the action that gives it: `2F0` is the output of stage 2 for micro-batch 0, `2B0` the
gradient of its input (by a B or an I).

Three rules keep it from standing still, whatever the schedule:

* No rank ever waits for a message to be *taken*. A send is started and left.
* A rank asks for messages in the order of use, two at a time with the one in use: not for all at
  once, or it would hold the memory for a whole batch.
* A sent tensor is let go where the order of things shows that it must have been taken: when this
  rank takes a message that the receiver gave after having used that one.
"""

from typing import NamedTuple

from s2s_lib.strategies.pipeline.actions import Action, Schedule
from s2s_lib.strategies.pipeline.order import before, goes_to, message

AHEAD = 2


class Step(NamedTuple):
    """One action and what goes with it; messages with the rank at the other end.

    In order: `ask` for messages that come soon, `take` the one this action needs (None: it is here,
    or needs none), let go of those in `settle`, compute, `give` the result (None: it stays here).
    """

    action: Action
    ask: tuple[tuple[Action, int], ...]
    take: tuple[Action, int] | None
    settle: tuple[Action, ...]
    give: tuple[Action, int] | None


def program(schedule: Schedule, rank: int) -> list[Step]:
    """What one rank does, step by step. What is not in any `settle` is waited for at the end."""
    line = schedule.ranks[rank]
    takes = [_from_elsewhere(schedule, action, rank) for action in line]
    gives = [_to_elsewhere(schedule, action, rank) for action in line]
    coming = [take for take in takes if take]
    settle = _settle(schedule, line, takes, gives)
    steps, used, asked = [], 0, 0
    for action, take, give, settled in zip(line, takes, gives, settle, strict=True):
        until = max(asked, min(used + AHEAD, len(coming)))
        steps.append(Step(action, tuple(coming[asked:until]), take, tuple(settled), give))
        used, asked = used + bool(take), until
    return steps


def _from_elsewhere(schedule, action, rank):
    need = before(action, schedule)
    if need is None or schedule.rank_of[need.stage] == rank:
        return None
    return need, schedule.rank_of[need.stage]


def _to_elsewhere(schedule, action, rank):
    to = goes_to(action, schedule)
    if to is None or schedule.rank_of[to] == rank:
        return None
    return message(action), schedule.rank_of[to]


def _settle(schedule, line, takes, gives):
    """For each action, the sent messages that have certainly been taken once it has its own."""
    places = {peer: _places(schedule, peer) for peer in {give[1] for give in gives if give}}
    settled = [[] for _ in line]
    for at, give in enumerate(gives):
        if give is None:
            continue
        sent, peer = give
        used = places[peer][sent][1]
        for later in range(at + 1, len(line)):
            take = takes[later]
            if take and take[1] == peer and places[peer][take[0]][0] >= used:
                settled[later].append(sent)
                break
    return settled


def _places(schedule, rank):
    """message -> (where in the rank's line it is given, where it is used)."""
    places = {}
    for at, action in enumerate(schedule.ranks[rank]):
        given, used = message(action), before(action, schedule)
        if action.kind != "W":
            places[given] = (at, places.get(given, (None, None))[1])
        if used:
            places[used] = (places.get(used, (None, None))[0], at)
    return places
