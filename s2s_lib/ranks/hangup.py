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


def connections() -> set[int]:
    """The descriptors of this process that are internet connections."""
    found = set()
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()
                found.add(descriptor)
    return found


def hang_up(descriptors: set[int]):
    """Shut down these connections; those that are closed already do not matter."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def borrowed(descriptor):
    """A socket object for a descriptor that belongs to somebody else; OSError if it is none."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
