"""This process's connection to the other ranks: how it is made, and who listens to it."""

import contextlib
import datetime
import gc
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

from s2s_lib.ranks import hangup
from s2s_lib.ranks.group import Group
from s2s_lib.ranks.links import Links


class ConnectionLost(RuntimeError):
    """The other end of a message is gone."""


class Log:
    """What the wire tells those who listen (`wire.logs`); times are of `time.monotonic`."""

    def message(self, name, group, peer, nbytes, when):
        """This rank sends `nbytes` to world rank `peer`, as part of collective `name`."""

    def operation(self, name, group, channel, start, end):
        """This rank was in `name` on thread `channel` (0 is the main thread)."""

    def wait(self, name, channel, start, end):
        """In it, this thread was blocked until its partner was ready (see `Transfer.wait`)."""

    def action(self, name, start, end):
        """The main thread computed something that has a name."""

    def mark(self, name, when):
        """Somebody noted a moment."""


class Wire:
    """This process's connection to the others."""

    def __init__(self, backend, rank, size, timeout, cluster, check):
        self.backend = backend
        self.rank = rank
        # Each connected rank's place in the backend, and what it is connected by.
        self.places = range(size)
        self.sockets = set()
        # Where the ranks met, or None under torchrun; how many `Islands` were made.
        self.file = None
        self.islands = 0
        self.timeout = timeout
        self.patience = datetime.timedelta(seconds=timeout)
        self.cluster = cluster
        self.links = Links(rank, cluster) if cluster else None
        self.check = check
        self.size = size
        # Keys of groups whose ranks are known to exist.
        self.known = set()
        self.logs = []
        # (group key, channel) -> how many collectives this rank has entered.
        self.counts = {}
        # Thread -> the transfer it is blocked on.
        self.blocked = {}
        # Transfers of isend and irecv that nobody has waited for yet (messages.py).
        self.pending = set()
        # What background tasks raised, until somebody waits for them.
        self.unheard = []
        # How often a strategy gave up in the midst of its messages, and the transfers it left:
        # their memory must stay, for a message may still come or be taken.
        self.given_up, self.left = 0, []

    def give_up(self, transfers):
        """Nobody will wait for these."""
        self.given_up += 1
        self.left.extend(transfers)
        self.pending.difference_update(transfers)

    def store(self, name: str) -> dist.Store:
        """A store of this name, which all ranks of a launch see, and which outlives each of them.
        RuntimeError under torchrun, which has none that does."""
        if self.file is None:
            raise RuntimeError(
                "under torchrun no rank outlives another: it ends all when one fails, and starts "
                "them again; for islands that come and go use launch(..., survive=True)"
            )
        return dist.FileStore(f"{self.file}.{name}", -1)

    def admit(self, group):
        """ValueError unless the group's ranks exist and this process is where it says it is."""
        if group.key not in self.known:
            missing = [rank for rank in group.ranks if rank not in self.places]
            if missing:
                there = f"0..{self.size - 1}" if type(self.places) is range else list(self.places)
                raise ValueError(
                    f"group {list(group.ranks)} names rank {missing[0]!r}, "
                    f"the world has ranks {there}"
                )
            self.known.add(group.key)
        if group.ranks[group.rank] != self.rank:
            raise ValueError(
                f"this is rank {self.rank} of the world, but its place {group.rank} in group "
                f"{list(group.ranks)} is that of rank {group.ranks[group.rank]}; "
                "groups from world.subgroup(...) know their place"
            )


class Thread(threading.local):
    """What belongs to one thread."""

    # Its messages match only those of the same channel elsewhere.
    channel = 0
    # The operation that it is in (wire.py).
    operation = None
    # Of a background thread (background.py): its Lane, and the Wire it was started for.
    lane = home = None


_wire: Wire | None = None
thread = Thread()


def connect(rank, size, store=None, timeout=60.0, cluster=None, check=False) -> Group:
    """Join `size` processes into one world; returns the group of all ranks.

    `store` is the path of a file that all ranks see; they then meet on the loopback interface.
    Without it the default process group must be there already (torchrun's case).
    """
    global _wire
    _prefer_batch_scheduling()
    before = hangup.connections()
    if store is not None:
        # gloo would otherwise look up the host's name and listen wherever that points.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            # Meeting the others takes its time, however short a message may take.
            timeout=datetime.timedelta(seconds=max(timeout, 30)),
        )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    _wire = Wire(backend, rank, size, timeout, cluster, check)
    _wire.sockets, _wire.file = hangup.connections() - before, store
    return Group(tuple(range(size)), rank)


def reconnect(store: dist.Store, ranks: list[int], patience: float):
    """Connect anew with these ranks of the world only, who all call this; all keep their numbers.

    What was under way on the connection before fails, here and on the other side. RuntimeError if
    they have not all come after `patience` seconds.
    """
    global _wire
    old = current()
    hang_up()
    before = hangup.connections()
    wait = datetime.timedelta(seconds=patience)
    store.set_timeout(wait)
    backend = dist.ProcessGroupGloo(store, ranks.index(old.rank), len(ranks), wait)
    new = Wire(backend, old.rank, old.size, old.timeout, old.cluster, old.check)
    new.places = {rank: place for place, rank in enumerate(ranks)}
    new.sockets = hangup.connections() - before
    new.links, new.logs, new.file = old.links, old.logs, old.file
    new.unheard, new.islands = old.unheard, old.islands
    _wire = new


@contextlib.contextmanager
def waiting_at_most(seconds: float):
    """Inside, no message of this rank may take longer than that, or than it otherwise may."""
    here = current()
    before = here.timeout, here.patience
    here.timeout = min(seconds, here.timeout)
    here.patience = datetime.timedelta(seconds=here.timeout)
    try:
        yield
    finally:
        here.timeout, here.patience = before


def hang_up():
    """End this process's connections: every wait for another rank fails, on both sides."""
    hangup.hang_up(current().sockets)


def disconnect():
    """Leave the world; `connect` may be called again."""
    global _wire
    _wire = None
    thread.operation = None
    dist.destroy_process_group()
    # torch keeps the old group in reference cycles, and its connections with it.
    gc.collect()


def _prefer_batch_scheduling():
    # gloo's threads wake others often; under the default policy a wake-up may preempt the thread
    # that holds the lock it needs, and then stall for a scheduler tick of 4 ms.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def current() -> Wire:
    """This process's connection; RuntimeError where there is none."""
    wire, home = _wire, thread.home
    if home is not None and home is not wire:
        raise ConnectionLost("this background task belongs to a connection that is gone")
    if wire is None:
        raise RuntimeError(
            "no ranks here: ranks communicate inside a function given to launch(fn, ranks=...)"
        )
    return wire


@contextlib.contextmanager
def heard_by(log: Log):
    """Inside, the wire tells `log` what it does, also after a new connection."""
    here = current()
    # A new list: other threads may be walking through the present one.
    here.logs = [*here.logs, log]
    try:
        yield log
    finally:
        here = _wire or here
        here.logs = [other for other in here.logs if other is not log]


def mark(name: str):
    """Note this moment, under a name, in every open log."""
    for log in current().logs:
        log.mark(name, time.monotonic())


def set_channel(channel: int):
    """Messages of this thread from now on match only those of the same channel elsewhere."""
    thread.channel = channel


def blocked() -> list[tuple[str, str, float]]:
    """For each blocked thread of this rank: what it waits for, in which group, since when."""
    return [transfer.row() for transfer in list(_wire.blocked.values())] if _wire else []
