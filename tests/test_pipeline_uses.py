"""Batches, groups and habits of use: whatever happens between steps, each equals one process.

The number of micro-batches and how rows and tokens fall into them, evaluation between steps,
shapes, flags and frozen parts that change, groups in another order, stages that have replicas.
A loss divided by the wrong number, a stale description, an output that meets another micro-batch's
target, an averaging too early or twice: each shows in gradients, and the last in bytes.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from pipeline_training import (
    CLOSE,
    IGNORED,
    WIDTH,
    Flow,
    Layers,
    adamw,
    assert_gradients,
    assert_parity,
    batch,
    linear,
    mean_square,
    parameters_of,
    run,
    stages,
)
from torch import nn

from s2s_lib import (
    DDP,
    Cluster,
    Link,
    Mesh,
    Pipeline,
    ZeRO,
    barrier,
    bill,
    clip_grad_norm_,
    launch,
    schedule,
    timeline,
)

# The number of micro-batches


def test_gradients_do_not_depend_on_the_number_of_micro_batches():
    def work(world):
        norms = []
        for count in (1, 2, 4, 8):
            for name in ("gpipe", "one_f_one_b", "zb_h1"):
                pipeline = Pipeline(
                    stages(2)(), world, schedule.BUILDERS[name](2, count), mean_square
                )
                pipeline.step(*batch(8))
                norms.append(clip_grad_norm_(pipeline, 1.0).item())
        reference = stages(2)()
        mean_square(run(reference, batch(8)[0]), batch(8)[1]).backward()
        return norms, nn.utils.clip_grad_norm_(parameters_of(reference), 1.0).item()

    for norms, want in launch(work, ranks=2):
        assert norms == pytest.approx([want] * 12, rel=1e-12)


def test_fewer_micro_batches_than_stages():
    def work(world):
        for count in (1, 2, 3):
            for name in ("gpipe", "one_f_one_b", "zb_h2", "interleaved", "zbv"):
                plan = schedule.BUILDERS[name](4, count)
                assert_parity(stages(plan.stages), world, plan, steps=2)

    launch(work, ranks=4)


def test_interleaving_runs_for_every_number_it_takes_and_names_the_nearest_for_others():
    def work(world):
        refused = []
        for count in range(1, 12):
            try:
                plan = schedule.interleaved(3, count, chunks=2)
            except ValueError as error:
                refused.append((count, str(error).rpartition("are ")[-1]))
                continue
            assert_parity(stages(6), world, plan, functools.partial(batch, 11), steps=1)
        return refused

    refused = launch(work, ranks=3)[0]
    assert refused == [(7, "6 and 8"), (10, "9 and 12"), (11, "9 and 12")]


def test_rows_that_do_not_divide_count_each_once():
    def work(world):
        for rows, count in ((11, 4), (5, 4), (7, 3), (4, 4)):
            data = functools.partial(batch, rows)
            assert_parity(stages(2), world, schedule.one_f_one_b(2, count), data, steps=2)

    launch(work, ranks=2)


def test_large_messages_both_ways_at_once_do_not_stand_still():
    """Two million numbers a message: no buffer on the way could hide a send that blocks."""

    def work(world):
        x = torch.ones(4, 500_000, dtype=torch.float32)
        for plan in (
            schedule.one_f_one_b(2, 4),
            schedule.interleaved(2, 4),
            schedule.zb_h1(2, 4),
            schedule.zbv(2, 4),
        ):
            parts = [Scale() for _ in range(plan.stages)]
            pipeline = Pipeline(parts, world, plan, lambda out, target: (out * target).mean())
            for _ in range(2):
                pipeline.zero_grad()
                pipeline.step([torch.ones(1, 2_000_000)] * 4, [torch.ones(1, 1)] * 4)
            for stage in pipeline.module_of.values():
                torch.testing.assert_close(stage.factor.grad, torch.ones(1))
        return x.numel()

    launch(work, ranks=2)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.factor


# Batches


def test_each_output_meets_the_target_of_its_own_micro_batch():
    """Micro-batches of different lengths, in an order of their own: a mix-up has other shapes."""

    def work(world):
        lengths = [3, 1, 5, 2, 4, 7]
        x, y = batch(sum(lengths))
        for name in ("gpipe", "one_f_one_b", "zb_h2", "zbv", "dualpipev", "interleaved"):
            plan = schedule.BUILDERS[name](2, 6)
            pipeline = Pipeline(stages(plan.stages)(), world, plan, mean_square)
            reference = stages(plan.stages)()
            for _ in range(2):
                loss = pipeline.step(list(x.split(lengths)), list(y.split(lengths)))
                want = mean_square(run(reference, x), y)
                want.backward()
                assert loss is None or abs(loss - want) < 1e-12
            assert_gradients(pipeline, reference, name)

    launch(work, ranks=2)


def test_tokens_that_do_not_count_have_no_part_however_they_fall():
    def tokens(seed=0):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 3, WIDTH, generator=random, dtype=torch.float64)
        y = torch.randint(WIDTH, (8, 3), generator=random)
        y[torch.rand(8, 3, generator=random) < 0.4] = IGNORED
        # In every step but the first a micro-batch without any.
        if seed:
            y[2 * seed : 2 * seed + 2] = IGNORED
        return x, y

    def entropy(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1", "zbv"):
            plan = schedule.BUILDERS[name](2, 4)
            assert_parity(
                stages(plan.stages),
                world,
                plan,
                tokens,
                entropy,
                count=lambda y: (y != IGNORED).sum(),
            )

    launch(work, ranks=2)


def test_a_micro_batch_that_does_not_count_does_no_harm():
    """Infinite outputs, and outputs of which the loss does not use all."""

    def build():
        never = torch.tensor([False] * 5 + [True])
        return [
            Flow(0, lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear()),
            Flow(1, lambda m, v: (m.a(v[0]).masked_fill(never, -torch.inf), v[1] * 2), a=linear()),
        ]

    def labels(seed=0):
        y = (torch.arange(8) + seed) % 5
        if seed:
            y[2 * seed : 2 * seed + 2] = IGNORED
        return batch(seed=seed)[0], y

    def entropy(output, target):
        return F.cross_entropy(output[0], target, ignore_index=IGNORED)

    def work(world):
        for name in ("gpipe", "zb_h1"):
            plan = schedule.BUILDERS[name](2, 4)
            assert_parity(build, world, plan, labels, entropy, count=lambda y: (y != IGNORED).sum())

    launch(work, ranks=2)


def test_batches_of_other_shapes_add_to_the_gradients_that_are_there():
    def work(world):
        for name in ("one_f_one_b", "zb_h1", "interleaved"):
            plan = schedule.BUILDERS[name](2, 4)
            pipeline = Pipeline(stages(plan.stages)(), world, plan, mean_square)
            reference = stages(plan.stages)()
            for rows in (8, 5, 8, 12, 5):
                pipeline.step(*batch(rows, seed=rows))
                x, y = batch(rows, seed=rows)
                mean_square(run(reference, x), y).backward()
                assert_gradients(pipeline, reference, f"{name}, {rows} rows")

    launch(work, ranks=2)


def test_x_and_y_may_be_nested():
    def build():
        return [
            Flow(0, lambda m, v: m.a(v["a"]) + v["b"][0], a=linear()),
            Layers(1),
        ]

    def data(seed=0):
        x, y = batch(seed=seed)
        return {"a": x, "b": (x.sin(), None)}, (y, y.sin())

    def loss(output, target):
        return mean_square(output * target[1], target[0])

    def work(world):
        assert_parity(build, world, schedule.one_f_one_b(2, 3), data, loss)

    launch(work, ranks=2)


def test_only_the_first_rank_needs_x_and_only_the_last_y():
    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.one_f_one_b(3, 4), mean_square)
        reference = stages(3)()
        x, y = batch()
        for _ in range(2):
            loss = pipeline.step(x if world.rank == 0 else None, y if world.rank == 2 else None)
        want = mean_square(run(reference, x), y)
        want.backward(torch.tensor(2.0, dtype=torch.float64))
        assert_gradients(pipeline, reference)
        assert (loss is None) == (world.rank < 2)
        assert all(p.grad.norm() > 0 for p in pipeline.parameters())

    launch(work, ranks=3)


# Training and evaluation


def test_evaluation_before_between_and_after_training():
    def work(world):
        for name in ("one_f_one_b", "zb_h1", "zbv", "interleaved"):
            plan = schedule.BUILDERS[name](2, 4)
            pipeline = Pipeline(stages(plan.stages)(), world, plan, mean_square)
            reference = stages(plan.stages)()
            optimizers = [adamw(pipeline.parameters()), adamw(parameters_of(reference))]
            for step in range(3):
                for rows in (7, 8):
                    x, y = batch(rows, seed=9)
                    got, output = pipeline.evaluate(x, y), pipeline(x)
                    want = run(reference, x)
                    if plan.rank_of[-1] == world.rank:
                        torch.testing.assert_close(got, mean_square(want, y).detach(), **CLOSE)
                        torch.testing.assert_close(output, want.detach(), **CLOSE)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                x, y = batch(seed=step)
                pipeline.step(x, y)
                pipeline.evaluate(*batch(seed=9))
                mean_square(run(reference, x), y).backward()
                assert_gradients(pipeline, reference, name)
                for optimizer in optimizers:
                    optimizer.step()

    launch(work, ranks=2)


class Dropping(nn.Module):
    """In training it drops, and gives another number of tensors."""

    def __init__(self, number):
        super().__init__()
        self.layers = Layers(number)

    def forward(self, value):
        x = value[0] if isinstance(value, tuple) else value
        x = self.layers(F.dropout(x, 0.5, self.training))
        return (x, x.detach().mean()) if self.training else x


def test_train_and_eval_may_change_what_passes_and_dropout_drops():
    def loss(output, target):
        return mean_square(output[0] if isinstance(output, tuple) else output, target)

    def work(world):
        for name in ("one_f_one_b", "zb_h1"):
            plan = schedule.BUILDERS[name](2, 4)
            pipeline = Pipeline(Dropping(world.rank), world, plan, loss)
            losses = []
            for training in (True, False, True, False, False, True):
                pipeline.train(training)
                assert pipeline.stages[0].training == training
                losses.append(pipeline.step(*batch()))
                pipeline.evaluate(*batch())
            if world.rank == 1:
                want = mean_square(run(stages(2)(), batch()[0]), batch()[1])
                for index in (1, 3, 4):
                    assert abs(losses[index] - want) < 1e-12
                assert len({float(losses[i]) for i in (0, 2, 5)}) == 3

    launch(work, ranks=2)


def test_stages_may_be_frozen_and_thawed_between_steps():
    def work(world):
        for name in ("one_f_one_b", "zb_h1", "zbv"):
            plan = schedule.BUILDERS[name](2, 4)
            pipeline = Pipeline(stages(plan.stages)(), world, plan, mean_square)
            reference = stages(plan.stages)()
            for frozen in ([], [0], [0, 1], [], [1], [0]):
                for number in range(2):
                    for parts in (pipeline.module_of, dict(enumerate(reference))):
                        if number in parts:
                            parts[number].requires_grad_(number not in frozen)
                if world.rank == 0 and 0 in pipeline.module_of:
                    pipeline.module_of[0].first.bias.requires_grad_(False)
                reference[0].first.bias.requires_grad_(False)
                for part in (pipeline, *reference):
                    part.zero_grad()
                pipeline.step(*batch())
                loss = mean_square(run(reference, batch()[0]), batch()[1])
                if loss.requires_grad:
                    loss.backward()
                assert_gradients(pipeline, reference, f"{name}, frozen {frozen}")

    launch(work, ranks=2)


# Groups


def test_on_groups_in_another_order_and_alone_and_several_at_once():
    def work(world):
        for ranks in ([2, 0, 1], [1, 2], [2]):
            if group := world.subgroup(ranks):
                for name in ("one_f_one_b", "zb_h1", "zbv"):
                    plan = schedule.BUILDERS[name](group.size, 4)
                    assert_parity(stages(plan.stages), group, plan, steps=2)

    launch(work, ranks=3)


def test_two_pipelines_on_one_group_take_turns():
    def work(world):
        one, two = (
            Pipeline(stages(2)(), world, schedule.BUILDERS[name](2, 4), mean_square)
            for name in ("one_f_one_b", "zb_h1")
        )
        reference = stages(2)()
        mean_square(run(reference, batch()[0]), batch()[1]).backward()
        for pipeline in (one, two, one, two):
            pipeline.zero_grad()
            pipeline.step(*batch())
            assert_gradients(pipeline, reference)

    launch(work, ranks=2)


REPLICATED = {
    "DDP": DDP,
    "ZeRO-1": lambda stage, group: ZeRO(stage, group, 1),
    "ZeRO-2": lambda stage, group: ZeRO(stage, group, 2),
}


def assert_replicas_average_once(mesh, name, strategy):
    group, replicas = mesh["pp"], mesh["dp"]
    plan = schedule.BUILDERS[name](2, 4)
    built, reference = stages(plan.stages)(), stages(plan.stages)()
    own = [REPLICATED[strategy](built[s], replicas) for s in plan.stages_of(group.rank)]
    pipeline = Pipeline(own, group, plan, mean_square)
    optimizers = [adamw(pipeline.parameters()), adamw(parameters_of(reference))]
    numbers = sum(p.numel() for p in reference[0].parameters())
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch(16, seed=step)
        mean_square(run(reference, x), y).backward()
        half = slice(8 * replicas.rank, 8 * replicas.rank + 8)
        with bill() as sent:
            pipeline.step(x[half], y[half])
        told = sent.by("collective")
        reduced = told.get("all_reduce", 0) + 2 * told.get("reduce_scatter", 0)
        # Two ranks: all of it, once, whole or in two halves.
        assert reduced == len(own) * numbers * 8, f"{name}, {strategy}, step {step}: {told}"
        if strategy == "DDP":
            assert_gradients(pipeline, reference, name)
        norm = nn.utils.clip_grad_norm_(parameters_of(reference), 0.1)
        torch.testing.assert_close(clip_grad_norm_(pipeline, 0.1), norm, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
    for number, stage in pipeline.module_of.items():
        state = stage.module.state_dict() if strategy == "DDP" else stage.full_state_dict()
        torch.testing.assert_close(state, dict(reference[number].state_dict()), **CLOSE)


WHOLE = [(name, s) for name in ("one_f_one_b", "interleaved") for s in REPLICATED]
APART = ["zb_h1", "zbv"]


@pytest.mark.parametrize("name, strategy", WHOLE + [(name, "DDP") for name in APART])
def test_replicas_of_a_stage_average_once_a_step(name, strategy):
    def work(world):
        assert_replicas_average_once(Mesh(world, dp=2, pp=2), name, strategy)

    launch(work, ranks=4)


def test_a_zero_whose_backward_would_be_taken_apart_is_refused():
    def work(world):
        for name in APART:
            plan = schedule.BUILDERS[name](2, 4)
            own = [
                ZeRO(Layers(s), Mesh(world, dp=1, pp=2)["dp"], 1)
                for s in plan.stages_of(world.rank)
            ]
            with pytest.raises(ValueError, match="takes the backward of stage . apart, and a ZeRO"):
                Pipeline(own, world, plan, mean_square)

    launch(work, ranks=2)


# A schedule written by hand


def test_a_schedule_written_by_hand_runs():
    def work(world):
        first = "0F0 0F1 0F2 0I2 0I0 0W0 0B1 0W2"
        last = "1F0 1F1 1F2 1B2 1I0 1B1 1W0"
        plan = schedule.Schedule(
            "mine",
            [[(int(a[0]), a[1], int(a[2])) for a in line.split()] for line in (first, last)],
        )
        assert_parity(stages(2), world, plan, functools.partial(batch, 7))

    launch(work, ranks=2)


@pytest.mark.parametrize("strategy", ["DDP", "ZeRO-1", "ZeRO-2"])
def test_a_stage_gets_its_last_gradient_before_the_replicas_of_the_next_have_averaged(strategy):
    """Else the averages of the stages follow each other, and a step waits for all of them."""

    def wrap(stage, group):
        return DDP(stage, group) if strategy == "DDP" else ZeRO(stage, group, int(strategy[-1]))

    def work(world):
        mesh = Mesh(world, dp=2, pp=2)
        stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        plan = schedule.one_f_one_b(2, 2)
        pipeline = Pipeline(wrap(stage, mesh["dp"]), mesh["pp"], plan, mean_square)
        for _ in range(2):
            barrier(world)
            with timeline() as line:
                pipeline.step(torch.ones(4, 64), torch.zeros(4, 64))
        averages = [s for s in line.spans(1) if s.name in ("all_reduce", "reduce_scatter")]
        return mesh["pp"].rank, averages[0].start, averages[-1].end

    # Between replicas: 33 kB take a third of a second.
    cluster = Cluster(2, 2, inter=Link(gbit_s=0.0008))
    spans = {stage: span for stage, *span in launch(work, ranks=4, cluster=cluster)}
    assert spans[0][0] < spans[1][1]
