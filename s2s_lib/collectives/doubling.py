"""Recursive doubling and halving: exchange with the rank at distance 1, 2, 4, ...

log2(W) steps instead of the ring's W-1. Doubling an all_reduce sends all N bytes at each step
(best when N is small). Halving a reduce_scatter sends N/2, then N/4, ...: (W-1)/W of N in all, as
the ring does; doubling an all_gather is the same backwards. One after the other they make an
all_reduce (Rabenseifner, 2004; Thakur et al., 2005).
"""

import functools

from s2s_lib.collectives.pieces import even_cuts, own_piece, piece, scratch


def power_below(size: int) -> int:
    """The largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


def check_power_of_two(size):
    if size & (size - 1):
        raise ValueError(
            f"halving and doubling pair ranks at distance 1, 2, 4, ...: a group of {size} is not "
            f"a power of two; use ring, tree or direct"
        )


def all_reduce(operation, x, out, reduction):
    """In a group that is no power of two, the ranks above one first add to a partner below."""
    rank, size = operation.group.rank, operation.group.size
    core = power_below(size)
    if rank >= core:
        arrival = operation.receive(out, rank - core, 200)
        operation.send(x, rank - core, 201)
        arrival.wait()
        return
    total = x
    if rank + core < size:
        extra = operation.receive(scratch(99, x.numel(), x.dtype), rank + core, 201)
    arrivals = [
        operation.receive(scratch(step, x.numel(), x.dtype), rank ^ (1 << step), step)
        for step in range(core.bit_length() - 1)
    ]
    if rank + core < size:
        received = extra.wait()
        reduction.combine(received, x, received)
        total = received
    for step, arrival in enumerate(arrivals):
        partner = rank ^ (1 << step)
        operation.send(total, partner, step)
        received = arrival.wait()
        # Both partners take the lower one's first: max(0, -0) and the bits of a NaN depend on it.
        pair = (received, total) if partner < rank else (total, received)
        # `total` may still be on its way out, so the sum goes where the partner's came in.
        reduction.combine(*pair, received)
        total = received
    # `out` may be `x`, which may still be on its way out.
    operation.wait_for_sends()
    out.copy_(total)
    reduction.finish(out)
    if rank + core < size:
        operation.send(out, rank + core, 200)


def reduce_scatter(operation, x, out, cuts, reduction):
    check_power_of_two(operation.group.size)
    run_reduce(operation, x, out, cuts, reduction, ask_for_sums(operation, x, cuts))


def all_gather(operation, x, out, cuts):
    check_power_of_two(operation.group.size)
    run_gather(operation, x, out, cuts, ask_for_pieces(operation, out, cuts))


def halving_all_reduce(operation, x, out, reduction):
    """reduce_scatter by halving, then all_gather by doubling."""
    check_power_of_two(operation.group.size)
    cuts = even_cuts(x.numel(), operation.group.size)
    sums = ask_for_sums(operation, x, cuts)
    pieces = ask_for_pieces(operation, out, cuts)
    mine = piece(out, cuts, operation.group.rank)
    run_reduce(operation, x, mine, cuts, reduction, sums)
    run_gather(operation, mine, out, cuts, pieces)


@functools.lru_cache
def distances(size):
    """size/2, ..., 2, 1: with whom a halving exchanges, in order."""
    return tuple(size >> step for step in range(1, size.bit_length()))


def block(rank, distance):
    """First and one past the last rank of the aligned block of `distance` ranks around `rank`."""
    first = rank // distance * distance
    return first, first + distance


def ask_for_sums(operation, x, cuts):
    rank = operation.group.rank
    return [
        operation.receive(
            scratch(step, piece(x, cuts, *block(rank, distance)).numel(), x.dtype),
            rank ^ distance,
            step,
        )
        for step, distance in enumerate(distances(operation.group.size))
    ]


def run_reduce(operation, x, out, cuts, reduction, arrivals):
    rank, size = operation.group.rank, operation.group.size
    total, start = x, 0
    for step, (distance, arrival) in enumerate(zip(distances(size), arrivals, strict=True)):
        partner = rank ^ distance
        theirs, mine = (
            total[cuts[first] - start : cuts[last] - start]
            for first, last in (block(partner, distance), block(rank, distance))
        )
        operation.send(theirs, partner, step)
        received = arrival.wait()
        target = out if distance == 1 else received
        reduction.combine(received, mine, target)
        total, start = target, cuts[block(rank, distance)[0]]
    if size == 1:
        out.copy_(x)
    reduction.finish(out)


def ask_for_pieces(operation, out, cuts):
    rank = operation.group.rank
    return [
        operation.receive(
            piece(out, cuts, *block(rank ^ distance, distance)), rank ^ distance, 100 + step
        )
        for step, distance in enumerate(reversed(distances(operation.group.size)))
    ]


def run_gather(operation, x, out, cuts, arrivals):
    rank = operation.group.rank
    pairs = zip(reversed(distances(operation.group.size)), arrivals, strict=True)
    for step, (distance, arrival) in enumerate(pairs):
        sending = piece(out, cuts, *block(rank, distance)) if step else x
        operation.send(sending, rank ^ distance, 100 + step)
        if step == 0:
            own_piece(x, out, cuts, rank)
        arrival.wait()
    if not arrivals:
        own_piece(x, out, cuts, rank)
