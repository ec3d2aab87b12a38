"""That all ranks of a pipeline are about to do the same: found at once, not by waiting."""

import hashlib
import json
from typing import NamedTuple

from s2s_lib.strategies.pipeline.ties import describe
from s2s_lib.strategies.replicas import exchange

# How a rank begins a batch.
REFUSED, STEP, EVALUATE, OUTPUT = -1, 0, 1, 2
WORDS = {STEP: "step", EVALUATE: "evaluate", OUTPUT: "forward"}


class Beginning(NamedTuple):
    """How a rank begins a batch, in whole numbers.

    `shapes` is a number for all that decides what its messages look like. Of x and of y, on the
    ranks that give them (else -1): the rows, a number for how they are cut, and whether by the
    user. `given_up` counts what failed on this rank before.
    """

    mode: int
    shapes: int = 0
    x_rows: int = -1
    x_cut: int = 0
    x_by_hand: int = 0
    y_rows: int = -1
    y_cut: int = 0
    y_by_hand: int = 0
    given_up: int = 0


def check_same_batch(said: tuple[Beginning, ...]):
    """ValueError where the ranks begin differently."""
    if len({beginning.mode for beginning in said}) > 1:
        told = ", ".join(f"rank {rank} {WORDS[b.mode]}" for rank, b in enumerate(said))
        raise ValueError(f"the ranks have called different things: {told}")
    x, y = max(said, key=lambda b: b.x_rows), max(said, key=lambda b: b.y_rows)
    # In lists that the user cut, targets may be numbers or rows of tokens: then other totals.
    if x.x_by_hand and y.y_by_hand and x.x_rows != y.y_rows:
        return
    if y.y_rows != -1 and (x.x_rows, x.x_cut) != (y.y_rows, y.y_cut):
        raise ValueError(
            f"x has {x.x_rows} rows on the first stage's rank, y {y.y_rows} on the last's"
            + (", in other micro-batches" if x.x_rows == y.y_rows else "")
            + ": give y a row for each row of x"
        )


def agree_on_schedule(schedule, group, modules, module_of, tied):
    """ValueError on all ranks unless they have one schedule, and each the stages it needs."""
    names = [sorted(weights.items()) for weights in tied]
    lines = repr((schedule.name, schedule.ranks, schedule.feedback, names))
    digest = hashlib.sha256(lines.encode()).hexdigest()
    try:
        check_stages(schedule, group, modules, module_of)
        mine = [repr(schedule), digest, None, describe(tied, module_of, schedule)]
    except ValueError as error:
        mine = [repr(schedule), digest, str(error), []]
    said = [json.loads(words) for words in exchange(json.dumps(mine).encode(), group)]
    for rank, (name, digest, *_) in enumerate(said):
        if digest != said[0][1]:
            other = name if name != said[0][0] else "one with other actions or other tied weights"
            raise ValueError(
                f"rank 0 has {said[0][0]}, rank {rank} {other}: build the same on every rank"
            )
    for rank, (*_, trouble, _) in enumerate(said):
        if trouble:
            raise ValueError(f"rank {rank}: {trouble}")
    for names, copies in zip(tied, zip(*(copies for *_, copies in said), strict=True), strict=True):
        kinds = {str(kind) for on_rank in copies for kind in on_rank.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"tied: {names} are not alike, [shape, dtype, trained] is {' and '.join(kinds)}"
            )


def check_stages(schedule, group, modules, module_of):
    """ValueError unless this rank has the modules that the schedule needs here."""
    if len(schedule.ranks) != group.size:
        raise ValueError(
            f"{schedule!r} is for {len(schedule.ranks)} ranks, the group has {group.size}"
        )
    own = schedule.stages_of(group.rank)
    for module in modules:
        ours = any(base.__module__.startswith("s2s_lib.") for base in type(module).__mro__)
        if hasattr(module, "no_sync") and not ours:
            raise ValueError(
                f"a {type(module).__module__}.{type(module).__name__} as a stage would be averaged "
                "at the wrong time: use DDP or ZeRO of s2s_lib"
            )
    if len(modules) != len(own):
        raise ValueError(
            f"got {len(modules)} modules for its stages {own} of {schedule!r}: give those "
            f"{len(own)}, or all {schedule.stages}"
        )
    split = {action.stage for action in schedule.ranks[group.rank] if action.kind == "I"}
    for number in sorted(split):
        for inner in module_of[number].modules():
            if not getattr(inner, "backward_comes_apart", True):
                raise ValueError(
                    f"{schedule.name} takes the backward of stage {number} apart, and a "
                    f"{type(inner).__name__} allows it only whole: use a schedule with B, 1F1B "
                    "say, or a DDP"
                )
