"""A job: the ranks of one launch, seen from the process that started them.

The launcher asks the fork server (server.py) for processes and talks to each over a channel of
its own. It shows what they print, in rank order: rank 0 as it comes, the others when the job is
done. What goes wrong is told apart here: a rank that raised, a rank that was killed, and ranks
that wait for each other in vain.
"""

import codecs
import contextlib
import os
import pickle
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection

from s2s_lib.ranks.failure import failure_of

# How long to wait, after a first sign of failure, for the sign that explains it. A rank that was
# killed shows up in its neighbours as a lost connection before the fork server has reported it.
GRACE = {"error": 0.05, "lost": 0.5, "timeout": 0.3}

_server = None
_starting = threading.Lock()


class _ServerHandle:
    """The fork server of this process."""

    def __init__(self):
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile()
        command = "import sys; sys.path[:] = {!r}; from s2s_lib.ranks.server import main; main({})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", command.format(sys.path, theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,
        )
        theirs.close()
        if self.control.recv(1) != b"r":
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"the fork server did not start:\n{self.errors.read().decode()}")

    def alive(self):
        return self.owner == os.getpid() and self.process.poll() is None


def _fork_server():
    global _server
    with _starting:
        if _server is None or not _server.alive():
            _server = _ServerHandle()
        return _server


class Stream:
    """One stream of one rank: its pipe, and what came out of it so far."""

    def __init__(self, target):
        self.target = target
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text = ""

    def drain(self) -> bool:
        """Take what there is; False at its end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reader, 1 << 16):
                self.text += self.decode(data)
            return False
        return True

    def show(self):
        if self.text:
            print(self.text, end="", file=getattr(sys, self.target), flush=True)
            self.text = ""


class Job:
    """Starts `ranks` processes and connects them; closing it ends them.

    `settings` are what each rank needs to know (see `Worker`). Use as a context: on leaving, for
    whatever reason, no process of the job is left and its output has been shown.
    """

    def __init__(self, ranks: int, settings: dict):
        self.size = ranks
        self.timeout = settings["timeout"]
        self.folder = tempfile.mkdtemp(prefix="s2s-")
        self.selector = selectors.DefaultSelector()
        self.channels, self.streams = [], []
        self.answers, self.failures, self.deaths, self.wheres = {}, {}, {}, {}
        try:
            self.start_ranks(settings)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # Starting

    def start_ranks(self, settings):
        server = _fork_server()
        self.sock, theirs = socket.socketpair()
        with _starting:
            socket.send_fds(server.control, [b"j"], [theirs.fileno()])
        theirs.close()
        self.selector.register(self.sock, selectors.EVENT_READ, self.read_deaths)
        for rank in range(self.size):
            self.start_rank(rank, settings)

    def start_rank(self, rank, settings):
        mine, theirs = socket.socketpair()
        streams = [Stream("stdout"), Stream("stderr")]
        descriptors = [theirs.fileno(), *(stream.writer for stream in streams)]
        socket.send_fds(self.sock, [b"r"], descriptors)
        theirs.close()
        for stream in streams:
            os.close(stream.writer)
            self.selector.register(stream.reader, selectors.EVENT_READ, (self.read_stream, rank))
        channel = Connection(mine.detach())
        self.selector.register(channel, selectors.EVENT_READ, (self.read_channel, rank))
        self.channels.append(channel)
        self.streams.append(streams)
        store = os.path.join(self.folder, "store")
        own = {"rank": rank, "size": self.size, "store": store}
        channel.send_bytes(pickle.dumps(settings | own))

    # Talking

    def ask(self, kind, payload, ranks=None) -> dict:
        """Send a task to some ranks (all by default) and return their answers by rank.

        RankError if a rank raises, dies or waits in vain.
        """
        ranks = range(self.size) if ranks is None else ranks
        self.answers, self.failures, self.wheres = {}, {}, {}
        for rank in ranks:
            self.send(rank, (kind, payload))
        deadline = None
        while len(self.answers) < len(ranks):
            self.serve(deadline)
            deadline = deadline or self.new_deadline()
            if deadline and (time.monotonic() >= deadline or self.all_told(ranks)):
                raise failure_of(self)
        return self.answers

    def send(self, rank, message):
        # A rank that is gone is noticed where its death is read.
        with contextlib.suppress(OSError):
            self.channels[rank].send_bytes(pickle.dumps(message))

    def new_deadline(self):
        """After a first sign of failure: when to stop waiting for a better one."""
        if self.deaths:
            return time.monotonic()
        if not self.failures:
            return None
        kind = next(iter(self.failures.values()))["kind"]
        if kind == "timeout":
            for rank in range(self.size):
                self.send(rank, ("where", None))
        return time.monotonic() + GRACE[kind]

    def all_told(self, ranks):
        """Every rank has been heard of, so nothing better will come."""
        if any(f["kind"] == "timeout" for f in self.failures.values()):
            return len(self.wheres) == self.size
        return len(self.answers) + len(self.failures) == len(ranks) and not any(
            f["kind"] == "lost" for f in self.failures.values()
        )

    def serve(self, deadline=None):
        """Wait for something to happen, at most until `deadline`, and take it in."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self.selector.select(left):
            handler, *args = key.data if isinstance(key.data, tuple) else (key.data,)
            handler(key.fileobj, *args)

    def read_channel(self, channel, rank):
        try:
            kind, content = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            # The process is ending; the fork server tells how.
            self.selector.unregister(channel)
            return
        for stream in self.streams[rank]:
            stream.drain()
        if kind == "where":
            self.wheres[rank] = content
        elif kind == "error":
            self.failures.setdefault(rank, content)
        else:
            self.answers[rank] = content

    def read_stream(self, reader, rank):
        stream = next(s for s in self.streams[rank] if s.reader == reader)
        if not stream.drain():
            self.selector.unregister(reader)
        if rank == 0:
            stream.show()

    def read_deaths(self, sock):
        data = sock.recv(1 << 16)
        if not data:
            self.selector.unregister(sock)
            self.deaths.setdefault(0, None)
        for line in data.decode().splitlines():
            rank, status = map(int, line.split())
            self.deaths[rank] = status

    # Ending

    def show_output(self):
        """Print what the ranks have printed so far, rank by rank."""
        for streams in self.streams:
            for stream in streams:
                stream.drain()
                stream.show()

    def close(self):
        """End every rank, wait until the fork server says they are gone, show their output."""
        try:
            if hasattr(self, "sock"):
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_WR)
                    self.sock.settimeout(5)
                    while self.sock.recv(1 << 16):
                        pass
                self.sock.close()
            self.show_output()
        finally:
            self.selector.close()
            for channel in self.channels:
                channel.close()
            for streams in self.streams:
                for stream in streams:
                    os.close(stream.reader)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.channels, self.streams = [], []
