"""launch: run a function on several ranks and get its values back, one for each rank."""

import contextlib
import os
import sys

import cloudpickle

from s2s_lib.ranks.job import Job

MOST_RANKS = 256


def launch(fn, *args, ranks: int | None = None, cluster=None, timeout: float = 60, check=False):
    """Call `fn(world, *args)` on `ranks` processes; returns the list of their values.

    `world` is the `Group` of all ranks. `fn`, `args` and the values travel by cloudpickle, so a
    function from a notebook cell, a closure or a lambda will do. What rank 0 prints appears at
    once, the others' output after it in rank order. Each rank has cores / ranks threads (at least
    one) and torch's default seed. `cluster` (of as many GPUs as ranks) slows messages to its
    links; no single send or receive may take longer than `timeout` seconds; `check=True` compares
    what the ranks are about to do before every collective, at the price of extra messages.

    Under torchrun the same call joins that world instead: `ranks` must then equal its size, or
    be left out, and the list holds the values of all ranks on each.

    RankError when a rank raises, is killed, or waits in vain; nothing is left running.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function to call on each rank, got {fn!r}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is a number of seconds above 0, got {timeout!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        from s2s_lib.ranks.elastic import run_in_world

        return run_in_world(fn, args, ranks, cluster, timeout, check)
    check_ranks(ranks, cluster)
    payload = pickled(fn, args)
    with Job(ranks, settings_for(ranks, cluster, timeout, check)) as job:
        answers = job.ask("call", payload)
    return [cloudpickle.loads(answers[rank]) for rank in range(ranks)]


def check_ranks(ranks, cluster):
    """ValueError unless `ranks` processes can be started, and the cluster has as many GPUs."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"ranks={ranks!r}: give a whole number from 1 to {MOST_RANKS} "
            "(each rank is a process of its own)"
        )
    if cluster is not None and cluster.size != ranks:
        raise ValueError(f"{ranks} ranks on a cluster of {cluster.size} GPUs: make them equal")


def settings_for(ranks, cluster, timeout, check) -> dict:
    """What a rank must know to behave as if it ran in this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cluster": cluster,
        "timeout": float(timeout),
        "check": check,
        "threads": max(1, cores // ranks),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "argv": list(sys.argv),
    }


def pickled(fn, args) -> bytes:
    """`fn` and `args` as bytes; TypeError naming the object that cannot travel."""
    try:
        return cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"cannot send {getattr(fn, '__name__', fn)!r} to the ranks: {culprit(fn, args)} "
            f"cannot be pickled ({error}); make it inside the function instead"
        ) from None


def culprit(fn, args) -> str:
    """Which argument, captured variable or global of `fn` does not pickle."""
    parts = {f"argument {i}": arg for i, arg in enumerate(args)}
    code = getattr(fn, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), fn.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):
            parts[f"its variable {name!r}"] = cell.cell_contents
    for name in code.co_names if code else ():
        if name in fn.__globals__:
            parts[f"the global {name!r}"] = fn.__globals__[name]
    for name, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name} (a {type(value).__name__})"
    return f"the function itself (a {type(fn).__name__})"
