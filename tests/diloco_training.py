"""What the tests of DiLoCo train, and the one process that judges them.

`simulate` holds all islands in one process: a copy of the model for each, with an optimizer of its
own, and torch.optim.SGD on one more copy of the weights, whose gradient is the mean of how far the
islands have come. `run` does the same with the library, on a rank for each island. An island draws
its batches from its number and that of the step.
"""

import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import DiLoCo

CLOSE = {"rtol": 0, "atol": 1e-10}


def mlp():
    """Odd sizes throughout: no row of parameters divides by the number of islands."""
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def build(make=mlp, seed=0):
    torch.manual_seed(seed)
    return make().double()


def batch(island, step, rows=6):
    random = torch.Generator().manual_seed(1000 * island + step)
    x = torch.randn(rows, 7, generator=random, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=random, dtype=torch.float64)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def inner_step(model, optimizer, island, step):
    x, y = batch(island, step)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def outer(diloco, what="outer"):
    """The outer weights by name, or with "momentum" their momentum."""
    found = {}
    for row in diloco.rows:
        parts = row.parts(getattr(row, what))
        found |= {name: part.clone() for name, part in zip(row.names, parts, strict=True)}
    return found


def run(world, steps, sync_every, make=mlp, inner=adamw, flush=True, **options):
    """Weights, outer weights and momentum of this island. All but the first draw other weights,
    and have to take the first's."""
    model = build(make, seed=world.rank)
    optimizer = inner(model)
    diloco = DiLoCo(model, optimizer, world, sync_every, **options)
    for step in range(1, steps + 1):
        inner_step(model, optimizer, world.rank, step)
    if flush:
        diloco.flush()
    return weights(model), outer(diloco), outer(diloco, "momentum")


class Simulation:
    """`size` islands in one process. `parts` are lists of the names that are synced together: in
    the order of the model, each once in `sync_every` steps."""

    def __init__(
        self,
        size,
        sync_every,
        make=mlp,
        inner=adamw,
        parts=None,
        delay=0,
        mixing=0.0,
        take_step=inner_step,
        **outer,
    ):
        self.models = [build(make) for _ in range(size)]
        self.optimizers = [inner(model) for model in self.models]
        self.take_step = take_step
        # What draws an island's batches.
        self.numbers = list(range(size))
        self.live = [dict(model.named_parameters()) for model in self.models]
        self.parts = parts or [list(self.live[0])]
        self.sync_every, self.delay, self.mixing = sync_every, delay, mixing
        self.outer = {n: nn.Parameter(p.detach().clone()) for n, p in self.live[0].items()}
        lr, momentum = outer.get("outer_lr", 0.7), outer.get("outer_momentum", 0.9)
        nesterov = outer.get("nesterov", True) and momentum > 0
        self.sgd = torch.optim.SGD(self.outer.values(), lr, momentum, nesterov=nesterov)
        # Part -> after which step it was sent off, and the mean of how far the islands had come.
        self.underway = {}
        # Parts in which some island's weights are not the outer ones.
        self.moved = set()

    def steps(self, first, last):
        for step in range(first, last + 1):
            for number, model, optimizer in zip(
                self.numbers, self.models, self.optimizers, strict=True
            ):
                self.take_step(model, optimizer, number, step)
            self.moved = set(range(len(self.parts)))
            for part in range(len(self.parts)):
                if (step - self.sync_every * (part + 1) // len(self.parts)) % self.sync_every == 0:
                    self.send(part, step)
                if part in self.underway and step == self.underway[part][0] + self.delay:
                    self.arrive(part, self.mixing)
        return self

    def lose(self, gone):
        """These islands are there no more."""
        stay = [i for i, number in enumerate(self.numbers) if number not in gone]
        for name in ("numbers", "models", "optimizers", "live"):
            setattr(self, name, [getattr(self, name)[i] for i in stay])
        return self

    def send(self, part, step):
        means = {
            name: torch.stack([self.outer[name] - live[name] for live in self.live]).mean(0)
            for name in self.parts[part]
        }
        self.underway[part] = step, means

    @torch.no_grad()
    def arrive(self, part, mixing=0.0):
        _, means = self.underway.pop(part)
        for name, parameter in self.outer.items():
            parameter.grad = means.get(name)
        self.sgd.step()
        for live in self.live:
            for name in means:
                live[name].copy_((1 - mixing) * self.outer[name] + mixing * live[name])
        if not mixing:
            self.moved.discard(part)

    def flush(self):
        for part in sorted(self.underway):
            self.arrive(part, self.mixing)
        for part in sorted(self.moved):
            self.send(part, None)
            self.arrive(part)
        return self

    def results(self):
        """For each island what `run` returns."""
        momentum = {
            name: self.sgd.state[p].get("momentum_buffer") if p in self.sgd.state else None
            for name, p in self.outer.items()
        }
        after = {name: p.detach().clone() for name, p in self.outer.items()}
        return [(weights(model), after, momentum) for model in self.models]


def simulate(size, steps, sync_every, flush=True, **options):
    simulation = Simulation(size, sync_every, **options).steps(1, steps)
    return (simulation.flush() if flush else simulation).results()


def assert_same(got, want, what="", close=CLOSE):
    """Two dictionaries of tensors; None stands for anything."""
    assert list(got) == list(want), what
    for name, tensor in got.items():
        if want[name] is not None:
            torch.testing.assert_close(
                tensor.detach(),
                want[name].detach(),
                **close,
                msg=lambda m, name=name: f"{what} {name}: {m}",
            )


def assert_equal(got, want, what=""):
    """The same bits."""
    assert list(got) == list(want), what
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), f"{what} {name}"
