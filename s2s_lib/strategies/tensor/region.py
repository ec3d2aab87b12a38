"""Where a tensor enters the column-parallel layers that share it.

q, k and v read the same input, gate and up another. Each layer gives it a partial gradient, and
the sum over ranks is owed once for all of them, not once a layer. So layers of one module that are
called with the very same tensor share one `Enter` in autograd's graph:

    x ---- Enter ---- x' ----> Product of q, of k, of v

Backward. Each Product leaves the gradient of its output with the region. When all have, Enter's
turn comes: it computes the gradient of x', which others wait for, starts its sum over the ranks on
a second thread, and computes the gradients of the weights meanwhile. The weights are inputs of
Enter, so autograd takes their gradients from there as from anywhere: hooks, accumulation and
torch.autograd.grad work as ever.

With sequence parallel x is this rank's part of the sequence, entering gathers it, and the sum over
ranks is a reduce_scatter. The gathered tensor is kept for the gradients of the weights, or with
`regather` only this rank's part, and gathered again: (W-1)/W of it sent once more (arXiv:2205.05198
section 4.2.2).

An x without a gradient is owed no sum, and each layer enters by itself. With sequence parallel they
still share what is gathered, so losses on each of them must be added before they go backward
(torch refuses the second backward).
"""

import torch
import torch.nn.functional as F

from s2s_lib.collectives.autograd import first_order
from s2s_lib.collectives.background import background
from s2s_lib.collectives.functions import all_reduce
from s2s_lib.strategies.backward import current_backward
from s2s_lib.strategies.tensor.pairs import gathered, scattered_sum

# Threads 0 and 1 carry gradients and weights of data parallelism, which may be long.
LANE = 2
SEQUENCE_DIM = -2


class Region:
    """What the layers that share one input know of each other in backward: the gradients of their
    outputs, by layer, until Enter has used them."""

    def __init__(self, group, sequence, regather):
        self.group, self.sequence, self.regather = group, sequence, regather
        self.grads, self.backward = {}, None

    def enter(self, x):
        return gathered(x, self.group, SEQUENCE_DIM) if self.sequence else x.view_as(x)

    def leave(self, number, grad):
        """Keep the gradient of an output for Enter, in the same backward."""
        backward = current_backward()
        if self.backward != backward:
            # One that did not come to Enter has left something.
            self.grads, self.backward = {}, backward
        self.grads[number] = grad

    def take(self):
        grads, self.grads = self.grads, {}
        return grads if self.backward == current_backward() else {}

    def total(self, grad):
        """The sum over ranks of a gradient of what entered, as the gradient of what was given."""
        if self.sequence:
            return scattered_sum(grad, self.group, SEQUENCE_DIM)
        return all_reduce(grad, self.group)


class Enter(torch.autograd.Function):
    """forward: identity (all_gather)    backward: all_reduce (reduce_scatter), and weights"""

    @staticmethod
    def forward(ctx, x, region, *weights):
        whole = region.enter(x)
        ctx.region, ctx.shape = region, whole.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if region.regather or not region.sequence else whole, *weights)
        return whole

    @staticmethod
    @first_order
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, _):
        x, *weights = ctx.saved_tensors
        region = ctx.region
        grads = region.take()
        wanted, _, *trained = ctx.needs_input_grad
        task = None
        if wanted and grads:
            of_x = sum_of_products([(grad, weights[i]) for i, grad in grads.items()])
            task = background(region.total, of_x.view(ctx.shape), lane=LANE)
        if any(trained):
            x = rows(region.enter(x) if region.regather else x).to(weights[0].dtype)
        of_weights = [None] * len(weights)
        for i, grad in grads.items():
            if trained[i]:
                of_weights[i] = grad.T @ x
        return task and task.wait(), None, *of_weights


class Product(torch.autograd.Function):
    """forward: x @ weight.T + bias    backward: of the bias; Enter has the rest"""

    @staticmethod
    def forward(ctx, x, weight, bias, region, number):
        ctx.region, ctx.number, ctx.dtype = region, number, weight.dtype
        # No view for autograd, so that it may be changed in place.
        return F.linear(x, weight, bias).data

    @staticmethod
    @first_order
    def backward(ctx, grad):
        # Under autocast the product was narrower than its factors.
        grad = rows(grad).to(ctx.dtype)
        ctx.region.leave(ctx.number, grad)
        return None, None, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


class Entrance:
    """The way into `layers` of one module, column-parallel over `group`.

    A tensor is entered when the first of them is called with it, and forgotten when the last was.
    """

    def __init__(self, layers, group, sequence=False, regather=False):
        self.layers = list(layers)
        self.settings = group, sequence, regather
        self.forget()

    def forget(self, *_):
        self.source = self.version = self.entered = self.region = None
        self.waiting = set()

    def product(self, layer, x):
        """x @ layer.weight.T + layer.bias, on this rank's part of the outputs."""
        group, sequence, regather = self.settings
        if not (sequence or x.requires_grad):
            # No sum is owed, and losses on each layer alone may be backward in turn.
            region = Region(group, sequence, regather)
            entered = Enter.apply(x, region, layer.weight)
            return Product.apply(entered, layer.weight.detach(), layer.bias, region, 0)
        number = self.layers.index(layer)
        if not (self.source is x and self.version == version(x) and number in self.waiting):
            self.enter(x)
        entered, region = self.entered, self.region
        self.waiting.discard(number)
        if not self.waiting:
            self.forget()
        return Product.apply(entered, layer.weight.detach(), layer.bias, region, number)

    def enter(self, x):
        self.source, self.version = x, version(x)
        self.region = Region(*self.settings)
        self.entered = Enter.apply(x, self.region, *(layer.weight for layer in self.layers))
        self.waiting = set(range(len(self.layers)))


def version(x):
    """Differs after a change in place, and between recording gradients and not: then a tensor is
    to be entered again."""
    return None if x.is_inference() else x._version, torch.is_grad_enabled()


def sum_of_products(pairs):
    """The sum of a @ b over the pairs (a, b)."""
    (a, b), *others = pairs
    total = a @ b
    for a, b in others:
        total.addmm_(a, b)
    return total


def rows(x):
    return x.reshape(-1, x.shape[-1])
