"""ZeRO with what is more than float64 weights: 16 bits, buffers, ties, the meta device, drift.

One process is the judge; of mixed precision a simulation on it, of replicas that step apart two
plain copies that are averaged. A buffer that is the second node's own, a tied weight that became
two, a moment in 16 bits, a rank that drew other weights: each differs from it.
"""

import copy

import pytest
import torch
from torch import nn
from zero_training import (
    CLOSE,
    HYBRIDS,
    adamw,
    assert_same,
    batch_for,
    build,
    gpt,
    hybrid,
    loss_of,
    mlp,
    part,
)

from s2s_lib import RankError, ZeRO, all_gather, bill, launch, memory

STAGES = (0, 1, 2, 3)


def every_stage(world, plain):
    for stage in STAGES:
        yield f"stage {stage}", ZeRO(copy.deepcopy(plain), world, stage)
    if world.size == 4:
        yield "hybrid", hybrid(world, 2, 2, copy.deepcopy(plain), 3)


# Made on the meta device


class Rotary(nn.Module):
    """Angles that no state dict holds, and a layer inside."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(3), persistent=False)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.angles.copy_(torch.arange(3.0) + 1)

    def forward(self, x):
        return self.inner(x) * self.angles


def rotary():
    return nn.Sequential(Rotary(), Rotary(), nn.Linear(3, 2))


def test_a_model_made_on_the_meta_device_is_the_one_that_its_seed_draws_on_the_first_rank():
    def work(world):
        results = {}
        for make in (gpt, rotary):
            for stage in STAGES:
                with torch.device("meta"):
                    plain = make()
                torch.manual_seed(5 + world.rank)
                model = ZeRO(plain, world, stage)
                buffers = dict(plain.named_buffers())
                results[make, stage] = model.full_state_dict() | buffers
                if make is gpt:
                    assert plain.head.weight is plain.embed.weight
                out = model(torch.ones(2, 3).long() if make is gpt else torch.randn(4, 3))
                assert out.isfinite().all()
        return results

    expected = {}
    for make in (gpt, rotary):
        plain = build(make, seed=5, dtype=torch.float32)
        expected[make] = plain.state_dict() | dict(plain.named_buffers())
    for results in launch(work, ranks=2):
        for (make, stage), state in results.items():
            what = f"{make.__name__}, stage {stage}"
            # Running statistics were moved by the forward meanwhile.
            names = [n for n in state if "running" not in n and "tracked" not in n]
            for name in names:
                assert torch.equal(state[name], expected[make][name]), f"{what}, {name}"


def test_a_model_made_on_the_meta_device_never_exists_whole_on_a_rank():
    def work(world):
        with torch.device("meta"):
            plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        with memory(plain) as m:
            ZeRO(plain, world, 3)
        return m.peak_total

    unit = (64 * 64 + 64) * 4
    for peak in launch(work, ranks=4):
        # The shards, and while a unit is cut: its drawing, its flat, and their copies on the way.
        assert peak <= 8 * unit / 4 + 4 * unit < 8 * unit


# Replicas that step apart


def test_sync_every_two_is_local_sgd_between_the_copies_and_they_drift_until_averaged():
    def work(world):
        model = hybrid(world, 2, 2, build(mlp), 3, sync_every=2)
        optimizer = adamw(model)
        states, sent = [], []
        for step in range(4):
            optimizer.zero_grad()
            with bill() as between:
                loss_of(model, *part(batch_for(mlp, 12, step), world)).backward()
                optimizer.step()
            sent.append(between.by("group").get(model.replicate.ranks, 0) > 0)
            states.append(model.full_state_dict())
        return states, sent

    copies = [build(mlp), build(mlp)]
    optimizers = [adamw(model) for model in copies]
    results = launch(work, ranks=4)
    for step in range(4):
        for i, (model, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, *[t.chunk(2)[i] for t in batch_for(mlp, 12, step)]).backward()
            optimizer.step()
        if step % 2:
            with torch.no_grad():
                for one, other in zip(*(m.parameters() for m in copies), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
        for rank, (states, sent) in enumerate(results):
            assert_same(states[step], copies[rank // 2].state_dict(), f"step {step}, rank {rank}")
            assert sent == [False, True, False, True]
        apart = results[0][0][step]["0.weight"] - results[2][0][step]["0.weight"]
        assert (apart.abs().max() > 1e-6) == (step % 2 == 0)


# Sixteen bits


def simulate(dtype, steps):
    """fp32 weights and moments, 16-bit working weights; two ranks' gradients averaged in fp32."""
    master = build(mlp, dtype=torch.float32)
    optimizer = adamw(master)
    for step in range(steps):
        working = copy.deepcopy(master).to(dtype)
        halves = []
        for rank in range(2):
            x, y = (t.chunk(2)[rank] for t in batch_for(mlp, 12, step, torch.float32))
            working.zero_grad()
            nn.functional.mse_loss(working(x.to(dtype)), y.to(dtype)).backward()
            halves.append([p.grad.float() for p in working.parameters()])
        for parameter, *grads in zip(master.parameters(), *halves, strict=True):
            parameter.grad = (sum(grads) / 2).to(dtype).float()
        optimizer.step()
    return master.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_equals_its_simulation_on_one_process(dtype):
    def work(world):
        results = {}
        for stage in STAGES:
            model = ZeRO(build(mlp, dtype=torch.float32), world, stage, param_dtype=dtype)
            optimizer = adamw(model)
            for step in range(3):
                optimizer.zero_grad()
                x, y = part(batch_for(mlp, 12, step, torch.float32), world)
                nn.functional.mse_loss(model(x), y.to(dtype)).backward()
                assert {p.grad.dtype for p in model.parameters()} == {dtype}
                optimizer.step()
            moments = [v for s in optimizer.state.values() for v in s.values()]
            assert {v.dtype for v in moments} == {torch.float32}
            results[stage] = model.full_state_dict()
        return results

    want = simulate(dtype, 3)
    for stage, state in launch(work, ranks=2)[0].items():
        assert_same(state, want, f"stage {stage}", {"rtol": 0, "atol": 1e-6})


