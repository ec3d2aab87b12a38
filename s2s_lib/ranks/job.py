"""A job: the ranks of one launch, seen from the process that started them.

The launcher asks the fork server (server.py) for processes and talks to each over a channel of
its own. It shows what they print, in rank order: rank 0 as it comes, the others when the job is
done. What goes wrong is told apart here: a rank that raised, a rank that was killed, and ranks
that wait for each other in vain.
"""

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
import warnings
from multiprocessing.connection import Connection

from s2s_lib.ranks.failure import failure_of
from s2s_lib.ranks.stream import Stream

# How long to wait, after a first sign of failure, for the sign that explains it. A rank that was
# killed shows up in its neighbours as a lost connection before the fork server has reported it;
# ranks that raise the same do so a little apart, and are then told together.
GRACE = {"error": 0.3, "lost": 0.5, "timeout": 1.0}

_server = None
_starting = threading.Lock()


class _ServerHandle:
    """The fork server of this process."""

    def __init__(self):
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile()
        command = "import sys; sys.path[:] = {!r}; from s2s_lib.ranks.server import main; main({})"
        path = [entry for entry in sys.path if isinstance(entry, str)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", command.format(path, theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                start_new_session=True,
            )
            theirs.close()
            ready = self.control.recv(1)
        except BaseException:
            # An interrupted launch leaves no server behind: without its socket it ends.
            self.control.close()
            raise
        if not ready:
            raise RuntimeError(f"the fork server did not start:\n{self.last_words()}")

    def alive(self):
        return self.owner == os.getpid() and self.process.poll() is None

    def last_words(self):
        """What a server that has ended wrote to its stderr."""
        self.process.wait()
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()


def _fork_server():
    global _server
    with _starting:
        if _server is None or not _server.alive():
            _server = _ServerHandle()
        return _server


