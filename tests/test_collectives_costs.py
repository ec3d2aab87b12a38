"""What a collective costs: messages and bytes counted on the wire, steps on a simulated one.

`Net` runs the ranks as threads over links in virtual time, by the rules of the emulated link, and
reads a message only when its receiver waits for it. So a wrong formula shows in the bytes or the
clock, an algorithm that waits for its messages in another order than they come shows in the
clock, and one that writes a buffer while a send still reads it shows in the values.
"""

import queue
import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from s2s_lib import (
    Cluster,
    Group,
    Link,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    bill,
    broadcast,
    choose,
    cost,
    gather,
    launch,
    reduce,
    reduce_scatter,
    scatter,
)
from s2s_lib.collectives import direct, naive
from s2s_lib.collectives.functions import ALGORITHMS
from s2s_lib.collectives.pieces import even_cuts
from s2s_lib.collectives.reduction import Reduction
from s2s_lib.ranks import connection

NUMEL = 840
NBYTES = NUMEL * 8
FUNCTIONS = {
    "broadcast": broadcast,
    "reduce": reduce,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
}
FROM_ROOT = ("naive", "tree")


def priced(size):
    """(collective, algorithm) for all that have a cost and run on `size` ranks."""
    power = size & (size - 1) == 0
    for collective, table in ALGORITHMS.items():
        for algorithm in table:
            halves = algorithm in ("doubling", "halving_doubling")
            needs_power = halves and (collective, algorithm) != ("all_reduce", "doubling")
            if algorithm not in ("torch", "hierarchical") and (power or not needs_power):
                yield collective, algorithm


class Net:
    """Full-duplex ports of `size` ranks; `latency` for a message, `per_byte` for each byte."""

    def __init__(self, size, latency, per_byte):
        self.latency, self.per_byte = latency, per_byte
        self.now, self.sending, self.receiving = ([0] * size for _ in range(3))
        self.lock = threading.Lock()
        self.boxes = {}

    def box(self, *key):
        with self.lock:
            return self.boxes.setdefault(key, queue.Queue())

    def run(self, function):
        """`function(operation)` on every rank; the values, and when the last was done."""
        size = len(self.now)

        def work(rank):
            operation = NetOperation(self, Group(tuple(range(size)), rank))
            value = function(operation)
            operation.wait_for_sends()
            return value

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, range(size))), max(self.now)


class NetOperation:
    """What an algorithm sees of the wire."""

    wire = types.SimpleNamespace(cluster=None)

    def __init__(self, net, group):
        self.net, self.group = net, group
        self.taken = []

    def send(self, tensor, to, step=0):
        net, rank = self.net, self.group.rank
        if tensor.numel():
            departs = max(net.now[rank], net.sending[rank])
            net.sending[rank] = departs + tensor.nbytes * net.per_byte
            self.taken.append(threading.Event())
            net.box(rank, to, step).put((tensor, departs, self.taken[-1]))

    def wait_for_sends(self):
        assert all(event.wait(10) for event in self.taken)

    def receive(self, out, source, step=0):
        return NetArrival(self, out, source, step)


class NetArrival:
    def __init__(self, operation, out, source, step):
        self.operation, self.out, self.source, self.step = operation, out, source, step

    def wait(self):
        net, rank = self.operation.net, self.operation.group.rank
        if self.out.numel():
            tensor, departs, taken = net.box(self.source, rank, self.step).get(timeout=10)
            begins = max(departs + net.latency, net.receiving[rank])
            net.receiving[rank] = net.now[rank] = begins + tensor.nbytes * net.per_byte
            time.sleep(random.random() * 2e-4)
            self.out.copy_(tensor)
            taken.set()
        return self.out


def inputs(size):
    return [torch.arange(NUMEL, dtype=torch.float64) + 1000 * rank for rank in range(size)]


