"""Kill a rank of `s2s train` at a moment that chance picks, 30 times; each run must get over it.

    python tools/kills.py [--times 30] [--seed 0]

A kill (SIGKILL) comes in a step, or while a checkpoint is being written. Then must hold: the
command ends within seconds, with exit code 1 and the name of the rank; none of its processes is
left; and with --resume it goes on from the last whole checkpoint and ends with the very losses of
a run that nobody disturbed.
"""

import argparse
import math
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from training_runs import course, rank_processes, start

# How long a command may take to end after a kill, and to come to the moment of the kill.
SOON, LONG = 15, 120
STEPS, EVERY = 12, 3
CONFIG = {
    "global_batch": 8,
    "steps": STEPS,
    "precision": "float64",
    "model": {"layers": 4, "hidden": 64, "heads": 4, "seq": 16, "dropout": 0.1},
    "lr_schedule": {"name": "cosine", "warmup_steps": 2},
}
LAYOUTS = {
    "ddp": {"data_parallel_size": 2},
    "zero3": {"data_parallel_size": 4, "zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel_size": 4},
    "background": {"data_parallel_size": 2, "zero_stage": 2, "checkpoint": {"background": True}},
    "mesh": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


class Kill(NamedTuple):
    """Which rank is killed, and when: when the log has `step` lines and the rank has computed for
    `work` seconds since, or, with `saving`, as soon as that step's checkpoint is half written."""

    rank: int
    step: int
    saving: bool
    work: float = 0.0


class Survival(NamedTuple):
    """Of a run that got over a kill: steps logged when it came, the step it then went on after,
    and the seconds until the command had ended."""

    logged: int
    step: int
    seconds: float

    @property
    def cost_a_checkpoint(self) -> bool:
        """The kill came between a checkpoint's step and the moment when it was whole."""
        return self.logged % EVERY == 0 and self.step < self.logged


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    expected, in_saves = {}, 0
    for number in range(given.times):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        with tempfile.TemporaryDirectory(prefix="s2s-kills-") as folder:
            path = write_config(Path(folder), layout)
            if layout not in expected:
                expected[layout] = undisturbed(path)
            kill = drawn(chance, ranks_of(layout))
        with tempfile.TemporaryDirectory(prefix="s2s-kills-") as folder:
            path = write_config(Path(folder), layout)
            after = survive(path, layout, kill, expected[layout])
        in_saves += after.cost_a_checkpoint
        print(
            f"{number + 1:>3}  {layout:<10}  rank {kill.rank} killed after step {after.logged}, "
            f"told in {after.seconds:.1f} s; went on after step {after.step}",
            flush=True,
        )
    print(f"{given.times} kills, {in_saves} of them before a checkpoint was whole: all got over")


def write_config(folder: Path, layout: str) -> Path:
    keys = CONFIG | LAYOUTS[layout]
    keys["checkpoint"] = {"every": EVERY} | keys.get("checkpoint", {})
    path = folder / f"{layout}.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def ranks_of(layout: str) -> int:
    sizes = (size for key, size in LAYOUTS[layout].items() if key.endswith("_parallel_size"))
    return math.prod(sizes)


def drawn(chance: random.Random, ranks: int) -> Kill:
    """A kill that chance picks: of any rank, in a step, or in a save that is not the first."""
    saving = chance.random() < 0.5
    step = chance.choice([2 * EVERY, 3 * EVERY]) if saving else chance.randrange(1, STEPS - EVERY)
    return Kill(chance.randrange(ranks), step, saving, chance.choice([0, 0.01, 0.02]))


def undisturbed(path: Path) -> list[tuple]:
    """The course of a run that nobody disturbs."""
    process = start(path.parent, "train", path.name)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    return course(folder_of(path))


def survive(path: Path, layout: str, kill: Kill, expected: list[tuple]) -> Survival:
    """Kill, look, resume, compare. AssertionError for what should have been otherwise."""
    process = start(path.parent, "train", path.name)
    ranks = at_the_moment(process, folder_of(path), kill)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    began = time.monotonic()
    ranks[kill.rank].kill()
    out, err = process.communicate(timeout=SOON)
    seconds = time.monotonic() - began
    assert process.returncode == 1, f"exit code {process.returncode}\n{out}\n{err}"
    assert f"rank {kill.rank} of {len(ranks)} was killed by SIGKILL" in err, err
    _, left = psutil.wait_procs(family, timeout=SOON)
    assert not left, left
    logged = len(course(folder_of(path)))
    process = start(path.parent, "train", path.name, "--resume")
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    gone_on = re.search("goes on after step ([0-9]+)", out)
    step = int(gone_on.group(1)) if gone_on else 0
    assert step >= checkpointed(logged, layout == "background"), (step, logged)
    pairs = zip(course(folder_of(path)), expected, strict=True)
    other = [pair for pair in pairs if pair[0] != pair[1]]
    assert not other, f"another course, first (after the kill, undisturbed): {other[0]}"
    return Survival(logged, step, seconds)


def checkpointed(logged: int, background: bool) -> int:
    """The step of which there is surely a whole checkpoint once `logged` steps are logged.

    A step is logged before its checkpoint is saved; in the background one may still be on its way
    until the next begins.
    """
    return max(0, (logged - 1) // EVERY - background) * EVERY


def at_the_moment(process, folder, kill) -> list[psutil.Process]:
    """Wait until the kill is due: the processes of the ranks, in order."""
    wait_until(process, lambda: len(course(folder)) >= kill.step)
    ranks = rank_processes(process)
    if kill.saving:
        wait_until(process, lambda: half_written(folder) or len(course(folder)) > kill.step)
    else:
        due = computed(ranks[kill.rank]) + kill.work
        wait_until(process, lambda: computed(ranks[kill.rank]) >= due)
    return ranks


def computed(process: psutil.Process) -> float:
    """Seconds, in steps of 0.01."""
    return sum(process.cpu_times()[:2])


def half_written(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*.tmp"))


def wait_until(process, condition):
    limit = time.monotonic() + LONG
    while not condition():
        assert process.poll() is None, f"it ended\n{process.communicate()}"
        assert time.monotonic() < limit, "it does not get there"


def folder_of(path: Path) -> Path:
    return path.parent / "runs" / path.stem


if __name__ == "__main__":
    main()
