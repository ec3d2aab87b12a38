"""What a pipeline refuses, and in which words.

A wrong call must end on every rank, long before the timeout, and leave a pipeline that works. What
fails in the middle of a batch, on one rank, must be what the launch tells, not the lost connections
of the others.
"""

import sys
import time

import pytest
import torch
from pipeline_training import Layers, assert_gradients, batch, mean_square, run, stages

from s2s_lib import Pipeline, RankError, all_reduce, generate, launch, schedule

# Wrong calls


def refusals(world):
    """What is wrong -> a call that all ranks make, and words that must be in somebody's error."""
    last = world.size - 1
    here = world.rank
    plan = schedule.one_f_one_b(3, 4)
    x, y = batch()

    def pipeline(loss_fn=mean_square, count=len):
        return Pipeline(Layers(here), world, plan, loss_fn, count)

    def built(stages=None, plan=plan, **more):
        return Pipeline(stages or Layers(here), world, plan, mean_square, **more)

    yield "too few rows", lambda p: p.step(x[:3], y[:3]), "3 rows for 4 micro-batches"
    yield "no x", lambda p: p.step(None, y), "x "
    yield "no y", lambda p: p.step(x), "y "
    yield "no y to evaluate", lambda p: p.evaluate(x), "y "
    yield "other rows", lambda p: p.step(x[:7], y), "x has 7 rows on the first stage's rank, y 8"
    yield (
        "other micro-batches",
        lambda p: p.step(list(x.split([1, 3, 2, 2])), list(y.split([3, 1, 2, 2]))),
        "in other micro-batches",
    )
    yield "a list too short", lambda p: p.step([x] * 3, y), "x is a list of 3: give 4"
    yield "tensors that differ in rows", lambda p: p.step((x, x[:5]), y), "rows"
    yield "a number in x", lambda p: p.step((x, 2.0), y), "2.0, of type float at [1]"
    yield "micro-batches of nothing", lambda p: p.step([None] * 4, y), "x"
    yield "x with gradient", lambda p: p.step(x.clone().requires_grad_(), y), "x.detach()"
    yield (
        "one evaluates",
        lambda p: (p.evaluate if here == 1 else p.step)(x, y),
        "rank 0 step, rank 1 evaluate, rank 2 step",
    )
    yield (
        "one calls",
        lambda p: p(x) if here == last else p.evaluate(x, y),
        "rank 2 forward",
    )
    yield "no loss", lambda p: pipeline(None).step(x, y), "loss_fn"
    yield "nothing counts", lambda p: pipeline(count=lambda y: 0).step(x, y), "mean of nothing"
    yield "count fails", lambda p: pipeline(count=lambda y: y.none).step(x, y), "none"
    yield (
        "a schedule's name",
        lambda p: built(plan="gpipe"),
        "'gpipe': give a Schedule, as",
    )
    yield "its builder", lambda p: built(plan=schedule.gpipe), "schedule.gpipe(4, 8) returns one"
    yield "two modules", lambda p: built([Layers(0)] * 2), "rank 0: got 2 modules"
    yield (
        "one rank has two modules",
        lambda p: built([Layers(0)] * 2 if here == 1 else None),
        "rank 1: got 2 modules for its stages [1]",
    )
    yield "other size", lambda p: built(plan=schedule.gpipe(4, 4)), "for 4 ranks, the group has 3"
    yield (
        "other schedules",
        lambda p: built(plan=schedule.gpipe(3, 4) if here == 2 else plan),
        "<1F1B: 3 stages, 4 micro-batches>, rank 2 <GPipe: 3 stages, 4 micro-batches>",
    )
    yield (
        "other numbers of micro-batches",
        lambda p: built(plan=schedule.one_f_one_b(3, 4 + (here == 1))),
        "rank 1 <1F1B: 3 stages, 5 micro-batches>",
    )
    yield (
        "other ties",
        lambda p: built(tied=[{0: "first.bias", 2: "first.bias"}] if here == 1 else []),
        "tied weights",
    )


def test_a_wrong_call_is_refused_on_every_rank_at_once_and_the_next_step_works():
    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.one_f_one_b(3, 4), mean_square)
        reference, said = stages(3)(), {}
        for what, call, _ in refusals(world):
            began = time.monotonic()
            try:
                call(pipeline)
            except Exception as error:
                said[what] = f"{type(error).__name__}: {error}"
            else:
                said[what] = "was not refused"
            assert time.monotonic() - began < 10, (what, said[what])
            pipeline.zero_grad()
            pipeline.step(*batch())
            for part in reference:
                part.zero_grad()
            mean_square(run(reference, batch()[0]), batch()[1]).backward()
            assert_gradients(pipeline, reference, what)
        return said, {what: words for what, _, words in refusals(world)}

    told = launch(work, ranks=3, timeout=20)
    wrong = []
    for what, words in told[0][1].items():
        errors = [said[what] for said, _ in told]
        if any("was not refused" in error for error in errors):
            wrong.append((what, errors))
        if not any(words in error for error in errors):
            wrong.append((what, errors))
    assert not wrong


@pytest.mark.parametrize(
    "rows, count, words",
    [(3, len, "has 3 rows for 4"), (8, lambda y: 0, "mean of nothing")],
)
def test_an_uncaught_refusal_tells_its_cause(rows, count, words):
    def work(world):
        plan = schedule.one_f_one_b(3, 4)
        pipeline = Pipeline(Layers(world.rank), world, plan, mean_square, count)
        pipeline.step(*batch(rows))

    with pytest.raises(RankError) as caught:
        launch(work, ranks=3, timeout=20)
    assert words in caught.value.summary


