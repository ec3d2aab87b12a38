"""Where a forward is: outside, where all ranks compute the same, or inside, where tensors are cut.

Inside is from the first column-parallel layer of a module to its row-parallel one, or to the
module's end. Two things depend on it.

*Parameters that are not cut.* Used outside, every rank computes their whole gradient. Used inside
(the norm of a query's head), each rank computes it from its own heads: a sum is owed. With sequence
parallel it is owed outside too, where each rank sees its part of the tokens, as norms do.

*Random numbers* (draws.py).

A module may use a whole tensor when it is already inside, and no name tells. So what layers with
parameters, and dropouts, get there is compared between the ranks the first time, 24 bytes each.
"""

import functools

import torch
from torch import nn

from s2s_lib.collectives.functions import all_gather, all_reduce
from s2s_lib.strategies.backward import tensors_in
from s2s_lib.strategies.tensor.layers import Parallel


class Place:
    """Follows the forward of one module; `draws` (or None) is told what begins and ends."""

    def __init__(self, group, sequence, draws):
        self.group, self.sequence, self.draws = group, sequence, draws
        self.forget()

    def forget(self, *_):
        # The module whose column layers have been called, and in which backward: in one,
        # checkpoints compute again, and may stop before the row layer.
        self.at = None

    def enter(self, holder, layer, *_):
        at = holder, torch._C._current_graph_task_id()
        if self.at != at:
            self.at = at
            if self.draws:
                self.draws.enter(layer)

    def leave(self, *_):
        if self.at is not None:
            self.at = None
            if self.draws:
                self.draws.leave()

    def watch(self, module: nn.Module, columns: list, rows: list):
        """Follow a module: `columns` begin the inside, `rows` and the holders of columns end it."""
        module.register_forward_pre_hook(self.forget)
        for layer in rows:
            layer.register_forward_pre_hook(self.leave)
        for name, holder in module.named_modules():
            own = [child for child in holder.children() if child in columns]
            for layer in own:
                layer.register_forward_hook(functools.partial(self.enter, name))
            if own:
                # Also where a forward raises, as a checkpoint's does once it has what it needs.
                holder.register_forward_hook(self.leave, always_call=True)
                if not self.sequence and self.group.size > 1:
                    ends = any(child in rows for child in holder.children())
                    self.compare_inputs(name, holder, ends)
        if self.draws:
            module.register_forward_pre_hook(self.draws.begin)
            module.register_forward_hook(self.draws.end, always_call=True)

    def compare_inputs(self, holder_name, holder, ends):
        for name, layer in holder.named_modules():
            trained = any(p.requires_grad for p in layer.parameters(recurse=False))
            drops = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
            if name and (trained or drops) and not isinstance(layer, Parallel):
                full = f"{holder_name}.{name}" if holder_name else name
                layer.register_forward_pre_hook(Compared(self, full, ends))

    def sum_gradients(self, named, cut):
        """Have the gradients of parameters that are not cut summed where that is owed."""
        owed = {}
        for name, layer in named:
            if isinstance(layer, Parallel):
                continue
            mine = [p for p in layer.parameters(recurse=False) if p.requires_grad and not cut(p)]
            for parameter in mine:
                if parameter not in owed:
                    owed[parameter] = Owed(name, self.group, True if self.sequence else None)
                    parameter.register_hook(owed[parameter])
            if mine and not self.sequence:
                layer.register_forward_pre_hook(
                    functools.partial(self.note, [owed[p] for p in mine])
                )

    def note(self, owed, *_):
        for one in owed:
            one.note(self.at is not None)


class Owed:
    """A hook of a parameter: sums its gradient over the group, if that is owed."""

    def __init__(self, name, group, owed):
        self.name, self.group, self.owed = name, group, owed

    def note(self, inside):
        if self.owed not in (None, inside):
            raise RuntimeError(
                f"{self.name} is used both where tensors are cut and where they are whole, and its "
                "gradient would be part of one sum and all of another: use two modules"
            )
        self.owed = inside

    def __call__(self, grad):
        return all_reduce(grad, self.group) if self.owed else grad


class Compared:
    """A hook before a layer's forward: RuntimeError where what it gets is whole inside, or cut
    outside, as far as sums over the tensor tell. Once it has seen more than zeros it rests. Outside
    is looked at only where a row layer `ends` the inside: else nothing is cut there."""

    def __init__(self, place, name, ends):
        self.place, self.name, self.ends, self.told = place, name, ends, False

    def __call__(self, layer, inputs):
        floating = [x for x in tensors_in(inputs) if x.is_floating_point()]
        inside = self.place.at is not None
        if self.told or not floating or not (inside or self.ends):
            return
        x = floating[0].detach().double().flatten()
        # Each place counts otherwise: the rows of a softmax add up to the same on all ranks.
        weighed = x @ torch.arange(1.0, len(x) + 1, dtype=x.dtype).cos()
        sums = torch.stack([x.new_tensor(len(x)), weighed, x.abs().sum()])
        every = all_gather(sums[None], self.place.group)
        largest = every[:, 2].max()
        if not largest:
            return
        self.told = True
        whole = bool(((every - every[0]).abs() <= 1e-6 * largest).all())
        if whole and inside:
            raise RuntimeError(
                f"{self.name} gets the same tensor on all ranks after the column-parallel layers "
                "beside it were called, where tensors are taken to be cut: its gradient and its "
                "dropout would be wrong. Call it before them, or after the row-parallel layer"
            )
        if not whole and not inside:
            raise RuntimeError(
                f"{self.name} gets another tensor on each rank, as of one that is cut, before the "
                "column-parallel layers beside it are called, or after the row-parallel one, where "
                "tensors are taken to be whole. Call it between them"
            )
