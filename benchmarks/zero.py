"""A ZeRO step of the 5 M GPT beside torch's classes on the same units, and what prefetch hides."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import GPT, Cluster, GPTConfig, Link, ZeRO, barrier, launch, next_token_loss, timeline

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


def forwards(world, batch, repeats):
    config = GPTConfig.small()
    tokens = torch.randint(config.vocab, (batch, 64))
    models = {
        name: ZeRO(GPT(config), world, 3, prefetch=name == "prefetched")
        for name in ("apart", "prefetched")
    }
    runs = {name: torch.no_grad()(lambda m=model: m(tokens)) for name, model in models.items()}
    lines = []

    def watched():
        with timeline() as line:
            runs["apart"]()
        lines.append(line)

    times = alternate(world, runs | {"watched": watched}, repeats)
    barrier(world)
    times["predicted"] = sorted(map(hidden, lines))[len(lines) // 2]
    return times


def prefetch():
    cluster = Cluster(nodes=2, gpus_per_node=1, inter=Link(2, 50))
    every = launch(forwards, 8, 11, ranks=2, cluster=cluster, timeout=120)
    times = {name: max(t[name] for t in every) for name in every[0]}
    shown = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items())
    print(f"stage 3 forward at 2 Gbit/s, 2 ranks: {shown}")
    gained, possible = (times["apart"] - times[n] for n in ("prefetched", "predicted"))
    result("    seconds hidden / what the timeline says can be hidden", gained / possible, 0.8)


def main():
    steps()
    prefetch()
