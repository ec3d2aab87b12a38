"""Kill a rank of `s2s train` at a moment that chance picks, 30 times; each run must get over it.

    python tools/kills.py [--times 30] [--seed 0]

A kill (SIGKILL) comes in a step, or while a checkpoint is being written. Then must hold: the
command ends within seconds, with exit code 1 and the name of the rank; none of its processes is
left; and with --resume it goes on from the last whole checkpoint and ends with the very losses of
a run that nobody disturbed.
"""

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
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
    """Which rank is killed, and when: `delay` seconds after the log has `step` lines, or, with
    `saving`, as soon as the checkpoint of that step is half written."""

    rank: int
    step: int
    saving: bool
    delay: float = 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    expected = {}
    for number in range(given.times):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        with tempfile.TemporaryDirectory(prefix="s2s-kills-") as folder:
            path = write_config(Path(folder), layout)
            if layout not in expected:
                expected[layout] = undisturbed(path)
            kill = drawn(chance, ranks_of(layout))
        with tempfile.TemporaryDirectory(prefix="s2s-kills-") as folder:
            path = write_config(Path(folder), layout)
            told = survive(path, layout, kill, expected[layout])
        print(f"{number + 1:>3}  {layout:<10}  {told}", flush=True)


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
    return Kill(chance.randrange(ranks), step, saving, chance.uniform(0, 0.03))


def undisturbed(path: Path) -> list[tuple]:
    """What a run logs that nobody disturbs."""
    process = start(path)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    return course(path)


def survive(path: Path, layout: str, kill: Kill, expected: list[tuple]) -> str:
    """Kill, look, resume, compare: what happened in a line. AssertionError where it should not."""
    process = start(path)
    ranks, moment = at_the_moment(process, path, kill)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    began = time.monotonic()
    ranks[kill.rank].kill()
    out, err = process.communicate(timeout=SOON)
    took = time.monotonic() - began
    assert process.returncode == 1, f"exit code {process.returncode}\n{out}\n{err}"
    assert f"rank {kill.rank} of {len(ranks)} was killed by SIGKILL" in err, err
    _, left = psutil.wait_procs(family, timeout=SOON)
    assert not left, left
    logged = len(course(path))
    process = start(path, "--resume")
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    gone_on = re.search("goes on after step ([0-9]+)", out)
    step = int(gone_on.group(1)) if gone_on else 0
    assert step >= checkpointed(logged, layout == "background"), (step, logged)
    other = [pair for pair in zip(course(path), expected, strict=True) if pair[0] != pair[1]]
    assert not other, f"another course, first (after the kill, undisturbed): {other[0]}"
    return (
        f"rank {kill.rank} killed {moment} after step {logged}, told in {took:.1f} s; "
        f"went on after step {step}"
    )


def checkpointed(logged: int, background: bool) -> int:
    """The step of which there is surely a whole checkpoint once `logged` steps are logged.

    A step is logged before its checkpoint is saved; in the background one may still be on its way
    until the next begins.
    """
    return max(0, (logged - 1) // EVERY - background) * EVERY


def at_the_moment(process, path, kill) -> tuple[list[psutil.Process], str]:
    """Wait until the kill is due: the processes of the ranks in order, and what they are at."""
    wait_until(process, lambda: len(course(path)) >= kill.step)
    ranks = rank_processes(process)
    if not kill.saving:
        time.sleep(kill.delay)
        return ranks, "in a step"
    checkpoints = folder_of(path) / "checkpoints"
    wait_until(process, lambda: half_written(checkpoints) or len(course(path)) > kill.step)
    return ranks, "in a save" if half_written(checkpoints) else "just past a save"


def half_written(checkpoints: Path) -> bool:
    return any(checkpoints.glob("*.tmp"))


def rank_processes(process) -> list[psutil.Process]:
    """In the order in which the fork server, the one child of the command, has made them."""
    (server,) = psutil.Process(process.pid).children()
    return sorted(server.children(), key=lambda each: (each.create_time(), each.pid))


def wait_until(process, condition):
    limit = time.monotonic() + LONG
    while not condition():
        assert process.poll() is None, f"it ended\n{process.communicate()}"
        assert time.monotonic() < limit, "it does not get there"
        time.sleep(0.0005)


def start(path: Path, *more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "s2s_lib", "train", path.name, *more],
        cwd=path.parent,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def folder_of(path: Path) -> Path:
    return path.parent / "runs" / path.stem


def course(path: Path) -> list[tuple]:
    """Steps, losses, norms and learning rates that a run has logged; half a line is left out."""
    log = folder_of(path) / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    entries = map(json.loads, lines)
    return [tuple(e[key] for key in ("step", "loss", "grad_norm", "lr")) for e in entries]


if __name__ == "__main__":
    main()
