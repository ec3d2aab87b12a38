"""What ZeRO and DDP make of uses that nobody planned: the right numbers, or a refusal in words."""

import gc
import weakref

import pytest
import torch
from torch import nn

from s2s_lib import DDP, Mesh, RankError, ZeRO, bill, clip_grad_norm_, launch

CLOSE = {"rtol": 0, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Branches(nn.Module):
    """Blocks of one shape, of which a rank runs those it is told, in that order."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x, order):
        for number in order:
            x = self.blocks[number](x)
        return x


def seeded(make):
    torch.manual_seed(0)
    return make().double()


def data(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def steps(model, runs, rank=None):
    """Two steps of SGD; `runs[rank]` is what each rank's forward gets besides its data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ranks = range(len(runs)) if rank is None else [rank]
        loss = sum(model(data(r), *runs[r]).square().mean() for r in ranks)
        (loss / len(ranks)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("orders", [([0, 1, 2], [2, 0, 1]), ([0, 1, 2], [0, 2]), ([0, 1], [2])])
def test_ranks_may_run_different_units_where_weights_are_not_cut(orders):
    runs = [(order,) for order in orders]
    expected = steps(seeded(Branches), runs).state_dict()

    def work(world):
        return [
            steps(ZeRO(seeded(Branches), world, s), runs, world.rank).full_state_dict()
            for s in (0, 1, 2)
        ]

    for states in launch(work, ranks=2, timeout=10):
        for state in states:
            torch.testing.assert_close(state, dict(expected), **CLOSE)


def test_where_weights_are_cut_other_units_on_some_ranks_are_named_and_never_mixed_up():
    def work(world):
        model = ZeRO(seeded(Branches), world, 3, prefetch=False)
        model(data(0), [0, 1, 2] if world.rank == 0 else [0, 2])

    with pytest.raises(RankError, match=r"blocks\.1\.up\.weight|blocks\.2\.up\.weight"):
        launch(work, ranks=2, timeout=2)


class Normalised(nn.Module):
    """Divides its weight by its norm whenever it runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.div_(self.layer.weight.norm())
        return self.layer(x)


def test_a_weight_that_its_own_forward_changes_stays_changed():
    def make():
        return nn.Sequential(Normalised(), Normalised())

    expected = steps(seeded(make), [()])

    def work(world):
        models = [ZeRO(seeded(make), world, stage) for stage in range(4)]
        return [steps(model, [()], rank=0).full_state_dict() for model in models]

    for states in launch(work, ranks=2, timeout=10):
        for state in states:
            torch.testing.assert_close(state, dict(expected.state_dict()), **CLOSE)


def test_a_unit_that_runs_twice_in_mixed_precision_has_the_gradient_of_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.layer(self.layer(x)))

    def work(world):
        torch.manual_seed(0)
        plain = Twice().bfloat16()
        plain(data(0).bfloat16()).sum().backward()
        found = []
        for stage in range(4):
            torch.manual_seed(0)
            model = ZeRO(Twice(), world, stage, param_dtype=torch.bfloat16, units=nn.Linear)
            model(data(0).bfloat16()).sum().backward()
            found.append(clip_grad_norm_(model, 1e9).item())
        return found, nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()

    for found, expected in launch(work, ranks=2, timeout=10):
        assert found == pytest.approx([expected] * 4, rel=2e-2)


def test_a_model_that_is_dropped_is_freed():
    def work(world):
        alive = []
        for make in (
            lambda m: ZeRO(m, world, 3),
            lambda m: ZeRO(m, world, 1),
            lambda m: DDP(m, world),
        ):
            model = make(nn.Linear(4, 4))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            seen = weakref.ref(model)
            del model, optimizer
            gc.collect()
            alive.append(seen() is not None)
        return alive

    assert launch(work, ranks=2) == [[False] * 3] * 2


def test_gathered_weights_can_be_used_and_changed_and_keep_what_sixteen_bits_cannot_hold():
    def work(world):
        for stage in range(4):
            for dtype in (None, torch.bfloat16):
                torch.manual_seed(0)
                model = ZeRO(Branches(), world, stage, param_dtype=dtype)
                before = model.full_state_dict()
                x = data(0).to(dtype or torch.float32)
                with torch.no_grad(), model.gathered() as plain:
                    inside = model(x, [0, 1])
                    with pytest.raises(RuntimeError, match="does not nest"), model.gathered():
                        pass
                    plain.blocks[0].up.bias.fill_(2.0)
                after = model.full_state_dict()
                before["blocks.0.up.bias"] = torch.full((6,), 2.0)
                torch.testing.assert_close(after, before, rtol=0, atol=0)
                assert not torch.equal(model(x, [0, 1]), inside)

    launch(work, ranks=2, timeout=10)


class UNet(nn.Module):
    """Lists of lists, and one input for all blocks."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(Mixer() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        memory = x * 2
        for level in self.levels:
            for mixer in level:
                x = mixer(x, memory)
        return x


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, memory):
        return torch.relu_(self.layer(x) + memory)


def test_an_input_that_goes_into_every_unit_keeps_none_of_them_whole():
    expected = steps(seeded(UNet), [(), ()]).state_dict()

    def work(world):
        model = ZeRO(seeded(UNet), world, 3)
        assert [unit.name for unit in model.units[:-1]] == [
            f"levels.{i}.{j}" for i in (0, 1) for j in (0, 1)
        ]
        most = []
        for unit in model.units:
            unit.module.register_full_backward_hook(
                lambda *_: most.append(sum(u.is_open for u in model.units))
            )
        x = data(world.rank).requires_grad_()
        model(x).sum().backward()
        model.zero_grad()
        assert max(most) <= 3, most
        return steps(model, [(), ()], world.rank).full_state_dict()

    for state in launch(work, ranks=2, timeout=10):
        torch.testing.assert_close(state, dict(expected), **CLOSE)


def test_clipping_in_sixteen_bits_does_not_round_the_factor():
    def work(world):
        model = ZeRO(nn.Linear(64, 64).half(), world, 3)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 60000.0)
        norm = clip_grad_norm_(model, 100.0)
        return norm.item(), clip_grad_norm_(model, 1e9).item()

    for before, after in launch(work, ranks=2):
        assert before == pytest.approx(60000 * 4160**0.5, rel=1e-3)
        assert after == pytest.approx(100, rel=2e-3)


