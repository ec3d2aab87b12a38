"""What is alive: what a stage cuts is gone where it is not in use, by count of real storages.

The first tests trust nothing of the library: they note, at every operation, a weak reference to
each storage that comes out of it, and ask later how large those still alive are. A weight that
autograd keeps, a copy of it, a gather that is not undone after an evaluation: each is a storage
with room for a whole weight. The others compare the memory meter with the formula, to the byte.
"""

import functools
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_training import GROUPS, adamw, hybrid

from s2s_lib import ZeRO, launch, memory

WIDTH, LAYERS, FLOAT = 64, 4, 4
WEIGHT = WIDTH * WIDTH * FLOAT


class Storages(TorchDispatchMode):
    """The storages of everything that an operation of this thread returned."""

    def __init__(self):
        super().__init__()
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.seen.add(tensor.untyped_storage())
        return result

    def note(self, model):
        self.seen.update(p.untyped_storage() for p in model.parameters())

    def large(self):
        """Those with room for a whole weight."""
        return [s.nbytes() for s in self.seen if s.nbytes() >= WEIGHT]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(self.a(x).tanh())


class Chain(nn.Module):
    """Four blocks and, in the root, a head that is smaller than one weight of theirs."""

    def __init__(self, frozen=()):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 3)
        for name in frozen:
            self.blocks.get_submodule(name).requires_grad_(False)

    def forward(self, x):
        return self.head(self.blocks(x))


X = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def at_use(layer, look):
    """Call `look()` after the layer's forward, and when its backward begins."""

    def after(_module, _inputs, out):
        look()
        if out.requires_grad:
            out.register_hook(lambda _: look())

    layer.register_forward_hook(after)


def check_alive(model, storages):
    """Forward, backward, evaluation: nothing large is alive after each, little in between."""
    most = []

    def look(module, *_):
        storages.note(module)
        most.append(len(storages.large()))

    for block in model.module.blocks:
        for layer in (block.a, block.b):
            at_use(layer, functools.partial(look, layer))
    optimizer = adamw(model)
    for mode in ("train", "eval", "train", "no_sync"):
        with torch.set_grad_enabled(mode != "eval"):
            out = model.train(mode != "eval")(X)
            assert storages.large() == [], f"after a forward in {mode}"
        if mode == "no_sync":
            with model.no_sync():
                out.sum().backward()
            continue
        if mode != "eval":
            out.sum().backward()
            assert storages.large() == [], f"after a backward in {mode}"
            optimizer.step()
            optimizer.zero_grad()
    return max(most)


HALF = [f"{i}.a" for i in range(LAYERS)]


def test_at_stage_3_no_whole_weight_is_alive_outside_of_the_unit_in_use():
    def work(world):
        # Cut in two, a unit without frozen parameters has shards as large as a weight.
        for shape, frozen in [((1, 4), ()), ((1, 4), HALF), ((2, 2), HALF), ((1, 4), ["0", "2"])]:
            for prefetch in (False, True):
                with Storages() as storages:
                    model = hybrid(world, *shape, Chain(frozen), 3, prefetch=prefetch)
                    storages.note(model)
                    assert storages.large() == [], "after construction"
                    most = check_alive(model, storages)
                # The unit in use and the one fetched, each in two parts if some is frozen; the
                # gradients of a unit being filled and of one on its way; what autograd has at hand.
                assert 1 <= most <= (1 + prefetch) * (1 + bool(frozen)) + 2 + 2, (most, frozen)

    launch(work, ranks=4)


def count_filled(storages, counts):
    counts.append(sum(storage.nbytes() > 0 for storage in storages))


def test_only_one_unit_is_whole_at_a_time_without_prefetch_and_two_with_it():
    def work(world):
        counts = {}
        for prefetch in (False, True):
            model = ZeRO(Chain(), world, 3, prefetch=prefetch)
            flats = [flat.full.untyped_storage() for u in model.units[:-1] for flat in u.flats]
            whole = []
            look = functools.partial(count_filled, flats, whole)
            for block in model.module.blocks:
                at_use(block.a, look)
            for _ in range(2):
                model(X).sum().backward()
                assert not any(s.nbytes() for s in flats)
            counts[prefetch] = whole[2 * LAYERS :]
        return counts

    for counts in launch(work, ranks=2):
        assert counts[False] == [1] * 2 * LAYERS
        assert counts[True] == ([2] * (LAYERS - 1) + [1]) * 2


