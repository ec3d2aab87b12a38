"""The arithmetic of DiLoCo: what an outer step does to weights.

Kept apart from the live weights, which the inner optimizer moves: the *outer* weights, those that
all islands agreed on last, and the momentum of their moves. An outer step takes the difference of
the two for a gradient, the *pseudo-gradient*: outer - live, old minus new, because a step goes
against a gradient and this one must go towards where the islands went. (Reddi et al.,
arXiv:2003.00295; Douillard et al., arXiv:2311.08105.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from s2s_lib.collectives.background import Background
from s2s_lib.strategies.grads import is_cut, is_shared


@dataclass(frozen=True)
class OuterStep:
    """The outer optimizer: SGD with momentum, as torch.optim.SGD.

    `lr` 1 and `momentum` 0 make the outer weights the mean of the islands': local SGD.
    """

    lr: float
    momentum: float
    nesterov: bool


class Row:
    """Parameters in one row of memory, of one dtype: their outer weights and their momentum.

    Both are of at least float32: live weights of 16 bits are what rounding leaves of them.
    `residual` is what quantising has left out of what this rank sent so far, or None.
    """

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], feedback: bool = False):
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        dtype = self.parameters[0].dtype
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.outer = self.live()
        self.momentum = torch.zeros_like(self.outer)
        self.residual = torch.zeros_like(self.outer) if feedback else None

    @torch.no_grad()
    def live(self) -> torch.Tensor:
        """A copy of what the parameters are now."""
        return torch.cat([p.detach().reshape(-1).to(self.dtype) for p in self.parameters])

    def pseudo_gradient(self) -> torch.Tensor:
        """How far this island has come, from what it was given: 16-bit weights were given what
        rounding left of the outer ones."""
        given = self.outer.to(self.parameters[0].dtype).to(self.dtype)
        return given - self.live()

    def step(self, gradient: torch.Tensor, how: OuterStep) -> tuple[torch.Tensor, torch.Tensor]:
        """The outer weights and the momentum after a step against a pseudo-gradient."""
        momentum = how.momentum * self.momentum + gradient
        move = gradient + how.momentum * momentum if how.nesterov else momentum
        return self.outer - how.lr * move, momentum

    @torch.no_grad()
    def hand_out(self, mixing: float = 0.0):
        """The live weights become the outer ones; of their own they keep the share `mixing`."""
        for parameter, new in zip(self.parameters, self.parts(self.outer), strict=True):
            if mixing:
                new = torch.lerp(new, parameter.to(new.dtype), mixing)
            parameter.copy_(new)

    def parts(self, row) -> list[torch.Tensor]:
        """The part of a row that belongs to each parameter, as a view of its shape."""
        parts = row.split([parameter.numel() for parameter in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


class Underway(NamedTuple):
    """The pseudo-gradients of this island, one a row, after so many inner steps; and the task that
    averages them, which gives a list of averages and one of new residuals."""

    mine: list[torch.Tensor]
    steps: int
    task: Background


class Fragment:
    """Parameters that are synced together: a row for each dtype, and where an island has several
    ranks others for what they have cut, and for each weight that two stages share. So what several
    of its ranks have is rounded alike on all of them.

    `since` counts the inner steps since this island last said how far it has come; `underway` is
    what it said then, until the islands' average is there.
    """

    def __init__(self, named, feedback=False):
        alike = {}
        for name, parameter in named:
            apart = name if is_shared(parameter) else None
            key = parameter.dtype, is_cut(parameter), apart
            alike.setdefault(key, []).append((name, parameter))
        self.rows = [Row(same, feedback) for same in alike.values()]
        self.since, self.underway = 0, None

    @property
    def parameters(self):
        return [parameter for row in self.rows for parameter in row.parameters]

    @property
    def names(self):
        return [name for row in self.rows for name in row.names]


def cut(named: list, count: int) -> list[list]:
    """Parameters with their names in `count` runs of about as many parameters each.

    By number and not by size, of which the ranks of an island may have different shares. What two
    stages share is in the last run, so that it is synced at the same time in both.
    """
    own = [(name, p) for name, p in named if not is_shared(p)]
    runs = [own[len(own) * i // count : len(own) * (i + 1) // count] for i in range(count)]
    runs[-1] += [(name, p) for name, p in named if is_shared(p)]
    return runs
