"""Dropout is the same at every layout, and is still dropout.

The judge is the plain GPT in a plain loop, whose dropout multiplies by masks that were taken from
the layer alone, for each step, layer and row of the whole batch: a replica that begins to count its
rows at 0, a stage that counts micro-batches in another order, a recomputation with another mask, a
step that is not counted each end in other losses, norms and weights. The layer alone is asked
for what a mask is to be: its share and scale, that two masks have nothing to do with each other,
the same one backward. Torch's own generator must not notice any of it.
"""

import itertools

import pytest
import torch
from parallel_training import ROWS, SHAPE, Layout, assert_same, batch, built, plain, plain_steps
from parallel_training import trained_at as trained
from torch import nn
from torch.utils.checkpoint import checkpoint

from s2s_lib import launch
from s2s_lib.training.dropout import ROW_BITS, Dropout, Places, place_dropout

T, H = 64, 64
RATE = 0.25


def masks(p=RATE, seed=0, step=0, cuts=((0, 6),), name="a", part=0, parts=1, shape=(T, H)):
    """What becomes of ones [rows, T, H] in a forward of each micro-batch; `cuts` are the first row
    and the number of rows of each."""
    stage = nn.Sequential(Dropout(p, name, part, parts))
    places = Places(stage, seed)
    places.begin(step, [first for first, _ in cuts])
    own = shape[0] // parts, *shape[1:]
    return torch.cat([stage(torch.ones(rows, *own)) for _, rows in cuts])


# At every layout


class Given(nn.Module):
    """Dropout with the masks of the whole batch."""

    def __init__(self, name):
        super().__init__()
        self.name, self.step = name, None

    def forward(self, x):
        if self.step is None:
            return x
        whole = (SHAPE["seq"], SHAPE["hidden"])
        kept = masks(step=self.step, cuts=[(0, ROWS)], name=self.name, shape=whole) > 0
        return x * kept / (1 - RATE)


def judged(layers):
    model = plain(layers, dropout=RATE)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            model.set_submodule(name, Given(name))
    given = [module for module in model.modules() if isinstance(module, Given)]

    def begin(step):
        for module in given:
            module.step = step

    return plain_steps(model, begin=begin)


LAYOUTS = [
    Layout(4, zero=1, hybrid=2),
    Layout(1, 4),
    Layout(2, 2, sequence=True, recompute=True),
    Layout(2, 1, 2, zero=3, recompute=True),
    Layout(1, 2, 2, schedule="interleaved", sequence=True),
    Layout(1, 2, 2, schedule="zb_h1", recompute=True),
    Layout(2, 1, 2, schedule="zbv"),
    Layout(1, 1, 4, schedule="gpipe", order="tp-dp-pp"),
]


def test_the_same_is_dropped_at_every_layout():
    layouts = [Layout(**vars(layout) | {"dropout": RATE}) for layout in LAYOUTS]
    results = launch(trained, layouts, ranks=4, timeout=120)
    want = {layers: judged(layers) for layers in {layout.layers for layout in layouts}}
    for layout, *of_ranks in zip(layouts, *results, strict=True):
        assert_same(layout, of_ranks, want[layout.layers])


def test_the_two_places_of_a_block_drop_different_numbers():
    def work(world):
        parallel = built(Layout(dropout=RATE), world)
        dropped = []
        for module in parallel.modules():
            if isinstance(module, Dropout):
                module.register_forward_hook(lambda *args: dropped.append(args[-1] == 0))
        parallel.step(*batch(0))
        return dropped

    [dropped] = launch(work, ranks=1)
    # Two places in each of 2 blocks, in each of 2 micro-batches.
    assert len(dropped) == 8
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(dropped, 2))


# The layer alone


def test_the_mask_of_a_row_does_not_depend_on_the_micro_batch_that_it_is_in():
    whole = masks()
    for cuts in ([(0, 2), (2, 4)], [(0, 1), (1, 1), (2, 3), (5, 1)]):
        assert torch.equal(masks(cuts=cuts), whole)
    # On another replica, which begins with row 4.
    assert torch.equal(masks(cuts=[(4, 2)]), whole[4:])


def test_ranks_that_have_a_part_of_the_row_have_that_part_of_its_mask():
    whole = masks()
    for parts in (1, 2, 4):
        own = [masks(part=part, parts=parts) for part in range(parts)]
        assert torch.equal(torch.cat(own, dim=1), whole)


