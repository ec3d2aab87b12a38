"""The life of one rank: connect, run what the launcher sends, report, and never outlive it.

The rank's main thread runs the user's code. A second thread reads the channel to the launcher,
so that a rank blocked in a receive still answers "where are you?", and ends the process when the
launcher is gone.
"""

import contextlib
import ctypes
import io
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

LAST_FD = 1 << 16
# Seconds for what is on its way to a stopped rank.
MESSAGES_ARRIVE = 0.5
# Their frames are in every traceback and tell nothing.
OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "cells.py"))


def preload():
    """Import, in the fork server, everything that a rank needs."""
    import cloudpickle  # noqa: F401
    import numpy  # noqa: F401

    # What training from a file needs beside torch: half a second of each rank.
    import pydantic  # noqa: F401
    import safetensors.torch  # noqa: F401

    # The first optimizer or checkpoint of a process imports it: seconds, in every rank.
    import torch._dynamo  # noqa: F401
    import torch.distributed  # noqa: F401

    # The first trace of a model imports it: half a second and 30 MB, in every rank.
    import torch.export._trace  # noqa: F401
    import torch.utils.flop_counter  # noqa: F401
    import tqdm  # noqa: F401
    import yaml  # noqa: F401

    from s2s_lib.ranks import messages  # noqa: F401


def main(channel_fd: int, stdout_fd: int, stderr_fd: int):
    """Be a rank until told to stop; called in the child right after the fork, never returns."""
    try:
        die_with_parent()
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        channel_fd = take_descriptors(channel_fd, stdout_fd, stderr_fd)
        Worker(Connection(channel_fd)).run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def die_with_parent():
    """On Linux the kernel ends this process when its parent ends, whatever it is doing."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_descriptors(channel_fd, stdout_fd, stderr_fd):
    """Put the streams at 0, 1, 2, the channel at 3, and close all the server had open."""
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kept = os.dup(channel_fd)
    os.dup2(kept, 3, inheritable=False)
    os.closerange(4, LAST_FD)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = Unbuffered(open(descriptor, "wb", closefd=False), "utf-8", errors="replace")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return 3


class Unbuffered(io.TextIOWrapper):
    """Whatever becomes of the rank next, what it has printed has left it."""

    def write(self, text):
        count = super().write(text)
        self.flush()
        return count


class Worker:
    def __init__(self, channel):
        self.channel = channel
        self.sending = threading.Lock()
        self.tasks = queue.SimpleQueue()
        self.state = "starting"
        self.in_cell = False
        # What this rank did when it was told to stop
        self.stopped_at = None

    def run(self):
        self.settings = pickle.loads(self.channel.recv_bytes())
        self.rank = self.settings["rank"]
        self.take_surroundings()
        threading.Thread(target=self.read_channel, daemon=True).start()
        self.attempt(self.connect)
        doing = {"call": self.do_call, "cell": self.do_cell, "reconnect": self.do_reconnect}
        while True:
            kind, payload = self.tasks.get()
            self.state = "running"
            self.attempt(doing[kind], payload)

    def take_surroundings(self):
        """Path, folder, environment and threads as in the process that called launch."""
        import torch

        os.environ.clear()
        os.environ.update(self.settings["environ"])
        sys.path[:] = self.settings["path"]
        os.chdir(self.settings["folder"])
        sys.argv = self.settings["argv"]
        torch.set_num_threads(self.settings["threads"])

    def read_channel(self):
        while True:
            try:
                kind, payload = pickle.loads(self.channel.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            if kind == "where":
                self.tell("where", self.where())
            elif kind == "stop":
                self.stop()
            else:
                self.state = "running"
                self.tasks.put((kind, payload))

    def tell(self, kind, content):
        with self.sending:
            self.channel.send_bytes(pickle.dumps((kind, content)))

    def attempt(self, task, *args):
        """Run a task and tell its answer, or what it raised."""
        self.stopped_at = None
        try:
            answer = task(*args)
        except BaseException as error:
            self.state = "failed"
            flush_streams()
            failure = described(error)
            if self.stopped_at:
                failure |= {"kind": "stopped", "where": self.stopped_at}
            self.tell("error", failure)
        else:
            self.state = "finished"
            flush_streams()
            if answer is not None:
                self.tell(*answer)

    def connect(self):
        from s2s_lib.ranks import connection

        settings = self.settings
        self.world = connection.connect(
            self.rank,
            settings["size"],
            store=settings["store"],
            timeout=settings["timeout"],
            cluster=settings["cluster"],
            check=settings["check"],
        )

    def do_call(self, payload):
        import cloudpickle

        from s2s_lib.ranks import messages

        fn, args = cloudpickle.loads(payload)
        if self.settings["survive"]:
            self.meet()
        try:
            value = fn(self.world, *args)
            messages.finish()
        finally:
            if self.settings["survive"]:
                # The others may go on, and must not wait for this one.
                self.hang_up()
        try:
            return "result", cloudpickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the result of rank {self.rank}, a {type(value).__name__}, cannot be pickled "
                f"({error}); return tensors, numbers and plain containers"
            ) from None

    def do_cell(self, task):
        """Call a function of cells.py, which `stop` may interrupt."""
        fn, args = task
        signal.signal(signal.SIGINT, self.interrupt)
        self.in_cell = True
        try:
            return "result", fn(self.world, *args)
        finally:
            self.in_cell = False

    def interrupt(self, *_):
        if self.in_cell:
            self.in_cell = False
            raise KeyboardInterrupt("stopped")

    def stop(self):
        """Called on the channel's thread: end the cell that runs, whatever it is doing."""
        while not self.in_cell:
            if self.state != "running":
                return
            time.sleep(0.01)
        self.stopped_at = self.where()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        # Python gets to its interrupt only when the message that it waits for has come. Most do.
        time.sleep(MESSAGES_ARRIVE)
        if self.state == "running":
            self.hang_up()

    def meet(self):
        """A rank that is done hangs up: no sooner than all have connected."""
        from s2s_lib.ranks import connection

        store, size = connection.current().store("connected"), self.settings["size"]
        store.set(str(self.rank), "")
        store.wait([str(rank) for rank in range(size)])

    def hang_up(self):
        from s2s_lib.ranks import connection

        connection.hang_up()

    def do_reconnect(self, store):
        from s2s_lib.ranks import connection

        self.hang_up()
        connection.disconnect()
        self.settings["store"] = store
        self.connect()
        return "result", None

    def where(self):
        """What this rank is doing, for the launcher's table: one line for each busy thread."""
        from s2s_lib.ranks import connection

        waits = connection.blocked()
        if waits or self.state in ("finished", "failed"):
            return waits or [(self.state, "", None)]
        frame = sys._current_frames().get(threading.main_thread().ident)
        return [(f"is {self.state}", user_line(frame), None)]


