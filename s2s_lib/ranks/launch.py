"""launch: run a function on several ranks and get its values back, one for each rank."""

import os
import sys
from numbers import Integral, Real

from s2s_lib.cluster import Cluster
from s2s_lib.ranks.failure import failure_at
from s2s_lib.ranks.job import Job
from s2s_lib.ranks.pickling import pickled, unpickled

MOST_RANKS = 256


def launch(
    fn,
    *args,
    ranks: int | None = None,
    cluster=None,
    timeout: float = 60,
    check: bool = False,
    survive: bool = False,
):
    """Call `fn(world, *args)` on `ranks` processes; returns the list of their values.

    `world` is the `Group` of all ranks. `fn`, `args` and the values travel by cloudpickle, so a
    function from a notebook cell, a closure or a lambda will do. What rank 0 prints appears at
    once, the others' output after it in rank order. Each rank has cores / ranks threads (at least
    one) and torch's default seed. `cluster` (of as many GPUs as ranks) slows messages to its
    links; no single send or receive may take longer than `timeout` seconds; `check=True` compares
    what the ranks are about to do before every collective, at the price of extra messages.

    With `survive=True` a rank that raises or is killed does not end the others: they find that its
    connections are gone, and go on if they can (see `Islands`). In the list is then its RankError.

    Under torchrun the same call joins that world instead: `ranks` must then equal its size, or
    be left out, and the list holds the values of all ranks on each.

    RankError when a rank raises, is killed, or waits in vain (with `survive`: when all do); nothing
    is left running.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function to call on each rank, got {fn!r}")
    check_timeout(timeout)
    if under_torchrun():
        from s2s_lib.ranks.elastic import run_in_world

        return run_in_world(fn, args, ranks, cluster, timeout, check, survive)
    if not hasattr(os, "fork"):
        raise OSError(
            f"launch forks its ranks, and {sys.platform} cannot fork: on Windows run this inside "
            "the Windows Subsystem for Linux"
        )
    check_ranks(ranks)
    check_cluster(ranks, cluster)
    payload = pickled(fn, args)
    settings = settings_for(ranks, cluster, timeout, check) | {"survive": survive}
    with Job(ranks, settings) as job:
        answers = job.ask("call", payload)
        return [
            unpickled(answers[rank], rank) if rank in answers else failure_at(job, rank)
            for rank in range(ranks)
        ]


def under_torchrun() -> bool:
    """Whether torchrun started this process, as one of a world."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def check_ranks(ranks):
    """ValueError unless `ranks` processes can be started."""
    if isinstance(ranks, bool) or not isinstance(ranks, Integral) or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"ranks={ranks!r}: give a whole number from 1 to {MOST_RANKS} "
            "(each rank is a process of its own), by name: launch(fn, ranks=4)"
        )


def check_cluster(ranks, cluster):
    """Errors unless `cluster` is None or a Cluster of as many GPUs as there are ranks."""
    if not isinstance(cluster, (Cluster, type(None))):
        raise TypeError(f"cluster={cluster!r} is no Cluster: write cluster=Cluster(nodes=2, ...)")
    if cluster is not None and cluster.size != ranks:
        raise ValueError(f"{ranks} ranks on a cluster of {cluster.size} GPUs: make them equal")


def check_timeout(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not 0 < timeout <= 1e9:
        raise ValueError(f"timeout is a number of seconds above 0, at most 1e9; got {timeout!r}")


def settings_for(ranks, cluster, timeout, check) -> dict:
    """What a rank must know to behave as if it ran in this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cluster": cluster,
        "timeout": float(timeout),
        "check": check,
        "survive": False,
        "threads": max(1, cores // ranks),
        "path": list(sys.path),
        "folder": working_folder(),
        "environ": dict(os.environ),
        "argv": list(sys.argv),
    }


def working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RuntimeError(
            "the folder that this process works in no longer exists: os.chdir to one that does"
        ) from None
