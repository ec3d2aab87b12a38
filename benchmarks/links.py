"""The emulated link against its formula, and overlap against what the timeline predicts."""

import statistics
import time

import torch

from benchmarks.collectives import alternate, human
from benchmarks.report import result
from benchmarks.steps import step_of
from s2s_lib import (
    DDP,
    GPT,
    Cluster,
    GPTConfig,
    Link,
    all_reduce,
    barrier,
    launch,
    recv,
    send,
    timeline,
)

MIB = 2**20


def one_way(world, numel, latency, repeats):
    """Median seconds from before the send to after the receive, on the clock both share."""
    tensor, times = torch.ones(numel), []
    for _ in range(repeats):
        barrier(world)
        if world.rank == 0:
            # The receiver leaves the barrier one latency later, and is to be there first.
            time.sleep(latency + 0.005)
            start = time.monotonic()
            send(tensor, 1, world)
            barrier(world)
            send(torch.tensor([start], dtype=torch.float64), 1, world)
        else:
            recv(tensor, 0, world)
            end = time.monotonic()
            barrier(world)
            start = recv(torch.empty(1, dtype=torch.float64), 0, world)
            times.append(end - start.item())
    return statistics.median(times) if times else None


def messages():
    for link in (Link(1, 50), Link(10, 50), Link(0.1, 25_000), Link(1, 1000)):
        cluster = Cluster(nodes=2, gpus_per_node=1, inter=link)
        for nbytes in (1024, MIB, 4 * MIB):
            if link.seconds(nbytes) > 1:
                continue
            took = launch(one_way, nbytes // 4, link.seconds(0), 15, ranks=2, cluster=cluster)[1]
            what = f"{human(nbytes)} at {link.gbit_s:g} Gbit/s and {link.latency_us:g} us"
            result(
                f"{what}: ms above the formula", (took - link.seconds(nbytes)) * 1e3, at_most=0.25
            )


def rings():
    link = Link(1, 50)
    cluster = Cluster(nodes=4, gpus_per_node=1, inter=link)
    for nbytes in (4 * MIB, 16 * MIB):

        def work(world, nbytes):
            x = torch.ones(nbytes // 4)
            run = {"ring": lambda: all_reduce(x, world, algorithm="ring", out=x)}
            return alternate(world, run, 9)["ring"]

        took = launch(work, nbytes, ranks=4, cluster=cluster)[0]
        formula = 6 * link.seconds(nbytes / 4)
        result(
            f"ring all_reduce of {human(nbytes)} on 4 ranks: time / formula",
            took / formula,
            at_most=1.03,
        )


def overlap_predicted(line) -> float:
    """Seconds of a step with overlap, from the timeline of one without: each bucket starts when
    it is ready and the one before is done."""
    sums = sorted(span for span in line.operations if span.name == "all_reduce")
    ready = [when for name, when in line.marks if name.startswith("bucket")]
    free = line.start
    for when, span in zip(ready, sums, strict=True):
        free = max(when, free) + span.seconds
    return max(free, sums[0].start) - line.start


def overlapped(world, batch, repeats):
    config = GPTConfig.small()
    tokens = torch.randint(config.vocab, (batch, 65))
    runs = {}
    for name in ("apart", "overlapped"):
        model = DDP(GPT(config), world, bucket_mb=4, overlap=name == "overlapped")
        runs[name] = step_of(model, tokens)
    times = alternate(world, runs, repeats)
    predicted = []
    for _ in range(repeats):
        barrier(world)
        with timeline() as line:
            runs["apart"]()
        predicted.append(overlap_predicted(line))
    return times | {"predicted": statistics.median(predicted)}


def overlap():
    for ranks, batch in ((2, 8), (4, 8)):
        cluster = Cluster(nodes=ranks, gpus_per_node=1, inter=Link(1, 50))
        every = launch(overlapped, batch, 9, ranks=ranks, cluster=cluster, timeout=120)
        times = {name: max(t[name] for t in every) for name in every[0]}
        shown = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items())
        print(f"DDP at 1 Gbit/s, {ranks} ranks: {shown}")
        result("    apart / overlapped", times["apart"] / times["overlapped"], at_least=1.1)
        error = abs(times["overlapped"] / times["predicted"] - 1)
        result("    measured against predicted by the timeline: error", error, at_most=0.10)


def main():
    messages()
    rings()
    overlap()
