"""Training runs for the tests: a small configuration, the command, and what a run logged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import yaml
from processes import ROOT

# In float64, so that layouts can be compared. An epoch of the text has few global batches.
BASE = {
    "global_batch": 8,
    "steps": 4,
    "precision": "float64",
    "model": {"layers": 4, "hidden": 16, "heads": 2, "seq": 16, "vocab": 128},
    "data": {"path": "text.txt", "hold_out": 0.25},
}
TEXT = " ".join(f"{n} squared is {n * n}," for n in range(55))


def write_config(folder: Path, name="run", **keys) -> Path:
    """`folder`/`name`.yaml: BASE with other `keys`, and the text that it trains on beside it."""
    (folder / "text.txt").write_text(TEXT)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(BASE | keys))
    return path


def start(folder: Path, *arguments, program=("-m", "s2s_lib"), wrapper=(), **environ):
    """`python -m s2s_lib ARGUMENTS` in a folder: a process whose output can be read."""
    return subprocess.Popen(
        [*wrapper, sys.executable, *program, *map(str, arguments)],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=str(ROOT), **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def log_of(folder: Path) -> list[dict]:
    """The whole lines of a run's log; a rank that was killed may leave half of one."""
    log = folder / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def course(folder: Path) -> list[tuple]:
    """What of a log must come out the same again: steps, losses, norms and learning rates."""
    return [(e["step"], e["loss"], e["grad_norm"], e["lr"]) for e in log_of(folder)]


def rank_processes(process) -> list[psutil.Process]:
    """Those of a command, in the order in which its fork server, its one child, has made them."""
    (server,) = psutil.Process(process.pid).children()
    return sorted(server.children(), key=lambda each: (each.create_time(), each.pid))
