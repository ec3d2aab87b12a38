"""Which algorithm `auto` takes, and what each costs.

With emulated links the cheapest by a plain model: latency for each step on the critical path,
time for the bytes through the busiest port, and a fixed price for each message. Without, by
thresholds in bytes, measured over gloo on loopback, where the number of messages decides small
sizes and the copies decide large ones (`make bench` measures them again).
"""

from typing import NamedTuple

from s2s_lib.ranks.group import Group
from s2s_lib.ranks.wire import current

# What a message costs the processors of a laptop, whatever its size.
SECONDS_PER_MESSAGE = 50e-6


class Cost(NamedTuple):
    """Of one collective: steps of latency, bytes through the busiest port, messages in all."""

    steps: int
    port_bytes: float
    messages: int


def cost(collective: str, algorithm: str, nbytes: int, size: int) -> Cost:
    """The cost of `collective` by `algorithm` over `size` ranks.

    `nbytes` is the size of the whole tensor: what is reduced, broadcast, or gathered. Bytes are
    those that the busiest rank sends or receives, whichever is more (ports are full duplex).
    """
    if collective == "all_reduce":
        parts = {
            "ring": ("reduce_scatter", "all_gather"),
            "direct": ("reduce_scatter", "all_gather"),
            "halving_doubling": ("reduce_scatter", "all_gather"),
            "tree": ("broadcast", "broadcast"),
            "naive": ("broadcast", "broadcast"),
        }
        if algorithm == "doubling":
            rounds, extra = (size.bit_length() - 1, size & (size - 1) != 0)
            core = 1 << rounds
            return Cost(
                rounds + 2 * extra,
                (rounds + extra) * nbytes,
                core * rounds + 2 * (size - core),
            )
        inner = "doubling" if algorithm == "halving_doubling" else algorithm
        pair = [cost(part, inner, nbytes, size) for part in parts[algorithm]]
        busiest = sum(part.port_bytes for part in pair)
        return Cost(pair[0].steps + pair[1].steps, busiest, pair[0].messages + pair[1].messages)
    return _one_way(collective, algorithm, nbytes, size)


def _one_way(collective, algorithm, nbytes, size):
    rounds = (size - 1).bit_length()
    share = nbytes * (size - 1) / size
    if algorithm == "naive" and collective in ("broadcast", "reduce"):
        return Cost(1, (size - 1) * nbytes, size - 1)
    if algorithm == "tree" and collective in ("broadcast", "reduce"):
        return Cost(rounds, rounds * nbytes, size - 1)
    if algorithm in ("naive", "tree"):
        whole = _one_way("broadcast", algorithm, nbytes, size)
        return Cost(whole.steps * 2, whole.port_bytes + share, whole.messages * 2)
    steps, messages = {
        "ring": (size - 1, size * (size - 1)),
        "doubling": (rounds, size * rounds),
        "direct": (1, size * (size - 1)),
    }[algorithm]
    return Cost(steps, share, messages)


def choose(collective: str, nbytes: int, group: Group, narrow: bool = False) -> str:
    """The algorithm that `auto` takes for a tensor of `nbytes` in this group.

    `narrow` is for sums of 16-bit floats, which only `direct` keeps at 16 bits on the wire.
    """
    if collective in ("gather", "scatter"):
        return "naive"
    if collective == "all_to_all":
        return "direct"
    cluster = current().cluster
    if cluster is not None and group.size > 1:
        slowest = _slowest_link(group, cluster)
        if slowest is not None:
            return _cheapest(collective, nbytes, group, slowest, narrow)
    return _by_size(collective, nbytes, group.size, narrow)


def _by_size(collective, nbytes, size, narrow):
    if collective in ("broadcast", "reduce"):
        return "tree"
    if collective == "all_reduce":
        if size == 2 and nbytes <= 256 * 1024:
            return "doubling"
        if size > 2 and nbytes <= 2**20:
            return "tree"
        return "direct" if narrow else "ring"
    small = 64 * 1024 if collective == "reduce_scatter" else 256 * 1024
    if size > 2 and nbytes <= small:
        return "tree"
    if narrow and collective == "reduce_scatter":
        return "direct"
    return "doubling" if size & (size - 1) == 0 else "direct"


def _slowest_link(group, cluster):
    """The link that any algorithm over this group must cross at some point."""
    nodes = {cluster.node(rank) for rank in group.ranks}
    return cluster.inter if len(nodes) > 1 else cluster.intra


def _cheapest(collective, nbytes, group, link, narrow):
    if collective in ("broadcast", "reduce"):
        names = ["naive", "tree"]
    else:
        names = ["direct", "ring", "tree"]
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
    per_node = {}
    for rank in group.ranks:
        per_node[cluster.node(rank)] = per_node.get(cluster.node(rank), 0) + 1
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
