"""The wire: every byte between two ranks passes here.

Messages travel over torch's gloo process group, point to point. The two ranks of a message agree
by its *tag*: a number computed from the group, the thread, the operation and the shape and dtype
of what is moved. So a rank in `all_reduce` never takes the bytes of one in `broadcast`, and a
tensor of another shape is never half filled: such messages find no partner, and when the timeout
ends the wait, the launcher prints who was waiting for what. (A tag has 22 bits for all this: of
four million pairs of different messages, one pair shares a tag.)

A gloo send is synchronous: it completes when the receiver has asked for the message.

With a `Cluster`, a message is also held back until the emulated link would have delivered it
(links.py). With a log open (`bill()`, `timeline()`), messages and operations are recorded. With
neither, nothing of the kind runs.
"""

import functools
import threading
import time
import zlib

import torch

from s2s_lib.ranks.connection import ConnectionLost, current
from s2s_lib.ranks.connection import thread as this_thread

# A dtype's number is part of a tag, so it must be the same in every process.
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
HEADER = 1 << 30


class WaitTimeout(RuntimeError):
    """A message did not come, or was not taken, within the timeout of the launch.

    `wait` is what `blocked()` said of it.
    """

    wait: tuple[str, str, float] | None = None


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

    __slots__ = (
        "wire", "name", "shown", "group", "shape", "dtype", "detail", "sends", "comparing",
        "channel", "tag", "outer", "outermost", "number", "since",
    )  # fmt: skip

    def __init__(self, name, group, shape=(), dtype=torch.uint8, detail=(), shown=None, since=None):
        self.wire = current()
        self.wire.admit(group)
        self.name = name
        self.shown = shown or name
        self.group = group
        self.shape = shape
        self.dtype = dtype
        self.detail = detail
        # When it was called, if that was a little earlier than now.
        self.since = time.monotonic() if since is None else since
        self.sends = []
        # While the ranks compare what they are about to do; that is not the program's own.
        self.comparing = False

    def __enter__(self):
        wire, group = self.wire, self.group
        self.channel = channel = this_thread.channel
        self.tag = make_tag(group.key, channel, self.name, self.dtype, self.shape, self.detail)
        self.outer = outer = this_thread.operation
        if outer is not None:
            self.outermost, self.number = outer.outermost, outer.number
        else:
            self.outermost = self
            own = self.name == self.shown
            self.number = wire.counts.get((group.key, channel), 0) + own
            if own:
                wire.counts[group.key, channel] = self.number
            if wire.links:
                wire.links.begin(self.since)
            if wire.blocked:
                # After a failed wait that somebody caught: this thread goes on.
                wire.blocked.pop(threading.get_ident(), None)
            if wire.check and own:
                agree(self)
        this_thread.operation = self
        return self

    def __exit__(self, kind, error, _):
        try:
            if error is None:
                self.wait_for_sends()
        finally:
            this_thread.operation = self.outer
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
        transfer = Transfer(self, tensor, to, self.tag | (step & 255))
        self.sends.append(transfer)
        return transfer

    def receive(self, out, source, step=0) -> "Transfer":
        """Ask the rank at place `source` for a message; `out` holds it after `.wait()`."""
        return Transfer(self, out, source, self.tag | (step & 255), receiving=True)

    def describe(self) -> str:
        """One line: `all_reduce number 3, (2, 3) float32, sum, ring`."""
        what = [self.shown if self.name != self.shown else f"{self.name} number {self.number}"]
        if self.name != "barrier":
            what.append(f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}")
        return ", ".join(what + [str(d) for d in self.detail])


