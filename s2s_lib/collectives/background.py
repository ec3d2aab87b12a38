"""Communication beside computation: run a collective on a second thread.

`background(all_reduce, x, group)` returns at once; `.wait()` on what it returns gives the result
or raises what the collective raised. (An error that nobody waits for is raised when the rank's
function returns, if it has happened by then.) Everything given to one lane runs in the order given, so ranks that give the same things in the
same order cannot wait for each other in a circle; lanes are independent of each other. Messages of
a lane match only those of the same lane elsewhere.
"""

import queue
import threading
import time

import torch

from s2s_lib.ranks import connection


class Lane(threading.Thread):
    """A thread that runs one task after the other on a channel of its own."""

    def __init__(self, number):
        super().__init__(daemon=True, name=f"background {number}")
        self.number = number
        self.tasks = queue.SimpleQueue()

    def run(self):
        connection.set_channel(1 + self.number)
        torch.set_grad_enabled(False)
        while True:
            self.tasks.get().run()


class Background:
    """A collective on its way; `wait()` returns its result."""

    def __init__(self, fn, args, kwargs):
        self.call = (fn, args, kwargs)
        self.finished = threading.Event()
        self.result = self.error = None

    def run(self):
        fn, args, kwargs = self.call
        try:
            self.result = fn(*args, **kwargs)
        except BaseException as error:
            self.error = error
            connection.current().unheard.append(error)
        self.call = None
        self.finished.set()

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self.finished.is_set()

    def wait(self):
        """The result, once it is there; raises what the collective raised."""
        began = time.monotonic()
        self.finished.wait()
        for log in connection.current().logs:
            log.wait("background", 0, began, time.monotonic())
        if self.error is not None:
            unheard = connection.current().unheard
            if self.error in unheard:
                unheard.remove(self.error)
            raise self.error
        return self.result


_lanes = {}
_making = threading.Lock()


def background(fn, *args, lane: int = 0, **kwargs) -> Background:
    """Call `fn(*args, **kwargs)` on the communication thread `lane` of this rank.

    Its tensors must not change before `.wait()`. Gradients are not recorded there.
    """
    task = Background(fn, args, kwargs)
    with _making:
        if lane not in _lanes:
            _lanes[lane] = Lane(lane)
            _lanes[lane].start()
    _lanes[lane].tasks.put(task)
    return task
