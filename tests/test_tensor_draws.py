"""Which numbers are dropped where, and that a forward computed again drops the same.

Masks are compared bit by bit between the ranks of two data-parallel pairs, and with one process
that is given the same masks. An equal mask where tensors are cut repeats along the cut; another
one where they are whole makes them differ between ranks, and gradients with them; a recomputed
mask that is another gives gradients of a network that was never run. All are silent in the loss.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from test_tensor_uses import (
    BOTH,
    CLOSE,
    NET_PLAN,
    batch,
    cut,
    gpt,
    loss_of,
    net,
    recomputed,
    whole_gradients,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from s2s_lib import Column, Mesh, bill, launch, tensor_parallel

# Of the dropouts of a Net, those between column and row layers.
CUT = ("attn.drop", "mlp.drop")


def is_cut(name):
    return name.endswith(CUT)


def watch_masks(model):
    """Name of each dropout -> what it dropped, call by call, as this forward goes on."""
    masks = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, inputs, out, name=name: masks.setdefault(name, []).append(
                    out.detach() != 0
                )
            )
    return masks


def masks_of(group, sequence=False, seed=1, before=lambda: None, steps=1):
    """The masks of some training forwards, and torch's random numbers afterwards."""
    model = cut(net(drop=0.5), group, sequence_parallel=sequence)
    masks = watch_masks(model)
    torch.manual_seed(seed)
    for _ in range(steps):
        before()
        model(batch()[0])
    return masks, torch.get_rng_state()


def same(one, other):
    """Whether two ranks dropped the same in a dropout, in each call."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_apart(masks):
    """Any two of these share no more than chance would have them share."""
    for one, other in itertools.combinations(masks, 2):
        for a, b in zip(one, other, strict=True):
            assert 0.35 < (a == b).double().mean() < 0.65


# Masks


def test_whole_regions_drop_the_same_in_a_group_and_cut_ones_and_other_groups_do_not():
    def work(world):
        return masks_of(Mesh(world, dp=2, tp=2)["tp"])[0]

    ranks = launch(work, ranks=4)
    assert len(ranks[0]) == 9
    for name in ranks[0]:
        if is_cut(name):
            assert_apart([masks[name] for masks in ranks])
        else:
            assert same(ranks[0][name], ranks[1][name]), name
            assert same(ranks[2][name], ranks[3][name]), name
            assert_apart([ranks[0][name], ranks[2][name]])


def test_with_sequence_parallel_every_rank_drops_its_own_everywhere():
    def work(world):
        return masks_of(Mesh(world, dp=2, tp=2)["tp"], sequence=True)[0]

    ranks = launch(work, ranks=4)
    for name in ranks[0]:
        assert_apart([masks[name] for masks in ranks])


def test_no_mask_comes_twice_on_a_rank():
    """Not in another layer of the same shape, nor in the next step."""

    def work(world):
        return [masks_of(world, sequence, steps=2)[0] for sequence in BOTH]

    for results in launch(work, ranks=2):
        for masks in results:
            for kind in ("attn.drop", "mlp.drop", "attn_drop", "mlp_drop"):
                both = [masks[f"blocks.{i}.{kind}"] for i in range(2)]
                assert_apart([[mask] for layer in both for mask in layer])
            # What a rank drops inside is no copy of what is dropped outside.
            for i in range(2):
                inside = masks[f"blocks.{i}.mlp.drop"][0].flatten()
                outside = masks[f"blocks.{i}.mlp_drop"][0].flatten()
                size = min(len(inside), len(outside))
                assert_apart([[inside[:size]], [outside[:size]]])


def test_what_a_rank_draws_for_itself_changes_nothing():
    """A loader that shuffles on one rank only, or on each in its own way."""

    def work(world):
        tp = Mesh(world, dp=2, tp=2)["tp"]

        def draw(places):
            return lambda: torch.rand(5 + world.rank) if tp.rank in places else None

        return [masks_of(tp, before=draw(places), steps=2)[0] for places in ((), (1,), (0, 1))]

    ranks = launch(work, ranks=4)
    for plain, other, _ in ranks:
        # The second of a pair draws: all masks are what they were.
        assert all(same(plain[name], other[name]) for name in plain)
    for pair in (ranks[:2], ranks[2:]):
        for name in pair[0][2]:
            if not is_cut(name):
                assert same(pair[0][2][name], pair[1][2][name])
                assert not same(pair[0][2][name], pair[0][0][name])


def test_the_seed_before_a_step_tells_its_masks():
    def work(world):
        first, again, other = (masks_of(world, seed=seed)[0] for seed in (1, 1, 2))
        model = cut(net(drop=0.5), world)
        gradients = []
        for _ in range(2):
            torch.manual_seed(7)
            model.zero_grad()
            loss_of(model(batch()[0]), batch()[1], world).backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        return (
            all(same(first[name], again[name]) for name in first),
            any(same(first[name], other[name]) for name in first),
        )

    assert launch(work, ranks=2) == [(True, False)] * 2


class Flat(nn.Module):
    """Drops by functions, with rates that its attributes tell."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.hidden_dropout, self.drop_rate = 0.5, 0.5

    def forward(self, x):
        h = F.dropout(self.up(x), self.hidden_dropout, self.training)
        return F.dropout(self.down(h), self.drop_rate, self.training), h


