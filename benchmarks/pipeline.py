"""A pipeline step beside torch's, the bubble beside the simulator's, a backward taken apart."""

import statistics
import time

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import (
    GPT,
    GPU,
    Cluster,
    GPTConfig,
    Pipeline,
    barrier,
    irecv,
    isend,
    launch,
    measured,
    next_token_loss,
    schedule,
    simulate,
    split,
    timeline,
)
from s2s_lib.course.model import Block
from s2s_lib.strategies.pipeline.halves import Halves

MICROBATCHES = 8
CASES = {
    "GPipe": (ScheduleGPipe, schedule.gpipe, 1.0),
    "1F1B": (Schedule1F1B, schedule.one_f_one_b, 0.95),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, schedule.interleaved, 1.0),
}


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig.small(tied=False))


def ours(world, order, tokens, targets):
    pipeline = Pipeline(split(gpt(), order.stages), world, order, next_token_loss)

    def step():
        pipeline.zero_grad()
        pipeline.step(tokens, targets)

    return step


def theirs(world, kind, order, tokens, targets):
    parts = split(gpt(), order.stages)
    own = [
        PipelineStage(parts[number], number, order.stages, torch.device("cpu"))
        for number in order.stages_of(world.rank)
    ]
    runner = kind(own if kind is ScheduleInterleaved1F1B else own[0], MICROBATCHES, next_token_loss)
    given = (tokens,) if world.rank == 0 else ()
    more = {"target": targets, "losses": []} if world.rank == world.size - 1 else {}

    def step():
        for stage in own:
            stage.submod.zero_grad()
        runner.step(*given, **more)

    return step


def compare(world, repeats):
    torch.manual_seed(0)
    tokens, targets = torch.randint(256, (2, MICROBATCHES, 64))
    runs = {}
    for name, (kind, build, _) in CASES.items():
        order = build(world.size, MICROBATCHES)
        runs[name] = ours(world, order, tokens, targets)
        runs[f"torch {name}"] = theirs(world, kind, order, tokens, targets)
    runs["ZB-H1"] = ours(world, schedule.zb_h1(world.size, MICROBATCHES), tokens, targets)
    return alternate(world, runs, repeats, warm_up=3)


def steps():
    times = launch(compare, 25, ranks=4, timeout=120)[0]
    print(", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items()))
    for name, (*_, bound) in CASES.items():
        result(f"step, 4 stages: torch / ours, {name}", times[f"torch {name}"] / times[name], bound)


class Layers(nn.Module):
    """Some layers whose true arithmetic is small beside what an emulated GPU is given for it."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


ROWS = 16
# 8 layers take 20 ms forward.
TOY = GPU("toy", 1, 8 * 2 * ROWS * 64 * 64 / 0.020 / 1e12)


def message_times(world):
    """When a message was sent, or came, between ranks that had slept."""
    times = []
    for _ in range(15):
        barrier(world)
        time.sleep(0.01)
        if world.rank == 0:
            times.append(time.monotonic())
            isend(torch.zeros(ROWS, 64), 1, world).wait()
        if world.rank == 1:
            irecv(torch.empty(ROWS, 64), 0, world).wait()
            times.append(time.monotonic())
    return times


def hop_seconds(times) -> float:
    """The median time of a message, from what every rank says."""
    return statistics.median(came - sent for sent, came in zip(*times[:2], strict=True))


def paced(world, order):
    stages = [Layers(8 * world.size // order.stages) for _ in order.stages_of(world.rank)]
    pipeline = Pipeline(stages, world, order, nn.functional.mse_loss)
    x = torch.randn(ROWS * order.microbatches, 64)
    pipeline.step(x, x)
    pipeline.accelerator.overran, lines = 0, []
    for _ in range(3):
        with timeline() as line:
            pipeline.step(x, x)
        lines.append(line)
    return lines, pipeline.durations(), message_times(world), pipeline.accelerator.overran


def bubbles():
    for microbatches in (8, 16):
        for build in (
            schedule.gpipe,
            schedule.one_f_one_b,
            schedule.interleaved,
            schedule.zb_h1,
        ):
            order = build(4, microbatches)
            lines, durations, sent, overran = zip(
                *launch(paced, order, ranks=4, cluster=Cluster(1, 4, gpu=TOY)), strict=True
            )
            hop = hop_seconds(sent)
            expected = simulate(order, **durations[0], transfer=hop)
            runs = [measured(order, run) for run in zip(*lines, strict=True)]
            found = min(runs, key=lambda run: run.total).bubble
            print(
                f"{order!r}: simulated bubble {expected.bubble:.2%} with {hop * 1e3:.2f} ms a "
                f"message, measured {found:.2%} of total; {sum(overran)} of "
                f"{3 * sum(map(len, order.ranks))} actions overran"
            )
            result("    points apart", abs(found - expected.bubble) * 100, at_most=2)


def take_apart(world, repeats):
    torch.manual_seed(0)
    # As where several ranks share the cores.
    torch.set_num_threads(1)
    config = GPTConfig(layers=2, hidden=224, heads=8)
    blocks = {name: nn.Sequential(Block(config), Block(config)) for name in ("whole", "halves")}
    x = torch.randn(1, 64, 224, requires_grad=True)
    grad = torch.randn(1, 64, 224)
    halves = Halves(blocks["halves"])

    def forward():
        blocks["whole"](x)

    def whole():
        torch.autograd.backward([blocks["whole"](x)], [grad])

    def recorded():
        halves.record()
        y = blocks["halves"](x)
        return y, halves.done()

    def in_halves():
        y, half = recorded()
        half.inputs([y], [grad], [x])
        half.weight_gradients()

    runs = {"forward": forward, "whole": whole, "recorded": recorded, "in halves": in_halves}
    return alternate(world, runs, repeats, warm_up=5)


def apart():
    times = launch(take_apart, 101, ranks=1)[0]
    print(", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items()))
    whole = times["whole"] - times["forward"]
    halves = times["in halves"] - times["recorded"]
    result("backward in two halves / whole", halves / whole, at_most=1.25)
    more = times["in halves"] - times["whole"]
    result("    with what its forward takes longer", 1 + more / whole)


def simulator():
    for name in ("gpipe", "one_f_one_b", "zb_h1"):
        order = schedule.BUILDERS[name](64, 512)
        start = time.perf_counter()
        simulate(order, 1, 1, 1)
        result(
            f"seconds to simulate {order.name}, 64 stages x 512 micro-batches",
            time.perf_counter() - start,
            at_most=1,
        )


def main():
    simulator()
    apart()
    steps()
    bubbles()