def user_line(frame):
    """File and line of the innermost frame that is neither this package's nor torch's."""
    import torch

    import s2s_lib

    inner = tuple(os.path.dirname(m.__file__) + os.sep for m in (s2s_lib, torch))
    for entry in reversed(traceback.extract_stack(frame)):
        if not entry.filename.startswith(inner):
            return f"{os.path.basename(entry.filename)}:{entry.lineno} in {entry.name}"
    return ""


def flush_streams():
    """Let go what is still buffered, in Python or in C; the user may have closed a stream."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def described(error):
    """`describe(error)`, or if the exception itself is broken, at least its type."""
    try:
        failure = describe(error)
        pickle.dumps(failure)
        return failure
    except Exception as broken:
        text = f"{type(error).__name__}, which cannot be described ({type(broken).__name__})"
        return {"kind": "error", "chain": [("", [], text)], "wait": None}


def describe(error):
    """An exception as plain values: how it came about, its frames, and what kind it is.

    Frames travel as (file, line, function); the launcher fills in the source lines, since only
    it knows the text of notebook cells.
    """
    chain, kind, wait = [], "error", None
    for relation, link in links(error):
        frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(link.__traceback__)]
        text = "".join(traceback.format_exception_only(type(link), link)).rstrip()
        chain.append((relation, [f for f in frames if f[0] not in OWN_FILES], text))
        if kind == "error":
            kind = kind_of(link)
            wait = link.wait if kind == "timeout" else None
    return {"kind": kind, "chain": chain, "wait": wait}


def links(error):
    """An exception and those it came from, each with its relation to the one before."""
    seen, relation = set(), ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield relation, error
        if error.__cause__ is not None:
            error, relation = error.__cause__, "The error above was raised from this one:"
        elif not error.__suppress_context__:
            error, relation = error.__context__, "It came up while handling this one:"
        else:
            return


def kind_of(error):
    """A wait in vain, a lost connection (torch's own collectives lose them too), or an error."""
    from s2s_lib.ranks import wire

    if isinstance(error, wire.WaitTimeout):
        return "timeout"
    lost = isinstance(error, RuntimeError) and "gloo" in str(error) and "closed" in str(error)
    return "lost" if lost or isinstance(error, wire.ConnectionLost) else "error"
