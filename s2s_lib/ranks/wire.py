"""The wire: every byte between two ranks passes here.

Messages travel over torch's gloo process group, point to point. The two ranks of a message agree
by its *tag*: a number computed from the group, the thread, the operation and the shape and dtype
of what is moved. So a rank in `all_reduce` never takes the bytes of one in `broadcast`, and a
tensor of another shape is never half filled: such messages find no partner, and when the timeout
ends the wait, the launcher prints who was waiting for what.

A gloo send is synchronous: it completes when the receiver has asked for the message.

With a `Cluster`, a message is also held back until the emulated link would have delivered it
(links.py). With a log open (`bill()`, `timeline()`), messages and operations are recorded. With
neither, nothing of the kind runs.
"""

import contextlib
import datetime
import functools
import gc
import os
import sys
import threading
import time
import zlib

import torch
import torch.distributed as dist

from s2s_lib.ranks.group import Group
from s2s_lib.ranks.links import Links

# A dtype's number is part of a tag, so it must be the same in every process.
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
HEADER = 1 << 30


class WaitTimeout(RuntimeError):
    """A message did not come, or was not taken, within the timeout of the launch.

    `wait` is what `blocked()` said of it.
    """

    wait: tuple[str, str, float] | None = None


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

    def mark(self, name, when):
        """Somebody noted a moment."""


class Wire:
    """This process's connection to the others."""

    def __init__(self, backend, rank, size, timeout, cluster, check):
        self.backend = backend
        self.rank = rank
        self.timeout = timeout
        self.cluster = cluster
        self.links = Links(rank, cluster) if cluster else None
        self.check = check
        self.size = size
        # keys of groups whose ranks are known to exist
        self.known = set()
        self.logs = []
        # (group key, channel) -> how many collectives this rank has entered
        self.counts = {}
        # thread -> the transfer it is blocked on
        self.blocked = {}
        # transfers of isend and irecv that nobody has waited for yet (messages.py)
        self.pending = set()

    def admit(self, group):
        """ValueError unless the group's ranks exist and this process is where it says it is."""
        if group.key not in self.known:
            missing = [rank for rank in group.ranks if rank not in range(self.size)]
            if missing:
                raise ValueError(
                    f"group {list(group.ranks)} names rank {missing[0]!r}, "
                    f"the world has ranks 0..{self.size - 1}"
                )
            self.known.add(group.key)
        if group.ranks[group.rank] != self.rank:
            raise ValueError(
                f"this is rank {self.rank} of the world, but its place {group.rank} in group "
                f"{list(group.ranks)} is that of rank {group.ranks[group.rank]}; "
                "groups from world.subgroup(...) know their place"
            )


_wire: Wire | None = None
_thread = threading.local()


def connect(rank, size, store=None, timeout=60.0, cluster=None, check=False) -> Group:
    """Join `size` processes into one world; returns the group of all ranks.

    `store` is the path of a file that all ranks see; they then meet on the loopback interface.
    Without it the default process group must be there already (torchrun's case).
    """
    global _wire
    _prefer_batch_scheduling()
    if store is not None:
        # gloo would otherwise look up the host's name and listen wherever that points.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    _wire = Wire(backend, rank, size, timeout, cluster, check)
    return Group(tuple(range(size)), rank)


def disconnect():
    """Leave the world; `connect` may be called again."""
    global _wire
    _wire = None
    _thread.operation = None
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
    if _wire is None:
        raise RuntimeError(
            "no ranks here: ranks communicate inside a function given to launch(fn, ranks=...)"
        )
    return _wire


def mark(name: str):
    """Note this moment, under a name, in every open log."""
    for log in current().logs:
        log.mark(name, time.monotonic())


def set_channel(channel: int):
    """Messages of this thread from now on match only those of the same channel elsewhere."""
    _thread.channel = channel


