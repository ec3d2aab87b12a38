"""Live and peak bytes by kind, counted from the storages that exist.

    with memory(model, optimizer) as m:
        loss_of(model(x)).backward()
        optimizer.step()
    m.live, m.peak, m.highest

A *storage* is the block of bytes under one or more tensors. Here each storage is counted once and
whole, however many tensors look into it: a tied weight once, gradients that are views into a
bucket as the bucket, a sharded parameter as its buffer, padding included. A storage emptied by
`untyped_storage().resize_(0)` counts nothing until it is filled again. No formula is involved.

How it works. A `TorchDispatchMode` is called at every operation, of forward, backward and
optimizer alike. It keeps weak references to the storages of what goes in and comes out, so it sees
them die without keeping any alive. After each operation it looks at the model and the optimizer
again, sorts the storages into kinds, and adds up their sizes:

    weights, gradients, buffers   a parameter of the model, its `.grad`, a buffer
    optimizer     a tensor in `optimizer.state`
    activations   what went into or came out of an operation that autograd recorded: outputs kept
                  for backward, checkpoints computed again, the batch
    temporary     anything else: gradients on their way down, an optimizer's scratch, messages

A storage that was named once keeps its name while it lives: a bucket is "gradients" also between
`zero_grad` and the next backward, the full weights of a sharded model between two uses. A gradient
is "temporary" until autograd has put it into `.grad`.

What it does not see: operations of other threads (a communication thread's receive buffers), the
scratch memory inside a kernel, tensors from before the `with` until they are first used, and what
the allocator keeps back. Torch's profiler logs each allocation and so can judge the total (a test
does); it does not know what the bytes are for.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from s2s_lib.meters.units import human_bytes

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers", "temporary")


class Memory:
    """What `memory()` found. All numbers are bytes; each dict has every kind, zeros included.

    `.live`     now; after the `with`, what was alive at its end.
    `.peak`     at the moment when the total was highest (the first such moment).
    `.highest`  each kind's own highest, which may fall at different moments.

    `.live_total` and `.peak_total` are the sums. Can be returned from a rank.
    """

    def __init__(self):
        self._watch: _Watch | None = None
        self._live = dict.fromkeys(KINDS, 0)
        self.peak = dict(self._live)
        self.highest = dict(self._live)

    @property
    def live(self) -> dict[str, int]:
        if self._watch is not None:
            self._record(self._watch.count())
        return self._live

    @property
    def live_total(self) -> int:
        return sum(self.live.values())

    @property
    def peak_total(self) -> int:
        return sum(self.peak.values())

    def _record(self, now):
        self._live = now
        self.highest = {kind: max(now[kind], high) for kind, high in self.highest.items()}
        if sum(now.values()) > self.peak_total:
            self.peak = now

    def _finish(self):
        self._record(self._watch.count())
        self._watch = None

    def _rows(self):
        live = self.live
        for kind in KINDS:
            yield kind, live[kind], self.peak[kind], self.highest[kind]
        yield "total", self.live_total, self.peak_total, None

    def _table(self):
        for kind, *columns in self._rows():
            yield kind, *("" if count is None else human_bytes(count) for count in columns)

    def __repr__(self):
        rows = [("bytes", "live", "at the peak", "own highest"), *self._table()]
        return "\n".join(f"{a:<12}{b:>12}{c:>14}{d:>14}".rstrip() for a, b, c, d in rows)

    def _repr_markdown_(self):
        lines = ["| bytes | live | at the peak | own highest |", "|:--|--:|--:|--:|"]
        return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in self._table()])


@contextlib.contextmanager
def memory(model: torch.nn.Module | None = None, optimizer=None, *others) -> Iterator[Memory]:
    """Count this rank's live and peak bytes by kind, while the `with` lasts; yields a `Memory`.

    Give the model and the optimizer to have their storages named; without them, their bytes appear
    as "activations" or "temporary" once used. `others` have a `held()` that says what they keep,
    by kind: a DiLoCo. Looks at every storage at every operation, so a step
    takes several times as long: measure one step, and time another.
    """
    if model is not None and not hasattr(model, "parameters"):
        raise TypeError(
            f"memory(model, optimizer) needs a module first, not a {type(model).__name__}; "
            "for an optimizer alone write memory(optimizer=...)"
        )
    found = Memory()
    found._watch = watch = _Watch(model, optimizer, others, found)
    found._record(watch.count())
    try:
        with watch:
            yield found
    finally:
        found._finish()


class _Watch(TorchDispatchMode):
    """Called at every operation of this thread; holds the kind of each storage that is alive."""

    def __init__(self, model, optimizer, others, found):
        super().__init__()
        self.model, self.optimizer, self.others, self.found = model, optimizer, others, found
        # torch keeps the Python object of a storage as long as its bytes exist, so an entry of this
        # dictionary disappears when the storage is freed, not when the last Python name goes.
        self.kind_of = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = list(_tensors((args, kwargs, result)))
        # Only forward runs operations with grad mode on and inputs that require grad: backward,
        # optimizers and collectives switch one of the two off.
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        for storage in _storages(tensors):
            if self.kind_of.setdefault(storage, "temporary") == "temporary" and recorded:
                self.kind_of[storage] = "activations"
        if not function.is_view:
            self.found._record(self.count())
        return result

    def count(self):
        """Bytes alive now, by kind."""
        for kind, tensors in self._owned():
            for storage in _storages(tensors):
                self.kind_of[storage] = kind
        now = dict.fromkeys(KINDS, 0)
        for storage, kind in self.kind_of.items():
            now[kind] += storage.nbytes()
        return now

    def _owned(self):
        """The tensors of the model and the optimizer as they are now: sharding changes them."""
        if self.optimizer is not None:
            yield "optimizer", _tensors(self.optimizer.state)
        for other in self.others:
            yield from other.held().items()
        modules = [self.model] if self.model is not None else []
        for module in modules:
            modules.extend(child for child in module._modules.values() if child is not None)
        weights = [p for m in modules for p in m._parameters.values() if p is not None]
        yield "buffers", [b for m in modules for b in m._buffers.values() if b is not None]
        for module in modules:
            # A strategy says what it keeps outside of parameters, by kind.
            if hasattr(type(module), "held"):
                yield from module.held().items()
        yield "gradients", [p.grad for p in weights if p.grad is not None]
        yield "weights", weights


def _tensors(tree):
    """Every tensor inside nested lists, tuples and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _storages(tensors):
    """The storages under `tensors`; a sharded or sparse tensor stands for the plain ones in it."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from _storages(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif tensor.is_meta:
            continue
        elif tensor.layout is torch.sparse_coo:
            yield from _storages([tensor._indices(), tensor._values()])
        else:
            yield tensor.untyped_storage()
