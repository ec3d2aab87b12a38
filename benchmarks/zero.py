"""A ZeRO step of the 5 M GPT beside torch's classes on the same units, and what prefetch hides."""

import functools
import statistics
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import GPT, Cluster, GPTConfig, Link, ZeRO, launch, next_token_loss, timeline

STAGES = (1, 2, 3)


def step_of(model, optimizer, tokens):
    def step():
        optimizer.zero_grad()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    return step


def torch_fully_shard(config, tokens):
    model = GPT(config)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    return step_of(model, torch.optim.AdamW(model.parameters()), tokens)


def torch_zero_1(config, tokens):
    model = nn.parallel.DistributedDataParallel(GPT(config))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    return step_of(model, optimizer, tokens)


def compare(world, batch, repeats):
    config = GPTConfig.small()
    tokens = torch.randint(config.vocab, (batch, 65))
    runs = {
        "fully_shard": torch_fully_shard(config, tokens),
        "DDP + ZeroRedundancyOptimizer": torch_zero_1(config, tokens),
    }
    for stage in STAGES:
        model = ZeRO(GPT(config), world, stage)
        runs[f"stage {stage}"] = step_of(model, torch.optim.AdamW(model.parameters()), tokens)
    return alternate(world, runs, repeats, warm_up=3)


def steps():
    bounds = {("fully_shard", 3): 1.5, ("DDP + ZeroRedundancyOptimizer", 1): 0.95}
    times = launch(compare, 1, 25, ranks=4, timeout=120)[0]
    print(", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items()))
    for theirs in ("fully_shard", "DDP + ZeroRedundancyOptimizer"):
        for stage in STAGES:
            ratio = times[theirs] / times[f"stage {stage}"]
            result(f"step, 4 ranks: {theirs} / stage {stage}", ratio, bounds.get((theirs, stage)))


def hidden(line) -> float:
    """Seconds of a forward with prefetch, from the timeline of one without: each gather starts
    when the unit before begins to compute."""
    gathers = sorted(span for span in line.operations if span.name == "all_gather")
    ends = [*[g.start for g in gathers[1:]], line.end]
    computes = [end - g.end for g, end in zip(gathers, ends, strict=True)]
    seconds = gathers[0].seconds
    for compute, following in zip(computes, [*[g.seconds for g in gathers[1:]], 0.0], strict=True):
        seconds += max(compute, following)
    return seconds


class Sleeper(nn.Module):
    """1 MB of weights, and 10 ms of computing that leaves the processor to others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, x):
        time.sleep(0.01)
        return self.layer(x)


def sleepers():
    return nn.Sequential(*(Sleeper() for _ in range(8))), torch.ones(1, 512)


def gpt():
    config = GPTConfig.small()
    return GPT(config), torch.randint(config.vocab, (8, 64))


def forwards(world, make, repeats):
    runs = {}
    for name in ("apart", "prefetched"):
        module, batch = make()
        model = ZeRO(module, world, 3, prefetch=name == "prefetched")
        runs[name] = torch.no_grad()(functools.partial(model, batch))
    lines = []

    def watched():
        with timeline() as line:
            runs["apart"]()
        lines.append(line)

    times = alternate(world, runs | {"watched": watched}, repeats)
    times["predicted"] = statistics.median(map(hidden, lines))
    return times


def prefetch():
    cluster = Cluster(nodes=2, gpus_per_node=1, inter=Link(1, 50))
    # The GPT computes on the cores that the messages need too.
    for make, bound in ((sleepers, 0.9), (gpt, None)):
        every = launch(forwards, make, 11, ranks=2, cluster=cluster, timeout=120)
        times = {name: max(t[name] for t in every) for name in every[0]}
        shown = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items())
        print(f"stage 3 forward of {make.__name__} at 1 Gbit/s, 2 ranks: {shown}")
        gained, possible = (times["apart"] - times[n] for n in ("prefetched", "predicted"))
        result(
            "    seconds hidden / what the timeline says can be hidden", gained / possible, bound
        )


def main():
    steps()
    prefetch()
