"""What the tests of the pipeline train: small stages, their batches, and one loop for all.

`assert_parity` takes the same steps with a pipeline and with plain autograd on the whole batch:
AdamW with weight decay, and gradients clipped so tightly that clipping acts in every step.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import Pipeline, clip_grad_norm_

WIDTH = 6
CLOSE = {"rtol": 0, "atol": 1e-10}
IGNORED = -100


class Layers(nn.Module):
    """A stage of one tensor; its weights depend on `number` alone."""

    def __init__(self, number):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH + 2), nn.Linear(WIDTH + 2, WIDTH)
        draw(self, number)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Flow(nn.Module):
    """Layers, and `flow(module, value)` to say how a value goes through them."""

    def __init__(self, number, flow, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.flow = flow
        draw(self, number)

    def forward(self, value):
        return self.flow(self, value)


def draw(module, number):
    random = torch.Generator().manual_seed(number)
    module.double()
    for parameter in module.parameters():
        parameter.data.normal_(generator=random).mul_(0.5)


def linear(**more):
    return nn.Linear(WIDTH, WIDTH, **more)


def mean_square(output, target):
    return (output - target).square().mean()


def batch(rows=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, WIDTH, generator=random, dtype=torch.float64).unbind()


def run(stages, value):
    return functools.reduce(lambda value, stage: stage(value), stages, value)


def parameters_of(stages):
    return list(dict.fromkeys(p for stage in stages for p in stage.parameters()))


def adamw(parameters):
    # A stage without parameters gets something to step.
    parameters = list(parameters) or [nn.Parameter(torch.zeros(1))]
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def assert_gradients(pipeline, reference, what=""):
    for number, stage in pipeline.module_of.items():
        theirs = dict(reference[number].named_parameters())
        for name, parameter in stage.named_parameters():
            own, other = parameter.grad, theirs[name.removeprefix("module.")].grad
            where = f"{what}: stage {number}, {name}"
            assert (own is None) == (other is None), where
            if own is not None:
                torch.testing.assert_close(own, other, **CLOSE, msg=where)


def assert_weights(pipeline, reference, what=""):
    for number, stage in pipeline.module_of.items():
        torch.testing.assert_close(
            [p.detach() for p in stage.parameters()],
            [p.detach() for p in reference[number].parameters()],
            **CLOSE,
            msg=lambda told, number=number: f"{what}: stage {number}: {told}",
        )


def assert_parity(build, world, plan, data=batch, loss_fn=mean_square, steps=3, **more):
    """Losses, gradients, norms and weights of some steps against one process."""
    pipeline = Pipeline(build(), world, plan, loss_fn, **more)
    reference = build()
    optimizers = [adamw(pipeline.parameters()), adamw(parameters_of(reference))]
    for step in range(steps):
        x, y = data(seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(run(reference, x), y)
        loss.backward()
        got = pipeline.step(x, y)
        if got is not None:
            torch.testing.assert_close(got, loss.detach(), **CLOSE, msg=f"{plan}, step {step}")
        assert_gradients(pipeline, reference, f"{plan!r}, step {step}")
        norm = nn.utils.clip_grad_norm_(parameters_of(reference), 0.1)
        torch.testing.assert_close(clip_grad_norm_(pipeline, 0.1), norm.double(), **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
    assert_weights(pipeline, reference, repr(plan))
    return pipeline


def stages(count):
    return lambda: [Layers(number) for number in range(count)]


def tokens(seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(WIDTH, (2, 8, 3), generator=random).unbind()


def entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
