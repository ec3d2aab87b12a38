"""ZeRO in the hands of people: accumulation, evaluation, errors, several optimizers.

What one process does with a plain module is the judge throughout, in float64 to 1e-10. Gradients of
the last micro-batch alone, a unit left whole by an evaluation, a graph that takes another forward's
weights, what a failed backward left behind: each ends in other weights.
"""

import copy

import pytest
import torch
from test_grads import Vector
from torch import nn
from zero_training import (
    CLOSE,
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

from s2s_lib import ZeRO, bill, launch

STAGES = (0, 1, 2, 3)


def every_stage(world, plain):
    for stage in STAGES:
        yield f"stage {stage}", ZeRO(copy.deepcopy(plain), world, stage)
    if world.size == 4:
        yield "hybrid", hybrid(world, 2, 2, copy.deepcopy(plain), 3)


# Accumulation


def test_gradients_of_all_micro_batches_count_with_and_without_no_sync():
    def work(world):
        totals = []
        for stage in STAGES:
            for silent in (False, True):
                model = ZeRO(Vector(1), world, stage)
                for gradient in (1.0, 10.0):
                    if silent:
                        with model.no_sync():
                            model([gradient]).backward()
                    else:
                        model([gradient]).backward()
                model([100.0]).backward()
                totals += model.module.weight.grad.tolist() if world.rank == 0 else []
        return totals

    assert launch(work, ranks=2)[0] == [111.0] * 8


class Branch(nn.Module):
    """`extra` is used only where the micro-batch says so; `head` is tied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.extra = nn.Linear(5, 5)
        self.back = nn.Linear(5, 3, bias=False)
        self.back.weight = nn.Parameter(self.embed.weight.detach().t().clone())

    def forward(self, x, extra):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h).tanh()
        return self.back(self.extra(h) if extra else h)


def micro(rank, step, i):
    random = torch.Generator().manual_seed(1000 * rank + 10 * step + i)
    return torch.randn(4, 3, generator=random, dtype=torch.float64)


def accumulate(model, rank, step, silent, factor=1.0):
    for i in range(3):
        loss = (model(micro(rank, step, i), i == 0) - 1).square().mean() * factor
        if silent and i < 2:
            with model.no_sync(), bill() as sent:
                loss.backward()
            assert "reduce_scatter" not in sent.by("collective")
            assert "all_reduce" not in sent.by("collective")
        else:
            loss.backward()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_used_in_one_micro_batch_only_is_accumulated_at_every_stage(ranks):
    def work(world):
        plain = build(Branch)
        results = {}
        for silent in (False, True):
            for what, model in every_stage(world, plain):
                optimizer = adamw(model)
                for step in range(3):
                    optimizer.zero_grad()
                    accumulate(model, world.rank, step, silent)
                    optimizer.step()
                results[what, silent] = model.full_state_dict()
        return results

    plain = build(Branch)
    optimizer = adamw(plain)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(ranks):
            accumulate(plain, rank, step, False, 1 / ranks)
        optimizer.step()
    for what, state in launch(work, ranks=ranks)[0].items():
        assert_same(state, plain.state_dict(), str(what))


# Forwards and backwards in other orders


def test_evaluations_and_several_forwards_before_a_backward_leave_the_steps_as_they_are():
    def steps(model, ranks):
        optimizer = adamw(model)
        outputs = []
        for step in range(3):
            x, y = batch_for(mlp, 12, step)
            with torch.no_grad():
                outputs.append(model.eval()(x).clone())
            model.train()(x)
            optimizer.zero_grad()
            halves = [part((x, y), ranks), part(batch_for(mlp, 12, 50 + step), ranks)]
            first, second = (loss_of(model, *half) for half in halves)
            if step == 0:
                (first + second).backward()
            elif step == 1:
                first.backward()
                second.backward()
            else:
                second.backward()
                first.backward()
            optimizer.step()
        return outputs

    class Alone:
        rank, size = 0, 1

    def work(world):
        return {
            w: (steps(m, world), m.full_state_dict()) for w, m in every_stage(world, build(mlp))
        }

    plain = build(mlp)
    outputs = steps(plain, Alone)
    for what, (got, state) in launch(work, ranks=4)[1].items():
        assert_same(state, plain.state_dict(), what)
        torch.testing.assert_close(got, outputs, **CLOSE)


def test_a_backward_that_raised_is_forgotten_and_repeated():
    def work(world):
        results = {}
        for what, model in every_stage(world, build(gpt)):
            batch = part(batch_for(gpt, 8, 0), world)
            armed = [True]

            def burst(gradient, armed=armed):
                if armed:
                    armed.clear()
                    raise ArithmeticError("in the middle of a backward")

            block = model.module.blocks[0]
            block.mlp.register_forward_hook(lambda m, i, out: out.register_hook(burst) and None)
            with pytest.raises(ArithmeticError):
                loss_of(model, *batch).backward()
            if what == "stage 1":
                model.zero_grad()
            optimizer = adamw(model)
            loss_of(model, *batch).backward()
            optimizer.step()
            results[what] = model.full_state_dict()
        return results

    plain = build(gpt)
    optimizer = adamw(plain)
    loss_of(plain, *batch_for(gpt, 8, 0)).backward()
    optimizer.step()
    for what, state in launch(work, ranks=2)[0].items():
        assert_same(state, plain.state_dict(), what)


# Optimizers


def test_several_optimizers_a_scheduler_and_decay_of_weights_alone_work_on_shards():
    def steps(model, ranks=None):
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        first = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.1)
        second = torch.optim.SGD(biases, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(first, 4)
        for step in range(4):
            for optimizer in (first, second):
                optimizer.zero_grad()
            batch = batch_for(mlp, 12, step)
            loss_of(model, *(part(batch, ranks) if ranks else batch)).backward()
            first.step()
            second.step()
            scheduler.step()

    def work(world):
        results = {}
        for what, model in every_stage(world, build(mlp)):
            steps(model, world)
            results[what] = model.full_state_dict()
        return results

    plain = build(mlp)
    steps(plain)
    for what, state in launch(work, ranks=4)[2].items():
        assert_same(state, plain.state_dict(), what)


def test_with_zero_gradients_weights_decay_by_a_hundredth_and_biases_stay():
    def work(world):
        model = ZeRO(build(mlp), world, 3)
        before = model.full_state_dict()
        weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
        (model(torch.ones(2, 7).double()) * 0).sum().backward()
        optimizer.step()
        return before, model.full_state_dict()

    for before, after in launch(work, ranks=2):
        factors = {n: 0.99 if n.endswith("weight") else 1.0 for n in before}
        assert_same(after, {n: t * factors[n] for n, t in before.items()})
