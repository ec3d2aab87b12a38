"""Communication beside computation: run a collective on a second thread.

`background(all_reduce, x, group)` returns at once; `.wait()` on what it returns gives the result
or raises what the collective raised. (An error that nobody waits for is raised when the rank's
function returns, if it has happened by then.) Everything given to one lane runs in the order
given, so ranks that give the same things in the same order cannot wait for each other in a circle;
lanes are independent of each other. Messages of a lane match only those of the same lane elsewhere.
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
        self.home = connection.current()
        self.tasks = queue.SimpleQueue()

    def run(self):
        connection.set_channel(1 + self.number)
        # Once the ranks have connected anew, what is still in line here must not reach the others.
        connection.thread.home = self.home
        connection.thread.lane = self
        torch.set_grad_enabled(False)
        while True:
            self.tasks.get().run()


class Background:
    """A collective on its way; `wait()` returns its result."""

    def __init__(self, fn, args, kwargs, lane):
        self.call = (fn, args, kwargs)
        self.lane = lane
        self.finished = threading.Event()
        self.result = self.error = None

    def run(self):
        fn, args, kwargs = self.call
        try:
            self.result = fn(*args, **kwargs)
        except BaseException as error:
            self.error = error
            self.lane.home.unheard.append(error)
        finally:
            self.call = None
            self.finished.set()

    def done(self) -> bool:
        """Whether `wait()` would return at once."""
        return self.finished.is_set()

    def wait(self):
        """The result, once it is there; raises what the collective raised."""
        began = time.monotonic()
        if self.lane is connection.thread.lane and not self.done():
            raise RuntimeError(
                f"a task on lane {self.lane.number} waits for a later one of the same lane, which "
                "starts only after it: use another lane"
            )
        self.finished.wait()
        for log in connection.current().logs:
            log.wait("background", connection.thread.channel, began, time.monotonic())
        if self.error is not None:
            unheard = self.lane.home.unheard
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
    if not callable(fn):
        raise TypeError(f"background needs a function and its arguments, got {fn!r}")
    if isinstance(lane, bool) or not isinstance(lane, int) or lane < 0:
        raise ValueError(f"lane={lane!r}: lanes are numbered 0, 1, 2, ...")
    with _making:
        if lane not in _lanes or _lanes[lane].home is not connection.current():
            _lanes[lane] = Lane(lane)
            _lanes[lane].start()
        task = Background(fn, args, kwargs, _lanes[lane])
    task.lane.tasks.put(task)
    return task
