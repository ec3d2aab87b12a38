"""The two halves of a backward make the whole, for layers used in every way there is.

Each case is a module and its input; both halves of a backward, apart and for two micro-batches on
the way at once, must leave the gradients of plain backwards, in float64 to 1e-12, and None where
those leave None. A weight used twice whose first use is counted again shows, as does a use that
nobody asks for. What the first half may not do is counted: products of matrices, and gradients.
"""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from s2s_lib.strategies.backward import tensors_in
from s2s_lib.strategies.pipeline.halves import Halves

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Flow(nn.Module):
    """Layers, and `flow(module, x)` to say how x goes through them."""

    def __init__(self, flow, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.flow = flow

    def forward(self, x):
        return self.flow(self, x)


def square(**more):
    return nn.Linear(4, 4, **more)


def frozen(layer):
    return layer.requires_grad_(False)


def tied():
    module = Flow(
        lambda m, x: m.head(torch.tanh(m.layer(m.embed(x)))),
        embed=nn.Embedding(7, 4),
        layer=square(),
        head=nn.Linear(4, 7, bias=False),
    )
    module.head.weight = module.embed.weight
    return module


class WithOwn(nn.Module):
    """Has a parameter of its own and children with theirs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.inner = nn.Sequential(square(), nn.Tanh(), square())

    def forward(self, x):
        return self.inner(x * self.scale) + self.scale


class KeepsSideOutput(nn.Linear):
    """As the router of a mixture of experts, with a loss of its own."""

    def forward(self, x):
        self.side = self.weight.square().sum()
        return super().forward(x)


class Result:
    """A value that torch does not look into."""

    def __init__(self, tensor):
        self.tensor = tensor


class GivesObject(nn.Linear):
    def forward(self, x):
        return Result(super().forward(x))


class WithBuffer(nn.Linear):
    """Runs a method of its parent beside its own forward."""

    def forward(self, x):
        return super().forward(x) + super().forward(2 * x).sin()


def penalised():
    """A hook that was there before keeps something for the loss."""
    module = Flow(lambda m, x: m.layer(x) + m.layer.kept, layer=square())

    def keep(layer, inputs, output):
        layer.kept = layer.weight.square().sum()

    module.layer.register_forward_hook(keep)
    return module


def hooked():
    module = nn.Sequential(square(), nn.Tanh(), square())
    module[2].register_full_backward_hook(lambda m, into, out: (3 * into[0],))
    module[0].weight.register_hook(lambda gradient: gradient + 1)
    return module


CASES = {
    "a chain": lambda: nn.Sequential(square(), nn.Tanh(), square(), nn.GELU(), square()),
    "a layer alone": square,
    "twice in series": lambda: Flow(lambda m, x: m.a(torch.tanh(m.a(x))), a=square()),
    "four times in series": lambda: Flow(
        lambda m, x: m.a(m.a(m.a(m.a(x).sin())).cos()), a=square()
    ),
    "twice side by side": lambda: Flow(lambda m, x: m.a(x) * m.a(x.sin()), a=square()),
    "twice, once unused": lambda: Flow(lambda m, x: (m.a(x), m.a(x.sin()))[1], a=square()),
    "a parent reads the weight of its child": lambda: Flow(
        lambda m, x: F.linear(m.a(x).tanh(), m.a.weight) + m.a.bias, a=square()
    ),
    "a parent alone reads it": lambda: Flow(lambda m, x: x @ m.a.weight, a=square()),
    "parameters beside children": WithOwn,
    "LSTM": lambda: Flow(lambda m, x: m.a(m.b(x)[0]), a=square(), b=nn.LSTM(4, 4, 2)),
    "GRU": lambda: Flow(lambda m, x: m.b(x)[1], b=nn.GRU(4, 4)),
    "LSTM cell in a loop": lambda: Flow(
        lambda m, x: m.c(x, m.c(x, m.c(x)))[0], c=nn.LSTMCell(4, 4)
    ),
    "attention": lambda: Flow(
        lambda m, x: m.a(x, x, m.v(x))[0], a=nn.MultiheadAttention(4, 2), v=square()
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "batch norm": lambda: nn.Sequential(
        square(), nn.BatchNorm1d(4), nn.ReLU(inplace=True), square()
    ),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(4), square(), nn.RMSNorm(4), square()),
    "activations in place": lambda: nn.Sequential(
        square(), nn.ReLU(inplace=True), square(), nn.ELU(inplace=True), square()
    ),
    "in place on a view": lambda: Flow(lambda m, x: m.b(relu_half(m.a(x))), a=square(), b=square()),
    "in place into the output": lambda: Flow(
        lambda m, x: m.a(x).add_(m.b(x)).mul_(x), a=square(), b=square()
    ),
    "frozen layer between": lambda: nn.Sequential(square(), frozen(square()), nn.Tanh(), square()),
    "frozen first layers": lambda: nn.Sequential(frozen(square()), nn.Tanh(), square()),
    "a frozen bias": lambda: Flow(lambda m, x: m.a(x), a=freeze_bias(square())),
    "no bias": lambda: nn.Sequential(square(bias=False), square(bias=False)),
    "an unused layer": lambda: Flow(lambda m, x: m.a(x), a=square(), b=square()),
    "a detached layer": lambda: Flow(lambda m, x: m.a(x) + m.b(x).detach(), a=square(), b=square()),
    "several outputs": lambda: Flow(
        lambda m, x: {"a": m.a(x), "b": [m.b(x), None]}, a=square(), b=square()
    ),
    "checkpoint": lambda: Flow(
        lambda m, x: m.c(checkpoint(lambda h: m.b(m.a(h).tanh()), x, use_reentrant=False)),
        a=square(), b=square(), c=square(),
    ),
    "checkpoint of a layer used outside too": lambda: Flow(
        lambda m, x: m.a(checkpoint(m.a, x, use_reentrant=False).tanh()), a=square()
    ),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(square()), square()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(square()), square()),
    "modules in modules": lambda: nn.Sequential(
        nn.Sequential(square(), nn.Sequential(nn.Tanh(), square())), WithOwn(), nn.Identity()
    ),
    "bilinear": lambda: Flow(lambda m, x: m.a(x, m.b(x)), a=nn.Bilinear(4, 4, 3), b=square()),
    "one object twice in a list": lambda: nn.Sequential(*[square()] * 3),
    "two layers with one weight": lambda: share(nn.Sequential(square(), nn.Tanh(), square())),
    "a subclass": lambda: nn.Sequential(WithBuffer(4, 4), square()),
    "a layer that keeps a side output": lambda: Flow(
        lambda m, x: m.a(x) + m.a.side, a=KeepsSideOutput(4, 4)
    ),
    "a layer that gives an object": lambda: Flow(lambda m, x: m.a(x).tensor, a=GivesObject(4, 4)),
    "a hook that keeps something for the loss": penalised,
    "hooks": hooked,
    "PReLU and scale": lambda: nn.Sequential(square(), nn.PReLU(), square()),
}  # fmt: skip
INPUTS = {
    "tied embedding": (tied, lambda: torch.tensor([[1, 2, 2], [0, 6, 1]])),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), square()),
        lambda: torch.tensor([1, 1]),
    ),
    "sparse embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, sparse=True), square()),
        lambda: torch.tensor([1, 1, 5]),
    ),
    "embedding bag": (
        lambda: nn.Sequential(nn.EmbeddingBag(7, 4, padding_idx=0), square()),
        lambda: torch.tensor([[1, 0], [3, 1]]),
    ),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)
        ),
        lambda: torch.randn(2, 2, 6, 6, dtype=torch.float64),
    ),
    "convolutions in groups": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 4, 3, groups=2, padding=1), nn.GroupNorm(2, 4), nn.ConvTranspose1d(4, 2, 3)
        ),
        lambda: torch.randn(2, 4, 6, dtype=torch.float64),
    ),
    "complex": (
        lambda: nn.Sequential(*[square(dtype=torch.complex128) for _ in range(2)]),
        lambda: torch.randn(3, 4, dtype=torch.complex128),
    ),
}  # fmt: skip
INPUTS |= {
    name: (make, lambda: torch.randn(3, 4, dtype=torch.float64)) for name, make in CASES.items()
}


def relu_half(h):
    h[:, 1:3].relu_()
    return h


def freeze_bias(layer):
    layer.bias.requires_grad_(False)
    return layer


def share(module):
    module[2].weight = module[0].weight
    return module


def loss_of(output):
    """A loss whose gradient differs in every element of every output."""
    terms = [t for t in tensors_in(output) if t.requires_grad]
    return sum(((t * torch.arange(1, t.numel() + 1).view(t.shape)).abs() ** 2).sum() for t in terms)


def make_two(name):
    make, example = INPUTS[name]
    torch.manual_seed(0)
    module, inputs = make(), [example(), example()]
    torch.manual_seed(0)
    # Not a copy, which would be without hooks of parameters.
    plain = make()
    if name != "complex":
        module, plain = module.double(), plain.double()
    if inputs[0].is_floating_point() or inputs[0].is_complex():
        inputs = [x.requires_grad_() for x in inputs]
    return module, plain, inputs


def in_halves(module, inputs):
    """The inputs' gradients. Both forwards come first, and the second halves last."""
    halves, flying, found = Halves(module), [], []
    for x in inputs:
        halves.record()
        loss = loss_of(module(x))
        flying.append((halves.done(), loss, [x] if x.requires_grad else []))
    for half, loss, x in flying:
        found += half.inputs([loss], [None], x)
    for half, *_ in flying:
        half.weight_gradients()
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_two_halves_make_a_whole_backward(name):
    module, plain, inputs = make_two(name)
    for step in range(2):
        found = in_halves(module, inputs)
        for x in inputs:
            x.grad = None
            loss_of(plain(x)).backward()
        want = [x.grad for x in inputs if x.requires_grad]
        torch.testing.assert_close(found, want, **CLOSE)
        for (which, own), other in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), which
            if own.grad is not None:
                assert own.grad.is_sparse == other.grad.is_sparse
                own, other = own.grad.to_dense(), other.grad.to_dense()
                torch.testing.assert_close(own, other, **CLOSE, msg=f"{which}, step {step}")
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        self.count += name in ("aten::mm", "aten::addmm", "aten::bmm")
        assert name != "aten::convolution_backward" or not any(args[-1][1:]) or not self.first
        return function(*args, **(kwargs or {}))

    first = False