# Tied weights and buffers


def test_a_tied_head_stays_one_weight_and_is_one_parameter():
    def work(world):
        for what, model in every_stage(world, build(gpt)):
            names = [n for n, _ in model.module.named_parameters()]
            assert "embed.weight" in names and "head.weight" not in names, what
            optimizer = adamw(model)
            for step in range(3):
                loss_of(model, *part(batch_for(gpt, 8, step), world)).backward()
                optimizer.step()
            state = model.full_state_dict()
            assert torch.equal(state["embed.weight"], state["head.weight"])
            with model.gathered() as module:
                assert module.head.weight is module.embed.weight
                assert module.num_parameters() == build(gpt).num_parameters()

    launch(work, ranks=2)


def test_buffers_are_the_first_ranks_after_construction_and_after_training_forwards():
    def work(world):
        said = []
        for shape in HYBRIDS:
            torch.manual_seed(world.rank)
            plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
            plain[1].running_mean.fill_(world.rank + 1.0)
            model = hybrid(world, *shape, plain, 3)
            said.append(plain[1].running_mean.clone())
            model.train()(torch.randn(5, 3, dtype=torch.float64))
            model.eval()(torch.randn(5, 3, dtype=torch.float64))
            before = all_gather(plain[1].running_mean, world).view(4, -1)
            assert not torch.equal(before[0], before[1]), "each rank has its own batch"
            model.train()(torch.ones(5, 3, dtype=torch.float64))
            after = all_gather(plain[1].running_mean, world).view(4, -1)
            # The first rank's, moved by a batch that is the same on all.
            torch.testing.assert_close(after, after[:1].expand(4, -1), **CLOSE)
        return said

    for said in launch(work, ranks=4):
        assert all(torch.equal(mean, torch.ones(4).double()) for mean in said)


def test_weights_changed_under_gathered_are_kept_and_whole_inside_only():
    def work(world):
        for what, model in every_stage(world, build(mlp)):
            shape = model.module[0].weight.shape
            with model.gathered() as module:
                assert module[0].weight.shape == (13, 7), what
                with torch.no_grad():
                    module[0].weight.mul_(2)
            assert model.module[0].weight.shape == shape
            want = build(mlp).state_dict() | {"0.weight": 2 * build(mlp).state_dict()["0.weight"]}
            assert_same(model.full_state_dict(), want, what)
            plain = build(mlp)
            plain.load_state_dict(want)
            x = batch_for(mlp, 2, 0)[0]
            torch.testing.assert_close(model(x), plain(x), **CLOSE)

    launch(work, ranks=2)


def test_the_check_names_the_units_that_ranks_use_in_another_order():
    def work(world):
        layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        model = ZeRO(layers, world, 3, prefetch=False)
        order = layers if world.rank == 0 else reversed(layers)
        layers.forward = lambda x: [x := layer(x) for layer in order][-1]
        model(torch.ones(1, 4))

    with pytest.raises(RankError) as caught:
        launch(work, ranks=2, check=True, timeout=10)
    assert "rank 0: 0" in str(caught.value) and "rank 1: 1" in str(caught.value)
