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
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.collectives.autograd import given_by
from s2s_lib.collectives.functions import all_reduce
from s2s_lib.strategies.backward import current_backward, tensors_in
from s2s_lib.strategies.grads import is_cut
from s2s_lib.strategies.tensor.layers import Parallel
from s2s_lib.strategies.tensor.region import Product


class Place:
    """Follows the forward of one module; `draws` (or None) is told what begins and ends."""

    def __init__(self, group, sequence, draws):
        self.group, self.sequence, self.draws = group, sequence, draws
        self.owed = WeakIdKeyDictionary()
        self.forget()

    def forget(self):
        # The module whose column layers have been called, and in which backward it was:
        # checkpoints call them again there, and may stop before the row layer.
        self.at = None
        # Whether what its column layers give has a graph.
        self.recorded = True

    def begin(self, module, *_):
        """A forward of the whole module begins."""
        self.forget()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in self.owed and not is_cut(parameter):
                raise RuntimeError(
                    f"{name} was frozen or not there when tensor_parallel was called, and is to be "
                    "trained now: its gradient might be that of this rank's part alone. Unfreeze "
                    "and add first, then cut; freezing later is fine"
                )

    def enter(self, holder, layer, _, output):
        at = holder, current_backward()
        if self.at != at:
            self.at, self.recorded = at, output.requires_grad
            if self.draws:
                self.draws.enter(layer)

    def leave(self, *_):
        if self.at is not None:
            self.at = None
            if self.draws:
                self.draws.leave()

    def watch(self, module: nn.Module, columns: dict, rows: list):
        """Follow a module: `columns`, by the name of the module that calls them, begin the inside;
        `rows`, and the end of that module, end it."""
        module.register_forward_pre_hook(self.begin)
        for layer in rows:
            layer.register_forward_pre_hook(self.leave)
        for name, layers in columns.items():
            for layer in layers:
                layer.register_forward_hook(functools.partial(self.enter, name))
            # Also where a forward raises, as a checkpoint's does once it has what it needs.
            module.get_submodule(name).register_forward_hook(self.leave, always_call=True)
        if self.draws:
            module.register_forward_pre_hook(self.draws.begin)
            module.register_forward_hook(self.draws.end, always_call=True)

    def watch_uncut(self, module, columns):
        """Sum gradients of parameters that are not cut where that is owed, and check dropouts."""
        for name, layer in module.named_modules():
            own = layer.parameters(recurse=False)
            mine = [p for p in own if p.requires_grad and not is_cut(p)]
            for parameter in mine:
                if parameter not in self.owed:
                    beside = any(holder and name.startswith(f"{holder}.") for holder in columns)
                    owed = Owed(name, self.group, True if self.sequence else None, beside)
                    self.owed[parameter] = owed
                    if not isinstance(layer, Parallel):
                        parameter.register_hook(owed)
            drops = isinstance(layer, nn.modules.dropout._DropoutNd) and self.draws
            if (mine or drops) and not (self.sequence or isinstance(layer, Parallel)):
                hook = Watch(self, name, [self.owed[p] for p in mine], drops)
                layer.register_forward_pre_hook(hook, with_kwargs=True)


class Owed:
    """A hook of a parameter: sums its gradient over the group, if that is owed. `beside` column
    layers, a parameter of a layer that nobody called may be anything."""

    def __init__(self, name, group, owed, beside):
        self.name, self.group, self.owed, self.beside = name, group, owed, beside

    def note(self, owed):
        if self.owed not in (None, owed):
            raise RuntimeError(
                f"{self.name} is used both where tensors are cut and where they are whole, and its "
                "gradient would be part of one sum and all of another: use two modules"
            )
        self.owed = owed

    def __call__(self, grad):
        if self.owed is None and self.beside:
            raise RuntimeError(
                f"a parameter of {self.name} has a gradient, and {self.name} was not called: it "
                "cannot be seen whether it was used on whole or on cut tensors. Call the layer, do "
                "not read its parameters"
            )
        return all_reduce(grad, self.group) if self.owed else grad


class Watch:
    """A hook before the forward of a layer that is not cut: what it gets, whole or cut, and what
    follows from that. Looked at the first time at each place."""

    def __init__(self, place, name, owed, drops):
        self.place, self.name, self.owed, self.drops = place, name, owed, drops
        self.known = {}

    def __call__(self, layer, args, kwargs):
        if not torch.is_grad_enabled():
            return
        inside = self.place.at is not None
        if inside not in self.known:
            recorded = [x for x in tensors_in((args, kwargs)) if x.grad_fn is not None]
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
    """Whether a column layer or scatter_to_group is behind a tensor in its graph, with no sum over
    ranks between."""
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        gives = given_by(node)
        if gives == "cut" or isinstance(node, Product._backward_cls):
            return True
        if gives != "whole" and node not in seen:
            seen.add(node)
            waiting += [node for node, _ in node.next_functions if node is not None]
    return False
