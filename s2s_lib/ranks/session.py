"""A session: ranks that stay, and run one notebook cell after the other.

When a rank fails in a cell, or the cell is interrupted, the ranks that still run are stopped: they
raise KeyboardInterrupt wherever they are, and their waits for other ranks fail. Messages that were
on their way are lost with that, so the ranks connect anew before the next cell. Variables stay.
Only a rank that ends, or that cannot be stopped, ends the session.
"""

import atexit
import contextlib
import math
import os
import pickle
import shutil
import signal
import sys
import threading
import time

from IPython.display import display

from s2s_lib.ranks import cells
from s2s_lib.ranks.failure import RankError, failure_of, names, render
from s2s_lib.ranks.job import Job

# After the first failure: how long the other ranks may go on, to finish or to fail themselves.
TO_FINISH = 0.5
# After the order to stop: how long until all must have.
TO_STOP = 3.0
ENDED = "the session has ended, and with it all variables; %dist_init starts another"


class Session(Job):
    """Starts ranks and waits until all are connected. `alive` until they are closed or lost."""

    def __init__(self, ranks: int, settings: dict):
        self.headed = {}
        self.bundles = {}
        self.reconnections = 0
        self.broken = False
        super().__init__(ranks, settings)
        # When the notebook ends, the fork server ends the ranks; the folder is left to us.
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            self.run("<start>", "", range(ranks))
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return bool(self.channels)

    # Doing

    def run(self, name, source, ranks):
        """Run a cell on some ranks, and show for each what it prints and what its last line gives.

        RankError if a rank fails; KeyboardInterrupt after an interrupt.
        """
        cells.remember(name, source)
        self.do(ranks, cells.run, name, source)

    def do(self, ranks, fn, *args) -> dict:
        """Call a function of cells.py on some ranks; returns their answers by rank."""
        if self.broken:
            self.reconnect()
        self.live = min(ranks)
        interrupted = self.converse(ranks, "cell", (fn, args))
        if fn is cells.run:
            self.bundles = self.answers
        self.show_output()
        if interrupted:
            self.tell_stopped()
            raise KeyboardInterrupt("the cell was stopped on all ranks; variables are kept")
        if self.failures:
            raise self.error()
        return self.answers

    def reconnect(self):
        self.reconnections += 1
        store = os.path.join(self.folder, f"store{self.reconnections}")
        self.broken = False
        interrupted = self.converse(range(self.size), "reconnect", store)
        if self.failures:
            error = failure_of(self)
            self.end(error.rank, error.summary, error.details)
        if interrupted:
            raise KeyboardInterrupt("before the cell ran; variables are kept")

    def converse(self, ranks, kind, payload) -> bool:
        """Send a task and wait until all ranks have answered or failed; True if interrupted."""
        self.answers, self.failures, self.wheres = {}, {}, {}
        stop_at, stopped = math.inf, False
        with interrupts_in_a_list() as interrupts:
            self.say(ranks, kind, payload)
            while running := [r for r in ranks if r not in self.answers | self.failures]:
                self.check_all_live(running, stop_at)
                now = time.monotonic()
                if self.failures:
                    stop_at = min(stop_at, now + TO_FINISH)
                if interrupts:
                    stop_at = min(stop_at, now)
                if now >= stop_at and not stopped:
                    self.say(running, "stop")
                    stopped = True
                # Python would not wake from a longer wait for an interrupt that raises nothing.
                self.serve(now + 0.1)
            self.serve(time.monotonic())
            self.check_all_live(running, stop_at)
        self.broken = self.broken or stopped or bool(self.failures)
        return bool(interrupts)

    def say(self, ranks, kind, payload=None):
        message = pickle.dumps((kind, payload))
        for rank in ranks:
            self.send(rank, message)

    def check_all_live(self, running, stop_at):
        """End the session if a rank is gone, or one of those running should have stopped."""
        if self.deaths or self.server_gone:
            error = failure_of(self)
            # What a rank wrote before it died is shown as its output.
            self.end(error.rank, error.summary, error.details if self.server_gone else "")
        if running and time.monotonic() > stop_at + TO_STOP:
            stuck = f"{names(running)} of {self.size} did not stop within {TO_STOP:g} s"
            self.end(running[0], stuck)

    def end(self, rank, summary, details=""):
        self.close()
        raise RankError(rank, f"{summary}; {ENDED}", details)

    # Showing

    def show_output(self):
        """Show, rank by rank, what each has printed and the value of its cell."""
        for rank, streams in enumerate(self.streams):
            for stream in streams:
                stream.drain()
                self.show_stream(rank, stream)
                if self.headed.get(stream.target) == rank and not stream.tail.endswith("\n"):
                    print(file=getattr(sys, stream.target))
            bundle = self.bundles.pop(rank, None)
            if bundle:
                self.head(rank, "stdout")
                show_value(bundle)
        self.headed = {}

    def show_stream(self, rank, stream):
        if any(stream.unshown):
            self.head(rank, stream.target)
            stream.show()

    def head(self, rank, target):
        """`rank 0:` on a line of its own, before the first thing that a rank shows in a cell."""
        if self.headed.get(target) != rank:
            self.headed[target] = rank
            print(f"rank {rank}:", file=getattr(sys, target), flush=True)

    def tell_stopped(self):
        for rank, failure in sorted(self.failures.items()):
            print(f"{names([rank])}: {account(failure)}", file=sys.stderr)

    def error(self) -> RankError:
        """What failed first, with an account of every rank that failed; equal ones together."""
        self.failures = dict(sorted(self.failures.items()))
        self.find_out_where()
        error = failure_of(self)
        if error.rank is None:
            return error
        ranks_by_text = {}
        for rank, failure in self.failures.items():
            ranks_by_text.setdefault(account(failure), []).append(rank)
        details = "\n\n".join(f"{names(ranks)}: {text}" for text, ranks in ranks_by_text.items())
        return RankError(error.rank, error.summary, details)

    def find_out_where(self):
        """What each rank that did not fail does, or did when it was stopped."""
        self.wheres = {r: f["where"] for r, f in self.failures.items() if "where" in f}
        self.say([r for r in range(self.size) if r not in self.failures], "where")
        deadline = time.monotonic() + 1
        while len(self.failures | self.wheres) < self.size and time.monotonic() < deadline:
            self.serve(deadline)


def account(failure) -> str:
    """How a rank's part of a cell ended."""
    if failure["kind"] != "stopped":
        return "\n".join(map(render, failure["chain"]))
    places = [
        f"stopped in {group or 'its cell'}" if since is None else f"stopped; it waited for {what}"
        for what, group, since in failure["where"]
    ]
    return "\n".join(places)


def show_value(bundle):
    if bundle.keys() == {"text/plain"}:
        print(bundle["text/plain"], flush=True)
    else:
        display(bundle, raw=True)


@contextlib.contextmanager
def interrupts_in_a_list():
    """While inside, an interrupt raises nothing; the list yielded grows by one."""
    seen = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