class Job:
    """Starts `ranks` processes and connects them; closing it ends them.

    `settings` are what each rank needs to know (see `Worker`). Use as a context: on leaving, for
    whatever reason, no process of the job is left and its output has been shown.
    """

    def __init__(self, ranks: int, settings: dict):
        self.size = ranks
        self.timeout, self.check = settings["timeout"], settings["check"]
        self.survive = settings["survive"]
        self.folder = tempfile.mkdtemp(prefix="s2s-")
        self.selector = selectors.DefaultSelector()
        self.channels, self.streams = [], []
        self.answers, self.failures, self.deaths, self.wheres = {}, {}, {}, {}
        self.server_gone = False
        # How much was heard of, in all.
        self.told = 0
        # Whose output appears as it comes.
        self.live = 0
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
        self.server = _fork_server()
        self.sock, theirs = socket.socketpair()
        with _starting, self.noticed_later():
            socket.send_fds(self.server.control, [b"j"], [theirs.fileno()])
        theirs.close()
        self.selector.register(self.sock, selectors.EVENT_READ, self.read_deaths)
        for rank in range(self.size):
            try:
                self.start_rank(rank, settings)
            except OSError as error:
                raise RuntimeError(
                    f"could start only {rank} of {self.size} ranks: {error.strerror}; "
                    "ask for fewer, or raise the limit (ulimit -n)"
                ) from error

    def start_rank(self, rank, settings):
        mine, theirs = socket.socketpair()
        channel = Connection(mine.detach())
        self.channels.append(channel)
        streams = []
        self.streams.append(streams)
        for target in ("stdout", "stderr"):
            streams.append(Stream(target))
            reader = streams[-1].reader
            self.selector.register(reader, selectors.EVENT_READ, (self.read_stream, rank))
        with theirs, self.noticed_later():
            descriptors = [theirs.fileno(), *(stream.writer for stream in streams)]
            socket.send_fds(self.sock, [b"r"], descriptors)
        for stream in streams:
            stream.close_writer()
        self.selector.register(channel, selectors.EVENT_READ, (self.read_channel, rank))
        store = os.path.join(self.folder, "store")
        own = {"rank": rank, "size": self.size, "store": store}
        self.send(rank, pickle.dumps(settings | own))

    @staticmethod
    def noticed_later():
        """Suppresses the error of writing to a rank or a server that is gone: its death is read."""
        return contextlib.suppress(BrokenPipeError, ConnectionResetError)

    # Talking

    def ask(self, kind, payload, ranks=None) -> dict:
        """Send a task to some ranks (all by default) and return their answers by rank.

        RankError if a rank raises, dies or waits in vain; where they may `survive` each other, only
        if all do.
        """
        ranks = range(self.size) if ranks is None else ranks
        self.answers, self.failures, self.wheres, self.asked_where = {}, {}, {}, False
        message = pickle.dumps((kind, payload))
        for rank in ranks:
            self.send(rank, message)
        deadline = None
        while not self.over(ranks):
            if self.survive and not self.server_gone:
                self.serve_survivors(ranks)
                continue
            deadline = self.new_deadline(deadline)
            if deadline and (time.monotonic() >= deadline or self.all_told(ranks)):
                raise failure_of(self)
            self.serve(deadline)
        if not self.answers:
            raise failure_of(self)
        return self.answers

    def serve_survivors(self, ranks):
        """Wait for something to happen. After a timeout's length without, a rank that does not even
        say where it is counts as failed: it is stopped, and would keep the others' results."""
        before = self.told
        self.serve(time.monotonic() + self.timeout)
        silent = set(ranks) - self.answers.keys() - self.failures.keys() - self.deaths.keys()
        if self.told > before or not silent:
            return
        self.wheres = {}
        for rank in silent:
            self.send(rank, pickle.dumps(("where", None)))
        until = time.monotonic() + GRACE["timeout"]
        while time.monotonic() < until and silent - self.wheres.keys() - self.deaths.keys():
            self.serve(until)
        for rank in silent - self.wheres.keys() - self.deaths.keys() - self.answers.keys():
            text = f"no answer after {self.timeout:g} s without a word: is it stopped?"
            self.failures[rank] = {"kind": "lost", "chain": [("", [], text)], "wait": None}

    def over(self, ranks) -> bool:
        """Whether every rank has answered, or has failed and may."""
        failed = self.failures.keys() | self.deaths.keys() if self.survive else set()
        return self.answers.keys() | failed >= set(ranks)

    def send(self, rank, message: bytes):
        with self.noticed_later():
            self.channels[rank].send_bytes(message)

    def new_deadline(self, deadline):
        """After a sign of failure: when to stop waiting for one that explains it."""
        if self.server_gone or self.deaths.keys() - self.answers.keys():
            return time.monotonic()
        kinds = [failure["kind"] for failure in self.failures.values()]
        if "timeout" in kinds and not self.asked_where:
            self.asked_where = True
            for rank in range(self.size):
                self.send(rank, pickle.dumps(("where", None)))
            return time.monotonic() + GRACE["timeout"]
        if deadline or not kinds:
            return deadline
        return time.monotonic() + GRACE[kinds[0]]

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
            self.told += 1
            handler, *args = key.data if isinstance(key.data, tuple) else (key.data,)
            handler(key.fileobj, *args)

    def read_channel(self, channel, rank) -> bool:
        """Take in one message of a rank; False if its process has closed the channel."""
        try:
            kind, content = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):
            # The process is ending; the fork server tells how.
            with contextlib.suppress(KeyError):
                self.selector.unregister(channel)
            return False
        for stream in self.streams[rank]:
            stream.drain()
        if kind == "where":
            self.wheres[rank] = content
        elif kind == "error":
            self.failures.setdefault(rank, content)
        else:
            self.answers[rank] = content
        return True

    def read_stream(self, reader, rank):
        stream = next(s for s in self.streams[rank] if s.reader == reader)
        if not stream.drain():
            self.selector.unregister(reader)
        if rank == self.live:
            self.show_stream(rank, stream)

    def show_stream(self, rank, stream):
        stream.show()

    def read_deaths(self, sock):
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = sock.recv(1 << 16)
        if not data:
            self.selector.unregister(sock)
            self.server_gone = True
        for line in data.decode().splitlines():
            rank, status = map(int, line.split())
            # What it said before it died counts.
            channel = self.channels[rank]
            while channel.poll() and self.read_channel(channel, rank):
                pass
            for stream in self.streams[rank]:
                stream.drain()
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
                self.end_ranks()
            self.show_output()
        finally:
            self.selector.close()
            for channel in self.channels:
                channel.close()
            for streams in self.streams:
                for stream in streams:
                    stream.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.channels, self.streams = [], []

    def end_ranks(self):
        with self.sock, contextlib.suppress(ConnectionError):
            self.sock.shutdown(socket.SHUT_WR)
            self.sock.settimeout(5)
            try:
                while self.sock.recv(1 << 16):
                    pass
            except TimeoutError:
                warnings.warn("ranks were killed but are not gone after 5 s", stacklevel=4)
