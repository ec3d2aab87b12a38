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
its weight, the same memory under a name of this call, and the second half asks for the alias. For
an nn.Linear there is no need to ask: the gradient of its weight is one product.

This is done for the layers of torch.nn, and classes of yours that keep their `forward`: of these
it is known that a weight reaches the loss through what the layer returns alone. Any other weight,
of a module with a forward of its own or read by another module, and those of norms, which cost
little, get their gradient in the first half: right, but not put off.

Memory: until the second half stay what went into each nn.Linear and the gradients of what came out;
and all activations, if the stage has other layers whose weights are put off (an embedding, a
convolution). Time: about that of a whole backward, and some for the hooks in the forward;
`make bench` measures both.
"""

import weakref
from collections import Counter

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


class Halves:
    """Watches the forwards of `module`, and takes their backwards apart.

    `record()` before a forward; `done()` after it gives the `Half` for its backward.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.calls = None
        self.inside = []
        before, after = Watch(self.put_aliases), Watch(self.note_output)
        hooks = []
        for layer in module.modules():
            if not (_is_worth_it(layer) or _has_hooks(layer)):
                continue
            hooks.append(layer.register_forward_pre_hook(before))
            # First of all, so that no other hook meets an alias.
            hooks.append(layer.register_forward_hook(after, prepend=True, always_call=True))
        weakref.finalize(self, _remove, hooks)

    def record(self):
        self.calls = []

    def done(self) -> "Half":
        calls, self.calls = self.calls, None
        return Half([p for p in self.module.parameters() if p.requires_grad], calls)

    def put_aliases(self, layer, inputs):
        if self.calls is None:
            return
        own = {name: p for name, p in layer._parameters.items() if _trained(p)}
        kind = Aliased if _is_worth_it(layer) else Asked
        call = (Product if _is_product(layer, inputs) else kind)(own, inputs)
        layer._parameters.update(call.stand_ins)
        self.inside.append((layer, own, call))

    def note_output(self, layer, _, output):
        # Calls that are not recorded, and recomputations inside a backward, pass by.
        if not self.inside or self.inside[-1][0] is not layer:
            return None
        _, own, call = self.inside.pop()
        layer._parameters.update(own)
        if not own or output is None:
            # A layer that raised has no output.
            return None
        self.calls.append(call)
        return call.note(output)


class Aliased:
    """One call of a layer. Its weights' gradients are asked of autograd, for the aliases that
    stood in for them, from `start`, where the output came out; read at `place`, behind a node of
    our own, after hooks that others put on the output. Without one such place both are None."""

    def __init__(self, own, _):
        self.weights = list(own.values())
        self.stand_ins = {name: p.detach().requires_grad_() for name, p in own.items()}
        self.start = self.place = None

    def note(self, output):
        """The output with its place noted."""
        if not _has_a_place(output):
            return output
        self.start, output = get_gradient_edge(output), Mark.apply(output)
        self.place = get_gradient_edge(output)
        return output

    def gradients(self, grad):
        """The gradient of each of `weights`, in a tuple, from that of the output."""
        asked = list(self.stand_ins.values())
        found = torch.autograd.grad(
            [self.start], asked, [grad], retain_graph=True, allow_unused=True
        )
        return [(g,) for g in found]


class Asked(Aliased):
    """One call of a layer whose weights get their gradients in the first half, and have hooks: for
    the aliases, since the hooks run when the gradients are added to the weights', in the second."""

    def note(self, output):
        return output


class Product:
    """One call of an nn.Linear, whose gradients are one product and one sum, and need no graph."""

    start = None

    def __init__(self, own, inputs):
        self.names, self.weights = list(own), list(own.values())
        self.stand_ins = {name: p.detach() for name, p in own.items()}
        self.x = inputs[0].detach()
        self.version = self.x._version

    def note(self, output):
        output = Mark.apply(output)
        self.place = get_gradient_edge(output)
        return output

    def gradients(self, grad):
        """The gradient of each of `weights`: two factors for the matrix, one for the bias."""
        if self.x._version != self.version:
            raise RuntimeError(
                f"what went into a Linear, {list(self.x.shape)}, has been changed in place since, "
                "and the gradient of its weight needs it: use an operation that is not in place"
            )
        rows = grad.reshape(-1, grad.shape[-1])
        of = {
            "weight": lambda: (rows.T, self.x.reshape(-1, self.x.shape[-1])),
            "bias": lambda: (rows.sum(0),),
        }
        return [of[name]() for name in self.names]


class Watch:
    """A hook that does not keep its Halves alive, and is nothing in a copy of the module."""

    def __init__(self, method=None):
        self.method = method and weakref.WeakMethod(method)

    def __call__(self, *args):
        bound = self.method and self.method()
        return bound(*args) if bound else None

    def __reduce__(self):
        return Watch, ()