def test_dropout_by_functions_is_known_by_an_attribute():
    def work(world):
        torch.manual_seed(0)
        model = tensor_parallel(Flat(), world, {"up": "column", "down": "row"})
        torch.manual_seed(world.rank)
        whole, part = model(torch.ones(16, 8))
        return whole != 0, part != 0

    ranks = launch(work, ranks=2)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert_apart([[part] for _, part in ranks])


# One process with the same masks


def whole_masks(ranks, sequence):
    """Name -> the masks of the whole model, from those of the ranks."""
    whole = {}
    for name in ranks[0]:
        calls = zip(*(masks[name] for masks in ranks), strict=True)
        if name.endswith("attn.drop"):
            whole[name] = [torch.cat(call, 1) for call in calls]
        elif name.endswith("mlp.drop"):
            whole[name] = [torch.cat(call, -1) for call in calls]
        else:
            whole[name] = [torch.cat(call, 1) if sequence else call[0] for call in calls]
    return whole


class Given(nn.Module):
    """Drops what it is told to."""

    def __init__(self, masks):
        super().__init__()
        self.masks = iter(masks)

    def forward(self, x):
        return x * next(self.masks) * 2


def test_gradients_are_those_of_one_process_with_the_same_masks():
    def work(world):
        results = []
        for sequence in BOTH:
            model = cut(net(drop=0.5, q_norm=True), world, sequence_parallel=sequence)
            masks = watch_masks(model)
            torch.manual_seed(world.rank)
            for step in range(2):
                loss_of(model(batch(step)[0]), batch(step)[1], world).backward()
            results.append((masks, whole_gradients(model)))
        return results

    for ranks in (2, 4):
        results = launch(work, ranks=ranks)
        for number, sequence in enumerate(BOTH):
            plain = net(drop=0.5, q_norm=True)
            masks = whole_masks([r[number][0] for r in results], sequence)
            for name, given in masks.items():
                plain.set_submodule(name, Given(given))
            for step in range(2):
                loss_of(plain(batch(step)[0]), batch(step)[1]).backward()
            want = {name: p.grad for name, p in plain.named_parameters()}
            for result in results:
                torch.testing.assert_close(
                    result[number][1],
                    want,
                    **CLOSE,
                    msg=lambda m, where=(ranks, sequence): f"{where}: {m}",
                )


# Computed again


RECOMPUTED = {
    "not at all": lambda make, x: make(None)(x),
    "blocks": lambda make, x: make(recomputed)(x),
    "blocks, reentrant": lambda make, x: make(
        lambda block, x: checkpoint(block, x, use_reentrant=True)
    )(x),
    "all of it": lambda make, x: recomputed(make(None), x),
    "blocks of all of it": lambda make, x: recomputed(make(recomputed), x),
    "one block of two": lambda make, x: make(
        lambda block, x: recomputed(block, x) if next(block.turn) else block(x)
    )(x),
}


def recomputed_gradients(group, sequence, regather, how, early):
    kept = []

    def make(run):
        kept.append(
            cut(
                net(drop=0.5, q_norm=True, run=run),
                group,
                sequence_parallel=sequence,
                regather=regather,
            )
        )
        for number, block in enumerate(kept[0].blocks):
            block.turn = itertools.repeat(number == 0)
        return kept[0]

    x, y = batch()
    torch.manual_seed(5 + group.rank)
    with set_checkpoint_early_stop(early):
        logits = RECOMPUTED[how](make, x)
        calls = []
        for module in kept[0].modules():
            module.register_forward_hook(lambda *_: calls.append(1))
        loss_of(logits, y, group).backward()
    gradients = [p.grad for p in kept[0].parameters()]
    return gradients, torch.get_rng_state(), len(calls)


