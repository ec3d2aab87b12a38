"""The emulated link: hold each message back until a slower wire would have delivered it.

Each rank has, for each class of link (inside a node, between nodes), one port that sends and one
that receives, both at the link's full rate. A message leaves when the sending port is free, its
first bit arrives one latency later, and its last bit when the receiving port has taken all of it:

    departs = max(now, sender's port free)
    arrives = max(departs + latency, receiver's port free) + bytes / bandwidth

The sender writes `departs` into a small header (the ranks of one machine share a clock) and goes
on at once; the receiver takes the true bytes and then sleeps until `arrives`. Inside one
operation "now" is when it began, or when the last message should have arrived: not the slightly
later moment at which a rank woke up and got to its next line. So lateness does not add up over the
steps of a ring, and the additions between two steps count as free. Messages pass the receiving
port in the order in which the rank waits for them.
"""

import ctypes
import math
import sys
import threading
import time

import torch

# How long before a moment to stop sleeping, in seconds.
WAKE_UP = 0.0004


class Links:
    """This rank's ports to each class of link of `cluster`."""

    def __init__(self, rank, cluster):
        self.rank = rank
        self.cluster = cluster
        self.lock = threading.Lock()
        self.sending_free = {}
        self.receiving_free = {}
        self.thread = threading.local()
        _sleep_precisely()

    def between(self, peer):
        """The Link to a world rank, or None where messages are not slowed."""
        return self.cluster.link(self.rank, peer)

    def begin(self, when):
        """A new operation was called: "now" is that moment."""
        self.thread.began = self.thread.now = when

    def depart(self, peer, nbytes) -> torch.Tensor:
        """Queue a message on the sending port; returns its header."""
        link, kind = self.between(peer), self.cluster.link_class(self.rank, peer)
        now = getattr(self.thread, "now", None) or time.monotonic()
        with self.lock:
            departs = max(now, self.sending_free.get(kind, 0.0))
            self.sending_free[kind] = departs + nbytes / link.bytes_per_second
        return torch.tensor([departs], dtype=torch.float64, device="cpu")

    def arrive(self, peer, nbytes, header, deadline=math.inf):
        """Sleep until the message with this header has arrived; False if `deadline` is earlier."""
        link, kind = self.between(peer), self.cluster.link_class(self.rank, peer)
        with self.lock:
            first_bit = header.item() + link.latency_us / 1e6
            begins = max(first_bit, self.receiving_free.get(kind, 0.0))
            arrives = begins + nbytes / link.bytes_per_second
            self.receiving_free[kind] = arrives
        # A message that came before this rank did has waited for it.
        self.thread.now = max(arrives, getattr(self.thread, "began", arrives))
        sleep_until(min(arrives, deadline))
        return arrives <= deadline


def sleep_until(moment):
    """Sleep until just before a moment of `time.monotonic`, then give way to others until it.

    A processor that idles takes long to wake up: a fraction of a millisecond, which is most of
    what a small message takes on a fast link.
    """
    left = moment - time.monotonic() - WAKE_UP
    if left > 0:
        time.sleep(left)
    while time.monotonic() < moment:
        time.sleep(0)


def _sleep_precisely():
    # Linux may delay a wake-up by 50 us to batch it with others; ask this thread, and those it
    # starts, for 1 ns.
    if sys.platform == "linux":
        PR_SET_TIMERSLACK = 29
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