def formula(model, stage, mixed):
    """Bytes of weights, gradients and optimizer state after a step. Flats and their pieces are
    padded, moments are not."""
    pieces = sum(flat.piece for unit in model.units for flat in unit.flats)
    whole = sum(f.piece * f.group.size for unit in model.units for f in unit.flats)
    numbers = 2 if mixed else 4
    weights = numbers * (whole if stage < 3 else pieces) + (4 * pieces if mixed else 0)
    gradients = numbers * (whole if stage < 2 else pieces)
    moments = sum(8 * p.numel() + 4 for p in model.parameters())
    return {"weights": weights, "gradients": gradients, "optimizer": moments}


def margins(model, stage, mixed):
    """How far above the formula weights and gradients may be for a while.

    Weights at stage 3: the root, the unit in use and the one fetched ahead. Gradients: the one that
    autograd has at hand; from stage 2 on also those of a unit being filled and of one on its way.
    In mixed precision the shards of all once more in float32 while the optimizer steps.
    """
    numbers = 2 if mixed else 4
    sizes = [sum(f.piece * f.group.size for f in unit.flats) for unit in model.units]
    units = numbers * 2 * max(sizes)
    one = numbers * WIDTH * WIDTH
    wide = 4 * sum(flat.piece for unit in model.units for flat in unit.flats) if mixed else 0
    weights = numbers * sizes[-1] + units if stage == 3 else 0
    return weights, max(one + (units if stage >= 2 else 0), wide)


def step(model, optimizer):
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_live_bytes_equal_the_formula_and_their_peak_is_within_the_units_on_their_way(dtype):
    def work(world):
        for group in filter(None, map(world.subgroup, GROUPS)):
            for stage in (0, 1, 2, 3):
                model = ZeRO(Chain(), group, stage, param_dtype=dtype)
                optimizer = adamw(model)
                step(model, optimizer)
                with memory(model, optimizer) as m:
                    step(model, optimizer)
                what = f"stage {stage}, {group.size} ranks, {dtype}"
                expected = formula(model, stage, dtype is not None)
                assert {kind: m.live[kind] for kind in expected} == expected, what
                for kind, margin in zip(
                    ("weights", "gradients"), margins(model, stage, dtype is not None), strict=True
                ):
                    over = m.highest[kind] - expected[kind]
                    assert over <= margin, f"{what}: {kind} {over} above, not {margin}"

    launch(work, ranks=4)


def test_gradients_under_no_sync_are_whole_and_otherwise_a_shard():
    def work(world):
        counts = []
        for stage in (2, 3):
            model = ZeRO(Chain(), world, stage)
            with memory(model) as m:
                with model.no_sync():
                    model(X).sum().backward()
                counts.append(m.live["gradients"])
                model(X).sum().backward()
                counts.append(m.live["gradients"])
                model.zero_grad()
                counts.append(m.live["gradients"])
        return counts, sum(flat.piece for unit in model.units for flat in unit.flats) * FLOAT

    for counts, shard in launch(work, ranks=4):
        assert counts == [4 * shard, shard, 0] * 2


def test_frozen_parameters_have_no_room_for_gradients_or_moments():
    def work(world):
        model = ZeRO(Chain(HALF), world, 2)
        optimizer = adamw(model)
        with memory(model, optimizer) as m:
            model(X).sum().backward()
            optimizer.step()
        ours = [flat for unit in model.units for flat in unit.flats if flat.trainable]
        pieces = sum(flat.piece for flat in ours) * FLOAT
        moments = sum(8 * p.numel() + 4 for flat in ours for p in flat.parameters)
        assert m.live["gradients"] == pieces
        assert m.live["optimizer"] == moments
        assert m.highest["gradients"] <= pieces + 2 * (WIDTH * WIDTH * 2 + 2 * WIDTH) * FLOAT

    launch(work, ranks=4)
