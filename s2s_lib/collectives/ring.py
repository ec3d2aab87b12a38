"""The ring: each rank sends only to its right neighbour and receives only from its left.

A reduce_scatter takes W-1 steps. Piece c starts at rank c+1 and travels right; every rank adds
its own part as the piece comes by, and after W-1 steps it is complete at rank c. An all_gather
sends the pieces round once more. Each step moves N/W bytes, so every rank sends (W-1)/W of N for
either, and 2(W-1)/W for an all_reduce: nearly independent of W, at 2(W-1) steps of latency.
(Patarasuk and Yuan, 2009.)
"""

from s2s_lib.collectives.pieces import blocks, own_piece, piece, scratch

# Larger tensors go round block by block, so that what is received is still in a cache when it is
# added and the memory to receive into stays small.
BLOCK_BYTES = 16 * 2**20


def reduce_scatter(operation, x, out, cuts, reduction):
    run_reduce(operation, x, out, cuts, reduction, ask_for_sums(operation, x, cuts))


def all_gather(operation, x, out, cuts):
    run_gather(operation, x, out, cuts, ask_for_pieces(operation, out, cuts))


def all_reduce(operation, x, out, reduction):
    for part, result, cuts in blocks(x, out, BLOCK_BYTES // x.itemsize, operation.group.size):
        # All receives are asked for first: a message that nobody expects yet has to wait.
        sums = ask_for_sums(operation, part, cuts)
        pieces = ask_for_pieces(operation, result, cuts)
        mine = piece(result, cuts, operation.group.rank)
        run_reduce(operation, part, mine, cuts, reduction, sums)
        run_gather(operation, mine, result, cuts, pieces)


def ask_for_sums(operation, x, cuts):
    rank, size = operation.group.rank, operation.group.size
    return [
        operation.receive(
            scratch(step, piece(x, cuts, (rank - step - 2) % size).numel(), x.dtype),
            (rank - 1) % size,
            step,
        )
        for step in range(size - 1)
    ]


def run_reduce(operation, x, out, cuts, reduction, arrivals):
    rank, size = operation.group.rank, operation.group.size
    if size == 1:
        out.copy_(x)
    sending = piece(x, cuts, (rank - 1) % size)
    for step, arrival in enumerate(arrivals):
        operation.send(sending, (rank + 1) % size, step)
        received = arrival.wait()
        sending = out if step == size - 2 else received
        reduction.combine(received, piece(x, cuts, (rank - step - 2) % size), sending)
    reduction.finish(out)


def ask_for_pieces(operation, out, cuts):
    rank, size = operation.group.rank, operation.group.size
    return [
        operation.receive(
            piece(out, cuts, (rank - step - 1) % size), (rank - 1) % size, size + step
        )
        for step in range(size - 1)
    ]


def run_gather(operation, x, out, cuts, arrivals):
    rank, size = operation.group.rank, operation.group.size
    sending = x
    for step, arrival in enumerate(arrivals):
        operation.send(sending, (rank + 1) % size, size + step)
        if step == 0:
            own_piece(x, out, cuts, rank)
        sending = arrival.wait()
    if size == 1:
        own_piece(x, out, cuts, rank)
