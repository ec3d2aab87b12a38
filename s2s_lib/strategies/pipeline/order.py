"""What must come before what, the same in every schedule.

    F     needs the F of the stage before (in the first stage nothing, or with `feedback` the F of
          the last stage for an earlier micro-batch)
    B, I  need the stage's own F, and the B or I of the stage after
    W     needs its I

What an action gives is a *message*, whether it has to be sent or not: `2F0` is the output of stage
2 for micro-batch 0, `2B0` the gradient of its input (by a B or an I).
"""

from collections import deque


def message(action):
    """The name of what an action gives."""
    return action._replace(kind="B") if action.kind == "I" else action


def before(action, schedule):
    """The message of another stage that an action needs, if any."""
    found = _before(action, schedule)
    return None if found is None else action._make(found)


def _before(action, schedule):
    stage, kind, micro = action
    if kind == "F":
        if stage:
            return stage - 1, "F", micro
        back = micro - schedule.feedback
        return (schedule.stages - 1, "F", back) if schedule.feedback and back >= 0 else None
    if kind == "W" or stage + 1 == schedule.stages:
        return None
    return stage + 1, "B", micro


def needs(action, schedule) -> list[int]:
    """What must be done before an action, as places (see `place`)."""
    stage, kind, micro = action
    places = []
    if kind != "F":
        own = "B" if kind == "W" else "F"
        places.append(place((stage, own, micro), schedule))
    found = _before(action, schedule)
    if found is not None:
        places.append(place(found, schedule))
    return places


def place(action, schedule) -> int:
    """A number for what an action gives to others: a forward, or the gradient of a stage's input
    (by B or by I). What W gives nobody needs: -1."""
    stage, kind, micro = action
    if kind == "W":
        return -1
    row = stage if kind == "F" else schedule.stages + stage
    return row * schedule.microbatches + micro


def goes_to(action, schedule) -> int | None:
    """The stage that uses what an action gives, if any."""
    stage, kind, micro = action
    if kind == "W":
        return None
    if kind == "F" and stage + 1 == schedule.stages:
        again = schedule.feedback and micro + schedule.feedback < schedule.microbatches
        return 0 if again else None
    to = stage + 1 if kind == "F" else stage - 1
    return to if to >= 0 else None


def in_order(schedule):
    """(rank, action, places it needs, place it gives) for all actions, each after what it needs and
    after those before it on its rank; ValueError names the first that can never run."""
    done = bytearray(2 * schedule.stages * schedule.microbatches + 1)
    waiting = {}
    at = [0] * len(schedule.ranks)
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        line = schedule.ranks[rank]
        while at[rank] < len(line):
            action = line[at[rank]]
            needed, given = needs(action, schedule), place(action, schedule)
            missing = [need for need in needed if not done[need]]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            yield rank, action, needed, given
            at[rank] += 1
            done[given] = 1
            if given in waiting:
                ready.extend(waiting.pop(given))
    wants = {rank: need for need, ranks in waiting.items() for rank in ranks}
    if wants:
        stuck = {rank: schedule.ranks[rank][at[rank]] for rank in sorted(wants)}
        raise ValueError(_impossible(schedule, stuck, wants))


def _impossible(schedule, stuck, wants):
    """Which action can never run; rank r stands at `stuck[r]` and needs the place `wants[r]`."""
    missing = {
        rank: next(a for line in schedule.ranks for a in line if place(a, schedule) == wants[rank])
        for rank in stuck
    }
    # Following who waits for whom ends in a ring, of one rank if what it needs stands after it.
    first, passed = min(stuck), []
    while first not in passed:
        passed.append(first)
        first = schedule.rank_of[missing[first].stage]
    ring = [*passed[passed.index(first) :], first]
    why = ", which stands after it"
    if len(ring) > 2:
        why = f"; ranks {', '.join(map(str, ring))} wait in a ring, each for the next"
    told = "; ".join(f"rank {rank}: {a} waits for {missing[rank]}" for rank, a in stuck.items())
    return (
        f"{schedule.name}: {stuck[first]} of rank {first} can never run: it needs "
        f"{missing[first]}{why} ({told})"
    )
