"""Where a forward is: outside, where all ranks compute the same, or inside, where tensors are cut.

Inside is from the first column-parallel layer of a module to its row-parallel one, or to the
module's end. Two things depend on it.

*Parameters that are not cut.* Used on whole tensors, every rank computes their whole gradient. Used
on cut ones (the norm of a query's head), each rank computes it from its own heads: a sum is owed.
With sequence parallel it is owed everywhere, since each rank sees its part of the tokens. A module
may use a whole tensor when it is already inside; so what counts here is the graph of the tensor,
the first time that gradients are recorded, and the place only where there is no graph.

*Random numbers* (draws.py). They are drawn by place; where place and graph differ, a dropout is
refused.
"""

import functools

import torch
from torch import nn

from s2s_lib.collectives.autograd import linear_node
from s2s_lib.collectives.functions import all_reduce
from s2s_lib.strategies.backward import tensors_in
from s2s_lib.strategies.tensor.layers import Parallel
from s2s_lib.strategies.tensor.region import Product


class Place:
    """Follows the forward of one module; `draws` (or None) is told what begins and ends."""

    def __init__(self, group, sequence, draws):
        self.group, self.sequence, self.draws = group, sequence, draws
        self.forget()

    def forget(self, *_):
        # The module whose column layers have been called, and in which backward: in one,
        # checkpoints compute again, and may stop before the row layer.
        self.at = None
        # Whether what its column layers give has a graph.
        self.recorded = True

    def enter(self, holder, layer, _, output):
        at = holder, torch._C._current_graph_task_id()
        if self.at != at:
            self.at, self.recorded = at, output.requires_grad
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
        if self.draws:
            module.register_forward_pre_hook(self.draws.begin)
            module.register_forward_hook(self.draws.end, always_call=True)

    def watch_uncut(self, named, cut):
        """Sum the gradients of parameters that are not cut where that is owed, and check dropouts;
        `named` are the parts of the module."""
        owed = {}
        for name, layer in named:
            if isinstance(layer, Parallel):
                continue
            mine = [p for p in layer.parameters(recurse=False) if p.requires_grad and not cut(p)]
            for parameter in mine:
                if parameter not in owed:
                    owed[parameter] = Owed(name, self.group, True if self.sequence else None)
                    parameter.register_hook(owed[parameter])
            drops = isinstance(layer, nn.modules.dropout._DropoutNd) and self.draws
            if (mine or drops) and not self.sequence:
                hook = Watch(self, name, [owed[p] for p in mine], drops)
                layer.register_forward_pre_hook(hook)


class Owed:
    """A hook of a parameter: sums its gradient over the group, if that is owed."""

    def __init__(self, name, group, owed):
        self.name, self.group, self.owed = name, group, owed

    def note(self, owed):
        if self.owed not in (None, owed):
            raise RuntimeError(
                f"{self.name} is used both where tensors are cut and where they are whole, and its "
                "gradient would be part of one sum and all of another: use two modules"
            )
        self.owed = owed

    def __call__(self, grad):
        return all_reduce(grad, self.group) if self.owed else grad


class Watch:
    """A hook before the forward of a layer that is not cut: what it gets, whole or cut, and what
    follows from that. Looked at the first time at each place."""

    def __init__(self, place, name, owed, drops):
        self.place, self.name, self.owed, self.drops = place, name, owed, drops
        self.known = {}

    def __call__(self, layer, inputs):
        if not torch.is_grad_enabled():
            return
        inside = self.place.at is not None
        if inside not in self.known:
            recorded = [x for x in tensors_in(inputs) if x.grad_fn is not None]
            if not recorded:
                # Data; or all that came before is frozen, and there is only the place to go by.
                self.tell(inside and not self.place.recorded, inside)
                return
            self.known[inside] = any(map(comes_from_column, recorded))
        self.tell(self.known[inside], inside)

    def tell(self, cut, inside):
        for one in self.owed:
            one.note(cut)
        if self.drops and cut != inside:
            state, place = ("cut", "outside of") if cut else ("whole", "inside")
            raise RuntimeError(
                f"the dropout {self.name} gets a tensor that is {state} {place} the stretch from "
                "the column-parallel layers of a module to its row-parallel one, where random "
                f"numbers are for tensors that are {'whole' if cut else 'cut'}: call it on the "
                "other side of those layers"
            )


def comes_from_column(x):
    """Whether a column layer is behind a tensor in its graph, with no sum over ranks between."""
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Product._backward_cls):
            return True
        if node not in seen and not linear_node(node):
            seen.add(node)
            waiting += [node for node, _ in node.next_functions if node is not None]
    return False
