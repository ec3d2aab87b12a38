"""The pipeline takes the steps of one process, whatever the schedule, and says so in bytes.

Every schedule on 2, 3 and 4 ranks and every number of micro-batches from 1 to 9 that it allows:
loss, gradients, the gradient's norm and the weights after three clipped steps of AdamW, in float64
to 1e-10. The rows do not divide by most of those numbers, so a loss divided by the number of
micro-batches instead of weighted by rows shows; a backward that is missing, done twice or given
another micro-batch's gradient shows in every weight. Bytes, storages and what is asked for ahead
are counted exactly. That no order of messages can stand still is shown without processes, with
sends that complete only when they are taken. Odd models and odd uses are in test_pipeline_cases.py.
"""

import functools
import gc
import inspect
import itertools
import weakref

import pipeline_training as training
import pytest
import torch
from pipeline_training import CLOSE, WIDTH, Layers, mean_square
from torch import nn

from s2s_lib import Pipeline, all_gather, bill, clip_grad_norm_, launch, memory, schedule
from s2s_lib.strategies.pipeline.mail import Mail
from s2s_lib.strategies.pipeline.program import AHEAD, message, program

ROWS = 11
# All but that for inference.
TRAINING = [name for name in schedule.BUILDERS if name != "forward_only"]


def batch(rows=ROWS, seed=0):
    return training.batch(rows, seed)


def run(stages, value):
    return functools.reduce(lambda value, stage: stage(value), stages, value)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def parameters_of(stages):
    return [parameter for stage in stages for parameter in stage.parameters()]


