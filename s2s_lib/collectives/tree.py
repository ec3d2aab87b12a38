"""The binomial tree: in every round, each rank that has the data passes it on to one that has not.

log2(W) rounds and W-1 messages for a broadcast; a reduce is the same backwards. The fewest
messages of all, so the best choice for small tensors where each message has a price of its own;
the root's port carries log2(W) times N bytes.
"""

import functools

from s2s_lib.collectives.pieces import own_piece, piece, scratch


@functools.lru_cache
def family(rank, size, root):
    """The parent of a rank (None at the root) and its children, nearest first.

    Counted from the root, rank r hangs below r without its lowest set bit.
    """
    place = (rank - root) % size
    lowest = place & -place if place else 1 << size.bit_length()
    parent = None if place == 0 else (place - lowest + root) % size
    children, distance = [], 1
    while distance < lowest and place + distance < size:
        children.append((place + distance + root) % size)
        distance *= 2
    return parent, tuple(children)


def broadcast(operation, flat, root, step=0):
    parent, children = family(operation.group.rank, operation.group.size, root)
    arrival = None if parent is None else operation.receive(flat, parent, step)
    pass_on(operation, flat, arrival, children, step)


def pass_on(operation, flat, arrival, children, step=0):
    if arrival is not None:
        arrival.wait()
    # The furthest child has the most descendants waiting.
    for child in reversed(children):
        operation.send(flat, child, step)


def reduce(operation, x, out, root, reduction):
    total = collect(operation, x, out, root, reduction)
    if operation.group.rank == root:
        if total is not out:
            out.copy_(total)
        reduction.finish(out)


def collect(operation, x, out, root, reduction):
    """Add the children's sums to `x` and send the total to the parent; the root's goes to `out`."""
    parent, children = family(operation.group.rank, operation.group.size, root)
    arrivals = [
        operation.receive(scratch(i, x.numel(), x.dtype), child, 1)
        for i, child in enumerate(children)
    ]
    total = x
    for i, arrival in enumerate(arrivals):
        received = arrival.wait()
        target = out if parent is None and i == len(arrivals) - 1 else received
        reduction.combine(received, total, target)
        total = target
    if parent is not None:
        operation.send(total, parent, 1)
    return total


def all_reduce(operation, x, out, reduction):
    parent, children = family(operation.group.rank, operation.group.size, 0)
    # `out` may be `x`: the result comes only after the parent has taken this rank's sum.
    arrival = None if parent is None else operation.receive(out, parent)
    reduce(operation, x, out, 0, reduction)
    pass_on(operation, out, arrival, children)


def below(rank, distance, size):
    """The ranks of the subtree that hangs at `rank + distance`, as first and one past the last."""
    return rank + distance, min(rank + 2 * distance, size)


def all_gather(operation, x, out, cuts):
    """Gather up the tree with root 0, whose subtrees are neighbouring pieces; broadcast back."""
    rank, size = operation.group.rank, operation.group.size
    parent, children = family(rank, size, 0)
    arrivals = [
        operation.receive(piece(out, cuts, *below(rank, child - rank, size)), child, 1)
        for child in children
    ]
    result = None if parent is None else operation.receive(out, parent)
    if children or parent is None:
        own_piece(x, out, cuts, rank)
    for arrival in arrivals:
        arrival.wait()
    if parent is not None:
        mine = piece(out, cuts, *below(parent, rank - parent, size)) if children else x
        operation.send(mine, parent, 1)
    pass_on(operation, out, result, children)


def reduce_scatter(operation, x, out, cuts, reduction):
    """Reduce to rank 0, then send each subtree its pieces down the tree."""
    rank, size = operation.group.rank, operation.group.size
    parent, children = family(rank, size, 0)
    last = size if parent is None else below(parent, rank - parent, size)[1]
    mine = scratch(50, cuts[last] - cuts[rank], x.dtype)
    arrival = None if parent is None else operation.receive(mine, parent)
    reduce(operation, x, mine, 0, reduction)
    if arrival is not None:
        arrival.wait()
    for child in reversed(children):
        first, last = below(rank, child - rank, size)
        operation.send(mine[cuts[first] - cuts[rank] : cuts[last] - cuts[rank]], child)
    out.copy_(mine[: out.numel()])
