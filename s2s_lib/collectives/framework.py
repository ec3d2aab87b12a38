"""The same collectives by torch's own process groups, as the algorithm named "torch".

It is what the hand-written ones are measured against. A process group for a subgroup is made on
first use, by its members only.
"""

import datetime

import torch.distributed as dist
from torch.distributed import distributed_c10d

from s2s_lib.ranks.connection import current

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
# torch's default process group -> our ranks -> their process group
_groups = {}


def process_group(group):
    """torch's process group of the same ranks."""
    world = dist.group.WORLD
    if group.ranks == tuple(range(world.size())):
        return world
    if world not in _groups:
        # Those made before the ranks were connected anew are of no use.
        _groups.clear()
        _groups[world] = {}
    groups = _groups[world]
    if group.ranks not in groups:
        groups[group.ranks] = make_process_group(group, world)
    return groups[group.ranks]


def make_process_group(group, world):
    # `dist.new_group` puts into the group's name how many this rank has made before; ranks that
    # have made different numbers of groups would look for each other under different names.
    backend, store = distributed_c10d._world.pg_map[world]
    made, _ = distributed_c10d._new_process_group_helper(
        group.size,
        group.rank,
        list(group.ranks),
        distributed_c10d.Backend(backend),
        store,
        f"ranks {list(group.ranks)}",
        timeout=datetime.timedelta(seconds=current().timeout),
    )
    return made


def broadcast(operation, flat, root):
    dist.broadcast(flat, group=process_group(operation.group), group_src=root)


def all_reduce(operation, x, out, reduction):
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    dist.all_reduce(out, OPS[reduction.op], process_group(operation.group))
    reduction.finish(out)


def reduce(operation, x, out, root, reduction):
    total = x.clone() if out is None else out.copy_(x)
    group = process_group(operation.group)
    dist.reduce(total, op=OPS[reduction.op], group=group, group_dst=root)
    if out is not None:
        reduction.finish(out)


def reduce_scatter(operation, x, out, cuts, reduction):
    same_size(cuts, "reduce_scatter")
    dist.reduce_scatter_single(out, x, OPS[reduction.op], process_group(operation.group))
    reduction.finish(out)


def all_gather(operation, x, out, cuts):
    same_size(cuts, "all_gather")
    dist.all_gather_single(out, x, process_group(operation.group))


def same_size(cuts, name):
    sizes = [after - before for before, after in zip(cuts, cuts[1:], strict=False)]
    if len(set(sizes)) > 1:
        raise ValueError(f"torch's {name} wants pieces of one size, got {sizes}")
