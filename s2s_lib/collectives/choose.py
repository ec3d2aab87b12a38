"""Which algorithm `auto` takes, and what each costs.

With emulated links the cheapest by a plain model: latency for each step on the critical path,
time for the bytes through the busiest port, and a fixed price for each message. Without, by
thresholds in bytes, which were measured over gloo on the loopback of a laptop with two cores: the
number of messages decides small sizes there, and copies decide large ones.
"""

import functools
from collections import Counter
from typing import NamedTuple

from s2s_lib.ranks.connection import current
from s2s_lib.ranks.group import Group, check_group

# About what a message costs the processors of a laptop, whatever its size: sending, waking the
# receiver, and Python on both sides.
SECONDS_PER_MESSAGE = 50e-6
# Up to how many bytes a tree beats what sends less but more often.
SMALL = {"reduce_scatter": 64 * 1024, "all_gather": 256 * 1024}
# Up to how many ranks sending to each other at once beats taking turns; of an all_gather, below.
FEW = 8
# From here on the sums of an all_reduce do not pay to be sent to all sides at once.
LONG_PIECE = 4 * 2**20


class Cost(NamedTuple):
    """Of one collective: latencies and bytes on the critical path, and messages in all."""

    steps: int
    port_bytes: float
    messages: int

    def __add__(self, other):
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


# Each sends the messages of the other backwards, so they cost the same.
_TRANSPOSE = {"reduce": "broadcast", "scatter": "gather", "reduce_scatter": "all_gather"}


def cost(collective: str, algorithm: str, nbytes: int, size: int) -> Cost:
    """The cost of `collective` by `algorithm` over `size` ranks.

    `nbytes` is the size of the whole tensor: what is broadcast, reduced, scattered or comes out
    of a gather, or what one rank gives to an all_to_all. With links of latency L and bandwidth B
    the collective takes at most `steps` L + `port_bytes` / B, where it is one block: an all_reduce
    by ring cuts a tensor above 16 MiB, by direct and direct_ring above 32 MiB, and waits anew for
    each. A rank sends and receives at B at the same time; where one must receive all before it
    sends (naive, tree), both count.
    Also of the parts that others are made of, such as a gather by tree. ValueError where there is
    no such algorithm, or no formula (hierarchical, torch).
    """
    if size < 1 or nbytes < 0:
        raise ValueError(f"a cost is of 0 or more bytes on 1 or more ranks; got {nbytes}, {size}")
    one_way = _TRANSPOSE.get(collective, collective)
    if one_way == "all_reduce" and algorithm in ("naive", "tree"):
        there = back = cost("broadcast", algorithm, nbytes, size)
    elif one_way == "all_reduce" and algorithm == "direct_ring":
        there = cost("reduce_scatter", "direct", nbytes, size)
        back = cost("all_gather", "ring", nbytes, size)
    elif one_way == "all_reduce" and algorithm in ("ring", "direct", "halving_doubling"):
        inner = "doubling" if algorithm == "halving_doubling" else algorithm
        there = back = cost("all_gather", inner, nbytes, size)
    elif one_way == "all_gather" and algorithm in ("naive", "tree"):
        there = cost("gather", algorithm, nbytes, size)
        back = cost("broadcast", algorithm, nbytes, size)
    else:
        single = _one_way(one_way, algorithm, nbytes, size)
        if single is None:
            raise ValueError(f"no cost is known for {collective} by {algorithm!r} on {size} ranks")
        return single
    return there + back


@functools.lru_cache(maxsize=1024)
def _one_way(collective, algorithm, nbytes, size):
    hop, depth, children = min(1, size - 1), size.bit_length() - 1, (size - 1).bit_length()
    pairs, share = size * (size - 1), nbytes * (size - 1) / size
    # In a group that is no power of two the ranks above one send first and receive last.
    above = size - (1 << depth)
    trips = depth + 2 * (above > 0)
    costs = {
        ("broadcast", "naive"): Cost(hop, (size - 1) * nbytes, size - 1),
        ("broadcast", "tree"): Cost(depth, children * nbytes, size - 1),
        ("gather", "naive"): Cost(hop, share, size - 1),
        ("gather", "tree"): Cost(depth, share, size - 1),
        ("all_gather", "ring"): Cost(size - 1, share, pairs),
        ("all_gather", "direct"): Cost(hop, share, pairs),
        ("all_to_all", "direct"): Cost(hop, share, pairs),
        ("all_reduce", "doubling"): Cost(trips, trips * nbytes, (size - above) * depth + 2 * above),
    }
    if not above:
        costs["all_gather", "doubling"] = Cost(depth, share, size * depth)
    return costs.get((collective, algorithm))


