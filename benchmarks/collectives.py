"""Our collectives beside gloo's own, over sizes and numbers of ranks.

Both get the same scheduling policy and the same tensors. Ours return into `out=`; gloo works in
place where that is its way, and for all_reduce also after a copy, which is our contract. A cell
is the median of alternating repeats; each repeat counts as long as on its slowest rank. "bare" is
a plain exchange (direct, for broadcast a tree) by gloo's own sends and receives, with none of our
code: what messages over gloo come to. Where that does not reach a target, ours must come near it.
"""

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.report import geometric_mean, result
from s2s_lib import all_gather, all_reduce, barrier, broadcast, launch, reduce_scatter
from s2s_lib.collectives.tree import family
from s2s_lib.ranks.connection import current

KIB, MIB = 1024, 2**20
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
TARGETS = {"all_reduce": 1.3, "reduce_scatter": 2.0, "all_gather": 2.0, "broadcast": 1.3}


def contenders(collective, nbytes, world):
    """name -> function, for one collective on a tensor of `nbytes` (the whole one)."""
    numel = max(world.size, nbytes // 4 // world.size * world.size)
    whole, part = torch.zeros(numel), torch.zeros(numel // world.size)
    whole_out, part_out = torch.empty_like(whole), torch.empty_like(part)
    if collective == "all_reduce":

        def copy_then_gloo():
            whole_out.copy_(whole)
            dist.all_reduce(whole_out)

        return {
            "ours": lambda: all_reduce(whole, world, out=whole_out),
            "gloo": lambda: dist.all_reduce(whole),
            "copy, then gloo": copy_then_gloo,
            "bare": bare_all_reduce(whole, whole_out, world),
        }
    if collective == "reduce_scatter":
        return {
            "ours": lambda: reduce_scatter(whole, world, out=part_out),
            "gloo": lambda: dist.reduce_scatter_single(part_out, whole),
        }
    if collective == "all_gather":
        return {
            "ours": lambda: all_gather(part, world, out=whole_out),
            "gloo": lambda: dist.all_gather_single(whole_out, part),
            "bare": bare_all_gather(part, list(whole_out.chunk(world.size)), world),
        }
    return {
        "ours": lambda: broadcast(whole, world, out=whole),
        "gloo": lambda: dist.broadcast(whole, 0),
        "bare": bare_broadcast(whole, world),
    }


def bare_all_reduce(whole, out, world):
    backend, rank, size = current().backend, world.rank, world.size
    inputs, pieces = whole.chunk(size), out.chunk(size)
    others = [(rank + i) % size for i in range(1, size)]
    theirs = [torch.empty_like(pieces[rank]) for _ in others]
    total = pieces[rank]

    def run():
        coming = [backend.recv([x], p, 0) for x, p in zip(theirs, reversed(others), strict=True)]
        works = [backend.recv([pieces[p]], p, 1) for p in reversed(others)]
        works += [backend.send([inputs[p]], p, 0) for p in others]
        mine = inputs[rank]
        for work, x in zip(coming, theirs, strict=True):
            work.wait()
            mine = torch.add(x, mine, out=total)
        works += [backend.send([total], p, 1) for p in others]
        for work in works:
            work.wait()

    return run


def bare_all_gather(part, pieces, world):
    backend, rank, size = current().backend, world.rank, world.size

    def run():
        works = [backend.recv([pieces[rank - i]], (rank - i) % size, 0) for i in range(1, size)]
        works += [backend.send([part], (rank + i) % size, 0) for i in range(1, size)]
        pieces[rank].copy_(part)
        for work in works:
            work.wait()

    return run


def bare_broadcast(whole, world):
    backend = current().backend
    parent, children = family(world.rank, world.size, 0)

    def run():
        if parent is not None:
            backend.recv([whole], parent, 0).wait()
        for work in [backend.send([whole], child, 0) for child in reversed(children)]:
            work.wait()

    return run


def alternate(world, runs, repeats, warm_up=2):
    """name -> median seconds on the slowest rank, the contenders taking turns."""
    times = {name: [] for name in runs}
    for repeat in range(-warm_up, repeats):
        for name, run in runs.items():
            barrier(world)
            start = time.perf_counter()
            run()
            if repeat >= 0:
                times[name].append(time.perf_counter() - start)
    mine = torch.tensor(list(times.values()), dtype=torch.float64)
    slowest = all_reduce(mine, world, op="max").tolist()
    return {name: statistics.median(row) for name, row in zip(runs, slowest, strict=True)}


def measure(world, cells):
    """cell -> contender -> seconds."""
    return {
        (collective, nbytes): alternate(
            world,
            contenders(collective, nbytes, world),
            repeats=60 if nbytes <= 256 * KIB else 31 if nbytes <= 4 * MIB else 21,
        )
        for collective, nbytes in cells
    }


def human(nbytes):
    return f"{nbytes // MIB} MB" if nbytes >= MIB else f"{nbytes // KIB} KB"


def main(sizes=SIZES, groups=(2, 4, 8, 3, 5, 6)):
    cells = [(collective, nbytes) for collective in TARGETS for nbytes in sizes]
    times = {}
    for ranks in groups:
        some = cells if ranks in (2, 4, 8) else [c for c in cells if c[1] <= 16 * MIB]
        times[ranks] = launch(measure, some, ranks=ranks, timeout=120)[0]
    print("gloo's time / ours\n" + " " * 27 + "".join(f"{human(n):>8}" for n in sizes))
    for collective, target in TARGETS.items():
        ratios, bare = {}, []
        for ranks in groups:
            row = {n: times[ranks].get((collective, n)) for n in sizes}
            ratios[ranks] = {n: t["gloo"] / t["ours"] for n, t in row.items() if t}
            print(f"{collective:<16}{ranks} ranks   " + line(ratios[ranks], sizes))
            if collective in ("all_gather", "broadcast"):
                least = {n: t["gloo"] / t["bare"] for n, t in row.items() if t}
                bare += least.values() if ranks in (2, 4, 8) else ()
                print(f"{'':<16}  bare".ljust(27) + line(least, sizes))
            if collective == "all_reduce":
                copied = {n: t["copy, then gloo"] / t["ours"] for n, t in row.items() if t}
                print(f"{'':<9}  copy, then gloo".ljust(27) + line(copied, sizes))
                least = {n: t["copy, then gloo"] / t["bare"] for n, t in row.items() if t}
                print(f"{'':<9}  the same / bare".ljust(27) + line(least, sizes))
                if ranks in (2, 4, 8):
                    judge_large(ranks, ratios[ranks], copied, least)
        if bare:
            least = geometric_mean(bare)
            result(f"{collective} on 2, 4, 8 ranks: bare, geometric mean", least)
            target = min(target, 0.9 * least)
        for name, chosen in (("2, 4, 8", (2, 4, 8)), ("3, 5, 6", (3, 5, 6))):
            values = [v for ranks in chosen if ranks in ratios for v in ratios[ranks].values()]
            if values:
                what = f"{collective} on {name} ranks"
                result(f"{what}: geometric mean", geometric_mean(values), target)
                result(f"{what}: worst cell", min(values), 0.75)


def judge_large(ranks, in_place, copied, least):
    large = [n for n in copied if n >= 4 * MIB]
    if large:
        what = f"all_reduce, {ranks} ranks, 4 MB and more: worst"
        result(f"{what}, in place", min(in_place[n] for n in large), 0.85)
        bound = min(1.0, 0.9 * min(least[n] for n in large))
        result(f"{what}, copied", min(copied[n] for n in large), bound)


def line(ratios, sizes):
    return "".join(f"{ratios[n]:8.2f}" if n in ratios else " " * 8 for n in sizes)
