"""Direct exchange: every rank sends each other rank what that one needs, all at once.

A reduce_scatter sends (W-1)/W of N bytes from each rank, as the ring does, in one step of latency
but W-1 messages for each rank. What travels is always an input, never a partial sum, so 16-bit
floats cross the wire as 16 bits and are still added in float32 and rounded once.
"""

import functools

from s2s_lib.collectives import ring
from s2s_lib.collectives.pieces import blocks, own_piece, piece, scratch

# Two ranks leave a laptop's cores idle while they add, so it pays to have half of the tensor on its
# way meanwhile; more ranks do not, and blocks only bound the memory to receive into.
LEAST_HALF_BYTES = 8 * 2**20
BLOCK_BYTES = 32 * 2**20


def peers(operation):
    """The other ranks in the order in which this one sends to them."""
    return rotation(operation.group, operation.wire.cluster, 1)


def sources(operation):
    """The other ranks in the order in which their messages leave for this one."""
    return rotation(operation.group, operation.wire.cluster, -1)


@functools.lru_cache(maxsize=1024)
def rotation(group, cluster, direction):
    """The other places of a group, so that at each step no two ranks send to the same one.

    On equal nodes also so that the ranks of a node never all send to one rank of another: first
    inside the node, then to the next node, each rank to its counterpart first.
    """
    places = places_by_node(group, cluster)
    if len({len(node) for node in places}) > 1:
        places = [list(range(group.size))]
    inside, nodes = len(places[0]), len(places)
    mine = next(n for n, node in enumerate(places) if group.rank in node)
    index = places[mine].index(group.rank)
    return tuple(
        places[(mine + direction * far) % nodes][(index + direction * near) % inside]
        for far in range(nodes)
        for near in range(inside)
        if far or near
    )


def places_by_node(group, cluster):
    """The places of the group on each of its nodes; without a cluster all are on one."""
    nodes = {}
    for place, rank in enumerate(group.ranks):
        nodes.setdefault(cluster.node(rank) if cluster else 0, []).append(place)
    return list(nodes.values())


def reduce_scatter(operation, x, out, cuts, reduction):
    arrivals = ask_for_inputs(operation, x, cuts)
    send_inputs(operation, x, cuts)
    add_up(operation, x, out, cuts, reduction, arrivals)


def ask_for_inputs(operation, x, cuts, slot=0):
    group = operation.group
    mine = cuts[group.rank + 1] - cuts[group.rank]
    first = slot * (group.size + 1)
    return [operation.receive(scratch(first + p, mine, x.dtype), p) for p in sources(operation)]


def send_inputs(operation, x, cuts):
    for peer in peers(operation):
        operation.send(piece(x, cuts, peer), peer)


def add_up(operation, x, out, cuts, reduction, arrivals):
    group = operation.group
    mine = piece(x, cuts, group.rank)
    total = out
    if reduction.widens:
        total = scratch(group.size, out.numel(), reduction.dtype)
        mine = mine.to(reduction.dtype)
    if not arrivals:
        total.copy_(mine)
    for arrival in arrivals:
        reduction.combine(arrival.wait(), mine, total)
        mine = total
    reduction.finish(total)
    if total is not out:
        out.copy_(total)


def all_gather(operation, x, out, cuts):
    arrivals = ask_for_pieces(operation, out, cuts)
    send_to_all(operation, x)
    own_piece(x, out, cuts, operation.group.rank)
    wait_for(arrivals)


def ask_for_pieces(operation, out, cuts):
    return [operation.receive(piece(out, cuts, p), p, 1) for p in sources(operation)]


def send_to_all(operation, x):
    for peer in peers(operation):
        operation.send(x, peer, 1)


def wait_for(arrivals):
    for arrival in arrivals:
        arrival.wait()


def all_reduce(operation, x, out, reduction):
    """Block by block: while one is added up, the next is on its way."""
    size = operation.group.size
    block = BLOCK_BYTES // x.itemsize
    if size == 2:
        block = min(block, max(LEAST_HALF_BYTES // x.itemsize, -(-x.numel() // 2)))
    begun, pieces = None, []
    for number, (part, result, cuts) in enumerate(blocks(x, out, block, size)):
        inputs = ask_for_inputs(operation, part, cuts, number % 2)
        pieces += ask_for_pieces(operation, result, cuts)
        send_inputs(operation, part, cuts)
        if begun is not None:
            add_up_and_tell(operation, reduction, *begun)
        begun = part, result, cuts, inputs
    add_up_and_tell(operation, reduction, *begun)
    wait_for(pieces)


def add_up_and_tell(operation, reduction, x, out, cuts, inputs):
    mine = piece(out, cuts, operation.group.rank)
    add_up(operation, x, mine, cuts, reduction, inputs)
    send_to_all(operation, mine)


def ring_all_reduce(operation, x, out, reduction):
    """Straight to their places, and back round the ring, where long pieces do not meet."""
    for part, result, cuts in blocks(x, out, BLOCK_BYTES // x.itemsize, operation.group.size):
        inputs = ask_for_inputs(operation, part, cuts)
        pieces = ring.ask_for_pieces(operation, result, cuts)
        send_inputs(operation, part, cuts)
        mine = piece(result, cuts, operation.group.rank)
        add_up(operation, part, mine, cuts, reduction, inputs)
        ring.run_gather(operation, mine, result, cuts, pieces)


def all_to_all(operation, x, out, sending, receiving):
    """Piece j of `x` goes to rank j; piece i of `out` comes from rank i."""
    group = operation.group
    arrivals = [operation.receive(piece(out, receiving, p), p) for p in sources(operation)]
    for peer in peers(operation):
        operation.send(piece(x, sending, peer), peer)
    own_piece(piece(x, sending, group.rank), out, receiving, group.rank)
    wait_for(arrivals)