def one_process(stages, steps=3):
    """Losses, norms and gradients (clipped) of each step, and the weights after the last."""
    stages = [Layers(number) for number in range(stages)]
    optimizer = adamw(parameters_of(stages))
    told = []
    for step in range(steps):
        x, y = batch(seed=step)
        optimizer.zero_grad()
        loss = mean_square(run(stages, x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters_of(stages), 0.1)
        gradients = [[p.grad.clone() for p in stage.parameters()] for stage in stages]
        told.append((loss.detach(), norm, gradients))
        optimizer.step()
    return told, [[p.detach() for p in stage.parameters()] for stage in stages]


def schedules(ranks, microbatches, names=TRAINING):
    for name, count in itertools.product(names, microbatches):
        try:
            yield schedule.BUILDERS[name](ranks, count)
        except ValueError:
            assert name in ("interleaved", "dualpipev")


def assert_trains_as_one_process(plan, group, expected):
    told, weights = expected
    pipeline = Pipeline([Layers(number) for number in range(plan.stages)], group, plan, mean_square)
    optimizer = adamw(pipeline.parameters())
    for step, (loss, norm, gradients) in enumerate(told):
        optimizer.zero_grad()
        got = pipeline.step(*batch(seed=step))
        assert (got is None) == (plan.rank_of[-1] != group.rank)
        if got is not None:
            torch.testing.assert_close(got, loss, **CLOSE)
        torch.testing.assert_close(clip_grad_norm_(pipeline, 0.1), norm, **CLOSE)
        assert norm > 0.2, "clipping never acted"
        for number, stage in pipeline.module_of.items():
            own = [p.grad for p in stage.parameters()]
            torch.testing.assert_close(own, gradients[number], **CLOSE)
        optimizer.step()
    for number, stage in pipeline.module_of.items():
        own = [p.detach() for p in stage.parameters()]
        torch.testing.assert_close(own, weights[number], **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_trains_as_one_process(ranks):
    counts = range(1, 10) if ranks > 1 else (1, 4, 9)

    def work(world):
        expected = {stages: one_process(stages) for stages in (world.size, 2 * world.size)}
        plans = list(schedules(world.size, counts))
        for plan in plans:
            assert_trains_as_one_process(plan, world, expected[plan.stages])
        return {(plan.name, plan.microbatches) for plan in plans}

    done = launch(work, ranks=ranks)[0]
    whole = {name for name, _ in done if sum(other == name for other, _ in done) == len(counts)}
    # The two that do not take every number of micro-batches.
    assert len(whole) >= len(TRAINING) - 2
    assert {"interleaved 1F1B x2", "DualPipeV"} <= {name for name, _ in done}


def test_evaluating_and_calling_give_what_one_process_gives_with_every_schedule():
    def work(world):
        x, y = batch()
        for plan in schedules(world.size, (1, 4, 6), schedule.BUILDERS):
            stages = [Layers(number) for number in range(plan.stages)]
            pipeline = Pipeline(stages, world, plan, mean_square)
            loss, output = pipeline.evaluate(x, y), pipeline(x)
            if plan.rank_of[-1] == world.rank:
                torch.testing.assert_close(output, run(stages, x).detach(), **CLOSE)
                torch.testing.assert_close(loss, mean_square(output, y), **CLOSE)
                assert not output.requires_grad and not loss.requires_grad
            else:
                assert output is loss is None
            assert all(p.grad is None for p in pipeline.parameters())

    launch(work, ranks=3)


def test_a_schedule_for_inference_refuses_a_step():
    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.forward_only(2, 3), mean_square)
        with pytest.raises(ValueError, match="forward only has no backward: call the pipeline"):
            pipeline.step(*batch())
        pipeline(batch()[0])

    launch(work, ranks=2)


# Bytes


def crossings(plan, rank):
    """How many micro-batches' activations, and how many gradients, a rank sends to others."""
    elsewhere = [
        action.kind
        for action in plan.ranks[rank]
        for to in [action.stage + (1 if action.kind == "F" else -1)]
        if action.kind != "W" and 0 <= to < plan.stages and plan.rank_of[to] != rank
    ]
    return elsewhere.count("F"), len(elsewhere) - elsewhere.count("F")


def test_each_rank_sends_activations_forward_and_their_gradients_backward_and_no_more():
    def work(world):
        rows = 12
        with bill() as agreement:
            all_gather(torch.zeros(1, 9, dtype=torch.int64), world)
        for plan in schedules(world.size, (1, 3, 6), schedule.BUILDERS):
            stages = [Layers(number) for number in range(plan.stages)]
            pipeline = Pipeline(stages, world, plan, mean_square)
            act = pipeline.step if plan.trains else pipeline.evaluate
            with bill() as first:
                act(*batch(rows))
            with bill() as second:
                act(*batch(rows, seed=1))
            forward, backward = crossings(plan, world.rank)
            each = rows // plan.microbatches * WIDTH * 8
            want = {
                "activations": forward * each,
                "activation gradients": backward * each,
                "all_gather": agreement.bytes,
            }
            assert second.by("collective") == {name: n for name, n in want.items() if n}, plan
            descriptions = first.by("collective").pop("description", 0)
            assert (descriptions > 0) == (forward > 0), plan
            assert first.bytes - descriptions == second.bytes, plan
            assert second.messages == forward + backward + agreement.messages, plan

    launch(work, ranks=3)


def test_evaluating_sends_activations_alone_and_describes_each_shape_once():
    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.one_f_one_b(2, 3), mean_square)
        bills = []
        for rows in (12, 12, 9, 12, 9):
            with bill() as sent:
                pipeline.evaluate(*batch(rows))
            bills.append(sent.by("collective"))
        assert [told.get("activations", 0) for told in bills] == (
            [rows * WIDTH * 8 for rows in (12, 12, 9, 12, 9)] if world.rank == 0 else [0] * 5
        )
        described = [index for index, told in enumerate(bills) if "description" in told]
        assert described == ([0, 2] if world.rank == 0 else [])

    launch(work, ranks=2)


# Memory


class Wide(nn.Module):
    """A stage that keeps one tensor of `width` numbers a row for its backward, beside the six that
    go in and the six that come out."""

    def __init__(self, width=4096):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        kept = x.new_ones(len(x), len(self.scale)) * self.scale
        return x + kept.exp().mean(1, keepdim=True)


def widest(plan, group, rows_each=2):
    """The memory meter's most bytes of activations on this rank, in a second step."""
    rows = rows_each * plan.microbatches
    stages = [Wide() for _ in plan.stages_of(group.rank)]
    pipeline = Pipeline(stages, group, plan, mean_square)
    x = torch.ones(rows, WIDTH)
    pipeline.step(x, x)
    pipeline.zero_grad()
    with memory(pipeline) as found:
        pipeline.step(x, x)
    return found.highest["activations"]