@pytest.mark.parametrize(
    "tied",
    [
        {0: "first.weight", 1: "second.weight"},
        {0: "first.weight", 1: "first.bias"},
        {0: "first.weight", 5: "first.weight"},
        {0: "first.weight", 1: "third.weight"},
    ],
)
def test_weights_that_cannot_be_tied_are_refused(tied):
    def work(world):
        with pytest.raises(ValueError, match="tied|first.weight"):
            Pipeline(Layers(world.rank), world, schedule.gpipe(2, 4), mean_square, tied=[tied])
        return True

    assert launch(work, ranks=2, timeout=5) == [True, True]


def test_a_tied_weight_that_one_stage_alone_trains_does_not_keep_the_others_waiting():
    def work(world):
        tied = [{0: "first.weight", 1: "first.weight"}]
        pipeline = Pipeline(Layers(world.rank), world, schedule.gpipe(2, 4), mean_square, tied=tied)
        pipeline.stages[0].first.weight.requires_grad_(world.rank == 0)
        with pytest.raises((ValueError, RuntimeError), match="first.weight.* was trained when"):
            pipeline.step(*batch())
        return True

    assert launch(work, ranks=2, timeout=5) == [True, True]


class Raises(Layers):
    """Raises in its third forward, or gives what cannot travel."""

    def __init__(self, number, how):
        super().__init__(number)
        self.how, self.calls = how, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            if self.how == "raise":
                raise ZeroDivisionError("in the middle of the model")
            if self.how == "int":
                return 7
            if self.how == "nested int":
                return {"a": super().forward(x), "b": [None, 3]}
            if self.how == "other shape":
                return super().forward(x)[:1]
            if self.how == "other dtype":
                return super().forward(x).float()
        return super().forward(x)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
@pytest.mark.parametrize(
    "how, words",
    [
        ("raise", "ZeroDivisionError: in the middle of the model"),
        ("int", "stage 1 gives 7, of type int: between stages only tensors and None travel"),
        ("nested int", "3, of type int at ['b'][1]"),
    ],
)
def test_a_stage_that_fails_is_what_is_told(name, how, words):
    def work(world):
        built = [Layers(0), Raises(1, how), Layers(2)]
        pipeline = Pipeline(built, world, schedule.BUILDERS[name](3, 4), mean_square)
        pipeline.step(*batch())

    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(work, ranks=3, timeout=60)
    assert time.monotonic() - began < 30
    assert words in caught.value.summary and caught.value.rank == 1
    if how != "raise" or sys.version_info < (3, 11):
        return
    # Third of its forwards: in both schedules of the middle of three stages that is micro-batch 2.
    assert "in 1F2: forward of stage 1, micro-batch 2" in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes on exceptions before 3.11")
@pytest.mark.parametrize("name, where", [("gpipe", "1B0: backward"), ("zb_h1", "1I0: input gradi")])
def test_an_error_in_a_backward_tells_its_action_once(name, where):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError("on the way back")

    class Stage(Layers):
        def forward(self, x):
            return Bad.apply(super().forward(x))

    def work(world):
        module = (Stage if world.rank else Layers)(world.rank)
        pipeline = Pipeline(module, world, schedule.BUILDERS[name](2, 4), mean_square)
        pipeline.step(*batch())

    with pytest.raises(RankError, match="on the way back") as caught:
        launch(work, ranks=2, timeout=60)
    assert str(caught.value).count(f"in {where}") == 1 == str(caught.value).count("\nin ")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes on exceptions before 3.11")
def test_an_error_in_generation_tells_its_action():
    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.forward_only(2, 1))
        generate(pipeline, [torch.zeros(3, dtype=torch.long)], tokens=2)

    with pytest.raises(RankError) as caught:
        launch(work, ranks=2, timeout=60)
    assert "in 0F0: forward of stage 0, micro-batch 0" in str(caught.value)


def test_who_waits_for_a_rank_that_has_returned_is_advised_to_check_only_where_that_is_off():
    # No pipeline: its construction may itself take the short timeout on a busy machine.
    def work(world):
        if world.rank:
            all_reduce(torch.ones(1), world)

    for check in (False, True):
        with pytest.raises(RankError, match="waited for each other") as caught:
            launch(work, ranks=2, timeout=0.5, check=check)
        assert "its function has returned" in str(caught.value)
        assert ("With check=True" in str(caught.value)) is not check


@pytest.mark.parametrize("how, shape", [("other shape", "[1, 6]"), ("other dtype", "float32")])
def test_what_passes_may_not_change_while_the_batch_does_not(how, shape):
    def work(world):
        built = [Layers(0), Raises(1, how), Layers(2)]
        pipeline = Pipeline(built, world, schedule.one_f_one_b(3, 2), mean_square)
        pipeline.step(*batch())
        pipeline.step(*batch())

    with pytest.raises(RankError, match="may change only with the shapes of the batch") as caught:
        launch(work, ranks=3, timeout=60)
    assert shape in caught.value.summary and caught.value.rank == 1


def test_a_loss_that_fails_is_what_is_told():
    def loss(output, target):
        raise KeyError("no such loss")

    def work(world):
        pipeline = Pipeline(Layers(world.rank), world, schedule.gpipe(2, 4), loss)
        pipeline.step(*batch())

    with pytest.raises(RankError, match="KeyError: 'no such loss'") as caught:
        launch(work, ranks=2, timeout=60)
    assert caught.value.rank == 1
