"""Hang up: make every wait for another rank fail at once.

gloo has no way to end a wait before its timeout. But a connection that closes fails all that wait
on it, on both sides, and the operating system lets any thread shut down a connection of its
process. Nothing else is closed: gloo gets to see an end of file, as if the other rank had left.

A message of which a part has arrived is the exception: its receiver waits on until its timeout.
So hang up once the messages on their way have had time to arrive.
"""

import contextlib
import os
import socket


def connections() -> set[tuple[int, int]]:
    """The internet connections of this process: each one's descriptor and the system's number of
    it, since a descriptor may later belong to another."""
    found = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()
                found.add((descriptor, os.fstat(descriptor).st_ino))
    return found


def hang_up(these: set[tuple[int, int]]):
    """Shut down those of these connections that are still open."""
    for descriptor, number in these:
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:
            if os.fstat(descriptor).st_ino == number:
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def borrowed(descriptor):
    """A socket object for a descriptor that belongs to somebody else; OSError if it is none."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