def choose(collective: str, nbytes: int, group: Group, narrow: bool = False) -> str:
    """The algorithm that `auto` takes for a tensor of `nbytes` in this group.

    `narrow` is for sums of 16-bit floats, which only `direct` and `direct_ring` keep at 16 bits on
    the wire.
    """
    check_group(group)
    if collective in ("gather", "scatter"):
        return "naive"
    if collective == "all_to_all":
        return "direct"
    cluster = current().cluster
    if cluster is not None and group.size > 1:
        slowest = _slowest_link(group, cluster, nbytes)
        if slowest is not None:
            return _cheapest(collective, nbytes, group, slowest, narrow)
    return _by_size(collective, nbytes, group.size, narrow)


def _by_size(collective, nbytes, size, narrow):
    if collective in ("broadcast", "reduce"):
        return "tree"
    if collective == "all_reduce":
        if nbytes <= 2**20:
            return "doubling" if size == 2 else "tree"
        if size > FEW and not narrow:
            return "ring"
        return "direct_ring" if size > 2 and nbytes >= size * LONG_PIECE else "direct"
    if collective not in SMALL:
        raise ValueError(f"no collective {collective!r}: there is nothing to choose")
    if size > 2 and nbytes <= SMALL[collective]:
        return "tree"
    if narrow or (size < FEW and collective == "all_gather"):
        return "direct"
    return "doubling" if size & (size - 1) == 0 else "direct"


def _slowest_link(group, cluster, nbytes):
    """Of the links that connect this group, the one that takes longest for a message of this
    size; None if none is slowed."""
    per_node = Counter(cluster.node(rank) for rank in group.ranks)
    crossed = [cluster.inter] * (len(per_node) > 1) + [cluster.intra] * (max(per_node.values()) > 1)
    slowed = [link for link in crossed if link is not None]
    return max(slowed, key=lambda link: link.seconds(nbytes), default=None)


def _cheapest(collective, nbytes, group, link, narrow):
    if collective in ("broadcast", "reduce"):
        names = ["naive", "tree"]
    else:
        names = ["direct", "ring", "tree"]
        if collective == "all_reduce" and group.size == 2:
            # Between more ranks it sends more than the others, which DDP and ZeRO do not promise.
            names.append("doubling")
        if group.size & (group.size - 1) == 0:
            names.append("halving_doubling" if collective == "all_reduce" else "doubling")

    def seconds(name):
        # A partial sum of 16-bit floats travels as float32.
        factor = 2 if narrow and name != "direct" and collective != "all_gather" else 1
        price = cost(collective, name, nbytes * factor, group.size)
        wire_time = price.steps * link.latency_us / 1e6 + price.port_bytes / link.bytes_per_second
        return wire_time + price.messages * SECONDS_PER_MESSAGE

    best = min(names, key=seconds)
    if collective == "all_reduce" and not narrow and worth_levels(group, seconds(best), nbytes):
        return "hierarchical"
    return best


def worth_levels(group: Group, flat_seconds: float, nbytes: int) -> bool:
    """Whether an all_reduce inside and then between nodes beats `flat_seconds`."""
    cluster = current().cluster
    per_node = Counter(cluster.node(rank) for rank in group.ranks)
    inside, nodes = min(per_node.values()), len(per_node)
    if nodes == 1 or inside == 1 or len(set(per_node.values())) > 1:
        return False
    fast = cost("all_reduce", "direct", nbytes, inside)
    slow = cost("all_reduce", "direct", nbytes / inside, nodes)
    seconds = (fast.messages * nodes + slow.messages * inside) * SECONDS_PER_MESSAGE
    for price, link in ((fast, cluster.intra), (slow, cluster.inter)):
        if link is not None:
            seconds += price.steps * link.latency_us / 1e6
            seconds += price.port_bytes / link.bytes_per_second
    return seconds < flat_seconds
