"""Where a forward is: outside, where all ranks compute the same, or inside, where tensors are cut.

Inside is from the first column-parallel layer of a module to its row-parallel one, or to the
module's end. Two things depend on it.

*Parameters that are not cut.* Used outside, every rank computes their whole gradient. Used inside
(the norm of a query's head), each rank computes it from its own heads: a sum is owed. With sequence
parallel it is owed outside too, where each rank sees its part of the tokens: for norms, and for
biases of row-parallel layers.

*Random numbers* (draws.py).
"""

import functools

from torch import nn

from s2s_lib.collectives.functions import all_reduce


class Place:
    """Follows the forward of one module; `draws` (or None) is told what begins and ends."""

    def __init__(self, group, sequence, draws):
        self.group, self.sequence, self.draws = group, sequence, draws
        self.inside = False

    def enter(self, layer, *_):
        if not self.inside:
            self.inside = True
            if self.draws:
                self.draws.enter(layer)

    def leave(self, layer, *_):
        if self.inside:
            self.inside = False
            if self.draws:
                self.draws.leave(layer)

    def watch(self, module: nn.Module, columns: list, rows: list):
        """Follow a module: `columns` begin the inside, `rows` and the holders of columns end it."""
        for layer in columns:
            layer.register_forward_hook(self.enter)
        for layer in rows:
            layer.register_forward_pre_hook(self.leave)
        held = {id(layer) for layer in columns}
        for holder in module.modules():
            own = [child for child in holder.children() if id(child) in held]
            if own:
                # Also where a forward raises, as a checkpoint's does once it has what it needs.
                holder.register_forward_hook(self.leave, always_call=True)
        if self.draws:
            module.register_forward_pre_hook(self.draws.begin)
            module.register_forward_hook(self.draws.end, always_call=True)

    def sum_gradients(self, named, cut):
        """Have the gradients of parameters that are not cut summed where that is owed."""
        owed = {}
        for name, layer in named:
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
            one.note(self.inside)


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