@pytest.mark.parametrize("sequence, regather", [(False, False), (True, False), (True, True)])
def test_a_forward_computed_again_drops_the_same(sequence, regather):
    def work(world):
        return {
            (how, early): recomputed_gradients(world, sequence, regather, how, early)
            for how in RECOMPUTED
            for early in (True, False)
        }

    for results in launch(work, ranks=2):
        want, state, calls = results["not at all", True]
        assert calls == 0
        for what, (got, its_state, again) in results.items():
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), what
            assert torch.equal(its_state, state), what
            assert (again > 0) == (what[0] != "not at all")
        # The recomputation that stops early ends fewer modules.
        assert results["all of it", True][2] < results["all of it", False][2]


class Selective(nn.Module):
    """Recomputes from its column layer through a dropout, and no module around them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.drop, self.out = nn.Dropout(0.5), nn.Dropout(0.5)
        self.run = lambda function, x: function(x)

    def hidden(self, x):
        return self.drop(torch.tanh(self.up(x)))

    def forward(self, x):
        return x + self.out(self.down(self.run(self.hidden, x)))


def test_a_part_of_the_inside_computed_again_drops_the_same():
    def gradients(world, run, parts):
        torch.manual_seed(0)
        model = nn.Sequential(*[Selective() for _ in range(parts)]).double()
        for part in model:
            part.run = run
        tensor_parallel(model, world, {"*.up": "column", "*.down": "row"})
        x = torch.linspace(-1, 1, 80, dtype=torch.float64).view(10, 8)
        torch.manual_seed(3)
        for _ in range(2):
            # Two forwards, and then the backward of each.
            for loss in [model(x + i).square().sum() for i in range(2)]:
                loss.backward()
        return [p.grad for p in model.parameters()], torch.get_rng_state()

    def work(world):
        runs = lambda function, x: function(x), recomputed
        return [[gradients(world, run, parts) for run in runs] for parts in (1, 3)]

    for results in launch(work, ranks=2):
        for (want, state), (got, its_state) in results:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert torch.equal(state, its_state)


# What is left of torch's random numbers, and what is sent


def after_one_number(seed):
    torch.manual_seed(seed)
    torch.randint(2**62, (1,))
    return torch.get_rng_state()


def test_a_forward_leaves_the_numbers_outside_but_one():
    def work(world):
        for sequence in BOTH:
            for make in (lambda: net(drop=0.5), lambda: gpt(dropout=0.5)):
                model = cut(make(), world, sequence_parallel=sequence)
                torch.manual_seed(world.rank)
                with bill() as sent:
                    logits = model(batch()[0])
                assert torch.equal(torch.get_rng_state(), after_one_number(world.rank))
                loss_of(logits, batch()[1], world).backward()
                assert torch.equal(torch.get_rng_state(), after_one_number(world.rank))
                # W-1 messages of 8 bytes, all from the first rank or handed on.
                assert sent.by("collective").get("broadcast", 0) in (0, 8, 16)

    launch(work, ranks=4)


def test_evaluation_and_models_that_do_not_drop_draw_nothing_and_send_nothing_for_it():
    def work(world):
        for sequence in BOTH:
            models = [
                cut(net(drop=0.5), world, sequence_parallel=sequence).eval(),
                cut(gpt(dropout=0.5), world, sequence_parallel=sequence).eval(),
                cut(net(), world, sequence_parallel=sequence),
                cut(gpt(), world, sequence_parallel=sequence),
            ]
            for model in models:
                for _ in range(2):
                    torch.manual_seed(3)
                    before = torch.get_rng_state()
                    with bill() as sent:
                        loss_of(model(batch()[0]), batch()[1], world).backward()
                    assert torch.equal(torch.get_rng_state(), before)
                assert "broadcast" not in sent.by("collective")

    launch(work, ranks=2)


@pytest.mark.parametrize("where", ["attn.q", "attn.drop", "mlp.down", "mlp_norm"])
def test_a_forward_that_raised_leaves_the_numbers_and_the_next_forward_right(where):
    def work(world):
        for sequence in BOTH:
            model = cut(net(drop=0.5), world, sequence_parallel=sequence)
            masks, armed = watch_masks(model), [True]

            def burst(*_, armed=armed):
                if armed:
                    armed.clear()
                    raise ArithmeticError("in the middle of a forward")

            part = model.blocks[1].get_submodule(where)
            part.register_forward_pre_hook(burst)
            torch.manual_seed(world.rank)
            with pytest.raises(ArithmeticError):
                model(batch()[0])
            assert torch.equal(torch.get_rng_state(), after_one_number(world.rank))
            masks.clear()
            torch.manual_seed(1)
            loss_of(model(batch()[0]), batch()[1], world).backward()
            want, _ = masks_of(world, sequence)
            assert masks.keys() == want.keys()
            assert all(same(masks[name], want[name]) for name in want)

    launch(work, ranks=2, timeout=20)


def test_parts_that_drop_by_themselves_are_refused_where_ranks_would_drop_differently():
    """Only the forward of the whole module agrees on numbers."""

    def work(world):
        model = cut(net(drop=0.5), world)
        x = torch.ones(1, 4, 16, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="called by itself in training"):
            model.blocks[0](x)
        # In eval mode a part may be called.
        model.eval().blocks[0](x)
        # What does not drop may be in any mode.
        steady = cut(net(), world)
        steady.blocks[0](x)

    launch(work, ranks=2, timeout=20)


@pytest.mark.parametrize("mode", ["all but one block trains", "one block alone trains"])
def test_only_the_parts_in_training_drop_and_whole_ones_alike(mode):
    def work(world):
        model = cut(net(drop=0.5), world)
        masks = watch_masks(model)
        model.train("all" in mode).blocks[1].train()
        model.blocks[0].eval()
        torch.manual_seed(world.rank)
        model(batch()[0])
        return masks

    ranks = launch(work, ranks=2)
    for name in ranks[0]:
        first, second = ranks[0][name], ranks[1][name]
        if "blocks.0" in name or "all" not in mode and "blocks" not in name:
            assert all(mask.all() for mask in first + second)
        elif is_cut(name):
            assert_apart([first, second])
        else:
            assert same(first, second) and not any(mask.all() for mask in first)


class LateDrop(nn.Module):
    """Drops its whole input after a column layer was called with it, or a part before the end."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = self.up(x)
        return self.down(h * torch.sigmoid(self.gate(self.drop(x))))


