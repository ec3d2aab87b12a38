"""Starting four ranks: launch (after the first) beside torch.multiprocessing.spawn."""

import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.report import result
from s2s_lib import launch


def work(group_rank):
    total = torch.tensor([float(group_rank)])
    dist.all_reduce(total)
    return total.item()


def launched(world):
    return work(world.rank)


def spawned(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    work(rank)
    dist.destroy_process_group()


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def spawn():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (os.path.join(folder, "store"),), nprocs=4)


def main():
    first = seconds(lambda: launch(launched, ranks=4))
    pairs = [(seconds(lambda: launch(launched, ranks=4)), seconds(spawn)) for _ in range(5)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"first launch {first:.2f} s, later {ours:.3f} s, spawn {theirs:.2f} s")
    result("start of 4 ranks: spawn / launch", theirs / ours, at_least=10)