def on_net(collective, algorithm, size, latency, per_byte, in_place=False):
    """Run one algorithm over a `Net`; asserts its values and returns the time it took."""
    run, tensors, cuts = ALGORITHMS[collective][algorithm], inputs(size), even_cuts(NUMEL, size)
    total, root = sum(tensors), 0 if size < 3 else 2
    pieces = [tensors[0][a:b].clone() for a, b in zip(cuts, cuts[1:], strict=False)]

    def work(operation):
        rank = operation.group.rank
        x, reduction = tensors[rank], Reduction("sum", torch.float64, size)
        out = x if in_place else torch.empty(NUMEL, dtype=torch.float64)
        if collective == "broadcast":
            run(operation, x, root)
            return x
        if collective == "reduce":
            run(operation, x, out if rank == root else None, root, reduction)
            return out if rank == root else total
        if collective == "all_reduce":
            run(operation, x, out, reduction)
            return out
        if collective == "reduce_scatter":
            mine = (x if in_place else out)[cuts[rank] : cuts[rank + 1]]
            run(operation, x, mine, cuts, reduction)
            return mine
        run(operation, pieces[rank], out, cuts)
        return out

    expected = {
        "broadcast": [tensors[root].clone()] * size,
        "reduce": [total] * size,
        "all_reduce": [total] * size,
        "reduce_scatter": [total[a:b] for a, b in zip(cuts, cuts[1:], strict=False)],
        "all_gather": [tensors[0].clone()] * size,
    }[collective]
    values, seconds = Net(size, latency, per_byte).run(work)
    assert all(map(torch.equal, values, expected)), (collective, algorithm, size, in_place)
    return seconds


@pytest.mark.parametrize("size", range(1, 9))
def test_steps_and_bytes_of_the_formula_are_those_of_the_critical_path(size):
    for collective, algorithm in priced(size):
        price = cost(collective, algorithm, NBYTES, size)
        name = (collective, algorithm, size)
        steps = on_net(*name, latency=1, per_byte=0)
        port_bytes = on_net(*name, latency=0, per_byte=1)
        if size & (size - 1) and algorithm == "doubling":
            # A bound: ranks without a partner above start their rounds a step early.
            assert price.steps - 1 <= steps <= price.steps, name
            assert price.port_bytes - NBYTES <= port_bytes <= price.port_bytes, name
        else:
            assert (steps, pytest.approx(port_bytes)) == price[:2], name


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_no_buffer_is_written_while_a_send_reads_it_not_even_in_place(size):
    for collective, algorithm in priced(size):
        for _ in range(3):
            on_net(collective, algorithm, size, latency=1, per_byte=1, in_place=True)