@functools.lru_cache(maxsize=4096)
def make_tag(group_key, channel, name, dtype, shape=(), detail=()) -> int:
    """A number below 2^30 with 8 low bits free, the same on every rank that says the same."""
    # Python's own hash of a string differs between processes, that of whole numbers does not.
    words = [zlib.crc32(str(word).encode()) for word in (name, *detail)]
    return (hash((group_key, channel, DTYPE_CODE[dtype], *shape, *words)) & 0x3FFFFF) << 8


class Operation:
    """One collective, send or receive in progress on this thread; used as a context.

    `name`, `shape`, `dtype` and `detail` (root, reduction, algorithm: all that must be equal on
    both sides of a message) decide the tag. `shown` is the name in tables, if another. Inside,
    `send` and `receive` start messages; leaving waits for the sends. Operations nest: a
    hierarchical all_reduce contains collectives of smaller groups.
    """

    def __init__(self, name, group, shape=(), dtype=torch.uint8, detail=(), shown=None):
        self.wire = current()
        self.wire.admit(group)
        self.name = name
        self.shown = shown or name
        self.group = group
        self.shape = shape if type(shape) is tuple else tuple(shape)
        self.dtype = dtype
        self.detail = detail
        self.sends = []

    def __enter__(self):
        wire = self.wire
        self.channel = getattr(_thread, "channel", 0)
        self.tag = make_tag(
            self.group.key, self.channel, self.name, self.dtype, self.shape, self.detail
        )
        self.outer = getattr(_thread, "operation", None)
        self.outermost = self if self.outer is None else self.outer.outermost
        if self.outer is None:
            if self.name == self.shown:
                key = (self.group.key, self.channel)
                wire.counts[key] = wire.counts.get(key, 0) + 1
            if wire.links:
                wire.links.begin()
        self.number = wire.counts.get((self.outermost.group.key, self.channel), 0)
        self.since = time.monotonic()
        if wire.check and self.outer is None and self.name == self.shown:
            agree(self)
        _thread.operation = self
        return self

    def __exit__(self, kind, error, _):
        try:
            if error is None:
                self.wait_for_sends()
        finally:
            _thread.operation = self.outer
        if self.wire.logs and self.outer is None and error is None:
            now = time.monotonic()
            for log in self.wire.logs:
                log.operation(self.shown, self.group, self.channel, self.since, now)

    def wait_for_sends(self):
        """Until everything sent so far has been taken, and its memory may be written again."""
        for transfer in self.sends:
            transfer.wait()
        self.sends.clear()

    def send(self, tensor, to, step=0) -> "Transfer":
        """Start sending a contiguous tensor to the rank at place `to`.

        It must not change before the operation ends. `step` tells apart the messages of one
        operation between one pair.
        """
        transfer = Transfer(self, "send to", tensor, to, self.tag | (step & 255))
        self.sends.append(transfer)
        return transfer

    def receive(self, out, source, step=0) -> "Transfer":
        """Ask the rank at place `source` for a message; `out` holds it after `.wait()`."""
        return Transfer(self, "receive from", out, source, self.tag | (step & 255))

    def describe(self) -> str:
        """One line: `all_reduce number 3, (2, 3) float32, sum, ring`."""
        what = [self.shown if self.name != self.shown else f"{self.name} number {self.number}"]
        if self.name != "barrier":
            what.append(f"{self.shape} {str(self.dtype).removeprefix('torch.')}")
        return ", ".join(what + [str(d) for d in self.detail])