def halves_of_a_chain(layers=4, **more):
    module = nn.Sequential(*[square(**more) for _ in range(layers)])
    halves = Halves(module)
    halves.record()
    x = torch.randn(3, 4, requires_grad=True)
    loss = module(x).square().sum()
    return module, x, loss, halves.done()


def test_the_first_half_computes_no_weights_gradient_and_the_second_no_inputs():
    module, x, loss, half = halves_of_a_chain(layers=4)
    with Products() as first:
        half.inputs([loss], [None], [x])
    assert first.count == 4
    assert all(p.grad is None for p in module.parameters()) and x.grad is None
    with Products() as second:
        half.weight_gradients()
    assert second.count == 4
    assert all(p.grad is not None for p in module.parameters()) and x.grad is None


def test_a_convolutions_first_half_computes_no_weights_gradient():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2))
    halves = Halves(module)
    halves.record()
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    loss = module(x).square().sum()
    half = halves.done()
    with Products() as products:
        products.first = True
        half.inputs([loss], [None], [x])
    half.weight_gradients()
    assert module[0].weight.grad is not None


def test_without_gradients_of_inputs_the_first_half_stops_at_the_first_layer():
    module = nn.Sequential(*[square() for _ in range(4)])
    halves = Halves(module)
    halves.record()
    loss = module(torch.randn(3, 4)).square().sum()
    half = halves.done()
    with Products() as first:
        half.inputs([loss], [None], [])
    assert first.count == 3
    with Products() as second:
        half.weight_gradients()
    assert second.count == 4


