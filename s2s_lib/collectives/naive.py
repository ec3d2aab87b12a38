"""The plain way: one rank does all the work.

With W ranks and N bytes, the root's port carries (W-1) N bytes for a broadcast, as many for a
reduce, twice as many for an all_reduce; everybody else waits for it.
"""

from s2s_lib.collectives.pieces import piece, scratch


def broadcast(operation, flat, root):
    group = operation.group
    if group.rank == root:
        for rank in others(group, root):
            operation.send(flat, rank, 1)
    else:
        operation.receive(flat, root, 1).wait()


def reduce(operation, x, out, root, reduction):
    group = operation.group
    if group.rank != root:
        operation.send(x, root)
        return
    arrivals = [
        operation.receive(scratch(rank, x.numel(), x.dtype), rank) for rank in others(group, root)
    ]
    total = x
    for arrival in arrivals:
        reduction.combine(arrival.wait(), total, out)
        total = out
    if not arrivals:
        out.copy_(x)
    reduction.finish(out)


def all_reduce(operation, x, out, reduction):
    reduce(operation, x, out, 0, reduction)
    broadcast(operation, out, 0)


def scatter(operation, x, out, cuts, root):
    group = operation.group
    if group.rank == root:
        for rank in others(group, root):
            operation.send(piece(x, cuts, rank), rank, 2)
        out.copy_(piece(x, cuts, root))
    else:
        operation.receive(out, root, 2).wait()


def gather(operation, x, out, cuts, root):
    group = operation.group
    if group.rank != root:
        operation.send(x, root, 3)
        return
    arrivals = [operation.receive(piece(out, cuts, rank), rank, 3) for rank in others(group, root)]
    piece(out, cuts, root).copy_(x)
    for arrival in arrivals:
        arrival.wait()


def all_gather(operation, x, out, cuts):
    gather(operation, x, out, cuts, 0)
    broadcast(operation, out, 0)


def reduce_scatter(operation, x, out, cuts, reduction):
    total = scratch(0, x.numel(), x.dtype) if operation.group.rank == 0 else None
    reduce(operation, x, total, 0, reduction)
    scatter(operation, total, out, cuts, 0)


def others(group, root):
    return [rank for rank in range(group.size) if rank != root]
