"""With an accelerator emulated, measured timelines lie over simulated ones.

An action that is not held for its time, a rank that waits for what it does not need, or a schedule
run in another order than simulated moves the bubble by more than the three points allowed here.
"""

import statistics
import time

import pytest
import torch
from torch import nn

from s2s_lib import (
    GPU,
    Cluster,
    Pipeline,
    RankError,
    barrier,
    irecv,
    isend,
    launch,
    measured,
    schedule,
    simulate,
    timeline,
)

ROWS, WIDTH = 16, 64
# Eight layers take 20 ms forward, some ten times their true arithmetic.
TOY = GPU("toy", 1, 8 * 2 * ROWS * WIDTH * WIDTH / 0.020 / 1e12)


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def message_seconds(world):
    """How long a message takes here between ranks that have slept."""
    times = []
    for _ in range(9):
        barrier(world)
        time.sleep(0.01)
        if world.rank == 0:
            times.append(time.monotonic())
            isend(torch.zeros(ROWS, WIDTH), 1, world).wait()
        if world.rank == 1:
            irecv(torch.empty(ROWS, WIDTH), 0, world).wait()
            times.append(time.monotonic())
    return times


def paced(world, order):
    stages = [Layers(8 * world.size // order.stages) for _ in order.stages_of(world.rank)]
    pipeline = Pipeline(stages, world, order, nn.functional.mse_loss)
    x = torch.randn(ROWS * order.microbatches, WIDTH)
    pipeline.step(x, x)
    lines = []
    for _ in range(3):
        with timeline() as line:
            pipeline.step(x, x)
        lines.append(line)
    return lines, pipeline.durations(), message_seconds(world)


@pytest.mark.parametrize("microbatches", [8, 16])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zb_h1"])
def test_the_measured_bubble_is_the_simulated_one(name, microbatches):
    order = schedule.BUILDERS[name](4, microbatches)
    lines, durations, sent = zip(
        *launch(paced, order, ranks=4, cluster=Cluster(1, 4, gpu=TOY)), strict=True
    )
    assert durations[0] == durations[3]
    forward = durations[0]["forward"]
    assert forward == pytest.approx([0.02 * 4 / order.stages] * order.stages)
    hop = statistics.median(b - a for a, b in zip(*sent[:2], strict=True))
    said = simulate(order, **durations[0], transfer=hop)
    runs = [measured(order, run) for run in zip(*lines, strict=True)]
    # Other programs only add.
    best = min(runs, key=lambda run: run.total)
    assert best.total >= simulate(order, **durations[0]).total * 0.999
    assert abs(best.bubble - said.bubble) < 0.03


def test_durations_need_an_accelerator():
    def work(world):
        return Pipeline(Layers(1), world, schedule.gpipe(2, 2), nn.functional.mse_loss).durations()

    with pytest.raises(RankError, match="durations are of an emulated accelerator"):
        launch(work, ranks=2)
