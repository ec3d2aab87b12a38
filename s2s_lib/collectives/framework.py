"""The same collectives by torch's own process groups, as the algorithm named "torch".

It is what the hand-written ones are measured against, and what runs on a GPU, where NCCL moves
the bytes. A process group for a subgroup is made on first use, by its members only.
"""

import torch.distributed as dist

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
_groups = {}


def process_group(group):
    """torch's process group of the same ranks."""
    if group.size == dist.get_world_size() and list(group.ranks) == sorted(group.ranks):
        return dist.group.WORLD
    if group.ranks not in _groups:
        _groups[group.ranks] = dist.new_group(
            list(group.ranks), use_local_synchronization=True, sort_ranks=False
        )
    return _groups[group.ranks]


def broadcast(operation, flat, root):
    group = operation.group
    dist.broadcast(flat, group.ranks[root], process_group(group))


def all_reduce(operation, x, out, reduction):
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    dist.all_reduce(out, OPS[reduction.op], process_group(operation.group))
    reduction.finish(out)


def reduce(operation, x, out, root, reduction):
    group = operation.group
    total = x.clone() if out is None else out.copy_(x)
    dist.reduce(total, group.ranks[root], OPS[reduction.op], process_group(group))
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