def test_activations_in_flight_are_what_the_schedule_says_by_the_memory_meter():
    """`exp` keeps its output, `*` the ones that go in: two wide tensors a micro-batch in flight.
    The rest, during one forward, is the same for every schedule, so differences count exactly."""

    def work(world):
        unit = 2 * 2 * 4096 * 4
        one = widest(schedule.gpipe(world.size, 1), world)
        found = {}
        for plan in (
            schedule.naive(3, 5),
            schedule.gpipe(3, 2),
            schedule.gpipe(3, 5),
            schedule.one_f_one_b(3, 2),
            schedule.one_f_one_b(3, 5),
        ):
            found[plan.name, plan.microbatches] = 1 + round((widest(plan, world) - one) / unit, 1)
        return found

    said = launch(work, ranks=3)
    for rank, found in enumerate(said):
        for count in (2, 5):
            assert found["GPipe", count] == pytest.approx(count, abs=0.1), rank
            assert found["1F1B", count] == pytest.approx(min(count, 3 - rank), abs=0.1), rank
        assert found["naive", 5] == pytest.approx(1, abs=0.1), rank


class Watched(nn.Module):
    """Counts how many of the storages that its forwards kept for backward, and gave, are alive."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept, self.most = weakref.WeakSet(), 0
        self.given, self.most_given = weakref.WeakSet(), 0

    def forward(self, x):
        kept = torch.exp(x)
        self.kept.add(kept.untyped_storage())
        self.most = max(self.most, len(self.kept))
        given = self.layer(kept) / 9
        self.given.add(given.untyped_storage())
        self.most_given = max(self.most_given, len(self.given))
        return given


def test_as_many_forwards_are_held_as_the_schedule_says():
    def work(world):
        held = {}
        for plan in schedules(world.size, (2, 5, 8)):
            stages = [Watched() for _ in plan.stages_of(world.rank)]
            pipeline = Pipeline(stages, world, plan, mean_square)
            for _ in range(2):
                pipeline.step(torch.ones(16, WIDTH) / 9, torch.ones(16, WIDTH))
            assert all(not stage.kept and not stage.given for stage in stages), plan
            if len(stages) == 1:
                assert stages[0].most == plan.peak_in_flight[world.rank], plan
                # One more may be on its way.
                assert stages[0].most_given <= plan.peak_in_flight[world.rank] + 1, plan
                held[plan.name, plan.microbatches] = stages[0].most
        return held

    for rank, held in enumerate(launch(work, ranks=4)):
        for count in (2, 5, 8):
            assert held["GPipe", count] == count
            assert held["1F1B", count] == min(count, 4 - rank)
            assert held["naive", count] == 1


def test_nothing_of_a_batch_stays_alive_and_a_pipeline_can_be_dropped():
    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1", "zbv", "interleaved"):
            plan = schedule.BUILDERS[name](2, 4)
            stages = [Layers(number) for number in range(plan.stages)]
            pipeline = Pipeline(stages, world, plan, mean_square)
            pipeline.step(*batch())
            pipeline.zero_grad(set_to_none=False)
            gc.collect()
            before = tensors_alive()
            x, y = batch(seed=1)
            inputs = [weakref.ref(x), weakref.ref(y)]
            loss, output = pipeline.step(x, y), pipeline(x)
            del x, y, loss, output
            # Without a collection: what must wait for one holds a batch's memory for long.
            assert [reference() for reference in inputs] == [None, None]
            assert tensors_alive() == before, plan
            gone = weakref.ref(pipeline)
            del pipeline
            gc.collect()
            assert gone() is None, plan

    def tensors_alive():
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    launch(work, ranks=2)


# Messages


def test_receives_are_asked_for_two_ahead_and_every_message_is_waited_for():
    def work(world):
        ahead, asked, sent = [], set(), []
        receive, give, take, settle = Mail.receive, Mail.give, Mail.take, Mail.settle

        def counted_receive(mail, message, *source):
            asked.add(message)
            ahead.append(len(asked))
            return receive(mail, message, *source)

        def counted_take(mail, message, source):
            result = take(mail, message, source)
            asked.remove(message)
            return result

        def counted_give(mail, message, to, leaves, description):
            give(mail, message, to, leaves, description)
            sent.append(message)

        def counted_settle(mail, message):
            assert all(t.operation.wire.pending >= {t} for t in mail.sent[message])
            transfers = mail.sent[message]
            settle(mail, message)
            assert all(t.work is None for t in transfers)
            sent.remove(message)

        Mail.receive, Mail.give, Mail.take, Mail.settle = (
            counted_receive,
            counted_give,
            counted_take,
            counted_settle,
        )
        for plan in schedules(world.size, (1, 3, 7, 9)):
            stages = [Layers(number) for number in range(plan.stages)]
            pipeline = Pipeline(stages, world, plan, mean_square)
            for _ in range(2):
                pipeline.step(*batch())
                assert not asked and not sent, plan
        return max(ahead)

    assert max(launch(work, ranks=3)) == 2


PLANS = [
    plan for ranks in range(1, 6) for plan in schedules(ranks, range(1, 11), schedule.BUILDERS)
]


def synchronous(plan, described):
    """Run the messages of a schedule's programs: a send is complete once the receiver has asked.

    In a first batch (`described`) a receiver asks only when it needs a message. Returns the most
    messages asked for at once, and the sends that nobody settled.
    """
    lines = [program(plan, rank) for rank in range(len(plan.ranks))]
    at, asked, given = [0] * len(lines), [set() for _ in lines], {}
    unsettled, ahead, moved = [set() for _ in lines], 0, True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while at[rank] < len(line):
                step = line[at[rank]]
                if not described:
                    asked[rank].update(step.ask)
                elif step.take:
                    asked[rank].add(step.take)
                ahead = max(ahead, len(asked[rank]))
                if step.take and given.get(step.take[0]) != step.take[1]:
                    break
                asked[rank] -= {step.take}
                for sent in step.settle:
                    # Letting go waits for the receiver: it must have taken it already.
                    assert sent not in given, f"{plan!r}: {sent} is waited for too early"
                    unsettled[rank].remove(sent)
                if step.take:
                    del given[step.take[0]]
                if step.give:
                    given[step.give[0]] = rank
                    unsettled[rank].add(step.give[0])
                at[rank] += 1
                moved = True
    assert [len(line) for line in lines] == at, f"{plan!r} stands still at {at}"
    assert not given and not any(asked), f"{plan!r}: messages that nobody takes"
    return ahead, unsettled


def test_no_program_stands_still_with_sends_that_complete_when_they_are_taken():
    for plan in PLANS:
        assert synchronous(plan, described=False)[0] <= AHEAD, plan
        assert synchronous(plan, described=True)[0] <= 1, plan
    assert AHEAD == 2 and len(PLANS) > 300


def test_a_sent_tensor_is_let_go_when_an_answer_shows_that_it_was_taken():
    """Of 1F1B's activations at most as many wait as are in flight, not a batch's."""
    for ranks, count in [(2, 8), (4, 8)]:
        plan = schedule.one_f_one_b(ranks, count)
        for rank in range(ranks - 1):
            waiting, most = 0, 0
            for step in program(plan, rank):
                waiting -= len([sent for sent in step.settle if sent.kind == "F"])
                waiting += bool(step.give and step.give[0].kind == "F")
                most = max(most, waiting)
            assert most <= plan.peak_in_flight[rank] + 1, (ranks, rank)


def test_a_program_has_the_schedules_actions_and_each_message_once_at_both_ends():
    for plan in PLANS:
        sent, taken = {}, {}
        for rank, actions in enumerate(plan.ranks):
            line = program(plan, rank)
            assert [step.action for step in line] == list(actions)
            asked = [pair for step in line for pair in step.ask]
            assert asked == [step.take for step in line if step.take]
            for step in line:
                if step.give:
                    sent[step.give[0]] = rank, step.give[1]
                    assert step.give[0] == message(step.action)
                if step.take:
                    taken[step.take[0]] = step.take[1], rank
        assert sent == taken
        boundaries = sum(a != b for a, b in itertools.pairwise(plan.rank_of))
        assert len(sent) == boundaries * plan.microbatches * (2 if plan.trains else 1)


def test_the_executor_names_no_schedule():
    from s2s_lib.strategies.pipeline import batch as batches
    from s2s_lib.strategies.pipeline import mail, run

    for module in (run, batches, mail):
        code = inspect.getsource(module)
        assert not any(f"{name}(" in code or f'"{name}"' in code for name in schedule.BUILDERS)