def test_a_whole_tensor_dropped_where_numbers_are_for_parts_is_refused():
    def work(world):
        model = nn.Sequential(nn.Linear(8, 8), LateDrop())
        tensor_parallel(model, world, {"1.up": "column", "1.gate": "column", "1.down": "row"})
        with pytest.raises(RuntimeError, match="the dropout 1.drop gets a tensor that is whole"):
            model(torch.ones(3, 8))

    launch(work, ranks=2, timeout=20)


def test_heads_that_begin_alike_are_no_whole_tensor():
    """A query projection of zeros gives every head the same weights, on every rank."""

    def work(world):
        model = net(drop=0.5)
        for block in model.blocks:
            nn.init.zeros_(block.attn.q.weight)
            nn.init.zeros_(block.attn.q.bias)
        masks = watch_masks(cut(model, world))
        for _ in range(2):
            loss_of(model(batch()[0]), batch()[1], world).backward()
        return masks

    ranks = launch(work, ranks=2)
    for name in filter(is_cut, ranks[0]):
        assert_apart([masks[name] for masks in ranks])


def test_gathered_outputs_are_whole_and_dropped_alike():
    def work(world):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
        tensor_parallel(model, world, {"0": Column(gather=True)})
        torch.manual_seed(world.rank)
        return model(torch.ones(4, 8))

    one, other = launch(work, ranks=2)
    assert torch.equal(one, other) and (one == 0).any()


def test_every_dropout_of_the_plan_is_seen():
    """If the model of these tests changes, so must what they say is cut."""
    names = [
        name for name, module in net(drop=0.5).named_modules() if isinstance(module, nn.Dropout)
    ]
    assert len(names) == 9 and sum(map(is_cut, names)) == 4
    assert set(NET_PLAN) >= {"blocks.*.attn.o", "blocks.*.mlp.down"}
