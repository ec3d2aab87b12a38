"""What the tests of ranks/ need to know about processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from s2s_lib.ranks import job

ROOT = Path(__file__).parent.parent


def alive(pid: int) -> bool:
    """Whether a process runs or is stopped; one that waits to be buried does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_alive() -> list[psutil.Process]:
    """All that this process's fork server has started and that is still there."""
    if job._server is None or not alive(job._server.process.pid):
        return []
    children = psutil.Process(job._server.process.pid).children(recursive=True)
    return [child for child in children if alive(child.pid)]


def wait_until(condition, seconds: float) -> float:
    """Seconds until `condition()` held; AssertionError if it still does not after `seconds`."""
    began = time.monotonic()
    while not condition():
        took = time.monotonic() - began
        assert took < seconds, f"not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - began


def pids_in(folder: Path, count: int) -> list[int]:
    """The process ids that `count` processes write, each into a file of its own."""

    def written():
        return [text for file in folder.iterdir() if (text := file.read_text()).endswith("\n")]

    wait_until(lambda: len(written()) == count, 60)
    return [int(text) for text in written()]


def start_script(path: Path, text: str, *args, wrapper=(), **options) -> subprocess.Popen:
    """Run `text` as a Python script of its own, which sees this package but not its path."""
    path.write_text(text)
    environ = dict(os.environ, PYTHONPATH=str(ROOT)) | options.pop("environ", {})
    return subprocess.Popen(
        [*wrapper, sys.executable, str(path), *map(str, args)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run_script(path: Path, text: str, *args, **options) -> str:
    """The stdout of a script that must end well and say nothing on stderr."""
    process = start_script(path, text, *args, **options)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), f"status {process.returncode}\n{out}\n{err}"
    return out


def printed_by(program: str) -> str:
    """What a Python program prints in a process of its own, with other hashes than this one."""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "7"},
        cwd=ROOT,
    )
    return run.stdout.strip()
