"""What ZeRO cannot do it says at once, on every rank, with the way out.

Silence would be worse in each case: an optimizer that steps memory nobody uses, a weight that is
read while only its shard is there, gradients averaged twice, replicas that are none.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from zero_training import batch_for, build, gpt, loss_of, mlp

from s2s_lib import DDP, Mesh, ZeRO, launch


def alone(test):
    """Run on one rank, where most of this can be seen."""
    launch(lambda world: test(world), ranks=1)


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "3", None, True, torch.float32])
def test_stages_are_0_to_3(stage):
    @alone
    def _(world):
        with pytest.raises(ValueError, match="0 cuts nothing"):
            ZeRO(build(mlp), world, stage)


def test_other_options_are_checked_too():
    @alone
    def _(world):
        for settings, words in [
            ({"sync_every": 0, "replicate": world}, "every 1, 2, ... steps"),
            ({"sync_every": 2}, "give replicate="),
            ({"param_dtype": torch.int32}, "torch.bfloat16, torch.float16 or None"),
            ({"param_dtype": "bfloat16"}, "torch.bfloat16, torch.float16 or None"),
            ({"units": nn.Conv2d}, "contains none"),
            ({"units": [nn.Linear(2, 2)]}, "no part of the module"),
        ]:
            with pytest.raises(ValueError, match=words):
                ZeRO(build(mlp), world, 3, **settings)
        for bad in (build(mlp).parameters(), None):
            with pytest.raises(TypeError, match="wraps a torch.nn.Module"):
                ZeRO(bad, world, 3)
        with pytest.raises(TypeError, match="units is a class"):
            ZeRO(build(mlp), world, 3, units=["0"])
        with pytest.raises(TypeError, match="expected a Group"):
            ZeRO(build(mlp), None, 3)
        with pytest.raises(ValueError, match="nothing to cut"):
            ZeRO(nn.ReLU(), world, 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_built_before_wrapping_is_told_at_its_first_step(stage):
    def work(world):
        plain = build(mlp)
        old = torch.optim.AdamW(plain.parameters())
        loss_of(plain, *batch_for(mlp, 4, 0)).backward()
        old.step()
        model = ZeRO(plain, world, stage)
        model.zero_grad()
        loss_of(model, *batch_for(mlp, 4, 0)).backward()
        if stage:
            # It has moments of whole weights.
            with pytest.raises(RuntimeError, match="before ZeRO"):
                old.step()

    launch(work, ranks=2)


def test_optimizers_that_look_at_whole_tensors_are_refused():
    def work(world):
        plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model = ZeRO(plain, world, 1)
        model(torch.ones(1, 4)).sum().backward()
        for optimizer in (
            torch.optim.Adafactor(model.parameters()),
            torch.optim.LBFGS(model.parameters()),
        ):
            with pytest.raises(TypeError, match="whole tensors"):
                optimizer.step(*[lambda: 0.0] * isinstance(optimizer, torch.optim.LBFGS))

    launch(work, ranks=2)


def test_a_weight_used_outside_of_its_forward_is_named_with_the_way_out():
    def work(world):
        for stage in (1, 3):
            model = ZeRO(build(gpt), world, stage)
            x = torch.ones(1, 2, dtype=torch.long)
            with pytest.raises(RuntimeError, match="embed.weight is used outside") as caught:
                model.module.embed(x)
            assert "model.gathered()" in str(caught.value)
            with model.gathered() as module:
                module.embed(x)

    launch(work, ranks=2)


def test_replicas_and_shards_that_do_not_tile_the_world_are_refused_on_all_ranks():
    def work(world):
        mesh = Mesh(world, replicate=2, shard=2)
        crossed = world.subgroup([0, 3] if world.rank in (0, 3) else [1, 2])
        pairs = [
            (mesh["shard"], mesh["shard"]),
            (world, world),
            (mesh["shard"], world),
            (mesh["shard"], crossed),
        ]
        for group, replicate in pairs:
            with pytest.raises(ValueError, match="do not tile"):
                ZeRO(build(mlp), group, 3, replicate=replicate)

    launch(work, ranks=4, timeout=10)


def test_other_modules_on_another_rank_are_refused_everywhere():
    def work(world):
        plain = build(mlp) if world.rank else build(gpt)
        with pytest.raises(ValueError, match="built different modules"):
            ZeRO(plain, world, 3)

    launch(work, ranks=2)


def test_a_module_is_averaged_by_one_strategy_only():
    @alone
    def _(world):
        for one in (DDP(build(mlp), world), ZeRO(build(mlp), world, 2)):
            with pytest.raises(ValueError, match="averaged twice"):
                ZeRO(one.module, world, 3)
        with pytest.raises(ValueError, match="averaged twice"):
            DDP(ZeRO(build(mlp), world, 3).module, world)


def test_several_dtypes_in_a_unit_have_a_buffer_each_and_are_never_cast():
    def work(world):
        for stage in (0, 1, 2, 3):
            plain = nn.Sequential(nn.Linear(5, 3, dtype=torch.bfloat16), nn.LayerNorm(3))
            plain.forward = lambda x, m=plain: m[1](m[0](x.bfloat16()).float())
            model = ZeRO(plain, world, stage)
            seen = []
            for layer in plain:
                layer.register_forward_hook(lambda m, i, o, s=seen: s.append(m.weight.dtype))
            model(torch.ones(2, 5)).square().sum().backward()
            assert seen == [torch.bfloat16, torch.float32]
            assert [p.grad.dtype for p in plain.parameters()] == [torch.bfloat16] * 2 + [
                torch.float32
            ] * 2

    launch(work, ranks=2)


def test_gradients_kept_under_no_sync_are_not_stepped_and_can_be_dropped():
    def work(world):
        for stage in (0, 1, 2, 3):
            model = ZeRO(build(mlp), world, stage)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.no_sync():
                loss_of(model, *batch_for(mlp, 2, 0)).backward()
            with pytest.raises(RuntimeError, match="not reduced"):
                optimizer.step()
            model.zero_grad()
            optimizer.step()

    launch(work, ranks=2)


def test_what_would_tear_it_from_its_memory_is_refused():
    @alone
    def _(world):
        model = ZeRO(build(mlp), world, 3)
        for change in (model.float, lambda: model.to(torch.float32), model.half):
            with pytest.raises(RuntimeError, match="convert the module first"):
                change()
        for keep in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="full_state_dict"):
                keep(model)
        model.module[0].weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad of 0.weight"):
            model(batch_for(mlp, 2, 0)[0])


def test_sparse_gradients_and_graphs_through_the_reduction_are_refused():
    def work(world):
        model = ZeRO(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), world, 2)
        with pytest.raises(RuntimeError, match="sparse=False"):
            model(torch.tensor([1])).sum().backward()
        model = ZeRO(build(mlp), world, 2)
        with pytest.raises(RuntimeError, match="create_graph"):
            loss_of(model, *batch_for(mlp, 2, 0)).backward(create_graph=True)

    launch(work, ranks=2)


def test_a_unit_may_change_its_input_in_place():
    def work(world):
        plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
        other = copy.deepcopy(plain)
        model = ZeRO(plain, world, 3, units=[plain[0], plain[1], plain[2]])
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
        model(x).square().sum().backward()
        other(x).square().sum().backward()
        grads = [
            model.flat_of[p].part_of(q.grad, i % 2)
            for i, (p, q) in enumerate(zip(plain.parameters(), other.parameters(), strict=True))
        ]
        for parameter, gradient in zip(plain.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

    launch(work, ranks=2)
