"""DiLoCo beside DDP on four islands with 100 Mbit/s and 50 ms between them.

One layer of width 512, 8 tokens a rank, plain SGD, as in lesson 07: islands that share two cores
must compute fast for the line to matter. In one launch, in turns: some steps of DDP, and a round of
DiLoCo with H = 50, its sync included. Beside the ratio of tokens a second: what follows
from an inner step's measured time, the bytes, the bandwidth and the latency, over what was
measured. DDP averages after backward here, since a formula for what overlaps would guess.
"""

import statistics
import time

import torch

from benchmarks.report import result
from s2s_lib import DDP, GPT, Cluster, DiLoCo, GPTConfig, Link, launch, next_token_loss
from s2s_lib.plan.islands import all_reduce_seconds

ISLANDS, H, TURNS, DDP_STEPS = 4, 50, 3, 3
LINK = Link(gbit_s=0.1, latency_us=50_000)
MODEL = GPTConfig(layers=1, hidden=512, heads=8)


def stepper(model, optimizer, rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, MODEL.vocab, (1, 9), generator=generator)

    def step():
        start = time.monotonic()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.monotonic() - start

    return step


def work(world):
    torch.manual_seed(0)
    together, apart = GPT(MODEL), GPT(MODEL)
    ddp = DDP(together, world, overlap=False)
    averaged = stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=1e-3), world.rank)
    optimizer = torch.optim.SGD(apart.parameters(), lr=1e-3)
    DiLoCo(apart, optimizer, world, H)
    inner = stepper(apart, optimizer, world.rank)
    found = {"ddp": [], "round": [], "inner": []}
    for _ in range(TURNS):
        found["ddp"] += [averaged() for _ in range(DDP_STEPS)]
        steps = [inner() for _ in range(H)]
        found["round"].append(sum(steps))
        found["inner"] += steps[:-1]
    buckets = len(ddp.buckets)
    return found, sum(p.nbytes for p in apart.parameters()), buckets


def main():
    cluster = Cluster(ISLANDS, 1, inter=LINK)
    ranks = launch(work, ranks=ISLANDS, cluster=cluster)
    found = {key: max(statistics.median(r[key]) for r, _, _ in ranks) for key in ranks[0][0]}
    # A round lasts as long as its slowest island, step by step or in all.
    inner = max(statistics.mean(r["inner"]) for r, _, _ in ranks)
    _, nbytes, buckets = ranks[0]
    sync = all_reduce_seconds(nbytes, ISLANDS, LINK)
    # In two phases of one latency each, where a ring has 2(W-1).
    sync -= (2 * (ISLANDS - 1) - 2) * LINK.latency_us * 1e-6
    result("tokens a second, DiLoCo (H = 50) / DDP", found["ddp"] * H / found["round"], 20)
    result("a round of DiLoCo, measured / predicted", found["round"] / (H * inner + sync), 0.9, 1.1)
    ddp = inner + sync + 2 * (buckets - 1) * LINK.latency_us * 1e-6
    result("a step of DDP, measured / predicted", found["ddp"] / ddp, 0.9, 1.1)