class Transfer:
    """One message on its way, out of or into `tensor`; `wait()` returns that tensor."""

    __slots__ = ("operation", "receiving", "tensor", "place", "peer", "work", "header", "logs")

    def __init__(self, operation, tensor, place, tag, receiving=False):
        wire = operation.wire
        self.operation = operation
        self.receiving = receiving
        self.logs = () if operation.comparing else wire.logs
        self.tensor = tensor
        self.place = place
        self.peer = operation.group.ranks[place]
        self.header = None
        self.work = None
        # Both sides know when nothing is to come.
        if tensor.nbytes:
            try:
                self.work = self.start(wire, tag)
            except RuntimeError as error:
                raise self.explain(error) from None

    def start(self, wire, tag):
        slowed = wire.links and wire.links.between(self.peer)
        place = wire.places[self.peer]
        if self.receiving:
            if slowed:
                header = torch.empty(1, dtype=torch.float64, device="cpu")
                self.header = (header, wire.backend.recv([header], place, tag | HEADER))
            return wire.backend.recv([self.tensor], place, tag)
        if slowed:
            header = wire.links.depart(self.peer, self.tensor.nbytes)
            self.header = (header, wire.backend.send([header], place, tag | HEADER))
        if self.logs:
            outermost, now = self.operation.outermost, time.monotonic()
            for log in self.logs:
                log.message(outermost.shown, outermost.group, self.peer, self.tensor.nbytes, now)
        return wire.backend.send([self.tensor], place, tag)

    def wait(self) -> torch.Tensor:
        """Block until the message has gone or come. Waiting again returns at once."""
        if self.work is not None:
            wire = self.operation.wire
            began = time.monotonic()
            thread = threading.get_ident()
            wire.blocked[thread] = self
            try:
                # A second wait on a gloo send blocks for ever, so each is forgotten first.
                work, self.work = self.work, None
                work.wait(wire.patience)
                if self.header is not None:
                    self.header[1].wait(wire.patience)
            except RuntimeError as error:
                # It stays in `blocked`: until this thread waits again, that is where it is.
                raise self.explain(error) from None
            ended = time.monotonic()
            if self.header is not None and self.receiving:
                deadline = began + wire.timeout
                if not wire.links.arrive(self.peer, self.tensor.nbytes, self.header[0], deadline):
                    raise self.explain("timed out on an emulated link")
                # On an emulated link it is known when the sender was ready.
                ended = min(ended, max(began, self.header[0].item()))
            del wire.blocked[thread]
            wire.pending.discard(self)
            if self.logs:
                outermost = self.operation.outermost
                for log in self.logs:
                    log.wait(outermost.shown, outermost.channel, began, ended)
        return self.tensor

    @property
    def direction(self):
        return "receive from" if self.receiving else "send to"

    def explain(self, error):
        what = f"{self.operation.describe()}: {self.direction} rank {self.place}"
        if "pair closure" in str(error):
            return ConnectionLost(
                f"{what} failed: at the timeout of an earlier wait all connections ended"
            )
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
        what = f"{operation.describe()}: {self.direction} rank {self.place}"
        return what, str(list(operation.group.ranks)), operation.outermost.since


def agree(operation: Operation):
    """The optional check (`launch(..., check=True)`): all members tell what they are about to do.

    Raises ValueError on all of them, with what each said, unless all said the same.
    """
    group, text = operation.group, operation.describe()
    tag = make_tag(group.key, operation.channel, "agree", torch.uint8)
    places = [place for place in range(group.size) if place != group.rank]
    theirs = {place: torch.empty(256, dtype=torch.uint8, device="cpu") for place in places}
    mine = torch.frombuffer(bytearray(_line_of_256(text)), dtype=torch.uint8)
    operation.comparing = True
    transfers = [Transfer(operation, theirs[p], p, tag, receiving=True) for p in places]
    transfers += [Transfer(operation, mine, p, tag) for p in places]
    for transfer in transfers:
        transfer.wait()
    operation.comparing = False
    said = {place: bytes(line.tolist()) for place, line in (theirs | {group.rank: mine}).items()}
    if len(set(said.values())) > 1:
        shown = {
            place: line[8:].rstrip(b"\0").decode(errors="ignore") for place, line in said.items()
        }
        rows = "\n".join(f"  rank {place}: {shown[place]}" for place in sorted(said))
        raise ValueError(f"the ranks of group {list(group.ranks)} disagree:\n{rows}")


def _line_of_256(text):
    """A checksum of the text in 8 bytes, and as much of the text as fits."""
    data = text.encode()
    return f"{zlib.crc32(data):08x}".encode() + data[:248].ljust(248, b"\0")
