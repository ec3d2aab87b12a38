"""The emulated link against its formula, and overlap against what the timeline predicts."""

import os
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
from s2s_lib.ranks.connection import current

MIB = 2**20


def bare_send(tensor, to, world):
    current().backend.send([tensor], to, 0).wait()


def bare_recv(tensor, source, world):
    current().backend.recv([tensor], source, 0).wait()


def one_way(world, numel, latency, repeats, send_it=send, receive_it=recv):
    """Median seconds from before the send to after the receive, on the clock both share."""
    tensor, times = torch.ones(numel), []
    for _ in range(repeats):
        barrier(world)
        if world.rank == 0:
            # The receiver leaves the barrier one latency later, and is to be there first. The
            # sender is busy meanwhile, as one that computes.
            moment = time.monotonic() + latency + 0.0005
            while time.monotonic() < moment:
                pass
            start = time.monotonic()
            send_it(tensor, 1, world)
            barrier(world)
            send(torch.tensor([start], dtype=torch.float64), 1, world)
        else:
            receive_it(tensor, 0, world)
            end = time.monotonic()
            barrier(world)
            start = recv(torch.empty(1, dtype=torch.float64), 0, world)
            times.append(end - start.item())
    return statistics.median(times) if times else None


def messages():
    took = launch(one_way, 256, 0, 40, bare_send, bare_recv, ranks=2)[1]
    result("1 KB by gloo, no link emulated: ms", took * 1e3)
    for link in (Link(1, 50), Link(10, 50), Link(0.1, 25_000), Link(1, 1000)):
        cluster = Cluster(nodes=2, gpus_per_node=1, inter=link)
        for nbytes in (1024, MIB, 4 * MIB):
            if link.seconds(nbytes) > 1:
                continue
            took = launch(one_way, nbytes // 4, link.seconds(0), 25, ranks=2, cluster=cluster)[1]
            what = f"{human(nbytes)} at {link.gbit_s:g} Gbit/s and {link.latency_us:g} us"
            result(
                f"{what}: ms above the formula", (took - link.seconds(nbytes)) * 1e3, at_most=0.25
            )


def rings():
    link = Link(1, 50)
    cluster = Cluster(nodes=4, gpus_per_node=1, inter=link)
    for nbytes in (4 * MIB, 16 * MIB):

        def work(world, nbytes, repeats=9):
            x, times = torch.ones(nbytes // 4), []
            for _ in range(repeats):
                barrier(world)
                start = time.monotonic()
                all_reduce(x, world, algorithm="ring", out=x)
                times.append([start, time.monotonic()])
            # From when the last rank came to when the last one left: the formula's own terms.
            last = all_reduce(torch.tensor(times, dtype=torch.float64), world, op="max")
            return (last[:, 1] - last[:, 0]).median().item()

        took = launch(work, nbytes, ranks=4, cluster=cluster)[0]
        formula = 6 * link.seconds(nbytes / 4)
        result(
            f"ring all_reduce of {human(nbytes)} on 4 ranks: time / formula",
            took / formula,
            at_most=1.03,
        )


def overlap_predicted(line, taken: float) -> float:
    """Seconds of a step with overlap, from the timeline of one without: each bucket starts when
    it is ready and the one before is done.

    Whatever an all_reduce that goes on beside the backward takes of the processors (`taken`
    seconds for all of them together) delays what is computed after it.
    """
    sums = sorted(span for span in line.operations if span.name == "all_reduce")
    ready = [when for name, when in line.marks if name.startswith("bucket")]
    total = sum(span.seconds for span in sums)
    computed = sums[0].start
    free, delay = line.start, 0.0
    for when, span in zip(ready, sums, strict=True):
        began = max(when + delay, free)
        free = began + span.seconds
        beside = max(0.0, min(free, computed + delay) - began)
        delay += taken * beside / total
    return max(free, computed + delay) - line.start


def processor_seconds(run, repeats) -> float:
    """Median processor time that this rank's threads take for one run."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def overlapped(world, batch, repeats):
    config = GPTConfig.small()
    tokens = torch.randint(config.vocab, (batch, 65))
    steps = {}
    for name in ("apart", "overlapped"):
        model = DDP(GPT(config), world, bucket_mb=4, overlap=name == "overlapped")
        steps[name] = step_of(model, tokens)
    with model.no_sync():
        alone = processor_seconds(steps["overlapped"], repeats)
    mine = processor_seconds(steps["apart"], repeats) - alone
    # All ranks share the cores of this machine.
    taken = all_reduce(torch.tensor(mine), world).item() / min(os.cpu_count(), world.size)
    lines = []

    def watched():
        with timeline() as line:
            steps["apart"]()
        lines.append(line)

    times = alternate(world, steps | {"watched": watched}, repeats)
    times["predicted"] = statistics.median(overlap_predicted(line, taken) for line in lines)
    return times


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
