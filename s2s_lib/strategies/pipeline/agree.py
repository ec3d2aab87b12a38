"""That all ranks of a pipeline are about to do the same: found at once, not by waiting."""

import hashlib
import json

from s2s_lib.strategies.pipeline.ties import describe
from s2s_lib.strategies.replicas import exchange


def check_same_batch(said):
    """Errors where the ranks begin differently; `said` by all, see `Pipeline.summary`."""
    modes = [mode for mode, *_ in said]
    if len(set(modes)) > 1:
        words = [("step", "evaluate", "forward")[mode] for mode in modes]
        told = ", ".join(f"rank {rank} {word}" for rank, word in enumerate(words))
        raise ValueError(f"the ranks have called different things: {told}")
    (x, cut_x, own_x), (y, cut_y, own_y) = (max(row[i : i + 3] for row in said) for i in (2, 5))
    # In lists that the user cut, targets may be numbers or rows of tokens: then other totals.
    by_hand = own_x and own_y and x != y
    if y != -1 and (x, cut_x) != (y, cut_y) and not by_hand:
        raise ValueError(
            f"x has {x} rows on the first stage's rank, y {y} on the last's"
            + (", in other micro-batches" if x == y else "")
            + ": give y a row for each row of x"
        )


def agree_on_schedule(schedule, group, modules, stage, tied):
    """ValueError on all ranks unless they have one schedule, and each the stages it needs."""
    lines = repr((schedule.name, schedule.ranks, schedule.feedback, tied_as_lists(tied)))
    digest = hashlib.sha256(lines.encode()).hexdigest()
    try:
        check_stages(schedule, group, modules, stage)
        mine = [repr(schedule), digest, None, describe(tied, stage, schedule)]
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


def tied_as_lists(tied):
    return [sorted(names.items()) for names in tied]


def check_stages(schedule, group, modules, stage):
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
        for inner in stage[number].modules():
            if not getattr(inner, "backward_comes_apart", True):
                raise ValueError(
                    f"{schedule.name} takes the backward of stage {number} apart, and a "
                    f"{type(inner).__name__} allows it only whole: use a schedule with B, 1F1B "
                    "say, or a DDP"
                )