def test_masks_of_other_steps_rows_layers_and_seeds_have_nothing_to_do_with_each_other():
    """Two of them agree as often as chance has it, also where two of the numbers are swapped or
    add up to the same."""
    every = {
        (seed, step, name, row): masks(seed=seed, step=step, name=name)[row] > 0
        for seed, step, name in itertools.product((0, 1), (0, 1), ("a", "b"))
        for row in (0, 1, 2)
    }
    chance = RATE**2 + (1 - RATE) ** 2
    # Five standard deviations of the mean of T * H numbers.
    margin = 5 * (chance * (1 - chance) / (T * H)) ** 0.5
    for one, other in itertools.combinations(every, 2):
        agree = (every[one] == every[other]).double().mean().item()
        assert agree == pytest.approx(chance, abs=margin), (one, other)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_is_p_and_what_is_left_is_scaled(p):
    dropped = masks(p=p)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    share = (dropped == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / dropped.numel()) ** 0.5)
    # Along a row, a column and over rows, so that no stretch is spared.
    for dim in (0, 1, 2):
        count = dropped.numel() // dropped.shape[dim]
        along = (dropped == 0).double().transpose(0, dim).flatten(1).mean(1)
        assert (along - p).abs().max() < 5 * (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_is_dropped_where_the_number_was(dtype):
    stage = nn.Sequential(Dropout(RATE, "a"))
    Places(stage, 0).begin(0, [0])
    x = torch.ones(2, T, H, dtype=dtype, requires_grad=True)
    y = stage(x)
    y.sum().backward()
    assert y.dtype == dtype and torch.equal(x.grad, y.detach())
    assert torch.equal(y.detach() > 0, masks(cuts=[(0, 2)]) > 0)


class Twice(nn.Module):
    """Two layers, of which the first draws from torch's generator too; all of it recomputed."""

    def __init__(self):
        super().__init__()
        self.one, self.other = Dropout(RATE, "one"), Dropout(RATE, "other")
        self.calls = 0

    def inside(self, x):
        self.calls += 1
        return self.other(self.one(x) * torch.rand(1))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def test_a_recomputation_drops_the_same_after_other_steps_have_begun():
    stage = Twice()
    places = Places(stage, 0)
    x = torch.ones(1, T, H, requires_grad=True)
    places.begin(0, [0, 1])
    outputs = [stage(x), stage(x)]
    torch.rand(10)
    places.begin(1, [0])
    outputs.append(stage(x))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outputs, 2))
    for out in reversed(outputs):
        # Of ones, the gradient is the product of the masks, as the output is.
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, out.detach())
    assert stage.calls == 6


def test_nothing_is_dropped_in_evaluation_or_outside_of_a_step():
    stage = nn.Sequential(Dropout(RATE, "a"))
    places, x = Places(stage, 0), torch.ones(2, T, H)
    places.begin(0, [0])
    # A step ends with its micro-batches.
    assert not torch.equal(stage(x), x) and stage(x) is x
    places.begin(1, [0])
    assert stage.eval()(x) is x
    # What was evaluated did not use up a micro-batch of the step.
    assert torch.equal(stage.train()(x), masks(step=1, cuts=[(0, 2)]))
    assert nn.Sequential(Dropout(0.0, "a"))(x) is x and Dropout(RATE, "a")(x) is x


def test_torch_s_generator_is_left_as_it_was():
    stage = Twice()
    places = Places(stage, 0)
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    places.begin(0, [0, 1])
    got = [torch.rand(1)]
    out = stage(torch.ones(2, T, H, requires_grad=True))
    got.append(torch.rand(1))
    out.sum().backward()
    got.append(torch.rand(1))
    with pytest.raises(AttributeError):
        stage("no tensor")
    got.append(torch.rand(1))
    assert torch.equal(torch.cat(got), want)


def test_every_dropout_of_a_model_is_replaced_and_named_and_stays_in_its_mode():
    model = plain(dropout=RATE)
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout)]
    model.get_submodule(names[0]).eval()
    place_dropout(model, 1, 2)
    placed = {name: m for name, m in model.named_modules() if isinstance(m, Dropout)}
    assert list(placed) == names == [m.name for m in placed.values()]
    assert {(m.p, m.part, m.parts) for m in placed.values()} == {(RATE, 1, 2)}
    assert [m.training for m in placed.values()] == [False] + [True] * (len(names) - 1)
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())


def test_more_rows_than_can_be_told_apart_are_refused_and_the_last_is_not():
    stage = nn.Sequential(Dropout(RATE, "a"))
    Places(stage, 0).begin(0, [2**ROW_BITS - 1])
    with pytest.raises(ValueError, match="row 16777216 of a global batch"):
        Places(stage, 0).begin(0, [2**ROW_BITS])