def test_saving_an_optimizer_sends_each_moment_once():
    def work(world):
        layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
        model = ZeRO(nn.Sequential(nn.Sequential(*layers), nn.ReLU()), world, 3, units=[])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        with bill() as sent:
            state = model.full_optimizer_state_dict(optimizer)
        assert len(state["state"]) == 8
        return sent.bytes

    for sent in launch(work, ranks=2):
        assert sent < 2 * 8 * 64 * 64 * 4 / 2 + 10_000


# Refusals


def test_gradients_that_a_failed_backward_took_with_it_are_missed():
    class Fails(nn.Linear):
        fail = False

        def forward(self, x):
            weight = self.weight * 1
            if self.fail:
                weight.register_hook(lambda _: 1 / 0)
            return nn.functional.linear(x, weight, self.bias)

    def work(world):
        layer = Fails(2, 2)
        model = ZeRO(layer, world, 2)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        layer.fail = True
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2)).sum().backward()
        layer.fail = False
        with pytest.raises(RuntimeError, match="took with it the gradients"):
            model(torch.ones(1, 2))
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        return [p.grad.sum().item() for p in model.parameters()]

    assert launch(work, ranks=1, timeout=10) == [[4.0, 2.0]]


def test_a_closure_in_mixed_precision_is_refused_before_anything_changes():
    def work(world):
        model = ZeRO(nn.Linear(2, 2), world, 1, param_dtype=torch.bfloat16)
        torch.optim.SGD(model.parameters(), lr=1).step(lambda: model(torch.ones(1, 2)).sum())

    assert "run forward and backward first" in refusal(work)


def refusal(work, ranks=2):
    with pytest.raises(RankError) as raised:
        launch(work, ranks=ranks, timeout=5)
    return raised.value.summary


def test_options_that_differ_between_ranks_are_named_before_anything_is_cut():
    for name, pair in {
        "stage": (1, 3),
        "prefetch": (True, False),
        "param_dtype": (None, torch.bfloat16),
    }.items():

        def work(world, name=name, pair=pair):
            ZeRO(nn.Linear(4, 4), world, **({"stage": 2} | {name: pair[world.rank]}))

        assert f"{name}={pair[0]} on rank 0 and {name}={pair[1]} on rank 1" in refusal(work)


def test_replicas_on_some_ranks_only_are_refused():
    def work(world):
        shard = Mesh(world, replicate=2, shard=2)["shard"]
        ZeRO(nn.Linear(4, 4), shard, 3, replicate=world.subgroup([0, 2]))

    assert "replicate=2 on rank 0 and replicate=None on rank 1" in refusal(work, ranks=4)


def test_a_layer_that_comes_after_wrapping_is_refused_by_name():
    for make in (lambda m, w: ZeRO(m, w, 2), DDP):

        def work(world, make=make):
            model = make(nn.Sequential(nn.Linear(2, 2)), world)
            model.module.append(nn.Linear(2, 2))
            model(torch.ones(1, 2))

        said = refusal(work)
        assert "1.weight is new since" in said and "finish the module first" in said


def test_a_parameter_that_is_given_other_memory_is_refused_by_name():
    def work(world):
        model = ZeRO(nn.Linear(4, 4), world, 1)
        for parameter in model.parameters():
            parameter.data = parameter.data - 1
        model(torch.ones(1, 4))

    assert "weight was given other memory" in refusal(work)


def test_outputs_in_which_no_tensor_is_found_are_refused():
    class Plain:
        pass

    class Opaque(nn.Linear):
        def forward(self, x):
            out = Plain()
            out.y = super().forward(x)
            return out

    def work(world):
        ZeRO(Opaque(2, 2), world, 3)(torch.ones(1, 2))

    assert "returns a Plain, and ZeRO finds no tensor in it" in refusal(work)


def test_a_strategy_around_another_is_refused_as_such():
    def twice(world):
        ZeRO(ZeRO(nn.Linear(3, 3), world, 3), world, 3)

    def around(world):
        DDP(ZeRO(nn.Linear(3, 3), world, 3), world)

    for work in (twice, around):
        assert "is in a DDP or ZeRO already" in refusal(work)


def test_a_state_dict_with_something_else_than_tensors_is_refused_by_name():
    def work(world):
        model = ZeRO(nn.Linear(2, 2), world, 3)
        model.load_full_state_dict({"weight": 1.0, "bias": torch.ones(2, device="meta")})

    said = refusal(work)
    assert "weight is 1.0, not a tensor" in said and "bias is tensor(" in said
