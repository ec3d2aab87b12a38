"""The pipeline ends where torch.distributed.pipelining ends, schedule by schedule.

Both run the same stages on the same batches, on gloo, in the same launch, in float64: gradients of
each of three steps and the weights after AdamW, to 1e-10.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from pipeline_training import CLOSE, Layers, batch, mean_square
from torch.distributed import pipelining

from s2s_lib import Pipeline, launch, schedule

ONE_STAGE = {
    "gpipe": pipelining.ScheduleGPipe,
    "one_f_one_b": pipelining.Schedule1F1B,
}
LOOPED = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved, split": pipelining.ScheduleInterleavedZeroBubble,
}
IN_A_V = {
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.schedules.ScheduleDualPipeV,
}


def adamw(stages):
    return torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2)


def history(stages, step):
    """Gradients of three steps, then the weights."""
    optimizer, told = adamw(stages), []
    for number in range(3):
        optimizer.zero_grad()
        step(*batch(16, seed=number))
        told.append([p.grad.clone() for stage in stages for p in stage.parameters()])
        optimizer.step()
    return told, [p.detach() for stage in stages for p in stage.parameters()]


def torchs(make, plan, world):
    """The same three steps by torch's class; it takes its stages in the order of the model."""
    own = plan.stages_of(world.rank)
    modules = [Layers(number) for number in own]
    parts = [
        pipelining.PipelineStage(module, number, plan.stages, torch.device("cpu"))
        for number, module in zip(own, modules, strict=True)
    ]
    several = issubclass(make, pipelining.schedules.PipelineScheduleMulti)
    runs = make(parts if several else parts[0], plan.microbatches, loss_fn=mean_square)

    def step(x, y):
        x = (x,) if 0 in own else ()
        runs.step(*x, target=y if plan.stages - 1 in own else None)

    return history(modules, step)


def ours(plan, world):
    pipeline = Pipeline([Layers(s) for s in plan.stages_of(world.rank)], world, plan, mean_square)
    return history(pipeline.stages, pipeline.step)


def assert_same(make, plan, world):
    want = torchs(make, plan, world)
    torch.testing.assert_close(
        ours(plan, world), want, **CLOSE, msg=lambda told: f"{plan!r} {told}"
    )
    assert all(gradient.abs().max() > 1e-4 for gradient in want[0][0])


def builders(ranks, microbatches):
    """torch's class and our schedule."""
    for name, make in ONE_STAGE.items():
        yield make, schedule.BUILDERS[name](ranks, microbatches)
    # torch has no ZB-H1 of one stage a rank; the gradients are those of any schedule.
    yield pipelining.ScheduleGPipe, schedule.zb_h1(ranks, microbatches)
    yield pipelining.Schedule1F1B, schedule.zb_h2(ranks, microbatches)
    for name, make in LOOPED.items():
        builder = schedule.BUILDERS[name.partition(",")[0]]
        yield make, builder(ranks, microbatches)
    for name, make in IN_A_V.items():
        yield make, schedule.BUILDERS[name](ranks, microbatches)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (2, 8), (4, 8)])
def test_gradients_and_weights_are_those_of_torchs_pipelining(ranks, microbatches):
    def work(world):
        warnings.simplefilter("ignore")
        compared = 0
        for make, plan in builders(world.size, microbatches):
            assert_same(make, plan, world)
            compared += 1
            dist.barrier()
        return compared

    assert launch(work, ranks=ranks) == [9] * ranks
