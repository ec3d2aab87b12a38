"""Direct exchange: every rank sends each other rank what that one needs, all at once.

A reduce_scatter sends (W-1)/W of N bytes from each rank, as the ring does, in one step of latency
but W-1 messages for each rank. What travels is always an input, never a partial sum, so 16-bit
floats cross the wire as 16 bits and are still added in float32 and rounded once.
"""

from s2s_lib.collectives.pieces import even_cuts, piece, scratch


def peers(group):
    """The other ranks, starting after this one, so that not all begin with rank 0."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


def sources(group):
    """The other ranks in the order in which their messages leave for this one."""
    return [(group.rank - distance) % group.size for distance in range(1, group.size)]


def reduce_scatter(operation, x, out, cuts, reduction):
    run_reduce(operation, x, out, cuts, reduction, ask_for_inputs(operation, x, cuts))


def ask_for_inputs(operation, x, cuts):
    mine = cuts[operation.group.rank + 1] - cuts[operation.group.rank]
    return [operation.receive(scratch(p, mine, x.dtype), p) for p in sources(operation.group)]


def run_reduce(operation, x, out, cuts, reduction, arrivals):
    group = operation.group
    for peer in peers(group):
        operation.send(piece(x, cuts, peer), peer)
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
    piece(out, cuts, operation.group.rank).copy_(x)
    run_gather(operation, x, arrivals)


def ask_for_pieces(operation, out, cuts):
    return [operation.receive(piece(out, cuts, p), p, 1) for p in sources(operation.group)]


def run_gather(operation, x, arrivals):
    for peer in peers(operation.group):
        operation.send(x, peer, 1)
    for arrival in arrivals:
        arrival.wait()


def all_reduce(operation, x, out, reduction):
    cuts = even_cuts(x.numel(), operation.group.size)
    inputs = ask_for_inputs(operation, x, cuts)
    pieces = ask_for_pieces(operation, out, cuts)
    mine = piece(out, cuts, operation.group.rank)
    run_reduce(operation, x, mine, cuts, reduction, inputs)
    run_gather(operation, mine, pieces)


def all_to_all(operation, x, out, sending, receiving):
    """Piece j of `x` goes to rank j; piece i of `out` comes from rank i."""
    group = operation.group
    arrivals = [operation.receive(piece(out, receiving, p), p) for p in sources(group)]
    for peer in peers(group):
        operation.send(piece(x, sending, peer), peer)
    piece(out, receiving, group.rank).copy_(piece(x, sending, group.rank))
    for arrival in arrivals:
        arrival.wait()
