"""Whole weights from parts, and parts from whole weights, at any number of ranks.

What four ranks save, one, two and four load, and go on as one process would. A part put where
another rank's belongs, a fused weight joined straight through its blocks, an odd vocabulary joined
at the wrong row, a tied weight that became two: each differs bit for bit. What does not fit is
refused with all that is wrong, before anything is changed.
"""

import pytest
import torch
from test_tensor_uses import (
    BOTH,
    CLOSE,
    VOCAB,
    adamw,
    batch,
    cut,
    gpt,
    loss_of,
    net,
    train,
)
from torch import nn

from s2s_lib import (
    DDP,
    Column,
    ColumnParallelLinear,
    Mesh,
    RowParallelLinear,
    VocabParallelEmbedding,
    ZeRO,
    bill,
    clip_grad_norm_,
    full_state_dict,
    launch,
    load_full_state_dict,
    tensor_parallel,
)

GROUPS = {4: [[0, 1, 2, 3], [3, 1], [2]], 2: [[0, 1], [1, 0]], 1: [[0]]}
MODELS = {
    "tied": lambda seed=0: gpt(seed),
    "untied": lambda seed=0: gpt(seed, tied=False),
    "fused": lambda seed=0: net(seed, q_norm=True),
}


def assert_bitwise(got, want, what=""):
    assert list(got) == list(want), what
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), f"{what}: {name}"


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_is_what_was_cut_and_any_number_of_ranks_loads_it(name):
    make = MODELS[name]

    def work(world, saved):
        results = []
        for ranks in GROUPS[world.size]:
            if group := world.subgroup(ranks):
                for sequence in BOTH:
                    model = cut(make(), group, sequence_parallel=sequence)
                    first = full_state_dict(model)
                    other = cut(make(seed=7 + world.rank), group, sequence_parallel=sequence)
                    with bill() as sent:
                        load_full_state_dict(other, saved)
                    assert sent.bytes == 0
                    results.append((first, full_state_dict(other)))
        return results

    want, saved = make().state_dict(), make(seed=3).state_dict()
    for ranks in GROUPS:
        for results in launch(work, saved, ranks=ranks):
            for first, loaded in results:
                assert_bitwise(first, want, f"{ranks} ranks, cut")
                assert_bitwise(loaded, saved, f"{ranks} ranks, loaded")


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_at_another_number_of_ranks_as_in_one_process(name):
    make = MODELS[name]

    def steps(model, group, first):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (first, first + 1):
            optimizer.zero_grad()
            loss_of(model(batch(step)[0]), batch(step)[1], group).backward()
            clip_grad_norm_(model, 0.05)
            optimizer.step()

    def work(world, saved, first):
        model = cut(make(seed=9), world, sequence_parallel=first > 0)
        load_full_state_dict(model, saved)
        steps(model, world, first)
        return full_state_dict(model)

    plain = make()
    state = plain.state_dict()
    for first, ranks in ((0, 4), (2, 1), (4, 2)):
        results = launch(work, state, first, ranks=ranks)
        for result in results[1:]:
            assert_bitwise(result, results[0])
        state = results[0]
        steps(plain, None, first)
        torch.testing.assert_close(state, dict(plain.state_dict()), **CLOSE)
    # A plain module loads it, strictly.
    other = make(seed=5)
    other.load_state_dict(state, strict=True)
    assert_bitwise(other.state_dict(), state)


def test_the_whole_is_a_copy_without_gradient_and_loading_copies_into_the_parts():
    def work(world):
        model = cut(gpt(), world)
        objects = [(id(p), p.data_ptr()) for p in model.parameters()]
        state = full_state_dict(model)
        assert not any(value.requires_grad for value in state.values())
        kept = {name: value.clone() for name, value in state.items()}
        for value in state.values():
            value.add_(1)
        assert_bitwise(full_state_dict(model), kept)
        load_full_state_dict(model, state)
        loaded = full_state_dict(model)
        for value in state.values():
            value.zero_()
        assert_bitwise(full_state_dict(model), loaded)
        assert [(id(p), p.data_ptr()) for p in model.parameters()] == objects
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        assert model.head.weight is model.embed.weight

    launch(work, ranks=2)


def test_the_optimizer_built_before_loading_steps_what_was_loaded():
    def work(world):
        model = cut(gpt(seed=8), world)
        optimizer = adamw(model)
        load_full_state_dict(model, gpt().state_dict())
        train(model, world, optimizer=optimizer, steps=2)
        same = cut(gpt(), world)
        train(same, world, steps=2)
        assert_bitwise(full_state_dict(model), full_state_dict(same))

    launch(work, ranks=2)


def test_the_bytes_of_what_is_cut_are_sent_once():
    def work(world):
        model = cut(gpt(tied=False), world)
        parts = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        with bill() as sent:
            full_state_dict(model)
        assert sent.bytes == parts * 8, sent
        assert set(sent.by("collective")) == {"all_gather"}

    launch(work, ranks=2)


