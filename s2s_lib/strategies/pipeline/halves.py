"""A backward in two halves: the gradient of a stage's input now, those of its weights later.

Only the first is on the way of others: the stage before waits for it. So a schedule may put the
second where a rank would otherwise be idle (Zero Bubble, arXiv:2401.10241).

How. The gradient of a weight needs two things: what went into the layer, which autograd has saved,
and the gradient of what came out of it. While the stage runs forward, hooks note the place in the
graph where the output of each layer that owns weights comes out. The first half asks autograd for
the gradients of the stage's input and of all those places, which computes no weight's gradient.
The second half then asks, layer by layer, from such a place to the layer's weights alone.

Where a layer is used twice, the second output depends on the weight along two ways, and asking for
the weight would count the first use again. So for the length of one call a layer holds an alias of
its weight, the same memory under a name of this call, and the second half asks for the alias.

This is done for the layers of torch.nn, and for classes of yours that keep their `forward`: of these
it is known that a weight reaches the loss through what the layer returns alone. Any other weight,
of a module with a forward of its own or read by another module, gets its gradient in the first
half: right, but not put off.

Memory: activations stay until the second half, and the gradients of the layers' outputs come to
them. Cost: about 1.2 times a whole backward.
"""

from collections import Counter

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree


class Halves:
    """Watches the forwards of `module`, and takes their backwards apart.

    `record()` before a forward; `done()` after it gives the `Half` for its backward.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.calls = None
        self.inside = []
        for layer in module.modules():
            if _is_plain(layer):
                layer.register_forward_pre_hook(self.put_aliases)
                layer.register_forward_hook(self.note_output, always_call=True)

    def record(self):
        self.calls = []

    def done(self) -> "Half":
        calls, self.calls = self.calls, None
        return Half([p for p in self.module.parameters() if p.requires_grad], calls)

    def put_aliases(self, layer, _):
        if self.calls is None:
            return
        own = {name: p for name, p in layer._parameters.items() if _trained(p)}
        for name, parameter in own.items():
            layer._parameters[name] = nn.Parameter(parameter.detach())
        aliases = [(layer._parameters[name], parameter) for name, parameter in own.items()]
        self.inside.append((layer, own, aliases))

    def note_output(self, layer, _, output):
        # Calls that are not recorded, and recomputations inside a backward, pass by.
        if not self.inside or self.inside[-1][0] is not layer:
            return
        _, own, aliases = self.inside.pop()
        layer._parameters.update(own)
        tensors = [t for t in pytree.tree_leaves(output) if _trained(t)]
        if aliases:
            self.calls.append(([get_gradient_edge(t) for t in tensors], aliases))


class Half:
    """What the two halves of one backward need: `weights` of the stage, and for each call of a
    layer the places where its output came out and (alias, parameter) for its own weights."""

    def __init__(self, weights, calls):
        self.weights = weights
        self.calls = calls
        # What the first half finds: gradients of places with the aliases behind them, and of
        # weights without an alias.
        self.found = []
        self.direct = [None] * len(weights)

    def inputs(self, outputs, gradients, inputs) -> list[torch.Tensor | None]:
        """The first half: the gradients of `inputs` from those of `outputs`."""
        places = [edge for edges, _ in self.calls for edge in edges]
        found = torch.autograd.grad(
            outputs,
            [*inputs, *places, *self.weights],
            gradients,
            retain_graph=True,
            allow_unused=True,
        )
        of_inputs, rest = found[: len(inputs)], found[len(inputs) :]
        of_places, self.direct = iter(rest[: len(places)]), rest[len(places) :]
        for edges, aliases in self.calls:
            pairs = [(edge, g) for edge, g in zip(edges, of_places, strict=False) if g is not None]
            if pairs:
                self.found.append((pairs, aliases))
        self.calls = []
        return list(of_inputs)

    def weight_gradients(self):
        """The second half: adds to the `.grad` of every weight, once, as a backward would."""
        sums = {p: g for p, g in zip(self.weights, self.direct, strict=True) if g is not None}
        left = Counter(parameter for _, aliases in self.found for _, parameter in aliases)
        for parameter in sums.keys() - left.keys():
            add_to_grad(parameter, sums.pop(parameter))
        while self.found:
            pairs, aliases = self.found.pop()
            edges, grads = zip(*pairs, strict=True)
            own = torch.autograd.grad(
                edges, [a for a, _ in aliases], grads, retain_graph=True, allow_unused=True
            )
            for (_, parameter), grad in zip(aliases, own, strict=True):
                left[parameter] -= 1
                if parameter in sums:
                    grad = sums.pop(parameter) if grad is None else sums.pop(parameter) + grad
                if grad is not None and left[parameter]:
                    sums[parameter] = grad
                elif grad is not None:
                    # At once, while the gradient is still in the processor's cache.
                    add_to_grad(parameter, grad)


def add_to_grad(parameter, grad):
    """As the end of a backward does."""
    hooks = parameter._post_accumulate_grad_hooks or parameter._backward_hooks
    if parameter.grad is None or hooks or parameter.grad.is_sparse or grad.is_sparse:
        # Through the parameter's own node in the graph: calls hooks, copies what others hold too.
        torch.autograd.backward([parameter], [grad])
    else:
        # The same, without a run of autograd's engine for each weight.
        parameter.grad.add_(grad)


def _trained(thing):
    return isinstance(thing, torch.Tensor) and thing.requires_grad


def _is_plain(layer):
    """Whether a layer is torch.nn's own, with parameters of its own and none inside."""
    inside = [p for child in layer.children() for p in child.parameters()]
    forward = type(layer).forward.__module__
    return bool(layer._parameters) and not inside and forward.startswith("torch.nn.")
