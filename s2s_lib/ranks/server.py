"""The fork server: a process that has torch imported and forks a rank when asked.

A fresh Python needs over a second to import torch; a fork of one that has it needs milliseconds
and shares its memory. Forking the notebook's own process is not an option: its thread pools do
not survive a fork. So one helper process per notebook, started on first use, does nothing but
import torch and fork (which is also what Python's own `forkserver` start method does).

Two kinds of sockets lead here. Over the control socket comes, for each launch, one job socket.
Over a job socket comes one byte for each rank, carrying that rank's three descriptors (its
channel, its stdout, its stderr); back goes one line `rank status` when a rank ends. Closing the
job socket from the other side ends its ranks; the server closes its own end when all are gone.
When the control socket closes, whoever started the server is gone, and so is everything here.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket

from s2s_lib.ranks import worker


def end_group(pid):
    """Kill a rank's process group: itself and, even if it is gone, its data-loader workers."""
    # macOS answers with a PermissionError where only a zombie is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Job:
    """The ranks of one launch: `pids` maps a living process to its rank."""

    def __init__(self, sock):
        self.sock = sock
        self.pids = {}
        self.started = 0
        self.closing = False

    def report(self, rank, status):
        with contextlib.suppress(OSError):
            self.sock.sendall(f"{rank} {status}\n".encode())

    def kill(self):
        self.closing = True
        for pid in self.pids:
            end_group(pid)


class Server:
    def __init__(self, control):
        self.control = control
        self.jobs = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, self.accept)
        self.wake, wake_writer = socket.socketpair()
        self.wake.setblocking(False)
        wake_writer.setblocking(False)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        self.wake_writer = wake_writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.wake, selectors.EVENT_READ, self.reap)

    def run(self):
        # A child that the launching process forked may hold the control socket open after it.
        launcher = os.getppid()
        while os.getppid() == launcher:
            for key, _ in self.selector.select(timeout=1):
                key.data(key.fileobj)
        self.end()

    def end(self):
        for job in self.jobs.values():
            job.kill()
        os._exit(0)

    def accept(self, control):
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            self.end()
        sock = socket.socket(fileno=descriptors[0])
        self.jobs[sock] = Job(sock)
        self.selector.register(sock, selectors.EVENT_READ, self.serve)

    def serve(self, sock):
        job = self.jobs[sock]
        data, descriptors = b"", []
        with contextlib.suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(sock, 1, 3)
        if data:
            self.start_rank(job, descriptors)
        else:
            self.selector.unregister(sock)
            job.kill()
            self.close_if_done(job)

    def start_rank(self, job, descriptors):
        rank, job.started = job.started, job.started + 1
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            worker.main(*descriptors)
        # Both sides do this, so that it holds before either goes on.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        job.pids[pid] = rank

    def reap(self, wake):
        with contextlib.suppress(BlockingIOError):
            wake.recv(4096)
        for job in list(self.jobs.values()):
            for pid in list(job.pids):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    end_group(pid)
                    job.report(job.pids.pop(pid), os.waitstatus_to_exitcode(status))
            self.close_if_done(job)

    def close_if_done(self, job):
        if job.closing and not job.pids:
            del self.jobs[job.sock]
            job.sock.close()


def main(control_fd: int):
    """Serve until the control socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker.preload()
    # Forked ranks share these objects' pages as long as no collection writes to them.
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    control.sendall(b"r")
    Server(control).run()