def test_hooks_of_parameters_are_called_once_a_backward_with_the_whole_gradient():
    module = Flow(lambda m, x: m.a(torch.tanh(m.a(x))) + m.b(x), a=square(), b=square())
    arrived, accumulated = [], []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda g, name=name: arrived.append((name, g.clone())))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: accumulated.append((name, p.grad.clone()))
        )
    halves = Halves(module)
    halves.record()
    loss = module(torch.randn(3, 4)).square().sum()
    half = halves.done()
    half.inputs([loss], [None], [])
    assert not arrived and not accumulated
    half.weight_gradients()
    names = [name for name, _ in module.named_parameters()]
    assert sorted(name for name, _ in arrived) == sorted(names)
    assert sorted(name for name, _ in accumulated) == sorted(names)
    for told in (dict(arrived), dict(accumulated)):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(told[name], parameter.grad)


def test_a_hook_that_changes_the_gradient_of_what_a_layer_gave_acts_once():
    module = nn.Sequential(square(), nn.Tanh(), square())
    module[0].register_forward_hook(lambda m, i, out: out.register_hook(lambda g: 2 * g) and None)
    plain = copy.deepcopy(module)
    x = torch.randn(3, 4)
    in_halves(module, [x])
    loss_of(plain(x)).backward()
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_gradient_belongs_to_its_weight_alone():
    """Some are one tensor with that of an input; to add to one must not change another."""
    a, b = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    module = Flow(lambda m, x: m.a + x + m.b, a=a, b=b)
    halves = Halves(module)
    x = torch.ones(3, 4, requires_grad=True)
    halves.record()
    out = module(x)
    half = halves.done()
    gradient = torch.ones(3, 4)
    (found,) = half.inputs([out], [gradient], [x])
    half.weight_gradients()
    module.a.grad.add_(1)
    assert module.b.grad.eq(1).all() and found.eq(1).all() and gradient.eq(1).all()


