"""What a training run does that has islands: their outer step, and a checkpoint for each.

    runs/diloco/checkpoints/step-000050              the first island's, and so the run's
    runs/diloco/checkpoints/island-1/step-000050     the others'

Weights and momentum of the outer step are the same in all; the inner optimizer's moments are not.
"""

from pathlib import Path

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.strategies.diloco.diloco import DiLoCo
from s2s_lib.strategies.diloco.state import KEYS
from s2s_lib.training import checkpoint
from s2s_lib.training.disk import read_manifest
from s2s_lib.training.parallel import Parallel


def make_diloco(parallel: Parallel, optimizer) -> DiLoCo | None:
    """Between the islands of a run; None where there is one model."""
    keys = parallel.config.diloco
    if keys is None:
        return None
    options = keys.model_dump(exclude={"islands"})
    group = parallel.mesh["island"]
    return DiLoCo(parallel, optimizer, group, **options, seed=parallel.config.seed)


def over_islands(number: float, parallel: Parallel) -> float:
    """The mean of one number of each island: 8 bytes."""
    if parallel.config.diloco is None:
        return number
    mine = torch.tensor(number, dtype=torch.float64)
    return all_reduce(mine, parallel.mesh["island"], "avg").item()


def of_island(checkpoints: Path, number: int) -> Path:
    """Where an island has its checkpoints."""
    return checkpoints / f"island-{number}" if number else checkpoints


def to_load(checkpoints: Path, islands: int) -> list[str] | None:
    """For each island of this run a checkpoint: the last that all islands have which saved it; if
    there is none, the first one's last for all. None where there is nothing to load."""
    last = checkpoint.latest(checkpoints)
    if last is None:
        return None
    saved = read_manifest(last)["layout"].get("island", 1)
    folders = [of_island(checkpoints, number) for number in range(saved)]
    names = [{path.name for _, path in checkpoint.checkpoints(folder)} for folder in folders]
    for _, path in reversed(checkpoint.checkpoints(checkpoints)):
        if all(path.name in there for there in names):
            return [str(folders[n % saved] / path.name) for n in range(islands)]
    print(
        f"{last}: not all of {saved} islands have saved it, or any before it; each begins with it"
    )
    return [str(last)] * islands


def counts_of(saved: list[int] | None, diloco: DiLoCo) -> list[int]:
    """Where the islands are in their round; at its beginning if there were none, or other ones."""
    saved = saved or []
    fits = len(saved) == len(diloco.counts) and saved[1] < diloco.sync_every
    return saved if fits else [0] * len(diloco.counts)


def forget_outer(optimizer):
    """What was an island's goes on as a whole run."""
    for state in optimizer.state.values():
        for key in KEYS:
            state.pop(key, None)
