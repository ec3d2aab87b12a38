"""Our collectives beside gloo's own, over sizes and numbers of ranks.

Both get the same scheduling policy and the same tensors. Ours return into `out=`; gloo works in
place where that is its way. A cell is the median over alternating repeats on the slowest rank.
"""

import statistics
import time

import torch
import torch.distributed as dist

from s2s_lib import all_gather, all_reduce, barrier, broadcast, launch, reduce_scatter

KIB, MIB = 1024, 2**20
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def contenders(collective, nbytes, world):
    """name -> function, for one collective on a tensor of `nbytes` (the whole one)."""
    numel = max(world.size, nbytes // 4 // world.size * world.size)
    whole, part = torch.ones(numel), torch.ones(numel // world.size)
    whole_out, part_out = torch.empty_like(whole), torch.empty_like(part)
    if collective == "all_reduce":

        def copy_then_gloo():
            whole_out.copy_(whole)
            dist.all_reduce(whole_out)

        return {
            "ours": lambda: all_reduce(whole, world, op="max", out=whole_out),
            "gloo": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
            "copy, gloo": copy_then_gloo,
        }
    if collective == "reduce_scatter":
        return {
            "ours": lambda: reduce_scatter(whole, world, op="max", out=part_out),
            "gloo": lambda: dist.reduce_scatter_single(part_out, whole, dist.ReduceOp.MAX),
        }
    if collective == "all_gather":
        return {
            "ours": lambda: all_gather(part, world, out=whole_out),
            "gloo": lambda: dist.all_gather_single(whole_out, part),
        }
    return {
        "ours": lambda: broadcast(whole, world, out=whole),
        "gloo": lambda: dist.broadcast(whole, 0),
    }


def measure(world, cells):
    """cell -> contender -> median seconds on the slowest rank."""
    torch.set_num_threads(1)
    results = {}
    for collective, nbytes in cells:
        runs = contenders(collective, nbytes, world)
        times = {name: [] for name in runs}
        repeats = 40 if nbytes <= 256 * KIB else 15 if nbytes <= 4 * MIB else 7
        for repeat in range(-2, repeats):
            for name, run in runs.items():
                barrier(world)
                start = time.perf_counter()
                run()
                if repeat >= 0:
                    times[name].append(time.perf_counter() - start)
        mine = torch.tensor([times[name] for name in runs], dtype=torch.float64)
        slowest = all_reduce(mine, world, op="max")
        results[collective, nbytes] = {
            name: statistics.median(row) for name, row in zip(runs, slowest.tolist(), strict=True)
        }
    return results


def report(ranks, sizes=SIZES, collectives=None):
    collectives = collectives or ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    cells = [(collective, nbytes) for collective in collectives for nbytes in sizes]
    return launch(measure, cells, ranks=ranks, timeout=120)[0]