def test_nothing_is_kept_after_the_second_half():
    module = nn.Sequential(square(), nn.Tanh(), WithOwn(), square())
    halves = Halves(module)
    halves.record()
    x = torch.randn(3, 4, requires_grad=True)
    kept = weakref.WeakSet()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: hold(t, kept), lambda box: box.tensor):
        loss = module(x).square().sum()
    half = halves.done()
    half.inputs([loss], [None], [x])
    del loss
    assert kept
    half.weight_gradients()
    assert not kept and not half.found and not half.sums and not half.late
    assert halves.calls is None and not halves.inside


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


def hold(tensor, kept):
    # Detached: with its place in the graph it would be in a cycle.
    box = Box(tensor.detach())
    kept.add(box)
    return box


def test_weights_are_the_same_objects_in_the_same_places_after_forwards_that_end_or_raise():
    def forward(module, x):
        h = module.inner(x)
        if module.broken:
            raise RuntimeError("broken")
        return module.layer(h)

    module = Flow(forward, inner=nn.Sequential(square(), square()), layer=square())
    halves = Halves(module)
    before = {name: id(p) for name, p in module.named_parameters()}
    versions = {name: p._version for name, p in module.named_parameters()}
    for module.broken, shape in [(False, (3, 4)), (True, (3, 4)), (False, (3, 5)), (False, (3, 4))]:
        halves.record()
        try:
            module(torch.randn(shape))
        except RuntimeError:
            assert module.broken or shape == (3, 5)
        halves.done()
        assert {name: id(p) for name, p in module.named_parameters()} == before
        assert list(before) == [name for name, _ in module.named_parameters()]
        assert not halves.inside
    assert {name: p._version for name, p in module.named_parameters()} == versions


def test_weights_that_change_place_or_flag_between_backwards_count_as_they_are():
    module = nn.Sequential(square(), square())
    halves = Halves(module)

    def backward():
        module.zero_grad()
        halves.record()
        loss = module(torch.ones(2, 4)).sum()
        half = halves.done()
        half.inputs([loss], [None], [])
        half.weight_gradients()
        return [p.grad is not None for p in module.parameters()]

    assert backward() == [True, True, True, True]
    module[0].weight.requires_grad_(False)
    assert backward() == [False, True, True, True]
    module[0].weight = nn.Parameter(torch.ones(4, 4))
    assert backward() == [True, True, True, True]


def test_forwards_that_are_not_recorded_are_the_modules_own():
    module = nn.Sequential(square(), square())
    halves = Halves(module)
    loss = module(torch.ones(2, 4)).sum()
    loss.backward()
    assert all(p.grad is not None for p in module.parameters())
    with torch.no_grad():
        halves.record()
        assert not module(torch.ones(2, 4)).requires_grad
        half = halves.done()
    half.weight_gradients()


def test_a_watched_module_can_be_dropped():
    module, *_, half = halves_of_a_chain()
    gone = weakref.ref(module)
    del module, half, _
    gc.collect()
    assert gone() is None
