"""When a backward begins and ends, for strategies that have work to do around it."""

import contextlib
import dataclasses
import functools
import weakref

import torch
from torch.utils import _pytree as pytree


class Backward:
    """The outermost backward under way; `at_end` is called when it is over, and then `finish`,
    which waits for what is still on its way.

    A backward that raises calls neither, and `running` is False after it.
    """

    def __init__(self, at_end, finish):
        self.at_end, self.finish = at_end, finish
        self.ending = None
        self.waits, self.due = True, False

    @property
    def running(self) -> bool:
        return self.ending is not None and self.ending() is not None

    def begin(self) -> bool:
        """From a hook inside a backward; True for the first of this one."""
        if self.running:
            return False
        # Only autograd holds this, until its backward has ended or raised.
        ending = functools.partial(self.end)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self.ending = weakref.ref(ending)
        return True

    def end(self):
        self.ending = None
        self.at_end()
        self.due = True
        if self.waits:
            self.wait()

    @contextlib.contextmanager
    def waiting_later(self):
        """A backward inside returns before its gradients are final; they are after `wait()`. So in
        a pipeline the stage before need not wait for the average of this one."""
        self.waits = False
        try:
            yield
        finally:
            self.waits = True

    def wait(self):
        """Finish a backward under `waiting_later`, if there was one."""
        if self.due:
            self.due = False
            self.finish()


def current_backward() -> int | None:
    """The number of the backward that this thread runs, or None."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def weakly(method, *args):
    """`method` with these first arguments, for a hook of a parameter: torch keeps such hooks out
    of the garbage collector's sight, so what they hold, and all that it holds, is never freed."""
    reference = weakref.WeakMethod(method)

    def call(*more):
        bound = reference()
        return bound(*args, *more) if bound is not None else None

    return call


def tensors_in(tree):
    """Every tensor in nested containers and dataclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = dataclasses.fields(leaf)
            yield from tensors_in([getattr(leaf, field.name, None) for field in fields])
