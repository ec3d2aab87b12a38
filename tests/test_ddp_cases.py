"""Modules that are hard to average: each takes the steps of one process, and sends no byte more.

A case is a module and the loss of one rank. Every rank also runs one plain copy on the losses of
all ranks, and compares each gradient after each of four backward passes: the first, whose buckets
are sent at its end, and later ones, whose buckets are sent on the way. A gradient averaged before
its last contribution, or twice, differs; so does one that is zero where it should be None. Fewer
or more averages than one for each parameter show in the bytes.
"""

import dataclasses

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from s2s_lib import DDP, all_reduce, bill, launch

CLOSE = {"rtol": 0, "atol": 1e-10}


class Layers(nn.Module):
    """Three layers of odd sizes, and a place for `flow(layers, x)` to say how x goes through."""

    def __init__(self, flow):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.flow = flow

    def forward(self, x, **settings):
        return self.flow(self, x, **settings)


def data(rank, step, shape=(2, 3)):
    random = torch.Generator().manual_seed(7 * rank + step)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def simple(model, rank, step):
    return model(data(rank, step)).square().mean()


def with_input_gradient(model, rank, step):
    return model(data(rank, step).requires_grad_()).square().mean()


def once(layers, x):
    return layers.last(layers.middle(layers.first(x).tanh()).tanh())


def twice(layers, x):
    return layers.last(layers.middle(layers.middle(layers.first(x)).tanh()))


def checkpointed(reentrant):
    def flow(layers, x):
        def inside(h):
            return layers.middle(h).tanh()

        h = layers.first(x)
        for _ in range(3):
            h = checkpoint(inside, h, use_reentrant=reentrant)
        return layers.last(h + layers.middle(h))

    return flow


@dataclasses.dataclass
class Output:
    name: str
    y: torch.Tensor


def in_a_dataclass(layers, x):
    """No gradient comes before the first of several backward passes inside the outer one."""
    for layer in (layers.first, layers.middle, layers.middle, layers.last):
        x = checkpoint(layer, x, use_reentrant=True)
    return Output("y", x)


def two_forwards(model, rank, step):
    return (model(data(rank, step)) * model(data(rank, step + 50))).mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed((x.abs() * 3).long() % 7))


def skipping(layers, x, skip=()):
    """Leave out the middle or the last layer, which is then unused."""
    h = layers.first(x).tanh()
    if "middle" not in skip:
        h = layers.middle(h)
    return h.sum(1) if "last" in skip else layers.last(h)


def unused(where):
    def loss(model, rank, step):
        return model(data(rank, step), skip=where(rank, step)).square().mean()

    return loss


class Odd(nn.Module):
    """A number, nothing at all, a transposed matrix, complex numbers, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.complex = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.complex_unused = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)

    def forward(self, x):
        h = x @ self.frozen @ self.transposed * self.number + self.nothing.sum()
        return h.sum(1, keepdim=True) + (x + 0j) @ self.complex.conj() @ torch.tensor([1, 2j])


def odd_loss(model, rank, step):
    return model(data(rank, step)).abs().square().mean()


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return self.norm(self.conv(x.to(memory_format=torch.channels_last))).flatten(1)


def image_loss(model, rank, step):
    return model(data(rank, step, (2, 3, 5, 5))).pow(3).mean()


def in_containers(layers, x):
    y = once(layers, x)
    return {"pair": (y, [x, None]), "nested": {"deep": Output("2y", 2 * y)}, "text": "free"}


def loss_of_containers(model, rank, step):
    out = model(data(rank, step))
    return (out["pair"][0] + out["nested"]["deep"].y).square().mean()


class MinusZero(nn.Module):
    """The gradient of `a` is -0.0 in every element, on every rank or on rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x, everywhere=True):
        return (self.a * -0.0 + self.b if everywhere else self.b).sum() * x.sum().abs()


def minus_zero(everywhere):
    def loss(model, rank, step):
        return model(data(rank, step), everywhere=everywhere or rank == 0)

    return loss


def gradient_penalty(model, rank, step):
    x = data(rank, step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().mean() + model(x).mean()


CASES = {
    "a plain chain": (once, simple),
    "an input that requires a gradient": (once, with_input_gradient),
    "a shared layer": (twice, simple),
    "two forwards in one loss": (twice, two_forwards),
    "a shared layer under a checkpoint": (checkpointed(False), simple),
    "a shared layer under a reentrant checkpoint": (checkpointed(True), with_input_gradient),
    "a reentrant checkpoint and a dataclass": (
        in_a_dataclass,
        lambda model, rank, step: model(data(rank, step).requires_grad_()).y.square().mean(),
    ),
    "tied weights": (Tied, simple),
    "unused on rank 1": (skipping, unused(lambda rank, step: ["middle"] * (rank == 1))),
    "unused on all": (skipping, unused(lambda rank, step: ["last"])),
    "another unused on each rank": (
        skipping,
        unused(lambda rank, step: [["middle"], ["last"], []][rank % 3]),
    ),
    "unused in the first step": (skipping, unused(lambda rank, step: ["middle"] * (step == 0))),
    "used in the first step only": (skipping, unused(lambda rank, step: ["middle"] * (step > 0))),
    "used now and then, now here, now there": (
        skipping,
        unused(lambda rank, step: ["middle"] * ((rank + step) % 2)),
    ),
    "odd parameters": (Odd, odd_loss),
    "channels last": (Image, image_loss),
    "outputs in containers": (in_containers, loss_of_containers),
    "gradients of -0.0": (MinusZero, minus_zero(everywhere=True)),
    "gradients of -0.0 on one rank": (MinusZero, minus_zero(everywhere=False)),
    "a gradient penalty": (once, gradient_penalty),
}


def build(flow):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return flow() if isinstance(flow, type) else Layers(flow)


def descend(model):
    """A step of SGD with weight decay, which moves whatever has a gradient, be it zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.02 * (parameter.grad + parameter)


def check_equal(ours, plain, what):
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), f"{what}, {name}: {mine.grad}"
        if mine.grad is not None:
            message = f"{what}, gradient of {name}: "
            torch.testing.assert_close(
                mine.grad, theirs.grad, **CLOSE, msg=lambda m, message=message: message + m
            )
            assert mine.grad.stride() == mine.stride() or not mine.numel(), what
        torch.testing.assert_close(mine, theirs, **CLOSE)


def run_case(name, group, **settings):
    flow, loss = CASES[name]
    ours, plain = DDP(build(flow), group, **settings), build(flow)
    nbytes = sum(p.nbytes for p in ours.parameters() if p.requires_grad)
    for step in range(4):
        what = f"{name}, {group.size} ranks, {settings}, step {step}"
        for model in (ours, plain):
            model.zero_grad(set_to_none=step < 2)
        with bill() as sent:
            loss(ours, group.rank, step).backward()
        total = all_reduce(torch.tensor(sent.bytes), group).item()
        assert total == 2 * (group.size - 1) * nbytes, what
        (sum(loss(plain, rank, step) for rank in range(group.size)) / group.size).backward()
        check_equal(ours.module, plain, what)
        for model in (ours, plain):
            descend(model)


def test_every_case_equals_one_process_and_averages_each_parameter_once():
    def work(world):
        for group in (world, world.subgroup([2, 0]), world.subgroup([1])):
            for settings in ({}, {"bucket_mb": 1e-4}, {"overlap": False}):
                for name in CASES if group else ():
                    run_case(name, group, **settings)

    launch(work, ranks=3, timeout=20)