class Mark(torch.autograd.Function):
    """A node of our own after a layer's output, whose memory it shares.

    forward: identity    backward: identity
    """

    @staticmethod
    def forward(ctx, tensor):
        # No view for autograd: it may be changed in place like what the layer gave.
        return tensor.data

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Half:
    """What the two halves of one backward need: `weights` of the stage, and its layers' calls."""

    def __init__(self, weights, calls):
        self.late = [call for call in calls if call.place is not None]
        # What the first half asks for itself, and the parameter that each belongs to.
        self.direct = [(weight, weight) for weight in weights]
        for call in calls:
            if call.place is None:
                self.direct += zip(call.stand_ins.values(), call.weights, strict=True)
        # What it finds: calls with the gradients of their outputs, and those of parameters.
        self.found, self.sums = [], {}

    def inputs(self, outputs, gradients, inputs) -> list[torch.Tensor | None]:
        """The first half: the gradients of `inputs` from those of `outputs`."""
        places = [call.place for call in self.late]
        found = torch.autograd.grad(
            outputs,
            [*inputs, *places, *(asked for asked, _ in self.direct)],
            gradients,
            retain_graph=any(call.start is not None for call in self.late),
            allow_unused=True,
        )
        of_inputs, rest = found[: len(inputs)], found[len(inputs) :]
        of_places, of_direct = rest[: len(places)], rest[len(places) :]
        pairs = zip(self.late, of_places, strict=True)
        self.found = [(call, grad) for call, grad in pairs if grad is not None]
        for (_, parameter), grad in zip(self.direct, of_direct, strict=True):
            self.add(parameter, grad)
        self.late = self.direct = ()
        return list(of_inputs)

    def weight_gradients(self):
        """The second half: adds to the `.grad` of every weight, once, as a backward would."""
        left = Counter(parameter for call, _ in self.found for parameter in call.weights)
        # In the order of the layers, which all ranks have: a hook may communicate.
        ready = {p: self.sums.pop(p) for p in list(self.sums) if p not in left}
        while self.found:
            call, grad = self.found.pop()
            for parameter, own in zip(call.weights, call.gradients(grad), strict=True):
                left[parameter] -= 1
                if len(own) == 2 and _takes(parameter, own[0]) and parameter not in self.sums:
                    # Product and sum in one, without memory for the product.
                    parameter.grad.addmm_(*own)
                    continue
                self.add(parameter, own[0] @ own[1] if len(own) == 2 else own[0])
                if not left[parameter] and parameter in self.sums:
                    total = self.sums.pop(parameter)
                    if _takes(parameter, total):
                        # At once, while the gradient is still in the processor's cache.
                        parameter.grad.add_(total)
                    else:
                        ready[parameter] = total
        if ready:
            # Through the parameters' own nodes in the graph, all in one backward: calls their
            # hooks as any backward does.
            torch.autograd.backward(list(ready), list(ready.values()))

    def add(self, parameter, grad):
        if grad is not None:
            before = self.sums.get(parameter)
            self.sums[parameter] = grad if before is None else before + grad


def _takes(parameter, grad):
    """Whether adding to `.grad` is all that a backward would do."""
    hooks = parameter._post_accumulate_grad_hooks or parameter._backward_hooks
    held = parameter.grad
    return not (hooks or held is None or held.is_sparse or grad.is_sparse)


def _is_product(layer, inputs):
    """Whether this call is a plain product with an input that has a gradient of its own."""
    if type(layer).forward is not nn.Linear.forward or len(inputs) != 1:
        return False
    # A checkpoint compares what is saved for backward with what is saved when it computes again.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    x = inputs[0]
    return (
        _trained(x)
        and x.dim() > 1
        and x.is_floating_point()
        and not torch.is_autocast_enabled("cpu")
        and x.dtype is layer.weight.dtype
    )


def _has_a_place(output):
    """Whether a layer's output is one tensor with a place of its own in the graph.

    Of several one may be computed from another, and would count twice; and where the last operation
    has saved its result, autograd must see it changed in place.
    """
    if not isinstance(output, torch.Tensor) or output.grad_fn is None:
        return False
    return not hasattr(output.grad_fn, "_saved_result")


def _has_hooks(layer):
    return any(p is not None and p._backward_hooks for p in layer._parameters.values())


def _remove(hooks):
    for hook in hooks:
        hook.remove()


def _trained(thing):
    return isinstance(thing, torch.Tensor) and thing.requires_grad


def _is_worth_it(layer):
    """Whether a layer is torch.nn's own, with a matrix of its own and no parameters inside."""
    if not any(p is not None and p.dim() > 1 for p in layer._parameters.values()):
        return False
    inside = [p for child in layer.children() for p in child.parameters()]
    forward = type(layer).forward.__module__
    return not inside and forward.startswith("torch.nn.")
