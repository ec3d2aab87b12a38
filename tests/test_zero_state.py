"""What four ranks saved, one, two and three load: every weight and moment, element by element.

With two units and padding in play a shard begins elsewhere on each number of ranks. A moment that
moves with its neighbour's offset, the state of a rank whose shard is empty, a step count taken for
a shard: each differs here, or in the steps that follow.
"""

import copy

import pytest
import torch
from torch import nn
from zero_training import adamw, alone, assert_same, build, gpt, hybrid, mlp, train

from s2s_lib import ZeRO, launch


def state_of(model, optimizer):
    return model.full_state_dict(), model.full_optimizer_state_dict(optimizer)


def save(world, make, stage, shape=None, **settings):
    plain = build(make, seed=world.rank)
    model = hybrid(world, *shape, plain, stage, **settings) if shape else ZeRO(plain, world, stage)
    optimizer = adamw(model)
    train(model, make, world, steps=3, optimizer=optimizer)
    return state_of(model, optimizer)


def load(world, make, stage, saved, shape=None):
    """Two steps after loading; what was loaded; and what that is after the two."""
    plain = build(make, seed=7 + world.rank)
    model = hybrid(world, *shape, plain, stage) if shape else ZeRO(plain, world, stage)
    optimizer = adamw(model)
    model.load_full_state_dict(saved[0])
    model.load_full_optimizer_state_dict(optimizer, saved[1])
    loaded = state_of(model, optimizer)
    train(model, make, world, steps=2, optimizer=optimizer, first=3)
    return loaded, model.full_state_dict()


def assert_equal_states(got, want):
    assert got.keys() == want.keys() == {"state", "param_groups"}
    assert got["param_groups"] == want["param_groups"]
    assert got["state"].keys() == want["state"].keys()
    for name, entry in want["state"].items():
        assert got["state"][name].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(got["state"][name][key], value), (name, key)


@pytest.mark.parametrize("make", [gpt, mlp])
def test_four_ranks_save_and_any_number_loads_and_goes_on_as_one_process_would(make):
    saved = launch(save, make, 3, ranks=4)
    assert all(torch.equal(saved[0][0][n], other[0][n]) for other in saved for n in other[0])
    expected, _ = alone(make)
    for ranks, stage in [(1, 3), (2, 3), (3, 3), (3, 1), (2, 0)]:
        for loaded, after in launch(load, make, stage, saved[0], ranks=ranks):
            assert_same(loaded[0], saved[0][0], close={"rtol": 0, "atol": 0})
            assert_equal_states(loaded[1], saved[0][1])
            assert_same(after, expected, f"loaded on {ranks} ranks at stage {stage}")


def test_a_hybrid_of_four_saves_and_hybrids_and_single_copies_of_two_load():
    saved = launch(save, gpt, 3, (2, 2), ranks=4)[0]
    expected, _ = alone(gpt)
    for ranks, shape in [(2, (1, 2)), (2, (2, 1)), (2, None), (4, (4, 1)), (1, None)]:
        for loaded, after in launch(load, gpt, 3, saved, shape, ranks=ranks):
            assert_equal_states(loaded[1], saved[1])
            assert_same(after, expected, f"{ranks} ranks, {shape}")


def test_a_plain_module_loads_what_ranks_saved_and_ranks_load_what_it_saved():
    weights, _ = launch(save, gpt, 2, ranks=3)[0]
    plain = build(gpt, seed=9)
    plain.load_state_dict(weights)
    assert plain.head.weight is plain.embed.weight

    def work(world):
        model = ZeRO(build(gpt, seed=world.rank), world, 3)
        model.load_full_state_dict(plain.state_dict())
        return model.full_state_dict()

    for state in launch(work, ranks=2):
        assert_same(state, plain.state_dict(), close={"rtol": 0, "atol": 0})


OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def descend(model, optimizer, rank, size, steps):
    for step in steps:
        random = torch.Generator().manual_seed(step)
        x = torch.randn(4 * 3, 5, generator=random, dtype=torch.float64).chunk(size)[rank]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layers(x) * self.scale


