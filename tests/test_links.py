"""The emulated link: the arithmetic of its two queues on a clock of our own, then real ranks.

On the false clock nothing takes time but what the link says, so every expectation is exact. On
real ranks only what sleeping decides is asserted: never faster than the link, and ratios.
"""

import time
import types

import pytest
import torch

from s2s_lib import Cluster, Link, launch
from s2s_lib.ranks import links

# 1000 bytes take 1 s; the other class is ten times faster. Latencies: 0.25 s and none.
SLOW = Link(gbit_s=8e-6, latency_us=250_000)
FAST = Link(gbit_s=8e-5)
TWO_BY_TWO = Cluster(nodes=2, gpus_per_node=2, intra=FAST, inter=SLOW)


class Clock(types.SimpleNamespace):
    """A clock that moves only when somebody sleeps or a test says so."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 1e-7)

    @property
    def elapsed(self):
        return self.now - 100.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    monkeypatch.setattr(links, "_sleep_precisely", lambda: None)
    return clock


def ports(*ranks, cluster=TWO_BY_TWO):
    return [links.Links(rank, cluster) for rank in ranks]


def arrival(clock, receiver, source, nbytes, header):
    """When the message is there, for a receiver that asks for it as a new operation."""
    receiver.begin(clock.now)
    receiver.arrive(source, nbytes, header)
    return clock.elapsed


def test_a_message_takes_latency_plus_bytes_over_rate(clock):
    sender, receiver = ports(0, 2)
    header = sender.depart(2, 3000)
    assert clock.elapsed == 0, "the sender is free at once"
    assert arrival(clock, receiver, 0, 3000, header) == pytest.approx(3.25)


def test_an_empty_message_takes_the_latency(clock):
    sender, receiver = ports(0, 2)
    assert arrival(clock, receiver, 0, 0, sender.depart(2, 0)) == pytest.approx(0.25)


def test_a_busy_port_delays_the_next_message_whoever_it_is_for(clock):
    sender, third, fourth = ports(0, 2, 3)
    first, second = sender.depart(2, 1000), sender.depart(3, 500)
    assert arrival(clock, third, 0, 1000, first) == pytest.approx(1.25)
    assert arrival(clock, fourth, 0, 500, second) == pytest.approx(1.75)


def test_messages_between_one_pair_do_not_overtake(clock):
    sender, receiver = ports(0, 2)
    headers = [(n, sender.depart(2, n)) for n in (2000, 0, 1000)]
    arrivals = [arrival(clock, receiver, 0, n, header) for n, header in headers]
    assert arrivals == pytest.approx([2.25, 2.25, 3.25])


def test_the_latency_of_messages_in_a_row_is_paid_once(clock):
    sender, receiver = ports(0, 2)
    headers = [sender.depart(2, 1000) for _ in range(4)]
    for header in headers:
        last = arrival(clock, receiver, 0, 1000, header)
    assert last == pytest.approx(4.25)


def test_a_port_that_has_been_idle_owes_nothing(clock):
    sender, receiver = ports(0, 2)
    arrival(clock, receiver, 0, 1000, sender.depart(2, 1000))
    clock.now = 150.0
    sender.begin(clock.now)
    assert arrival(clock, receiver, 0, 1000, sender.depart(2, 1000)) == pytest.approx(51.25)


def test_two_senders_share_the_port_of_one_receiver(clock):
    first, second, receiver = ports(0, 1, 2)
    headers = first.depart(2, 1000), second.depart(2, 1000)
    assert arrival(clock, receiver, 0, 1000, headers[0]) == pytest.approx(1.25)
    assert arrival(clock, receiver, 1, 1000, headers[1]) == pytest.approx(2.25)


def test_a_rank_sends_and_receives_at_full_rate_at_once(clock):
    one, other = ports(0, 2)
    there, back = one.depart(2, 1000), other.depart(0, 1000)
    assert arrival(clock, other, 0, 1000, there) == pytest.approx(1.25)
    assert arrival(clock, one, 2, 1000, back) == pytest.approx(1.25)


def test_each_class_of_link_has_ports_of_its_own(clock):
    sender, near, far = ports(0, 1, 2)
    slow, fast = sender.depart(2, 10_000), sender.depart(1, 1000)
    assert arrival(clock, near, 0, 1000, fast) == pytest.approx(0.1)
    assert arrival(clock, far, 0, 10_000, slow) == pytest.approx(10.25)


def test_a_receiver_that_comes_late_does_not_wait(clock):
    sender, receiver = ports(0, 2)
    header = sender.depart(2, 1000)
    clock.now = 130.0
    assert arrival(clock, receiver, 0, 1000, header) == 30.0


def test_what_a_late_rank_passes_on_leaves_when_it_comes(clock):
    """The message has long been there; from the late rank on, the next hop takes its full time."""
    first, middle, last = ports(0, 2, 1)
    header = first.depart(2, 1000)
    clock.now = 130.0
    middle.begin(clock.now)
    middle.arrive(0, 1000, header)
    header = middle.depart(1, 1000)
    assert arrival(clock, last, 2, 1000, header) == pytest.approx(31.25)


def test_lateness_does_not_add_up_over_the_steps_of_an_operation(clock):
    """Each rank of a chain wakes up 0.4 s late, and passes on as if it had not."""
    chain = ports(0, 2, 1, 3)
    for rank in chain:
        rank.begin(clock.now)
    header = chain[0].depart(2, 1000)
    for here, there in zip(chain[1:], (*chain[2:], None), strict=True):
        source = chain[chain.index(here) - 1].rank
        here.arrive(source, 1000, header)
        clock.now += 0.4
        if there:
            header = here.depart(there.rank, 1000)
    assert clock.elapsed == pytest.approx(3 * 1.25 + 0.4)


def test_a_new_operation_starts_from_the_clock(clock):
    sender, receiver = ports(0, 2)
    arrival(clock, receiver, 0, 1000, sender.depart(2, 1000))
    clock.now += 10
    receiver.begin(clock.now)
    assert receiver.depart(0, 1000).item() - 100 == pytest.approx(11.25)


def test_a_class_without_a_link_is_not_slowed():
    free_inside = Cluster(nodes=2, gpus_per_node=2, inter=SLOW)
    (rank,) = ports(0, cluster=free_inside)
    assert rank.between(1) is None and rank.between(3) is SLOW


def test_real_messages_are_never_faster_than_the_link_and_arrive_whole():
    def exchange(world):
        from s2s_lib import barrier, isend, recv

        x = torch.arange(250_000.0)
        barrier(world)
        began = time.monotonic()
        if world.rank == 0:
            [isend(x + i, 2, world) for i in range(2)]
            isend(x, 1, world)
            return began, time.monotonic() - began
        arrivals = []
        for i in range((0, 1, 2, 0)[world.rank]):
            whole = torch.equal(recv(torch.empty_like(x), 0, world), x + i)
            arrivals.append((time.monotonic(), whole))
        return arrivals

    # 1 MB takes 0.1 s between the nodes and, a thousand times faster, 0.1 ms inside one.
    cluster = Cluster(2, 2, intra=Link(80), inter=Link(0.08, latency_us=50_000))
    (began, free), near, far, _ = launch(exchange, ranks=4, cluster=cluster, timeout=20)
    assert all(whole for _, whole in near + far)
    (near,), (first, second) = ([at - began for at, _ in arrivals] for arrivals in (near, far))
    assert 0.15 <= first < second and 0.25 <= second < 1.5
    assert free < first / 2 and near < second


def test_a_collective_over_slow_links_takes_their_time_and_gives_the_same_values():
    def reduce(world):
        from s2s_lib import all_reduce, barrier

        x = torch.arange(125_000.0) * (world.rank + 1)
        times = []
        for _ in range(3):
            barrier(world)
            began = time.monotonic()
            total = all_reduce(x, world, algorithm="ring")
            times.append(time.monotonic() - began)
        return min(times), torch.equal(total, torch.arange(125_000.0) * 6)

    # The ring of three sends 4/3 of 0.5 MB: 67 ms at 10 MB/s.
    slow = launch(reduce, ranks=3, cluster=Cluster(3, 1, inter=Link(0.08)), timeout=20)
    fast = launch(reduce, ranks=3, cluster=Cluster(1, 3, inter=Link(0.08)), timeout=20)
    assert all(same for _, same in slow + fast)
    assert min(took for took, _ in slow) > 0.04
    assert min(took for took, _ in fast) < min(took for took, _ in slow) / 2
