"""A folder is one job's at a time.

Whoever holds it has a lock of the kernel on the file `.lock` in it, which says who that is. The
kernel takes a lock away however its holder ends, by SIGKILL too, so none has to be removed by hand.
The file stays.

Not covered: machines that share a file system which keeps locks from one another (NFS mounted with
`nolock` or `local_lock`), and file systems without locks, where everybody gets one.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, made where it is not there, until the end of the block; ValueError, with its
    process and machine, if another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"another job writes into {folder}: {file.read() or 'one that has just begun'}. "
                "Let it end, or end it; or give this one a folder of its own"
            ) from None
        except OSError:
            # A file system without locks.
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
