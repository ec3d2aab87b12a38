"""Modules that are hard to cut: each takes the steps of one process, at every stage.

The modules of test_ddp_cases.py, and some that only a strategy with units can get wrong, with each
layer a unit of its own and with all in one. Every rank also runs one plain copy on the losses of
all ranks and compares weights after each of three steps of an SGD with weight decay, which moves
whatever has a gradient, be it zero; and whether there is one. A unit that is freed before its last
use, gathered too late, or reduced before its last gradient came differs or raises.
"""

import pytest
import torch
from test_ddp_cases import CASES, build, data, simple, with_input_gradient
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_training import assert_same, hybrid

from s2s_lib import ZeRO, bill, launch


class Small(nn.Module):
    """Parameters with fewer elements than there are ranks, and one number."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.scale)


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Blocks(nn.Module):
    """A chain of one kind of block, and how to go through it."""

    def __init__(self, block, flow=None, layers=3):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.flow = flow

    def forward(self, x):
        if self.flow is not None:
            return self.flow(self.blocks, x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Shared(nn.Module):
    """One weight in two units."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def wide(model, rank, step):
    return model(data(rank, step, (4, 8))).square().mean()


def last_first(blocks, x):
    for block in (blocks[2], blocks[0], blocks[1]):
        x = block(x).tanh()
    return x


def one_twice(blocks, x):
    for block in (blocks[0], blocks[1], blocks[0], blocks[2], blocks[0]):
        x = block(x).tanh()
    return x


def checkpoint_around(reentrant):
    """The unit is inside what is computed again."""

    def flow(blocks, x):
        for block in blocks:
            x = checkpoint(lambda h, block=block: block(h).tanh(), x, use_reentrant=reentrant)
        return x

    return flow


def around_several(reentrant):
    def flow(blocks, x):
        x = checkpoint(lambda h: blocks[1](blocks[0](h).tanh()), x, use_reentrant=reentrant)
        return blocks[2](x)

    return flow