def test_gather_scatter_and_all_to_all_cost_what_the_formula_says():
    size, cuts = 5, even_cuts(NUMEL, 5)
    whole = torch.arange(NUMEL, dtype=torch.float64)

    def work(collective):
        def gathers(operation):
            out = torch.empty(NUMEL, dtype=torch.float64)
            mine = whole[cuts[operation.group.rank] : cuts[operation.group.rank + 1]]
            naive.gather(operation, mine, out, cuts, 0)

        def scatters(operation):
            naive.scatter(operation, whole, torch.empty(NUMEL // size, dtype=whole.dtype), cuts, 0)

        def exchanges(operation):
            direct.all_to_all(operation, whole, torch.empty_like(whole), cuts, cuts)

        return {"gather": gathers, "scatter": scatters, "all_to_all": exchanges}[collective]

    for collective, algorithm in (
        ("gather", "naive"),
        ("scatter", "naive"),
        ("all_to_all", "direct"),
    ):
        price = cost(collective, algorithm, NBYTES, size)
        assert Net(size, 1, 0).run(work(collective))[1] == price.steps
        assert Net(size, 0, 1).run(work(collective))[1] == pytest.approx(price.port_bytes)


class Sent(connection.Log):
    """(name, world rank of the receiver, bytes) of each message that this rank sends."""

    def __init__(self):
        self.messages = []

    def message(self, name, group, peer, nbytes, when):
        self.messages.append((name, peer, nbytes))


def counted(call):
    """What this rank sends during `call()`."""
    log = Sent()
    connection.current().logs.append(log)
    call()
    connection.current().logs.remove(log)
    return log.messages


def count_everything(world):
    x = torch.arange(NUMEL, dtype=torch.float64)
    counts = {}
    for collective, algorithm in priced(world.size):
        mine = x[: NUMEL // world.size] if collective == "all_gather" else x
        counts[collective, algorithm] = counted(
            lambda function=FUNCTIONS[collective], mine=mine, algorithm=algorithm: function(
                mine, world, algorithm=algorithm
            )
        )
    return counts


@pytest.mark.parametrize("size", range(1, 9))
def test_messages_and_bytes_on_the_wire_are_those_of_the_formula(size):
    ranks = launch(count_everything, ranks=size)
    for collective, algorithm in priced(size):
        counts = [rank[collective, algorithm] for rank in ranks]
        assert {name for rank in counts for name, _, _ in rank} <= {collective}
        sent = [sum(nbytes for _, _, nbytes in rank) for rank in counts]
        received = [
            sum(nbytes for rank in counts for _, peer, nbytes in rank if peer == place)
            for place in range(size)
        ]
        price = cost(collective, algorithm, NBYTES, size)
        name = (collective, algorithm, size)
        assert sum(map(len, counts)) == price.messages, name
        if algorithm in FROM_ROOT:
            # The root's port is the busiest, in one direction after the other.
            assert sent[0] + received[0] == price.port_bytes, name
        elif size & (size - 1) == 0 or algorithm != "doubling":
            assert set(sent) == set(received) == {price.port_bytes}, name
        else:
            # One above the power of two sends N; its partner waits for it, then sends all.
            assert max(sent) == price.port_bytes - NBYTES and sent[-1] == NBYTES, name


def count_the_small_print(world):
    x = torch.arange(5.0) + world.rank
    return {
        "uneven ring": counted(lambda: all_reduce(x, world, algorithm="ring")),
        "barrier": counted(lambda: barrier(world)),
        "gather": counted(lambda: gather(x, world, root=1)),
        "scatter": counted(lambda: scatter(torch.arange(12.0), world, root=1)),
        "all_to_all": counted(lambda: all_to_all(torch.arange(12.0), world)),
        "narrow direct": counted(lambda: all_reduce(x.bfloat16(), world, algorithm="direct")),
        "narrow direct_ring": counted(
            lambda: all_reduce(x.bfloat16(), world, algorithm="direct_ring")
        ),
        "narrow ring": counted(lambda: all_reduce(x.bfloat16(), world, algorithm="ring")),
        "empty": counted(lambda: all_reduce(torch.empty(0), world)),
        "nested": counted(lambda: reduce_scatter(torch.ones(6, 2), world, sizes=[6, 0, 0])),
    }


def test_bytes_are_those_that_the_docstrings_promise():
    ranks = launch(count_the_small_print, ranks=3)

    def sent(name):
        return [sum(nbytes for _, _, nbytes in rank[name]) for rank in ranks]

    assert sum(sent("uneven ring")) == 2 * 2 * 5 * 4
    assert sum(len(rank["barrier"]) for rank in ranks) == 4 and max(sent("barrier")) == 2
    assert sent("gather") == [20, 0, 20]
    assert sent("scatter") == [0, 2 * (80 + 16), 0]
    assert sent("all_to_all") == [2 * 16] * 3
    # 16 bits on the wire where only inputs travel, 32 where partial sums do.
    assert sum(sent("narrow direct")) == sum(sent("narrow direct_ring")) == 2 * 2 * 5 * 2
    assert sum(sent("narrow ring")) == 2 * 2 * 5 * 4
    assert sent("empty") == [0, 0, 0]
    assert sent("nested")[1:] == [48, 48]


@pytest.mark.parametrize("nodes, inside", [(2, 2), (2, 3), (3, 2)])
def test_by_levels_each_rank_sends_a_kth_of_a_ring_between_nodes(nodes, inside):
    def work(world):
        with bill() as account:
            all_reduce(torch.ones(NUMEL, dtype=torch.float64), world, algorithm="hierarchical")
        return account

    for account in launch(work, ranks=nodes * inside, cluster=Cluster(nodes, inside)):
        within = 2 * (inside - 1) / inside * NBYTES
        between = 2 * (nodes - 1) / nodes * NBYTES / inside
        assert account.by("link") == {"intra": within, "inter": between}
        assert account.by("collective") == {"all_reduce": within + between}


def test_there_is_no_cost_for_what_does_not_exist():
    for call in (
        ("all_reduce", "hierarchical", 8, 4),
        ("all_reduce", "torch", 8, 4),
        ("all_reduce", "halving_doubling", 8, 3),
        ("all_gather", "doubling", 8, 6),
        ("reduce_scatter", "guess", 8, 4),
        ("gather", "ring", 8, 4),
        ("allreduce", "ring", 8, 4),
    ):
        with pytest.raises(ValueError, match="no cost is known for"):
            cost(*call)


SIZES = [0, 1, 1000, 30_000, 300_000, 3_000_000, 10**9]


def choices(world):
    groups = [world.subgroup(range(size)) for size in range(1, world.size + 1)]
    return {
        (collective, group.size, narrow): [choose(collective, n, group, narrow) for n in SIZES]
        for collective in FUNCTIONS
        for group in groups
        if group is not None
        for narrow in (False, True)
    }


SLOW = Link(gbit_s=1, latency_us=500)


@pytest.mark.parametrize(
    "cluster",
    [
        None,
        Cluster(1, 8, intra=SLOW),
        Cluster(2, 4, inter=SLOW),
        Cluster(4, 2, intra=SLOW, inter=SLOW),
    ],
    ids=["no links", "one slow node", "slow between nodes", "slow everywhere"],
)
def test_auto_names_an_algorithm_that_exists_and_another_for_large_tensors(cluster):
    by_rank = launch(choices, ranks=8, cluster=cluster)
    for (collective, size, _), names in by_rank[0].items():
        allowed = {name for kind, name in priced(size) if kind == collective} | {"hierarchical"}
        assert set(names) <= allowed & set(ALGORITHMS[collective])
    # Over slow links halving and doubling scatter and gather best at any size.
    changing = ("all_reduce",) if cluster else ("all_reduce", "reduce_scatter", "all_gather")
    for collective in changing:
        names = by_rank[0][collective, 8, False]
        assert names[1] != names[-1], (collective, names)
    # All ranks of a group must choose alike.
    for rank in by_rank:
        assert all(by_rank[0][key] == names for key, names in rank.items())


def test_between_slow_links_auto_takes_the_cheapest_by_formula():
    def work(world):
        return {n: choose("all_reduce", n, world) for n in (8, 10**9)}

    def seconds(name, nbytes):
        price = cost("all_reduce", name, nbytes, 4)
        return price.steps * SLOW.latency_us / 1e6 + price.port_bytes / SLOW.bytes_per_second

    chosen = launch(work, ranks=4, cluster=Cluster(1, 4, intra=SLOW))[0]
    for nbytes, name in chosen.items():
        slowest_loss = 24 * 50e-6
        for _, other in filter(lambda pair: pair[0] == "all_reduce", priced(4)):
            # Those that send more in all are left out.
            if other not in ("naive", "doubling"):
                assert seconds(name, nbytes) <= seconds(other, nbytes) + slowest_loss
    two_nodes = Cluster(2, 2, intra=Link(100, 1), inter=SLOW)
    assert launch(work, ranks=4, cluster=two_nodes)[0][10**9] == "hierarchical"


def test_auto_minds_the_slower_of_the_links_that_a_group_crosses():
    def work(world):
        return choose("all_reduce", 8, world)

    far = Link(gbit_s=1, latency_us=20_000)
    for cluster in (Cluster(2, 2, intra=far), Cluster(2, 2, intra=far, inter=Link(100))):
        # Both take two slow steps, a tree takes four.
        assert set(launch(work, ranks=4, cluster=cluster)) <= {"direct", "hierarchical"}


def test_between_two_ranks_over_a_slow_link_one_exchange_is_cheapest_at_any_size():
    """Doubling sends a pair's bytes at once, direct and tree the second half after the first."""

    def work(world):
        return [choose("all_reduce", n, world) for n in (8, 10**5, 10**8)]

    far = Cluster(2, 1, inter=Link(gbit_s=0.1, latency_us=50_000))
    assert launch(work, ranks=2, cluster=far)[0] == ["doubling"] * 3


def test_choosing_for_an_unknown_collective_is_refused():
    def work(world):
        with pytest.raises(ValueError, match="no collective 'allreduce'"):
            choose("allreduce", 8, world)
        return (
            choose("gather", 8, world),
            choose("scatter", 8, world),
            choose("all_to_all", 8, world),
        )

    assert launch(work, ranks=1) == [("naive", "naive", "direct")]