class Transfer:
    """One message on its way, out of or into `tensor`; `wait()` returns that tensor."""

    __slots__ = ("operation", "doing", "tensor", "place", "peer", "work", "header", "since")

    def __init__(self, operation, doing, tensor, place, tag):
        wire = operation.wire
        self.operation = operation
        self.doing = doing
        self.tensor = tensor
        self.place = place
        self.peer = operation.group.ranks[place]
        self.header = None
        self.since = operation.since
        self.work = None
        # Both sides know when nothing is to come.
        if tensor.nbytes:
            try:
                self.work = self.start(wire, tag)
            except RuntimeError as error:
                raise self.explain(error) from None

    def start(self, wire, tag):
        slowed = wire.links and wire.links.between(self.peer)
        if self.doing == "receive from":
            if slowed:
                header = torch.empty(1, dtype=torch.float64)
                self.header = (header, wire.backend.recv([header], self.peer, tag | HEADER))
            return wire.backend.recv([self.tensor], self.peer, tag)
        if slowed:
            header = wire.links.depart(self.peer, self.tensor.nbytes)
            self.header = (header, wire.backend.send([header], self.peer, tag | HEADER))
        if wire.logs:
            outermost, now = self.operation.outermost, time.monotonic()
            for log in wire.logs:
                log.message(outermost.shown, outermost.group, self.peer, self.tensor.nbytes, now)
        return wire.backend.send([self.tensor], self.peer, tag)

    def wait(self) -> torch.Tensor:
        """Block until the message has gone or come. Waiting again returns at once."""
        if self.work is not None:
            wire = self.operation.wire
            began = time.monotonic() if wire.logs else None
            thread = threading.get_ident()
            wire.blocked[thread] = self
            try:
                # A second wait on a gloo send blocks for ever, so each is forgotten first.
                work, self.work = self.work, None
                work.wait()
                if self.header is not None:
                    self.header[1].wait()
            except RuntimeError as error:
                # It stays in `blocked`: until this thread waits again, that is where it is.
                raise self.explain(error) from None
            del wire.blocked[thread]
            wire.pending.discard(self)
            ended = time.monotonic() if began is not None else None
            if self.header is not None and self.doing == "receive from":
                wire.links.arrive(self.peer, self.tensor.nbytes, self.header[0])
                if began is not None:
                    # On an emulated link it is known when the sender was ready.
                    ended = min(ended, max(began, self.header[0].item()))
            if began is not None:
                outermost = self.operation.outermost
                for log in wire.logs:
                    log.wait(outermost.shown, outermost.channel, began, ended)
        return self.tensor

    def explain(self, error):
        what = f"{self.operation.describe()}: {self.doing} rank {self.place}"
        if "closed by peer" in str(error):
            return ConnectionLost(f"{what} failed: the other end is gone, or gave up waiting")
        if "imed out" not in str(error):
            return ConnectionLost(f"{what} failed: {error}")
        timeout = WaitTimeout(f"{what} did not complete in {self.operation.wire.timeout:g} s")
        timeout.wait = self.row()
        return timeout

    def row(self) -> tuple[str, str, float]:
        """For a table of waits: what for, in which group of world ranks, since when."""
        operation = self.operation
        what = f"{operation.describe()}: {self.doing} rank {self.place}"
        return what, str(list(operation.group.ranks)), operation.outermost.since


def agree(operation: Operation):
    """The optional check (`launch(..., check=True)`): all members tell what they are about to do.

    Raises ValueError on all of them, with what each said, unless all said the same.
    """
    group, text = operation.group, operation.describe()
    tag = make_tag(group.key, operation.channel, "agree", torch.uint8)
    places = [place for place in range(group.size) if place != group.rank]
    theirs = {place: torch.empty(256, dtype=torch.uint8) for place in places}
    mine = torch.frombuffer(bytearray(text.encode()[:256].ljust(256, b"\0")), dtype=torch.uint8)
    transfers = [Transfer(operation, "receive from", theirs[p], p, tag) for p in places]
    transfers += [Transfer(operation, "send to", mine, p, tag) for p in places]
    for transfer in transfers:
        transfer.wait()
    said = {place: bytes(t.tolist()).rstrip(b"\0").decode() for place, t in theirs.items()}
    said[group.rank] = text
    if len(set(said.values())) > 1:
        rows = "\n".join(f"  rank {place}: {said[place]}" for place in sorted(said))
        raise ValueError(f"the ranks of group {list(group.ranks)} disagree:\n{rows}")


def blocked() -> list[tuple[str, str, float]]:
    """For each blocked thread of this rank: what it waits for, in which group, since when."""
    return [transfer.row() for transfer in list(_wire.blocked.values())] if _wire else []