class CheckpointsInside(nn.Module):
    """What is computed again is inside the unit."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(3, 5), nn.Linear(5, 3), reentrant

    def inside(self, x):
        return self.b(self.a(x).tanh())

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


class CheckpointsInsideReentrant(CheckpointsInside):
    def __init__(self):
        super().__init__(reentrant=True)


def layers(flow=None, block=lambda: nn.Linear(3, 3)):
    return lambda: Blocks(block, flow)


def partly_frozen():
    model = Blocks(lambda: nn.Linear(3, 3), layers=4)
    for i, name in [(0, "bias"), (1, "weight"), (1, "bias"), (2, "weight")]:
        getattr(model.blocks[i], name).requires_grad_(False)
    return model


OWN = {
    "smaller than the group": (Small, simple),
    "LoRA": (layers(block=Adapted), wide),
    "LoRA, the input requires a gradient": (
        layers(block=Adapted),
        lambda model, rank, step: model(data(rank, step, (4, 8)).requires_grad_()).pow(2).mean(),
    ),
    "partly frozen": (partly_frozen, simple),
    "partly frozen, the input requires a gradient": (partly_frozen, with_input_gradient),
    "one weight in two units": (Shared, simple),
    "units in another order than they are listed": (layers(last_first), simple),
    "a unit called three times": (layers(one_twice), simple),
    "a checkpoint around each unit": (layers(checkpoint_around(False)), simple),
    "a reentrant one": (layers(checkpoint_around(True)), with_input_gradient),
    "a checkpoint around two units": (layers(around_several(False)), simple),
    "a reentrant one around two units": (layers(around_several(True)), with_input_gradient),
    "a checkpoint inside each unit": (layers(block=CheckpointsInside), simple),
    "a reentrant one inside": (layers(block=CheckpointsInsideReentrant), with_input_gradient),
    "a chain of normalised layers": (
        layers(block=lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))),
        simple,
    ),
}
# The flow of a case of test_ddp_cases may be a function through three layers.
ALL = CASES | OWN


def make(name):
    flow = ALL[name][0]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    return flow() if name in OWN else build(flow)


def units_of(name, plain):
    """Each layer a unit; None, for the default, where there is a list of blocks. What some ranks
    leave out cannot be a unit: all ranks must run the same ones."""
    if name in OWN and name != "smaller than the group" or name in LEFT_OUT:
        return None
    return [m for m in plain.children() if any(True for _ in m.parameters())] or None


LEFT_OUT = {
    "unused on rank 1",
    "another unused on each rank",
    "used now and then, now here, now there",
}


def descent(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=1)


def run_case(name, wrap, group):
    """`wrap` makes a ZeRO of a plain module; `group` shares the batch."""
    plain, loss = make(name), ALL[name][1]
    ours = wrap(make(name))
    optimizers = descent(ours), descent(plain)
    for step in range(3):
        # The gradients of the second step are added to those of the first.
        for model in (ours, plain) if step != 1 else ():
            model.zero_grad()
        loss(ours, group.rank, step).backward()
        (sum(loss(plain, rank, step) for rank in range(group.size)) / group.size).backward()
        for (key, mine), theirs in zip(
            ours.module.named_parameters(), plain.parameters(), strict=True
        ):
            if mine.numel():
                assert (mine.grad is None) == (theirs.grad is None), f"step {step}, {key}"
        for optimizer in optimizers:
            optimizer.step()
        assert_same(ours.full_state_dict(), plain.state_dict(), f"step {step}")


def wrappers(world, name):
    """How each case is cut: the ranks that share a batch, and what makes a ZeRO of a module."""

    def cut(group, stage, **settings):
        def wrap(plain):
            return ZeRO(plain, group, stage, units=units_of(name, plain), **settings)

        what = f"stage {stage} on {group.size} ranks, {settings}"
        return what, stage, group, wrap

    yield from (cut(world, stage) for stage in (0, 1, 2, 3))
    yield cut(world, 3, prefetch=False)
    yield "one unit", 3, world, lambda m: ZeRO(m, world, 3, units=[])
    for members in [2, 0, 1], [1]:
        if group := world.subgroup(members):
            yield from (cut(group, stage) for stage in (1, 3))
    for stage in (2, 3):

        def wrap(plain, stage=stage):
            return hybrid(world, 2, 2, plain, stage, units=units_of(name, plain))

        yield f"hybrid, stage {stage}", stage, world, wrap


# Cases that need a unit's weights or gradients after it is done with them, what the error says,
# and from which stage on. With all in one unit, the shared layers are fine.
REFUSED = {
    "a shared layer under a reentrant checkpoint": ("use_reentrant=False", 0),
    "a reentrant checkpoint and a dataclass": ("use_reentrant=False", 0),
    "a gradient penalty": ("create_graph", 3),
}


@pytest.mark.parametrize("name", ALL)
def test_every_case_equals_one_process_or_is_refused(name):
    words, first = REFUSED.get(name, ("", 4))

    def work(world):
        for what, stage, group, wrap in wrappers(world, name):
            whole = what == "one unit" and name != "a gradient penalty"
            try:
                if stage >= first and not whole:
                    with pytest.raises(RuntimeError, match=words):
                        run_case(name, wrap, group)
                else:
                    run_case(name, wrap, group)
            except Exception as error:
                raise AssertionError(f"{name}, {what}: {error}") from error

    launch(work, ranks=4, timeout=10)


def gathers_of(flow, block=lambda: nn.Linear(3, 3), **settings):
    """How many units each rank gathers in forward and in backward."""

    def work(world):
        torch.manual_seed(0)
        model = ZeRO(Blocks(block, flow).double(), world, 3, **settings)
        nbytes = {flat.piece * 8 for unit in model.units for flat in unit.flats}.pop()
        for step in range(2):
            model.zero_grad()
            with bill() as forward:
                loss = with_input_gradient(model, world.rank, step)
            with bill() as backward:
                loss.backward()
        return [b.by("collective").get("all_gather", 0) / nbytes for b in (forward, backward)]

    first, second = launch(work, ranks=2)
    assert first == second
    return first


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_checkpoint_gathers_no_unit_more_often_than_a_plain_backward(prefetch):
    assert gathers_of(None, prefetch=prefetch) == [3, 3]
    for reentrant in (False, True):
        inside = CheckpointsInsideReentrant if reentrant else CheckpointsInside
        assert gathers_of(checkpoint_around(reentrant), prefetch=prefetch) == [3, 3], reentrant
        assert gathers_of(None, block=inside, prefetch=prefetch) == [3, 3], reentrant
