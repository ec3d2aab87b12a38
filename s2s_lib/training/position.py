"""How far a run has come, and whether it can go on from there."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from s2s_lib.ranks.group import Group
from s2s_lib.training.agree import told


class Position(NamedTuple):
    """How far a run has come: steps, and samples of this epoch that were used; and what it must
    find as it was to go on: the seed, the length of a sample, a digest of the text."""

    step: int
    epoch: int
    sample: int
    seed: int
    seq: int
    text: str
    # The counts of a DiLoCo.
    rounds: list[int] | None = None


def position_of(progress: dict, checkpoints: Path) -> Position:
    if set(progress) != set(Position._fields):
        raise ValueError(
            f"{checkpoints}: saved by another loop, with {sorted(progress)} as its progress; its "
            "weights alone can be had with `s2s export` and checkpoint.start_from"
        )
    return Position(**progress)


def refuse_others(start: Position, position: Position, folder: Path):
    """ValueError where the samples would not be those that the run has had and was to have."""
    for key in ("seed", "seq", "text"):
        was, now = getattr(position, key), getattr(start, key)
        if was != now:
            what = "the text to train on" if key == "text" else key
            raise ValueError(
                f"the run in {folder} has used samples that would not be the same now: {what} was "
                f"{was} and is {now}. Give what it was, or begin a new run without --resume"
            )


def digest_of(world: Group, tokens) -> str:
    """A short number of the text; ValueError where ranks have read different ones."""
    mine = hashlib.blake2b(tokens.numpy(), digest_size=8).hexdigest()
    said = told(world, lambda: mine, ValueError, "no text")
    if len(set(said)) > 1:
        other = next(rank for rank, digest in enumerate(said) if digest != said[0])
        raise ValueError(
            f"ranks 0 and {other} read different texts ({said[0]} and {said[other]}): give all "
            "the same data.path. The text that is taken without one differs between versions of "
            "Python"
        )
    return mine
