"""What somebody who wished a pipeline ill has tried, and what must come of it."""

import cloudpickle
import pytest
import torch
from pipeline_training import (
    Layers,
    assert_gradients,
    batch,
    mean_square,
    run,
)
from torch import nn

from s2s_lib import DDP, Mesh, Pipeline, RankError, generate, launch, materialize, schedule, split
from s2s_lib.course.reference import tiny_gpt
from s2s_lib.strategies.pipeline.actions import Schedule


class Remembers(nn.Module):
    """Gives a buffer that it writes into again at the next micro-batch."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(width, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.seen += x.mean(0)
        return self.linear(x), self.seen


class Scales(nn.Module):
    def forward(self, value):
        return value[0] * (1 + value[1])


class InPlace(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x.mul_(1.5).relu_())


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1"])
def test_what_a_stage_gave_is_what_it_was_then(name):
    def work(world):
        x, y = batch(8)
        width = x.shape[1]
        torch.manual_seed(0)
        parts = [Remembers(width), Scales()]
        Pipeline(parts, world, schedule.BUILDERS[name](2, 4), mean_square).step(x, y)
        torch.manual_seed(0)
        alone = Remembers(width)
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            (mean_square(Scales()(alone(part_x)), part_y) / 4).backward()
        if world.rank == 0:
            torch.testing.assert_close(
                parts[0].linear.weight.grad, alone.linear.weight.grad, rtol=0, atol=1e-10
            )

    launch(work, ranks=2)


def test_a_first_stage_may_change_its_input_in_place_and_the_users_stays():
    def work(world):
        x, y = batch(8)
        before = x.clone()
        for plan in (schedule.gpipe(2, 4), schedule.interleaved(2, 4), schedule.zbv(2, 4)):
            torch.manual_seed(1)
            parts = [InPlace(x.shape[1]) for _ in range(plan.stages)]
            torch.manual_seed(1)
            alone = [InPlace(x.shape[1]) for _ in range(plan.stages)]
            pipeline = Pipeline(parts, world, plan, mean_square)
            pipeline.step(x, y)
            assert x.equal(before)
            mean_square(run(alone, x.clone()), y).backward()
            assert_gradients(pipeline, alone, plan)

    launch(work, ranks=2)


class FailsAt(Layers):
    def __init__(self, number, at):
        super().__init__(number)
        self.at, self.calls = at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError("as planned")
        return super().forward(x)


@pytest.mark.parametrize("again", ["same", "new"])
def test_after_a_batch_that_failed_the_next_ones_are_right(again):
    """Rank 0 has sent micro-batches that rank 1 never took; nobody may take them later."""

    def work(world):
        plan = schedule.gpipe(2, 4)
        stage = FailsAt(world.rank, at=4 - 2 * world.rank)
        pipeline = Pipeline(stage, world, plan, mean_square)
        with pytest.raises(ZeroDivisionError):
            pipeline.step(*batch(8, seed=5))
        if again == "new":
            pipeline = Pipeline(stage, world, plan, mean_square)
        pipeline.zero_grad()
        pipeline.step(*batch(8))
        alone = [Layers(number) for number in range(2)]
        mean_square(run(alone, batch(8)[0]), batch(8)[1]).backward()
        assert_gradients(pipeline, alone, again)

    launch(work, ranks=2, timeout=10)


def test_a_stage_can_be_pickled_after_a_split_backward():
    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.zb_h1(2, 4), mean_square)
        pipeline.step(*batch(8))
        stage = pipeline.stages[0]
        copy = cloudpickle.loads(cloudpickle.dumps(stage))
        copy(torch.zeros_like(batch(8)[0]))
        return stage

    first, second = launch(work, ranks=2)
    assert first.state_dict().keys() == second.state_dict().keys()


def test_generate_refuses_stages_in_another_place():
    def work(world):
        order = schedule.forward_only(2, 1).ranks
        turned = Schedule("turned", (order[1], order[0]))
        pipeline = Pipeline(split(tiny_gpt(), 2), world, turned)
        generate(pipeline, [torch.ones(3, dtype=torch.int64)], 2)

    with pytest.raises(RankError, match=r"stage by stage on \[1, 0\]"):
        launch(work, ranks=2)


def test_the_same_words_with_other_places_are_another_schedule():
    def work(world):
        order = schedule.forward_only(2, 1).ranks
        plan = Schedule("one", order if world.rank else (order[1], order[0]))
        with pytest.raises(ValueError, match="build the same on every rank"):
            Pipeline(Layers(world.rank), world, plan)
        return True

    assert launch(work, ranks=2, timeout=5) == [True, True]


def uncounted(target):
    return (target >= 0).sum()


def masked_square(output, target):
    counts = target >= 0
    return ((output - target)[counts] ** 2).mean()


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zbv"])
@pytest.mark.parametrize("where", [(0,), (0, 1)])
def test_replicas_average_also_where_the_last_micro_batch_does_not_count(name, where):
    """Else one replica's gradients stay its own, and nobody says so."""

    def work(world):
        mesh = Mesh(world, dp=2, pp=2)
        plan = schedule.BUILDERS[name](2, 4)
        replica = mesh["dp"].rank
        x, y = batch(8, seed=replica)
        y = y.abs()
        if replica in where:
            y[-2:] = -1
        parts = [DDP(Layers(n), mesh["dp"]) for n in plan.stages_of(mesh["pp"].rank)]
        pipeline = Pipeline(parts, mesh["pp"], plan, masked_square, count=uncounted)
        pipeline.step(x, y)
        return [p.grad for part in parts for p in part.parameters()]

    found = launch(work, ranks=4, timeout=20)
    for a, b in ((0, 2), (1, 3)):
        torch.testing.assert_close(found[a], found[b], rtol=0, atol=0)
        assert any(gradient.abs().max() > 0 for gradient in found[a])


@pytest.mark.parametrize("given", ["whole list", "own stage", "materialized", "in a DDP"])
def test_ties_travel_with_the_stages(given):
    def work(world):
        stages = split(tiny_gpt(), 2)
        mine = stages[world.rank]
        if given == "materialized":
            with torch.device("meta"):
                empty = tiny_gpt()
            mine = materialize(split(empty, 2), world.rank, seed=0)
        if given == "in a DDP":
            mine = DDP(mine, world.subgroup([world.rank]))
        plan = schedule.one_f_one_b(2, 2)
        pipeline = Pipeline(stages if given == "whole list" else mine, world, plan)
        return len(pipeline.ties.own)

    assert launch(work, ranks=2) == [1, 1]