def optimize(world, name, saved=None):
    model = ZeRO(build(Scaled, seed=world.rank), world, 3)
    optimizer = OPTIMIZERS[name](model.parameters())
    if saved is None:
        descend(model, optimizer, world.rank, world.size, range(3))
    else:
        model.load_full_state_dict(saved[0])
        model.load_full_optimizer_state_dict(optimizer, saved[1])
        descend(model, optimizer, world.rank, world.size, range(3, 5))
    return state_of(model, optimizer)


def test_every_elementwise_optimizer_is_saved_and_loaded_whole():
    def work(world, saved=None):
        return {n: optimize(world, n, saved and saved[n]) for n in OPTIMIZERS}

    saved = launch(work, ranks=4)[0]
    for ranks in (1, 3):
        after = launch(work, saved, ranks=ranks)[0]
        for name, make in OPTIMIZERS.items():
            plain = build(Scaled)
            optimizer = make(plain.parameters())
            descend(plain, optimizer, 0, 1, range(5))
            assert_same(after[name][0], plain.state_dict(), f"{name} on {ranks} ranks")
            for key, tensor in plain.named_parameters():
                for what, value in optimizer.state[tensor].items():
                    got = after[name][1]["state"][key][what]
                    torch.testing.assert_close(
                        got, value, rtol=0, atol=1e-10, msg=lambda m, n=name, w=what: f"{n} {w} {m}"
                    )


def test_an_optimizers_own_state_dict_comes_back_on_the_same_ranks_with_a_scheduler():
    def work(world):
        def start():
            model = ZeRO(build(mlp, seed=world.rank), world, 3)
            optimizer = adamw(model)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        model, optimizer, scheduler = start()
        train(model, mlp, world, steps=2, optimizer=optimizer)
        scheduler.step()
        again = start()
        again[0].load_full_state_dict(model.full_state_dict())
        # Torch's own load takes the tensors as they are, without a copy.
        again[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again[2].load_state_dict(scheduler.state_dict())
        for m, o in ((model, optimizer), again[:2]):
            train(m, mlp, world, steps=2, optimizer=o, first=2)
        return model.full_state_dict(), again[0].full_state_dict()

    for one, other in launch(work, ranks=3):
        assert_same(one, other, close={"rtol": 0, "atol": 0})


def test_mixed_precision_saves_what_the_optimizer_steps_and_loads_it_unrounded():
    def work(world):
        plain = build(mlp, dtype=torch.float32)
        model = ZeRO(plain, world, 3, param_dtype=torch.bfloat16)
        model.load_full_state_dict({n: t.float() for n, t in odd.items()})
        return model.full_state_dict()

    odd = {n: torch.randn_like(t) for n, t in build(mlp).state_dict().items()}
    for state in launch(work, ranks=2):
        assert_same(state, {n: t.float() for n, t in odd.items()}, close={"rtol": 0, "atol": 0})


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing():
    def work(world):
        model = ZeRO(build(mlp), world, 3)
        optimizer = adamw(model)
        before = state = model.full_state_dict()
        bad = {n: t for n, t in state.items() if n != "0.bias"} | {"1.bias": torch.ones(3)}
        bad["0.weight"] = torch.ones(7, 13)
        with pytest.raises(ValueError, match="missing 0.bias") as caught:
            model.load_full_state_dict(bad)
        for words in ("unexpected 1.bias", "0.weight is (7, 13), not (13, 7)"):
            assert words in str(caught.value)
        assert_same(model.full_state_dict(), before, close={"rtol": 0, "atol": 0})
        saved = model.full_optimizer_state_dict(optimizer)
        with pytest.raises(ValueError, match="groups"):
            one_group = torch.optim.AdamW(model.parameters())
            model.load_full_optimizer_state_dict(one_group, saved)
        stranger = torch.optim.AdamW(build(mlp).parameters())
        with pytest.raises(ValueError, match="not this model's"):
            model.full_optimizer_state_dict(stranger)

    launch(work, ranks=2)