def test_what_does_not_fit_is_named_and_nothing_is_changed():
    def work(world):
        model = cut(gpt(), world)
        before = full_state_dict(model)
        good = gpt(seed=3).state_dict()

        def refused(state, *words):
            with pytest.raises(ValueError) as caught:
                load_full_state_dict(model, state)
            for word in ("does not fit the module", *words):
                assert word in str(caught.value), str(caught.value)
            assert_bitwise(full_state_dict(model), before)

        refused({n: v for n, v in good.items() if n != "norm.weight"}, "missing norm.weight")
        refused(good | {"norm.bias": torch.ones(16)}, "unexpected norm.bias")
        part = good["blocks.0.attn.q.weight"][:8]
        refused(good | {"blocks.0.attn.q.weight": part}, "q.weight is [8, 16]", "[16, 16]")
        # The parts themselves are not what is to be given, nor is another vocabulary.
        refused(model.state_dict(), "blocks.0.attn.q.weight is [8, 16]", "embed.weight is [")
        refused(good | {"embed.weight": torch.ones(18, 16)}, "embed.weight is [18, 16]", "[17, 16]")
        refused(good | {"norm.weight": torch.ones(1)}, "norm.weight is [1]")
        refused(good | {"norm.weight": None}, "norm.weight")
        refused({}, "missing embed.weight", "missing head.weight", "missing norm.weight")
        refused(
            {n: v for n, v in good.items() if n != "norm.weight"} | {"extra": torch.ones(1)},
            "missing norm.weight",
            "unexpected extra",
        )
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(good)
        load_full_state_dict(model, good)
        assert_bitwise(full_state_dict(model), good)

    launch(work, ranks=2, timeout=20)


def test_wrapped_in_data_parallelism_the_whole_is_still_had():
    def work(world):
        mesh = Mesh(world, dp=2, tp=2)
        results = [full_state_dict(DDP(cut(gpt(), mesh["tp"]), mesh["dp"]).module)]
        for stage in (1, 3):
            model = ZeRO(cut(gpt(), mesh["tp"]), mesh["dp"], stage)
            with model.gathered() as module:
                results.append(full_state_dict(module))
                # Written inside, it is kept.
                load_full_state_dict(module, gpt(seed=3).state_dict())
            with model.gathered() as module:
                results.append(full_state_dict(module))
            if stage == 3:
                with pytest.raises((ValueError, RuntimeError), match="gathered"):
                    full_state_dict(model)
        return results

    want = gpt().state_dict(), gpt(seed=3).state_dict()
    for ddp, *zero in launch(work, ranks=4, timeout=20):
        assert_bitwise(ddp, want[0])
        for i, state in enumerate(zero):
            assert_bitwise(state, want[i % 2])


class Mixed(nn.Module):
    """Buffers of both kinds, a frozen layer, and blocks of unequal sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8, padding_idx=16)
        self.norm = nn.BatchNorm1d(8)
        self.qkv, self.o = nn.Linear(8, 16), nn.Linear(16, 8)
        self.o.weight.requires_grad_(False)
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def test_buffers_frozen_weights_and_unequal_blocks_are_part_of_it():
    plan = {"embed": "vocab", "qkv": Column(blocks=(8, 4, 4)), "o": "row"}

    def make(seed):
        torch.manual_seed(seed)
        module = Mixed()
        module.norm.running_mean.normal_()
        return module

    def work(world, saved):
        model = tensor_parallel(make(0), world, plan)
        first = full_state_dict(model)
        parts = {name: list(p.shape) for name, p in model.named_parameters()}
        load_full_state_dict(model, saved)
        assert not model.o.weight.requires_grad
        return first, parts, full_state_dict(model)

    saved = make(1).state_dict()
    for ranks in (1, 2, 4):
        for rank, (first, parts, loaded) in enumerate(launch(work, saved, ranks=ranks)):
            assert_bitwise(first, make(0).state_dict())
            assert_bitwise(loaded, saved)
            assert parts["qkv.weight"] == [16 // ranks, 8] and parts["o.bias"] == [8]
            assert parts["o.weight"] == [8, 16 // ranks]
            rows = [(rank + 1) * VOCAB // ranks - rank * VOCAB // ranks, -(-VOCAB // ranks)]
            assert parts["embed.weight"][0] in rows


def test_layers_alone_and_modules_without_any_have_a_whole_state_too():
    def work(world):
        results = []
        for make in (
            lambda: ColumnParallelLinear(6, 8, world, blocks=2),
            lambda: RowParallelLinear(8, 6, world),
            lambda: VocabParallelEmbedding(9, 4, world),
            lambda: nn.Linear(3, 2),
            lambda: nn.Sequential(nn.Linear(3, 2), ColumnParallelLinear(2, 4, world, bias=False)),
        ):
            torch.manual_seed(0)
            results.append(full_state_dict(make()))
        return results

    wants = []
    for make in (
        lambda: nn.Linear(6, 8),
        lambda: nn.Linear(8, 6),
        lambda: nn.Embedding(9, 4),
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4, bias=False)),
    ):
        torch.manual_seed(0)
        wants.append(make().state_dict())
    for ranks in (1, 2, 4):
        for results in launch(work, ranks=ranks):
            for got, want in zip(results, wants, strict=True):
                assert_bitwise(got, want)
