"""Simulated times against closed forms, published tables, and a second simulator.

The second one asks, action by action, when it can begin; it shares no line with the library's and
knows nothing of its order. A dependency left out makes a total too short (the closed forms and the
lower bounds fail), a wrong denominator fails the worked fractions, a port that does not queue the
numbers of the slow link.
"""

import functools
import math
import random
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest

from s2s_lib.cluster import Cluster, Link
from s2s_lib.course.published import ZERO_BUBBLE_TABLE_5, ZERO_BUBBLE_TABLE_6
from s2s_lib.meters.timeline import Span
from s2s_lib.strategies.pipeline import order as rules
from s2s_lib.strategies.pipeline.actions import Schedule
from s2s_lib.strategies.pipeline.schedule import (
    BUILDERS,
    forward_only,
    gpipe,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    streaming,
    zb_h1,
    zb_h2,
    zbv,
)
from s2s_lib.strategies.pipeline.simulate import Timetable, measured, simulate

close = functools.partial(pytest.approx, rel=1e-9, abs=1e-9)
every_builder = pytest.mark.parametrize("name", BUILDERS)

# 1000 bytes a second, so that a message of 1000 bytes holds a port for 1 s; half a second more to
# arrive.
SLOW = Link(gbit_s=8e-6, latency_us=500_000)


def idle(table):
    return [table.total - busy for busy in table.busy]


def begins(schedule, forward, backward, weight, transfer=0.0, cluster=None, message_bytes=0):
    """When each action begins: the second simulator. Durations are lists, one for each stage."""
    home = {a.stage: rank for rank, line in enumerate(schedule.ranks) for a in line}
    before, sent_before = {}, {}

    def receiver(a):
        if a.kind == "W":
            return None
        if a.kind == "F" and a.stage == schedule.stages - 1:
            again = schedule.feedback and a.micro + schedule.feedback < schedule.microbatches
            return home[0] if again else None
        return home.get(a.stage + (1 if a.kind == "F" else -1))

    for rank, line in enumerate(schedule.ranks):
        port = {}
        for previous, action in zip([None, *line], line, strict=False):
            before[action] = previous
            to = receiver(action)
            if to not in (None, rank) and cluster:
                kind = cluster.link_class(rank, to)
                sent_before[action] = port.get(kind)
                port[kind] = action
    actions = {action: action for action in before}

    def length(a):
        back, last = backward[a.stage], weight[a.stage]
        return {"F": forward[a.stage], "I": back, "W": last, "B": back + last}[a.kind]

    def find(stage, kinds, micro):
        return next(actions[stage, k, micro] for k in kinds if (stage, k, micro) in actions)

    @functools.cache
    def left_port(a, to):
        queue = sent_before[a]
        earlier = left_port(queue, receiver(queue)) if queue else 0.0
        link = cluster.link(home[a.stage], to)
        on_wire = message_bytes / link.bytes_per_second if link else 0.0
        return max(end(a), earlier if link else 0.0) + on_wire

    def there(a, to):
        if home[a.stage] == to:
            return end(a)
        if cluster is None:
            return end(a) + transfer
        link = cluster.link(home[a.stage], to)
        return left_port(a, to) + (link.latency_us / 1e6 if link else 0.0)

    @functools.cache
    def begin(a):
        waits = [end(before[a])] if before[a] else [0.0]
        own, last = home[a.stage], schedule.stages - 1
        if a.kind == "F" and a.stage > 0:
            waits.append(there(find(a.stage - 1, "F", a.micro), own))
        if a.kind == "F" and a.stage == 0 and schedule.feedback and a.micro >= schedule.feedback:
            waits.append(there(find(last, "F", a.micro - schedule.feedback), own))
        if a.kind in "BI":
            waits.append(end(find(a.stage, "F", a.micro)))
            if a.stage < last:
                waits.append(there(find(a.stage + 1, "BI", a.micro), own))
        if a.kind == "W":
            waits.append(end(find(a.stage, "I", a.micro)))
        return max(waits)

    def end(a):
        return begin(a) + length(a)

    return {a: begin(a) for _, a in schedule.order}


def small(name):
    if name == "streaming":
        return [streaming(P, R, T) for P, R, T in ((1, 2, 2), (2, 3, 3), (3, 2, 3), (4, 5, 2))]
    if name in ("interleaved", "looped_bfs"):
        return [BUILDERS[name](P, M, v) for P, M, v in ((2, 4, 2), (3, 6, 3), (4, 3, 2), (1, 2, 2))]
    return [BUILDERS[name](P, M) for P, M in ((1, 3), (2, 5), (3, 6), (4, 9))]


# Against the second simulator.


@pytest.mark.parametrize("name", [*BUILDERS, "streaming"])
@pytest.mark.parametrize("seed", range(3))
def test_every_action_begins_when_its_rank_and_its_inputs_are_there(name, seed):
    draw = random.Random(seed)
    for schedule in small(name):
        S, P = schedule.stages, len(schedule.ranks)
        F, B, W = ([draw.randrange(1, 9) for _ in range(S)] for _ in range(3))
        transfer = draw.choice([0, 0.5, 3])
        link, fast = Link(8e-6, draw.randrange(0, 2_000_000)), Link(1e-4, 1000)
        clusters = [Cluster(1, P, intra=link), Cluster(P, 1, inter=link)]
        if P % 2 == 0:
            clusters += [
                Cluster(2, P // 2, intra=fast, inter=link),
                Cluster(2, P // 2, inter=link),
                Cluster(P // 2, 4, intra=fast, inter=None),
            ]
        runs = [(simulate(schedule, F, B, W, transfer), begins(schedule, F, B, W, transfer))]
        for cluster in clusters:
            runs.append(
                (
                    simulate(schedule, F, B, W, cluster, message_bytes=2500),
                    begins(schedule, F, B, W, cluster=cluster, message_bytes=2500),
                )
            )
        for table, expected in runs:
            assert tuple(tuple(a for *_, a in line) for line in table.spans) == schedule.ranks
            length = {"F": F, "I": B, "W": W, "B": [b + w for b, w in zip(B, W, strict=True)]}
            for start, end, action in (span for line in table.spans for span in line):
                assert start == close(expected[action]), (schedule, action)
                assert end - start == close(length[action.kind][action.stage])


# Worked numbers and closed forms.


def test_gpipe_and_1f1b_take_the_same_time_and_differ_in_memory():
    for P, M, total, share in ((8, 32, 78, 7 / 39), (4, 8, 22, 3 / 11)):
        first, second = simulate(gpipe(P, M), 1, 1), simulate(one_f_one_b(P, M), 1, 1)
        assert first.total == second.total == total == 2 * (M + P - 1)
        assert first.bubble == close(share) and second.bubble == close(share)
        assert first.peak_in_flight == [M] * P
        assert second.peak_in_flight == [min(M, P - stage) for stage in range(P)]
    assert round(simulate(one_f_one_b(8, 32), 1, 1).bubble, 4) == 0.1795
    assert simulate(one_f_one_b(4, 8), 1, 1).peak_in_flight == [4, 3, 2, 1]


def test_the_bubble_has_two_denominators():
    table = simulate(gpipe(4, 8), 1, 1)
    assert table.bubble_over_useful == close(0.375)
    assert table.bubble == close(3 / 11)
    assert table.zero_bubble_rate == close(3 / 11)
    for name in BUILDERS:
        for schedule in small(name):
            table = simulate(schedule, 3, 4, 2, 0.5)
            assert table.bubble_over_useful == close(table.bubble / (1 - table.bubble))
            lost, useful = sum(idle(table)), sum(table.busy)
            assert table.bubble == close(lost / (lost + useful))


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("durations", [(1, 1, 0), (1, 2, 0), (3, 1, 4), (5, 2, 1)])
def test_the_bubble_is_p_minus_1_over_m_plus_p_minus_1(build, durations):
    for P in range(1, 9):
        for M in range(1, 21):
            table = simulate(build(P, M), *durations)
            assert table.total == (M + P - 1) * sum(durations)
            assert table.bubble == close(float(Fraction(P - 1, M + P - 1)))
            assert table.bubble_over_useful == close(float(Fraction(P - 1, M)))


def test_one_micro_batch_at_a_time_leaves_all_ranks_but_one_idle():
    for P in range(1, 7):
        for M in (1, 2, 5):
            table = simulate(naive(P, M), 2, 3, 1)
            assert table.total == 6 * P * M
            assert table.bubble == close((P - 1) / P)


def test_forwards_alone_have_the_same_bubble_as_training():
    for P in range(1, 7):
        for M in (1, 2, 7):
            table = simulate(forward_only(P, M), 3)
            assert table.total == 3 * (M + P - 1)
            assert table.bubble == close((P - 1) / (M + P - 1))


def test_streaming_fills_the_ranks_with_as_many_requests_as_stages():
    for P in range(1, 6):
        for requests in range(1, 9):
            for tokens in (1, 2, 5):
                table = simulate(streaming(P, requests, tokens), 3)
                alone = 3 * P * requests * tokens
                if requests >= P:
                    assert table.total == 3 * (requests * tokens + P - 1)
                else:
                    assert table.total == 3 * (P * tokens + requests - 1)
                assert sum(table.busy) == alone
    # One process takes 4 x 4 x 50 forwards of a stage; four take a little over a quarter of it.
    assert simulate(streaming(4, 4, 50), 1).total == 203
    assert simulate(streaming(4, 1, 50), 1).bubble == close(0.75)


@pytest.mark.parametrize("build", [interleaved, looped_bfs])
def test_chunks_divide_the_bubble(build):
    assert simulate(build(4, 8, 2), 1, 1).bubble == close(3 / 19)
    for P in range(1, 7):
        for chunks in (1, 2, 3, 4):
            for M in range(P, 5 * P, P):
                table = simulate(build(P, M, chunks), 2, 3)
                assert table.bubble == close((P - 1) / (chunks * M + P - 1))
                assert table.bubble_over_useful == close((P - 1) / (chunks * M))


# F, B (the gradient of the input) and W, the last the shortest, as in the paper's measurements.
THIRDS = [(1, 1, 1), (3, 4, 2), (4, 3, 2), (2, 2, 1), (5, 5, 5)]


@pytest.mark.parametrize(("F", "B", "W"), THIRDS)
def test_the_zero_bubble_schedules_idle_as_long_as_the_paper_says(F, B, W):
    for P in range(1, 7):
        for M in (2 * P - 1, 2 * P, 4 * P + 1):
            assert idle(simulate(one_f_one_b(P, M), F, B, W)) == [(P - 1) * (F + B + W)] * P
            assert idle(simulate(zb_h1(P, M), F, B, W)) == [(P - 1) * (F + B - W)] * P
            second = simulate(zb_h2(P, M), F, B, W)
            taken = max(line[-1][1] - line[0][0] for line in second.spans)
            assert taken - M * (F + B + W) == close((P - 1) * (F + B - 2 * W))


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_and_zb_h2_none():
    assert set(idle(simulate(zb_h1(4, 8), 1, 1, 1))) == {3}
    assert set(idle(simulate(one_f_one_b(4, 8), 1, 1, 1))) == {9}
    for P in range(1, 8):
        for M in (2 * P - 1, 3 * P, 5 * P + 2):
            second, v = simulate(zb_h2(P, M), 1, 1, 1), simulate(zbv(P, M), 1, 1, 1)
            for table in (second, v):
                assert table.zero_bubble_rate == close(0)
                # Idle are only the ranks that have not begun, or have ended.
                assert idle(table) == [P - 1] * P
                for line in table.spans:
                    assert all(a[1] == b[0] for a, b in zip(line, line[1:], strict=False))
    # One micro-batch fewer and there are gaps.
    assert simulate(zb_h2(4, 6), 1, 1, 1).zero_bubble_rate > 0.01


def test_with_few_micro_batches_the_closed_forms_of_the_papers_appendix_hold():
    for P in range(1, 8):
        for M in range(1, P + 1):
            for F, B, W in THIRDS:
                least = (M + P - 1) * (F + B) + W
                assert simulate(one_f_one_b(P, M), F, B, W).total == (M + P - 1) * (F + B + W)
                assert simulate(zb_h1(P, M), F, B, W).total == least
                assert simulate(zb_h2(P, M), F, B, W).total >= least


CELLS = [
    (times, row)
    for times in ZERO_BUBBLE_TABLE_6
    for row in ZERO_BUBBLE_TABLE_5
    if row[:3] == times[:3]
]


def test_the_tables_are_whole():
    assert len(CELLS) == len(ZERO_BUBBLE_TABLE_5) == 72
    assert {row.schedule for row in ZERO_BUBBLE_TABLE_5} == {
        *("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
    }


@pytest.mark.parametrize(
    ("schedule", "build"), [("1F1B", one_f_one_b), ("ZB-H1", zb_h1), ("ZB-H2", zb_h2)]
)
def test_the_bubble_rates_of_the_zero_bubble_paper_to_four_decimals(schedule, build):
    cells = [(times, row.rate) for times, row in CELLS if row.schedule == schedule]
    assert len(cells) == 12
    for t, rate in cells:
        made = build(t.stages, t.microbatches)
        table = simulate(made, t.forward, t.backward, t.weight, t.transfer)
        assert round(table.zero_bubble_rate, 4) == rate, t


def test_the_papers_interleaved_bubble_rates_are_near():
    cells = [(times, row.rate) for times, row in CELLS if row.schedule == "1F1B-I"]
    assert len(cells) == 12
    for t, rate in cells:
        v = t.layers
        made = interleaved(t.stages, t.microbatches, v)
        table = simulate(made, t.forward / v, t.backward / v, t.weight / v, t.transfer)
        assert abs(table.zero_bubble_rate - rate) < 0.004, t


def test_the_zero_bubble_rate_is_of_the_rank_that_takes_longest():
    # From its own first action to its last the second rank takes 5, and computes for 3.
    times = [[(0, 1), (1, 2)], [(1, 2), (4, 6)], [(5, 6), (6, 7)]]
    made = forward_only(3, 2)
    lines = zip(times, made.ranks, strict=True)
    spans = [[(*time, a) for time, a in zip(*line, strict=True)] for line in lines]
    assert Timetable(made, spans).zero_bubble_rate == close(0.4)


# Lower bounds, stages of different speed, transfers.


@every_builder
def test_no_total_is_below_what_must_come_one_after_the_other(name):
    draw = random.Random(name)
    for schedule in small(name):
        S, M = schedule.stages, schedule.microbatches
        F, B, W = ([draw.randrange(1, 9) for _ in range(S)] for _ in range(3))
        table = simulate(schedule, F, B, W, transfer=0.25)
        messages = sum(a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False))
        way = sum(F) + 0.25 * messages
        if schedule.trains:
            way += sum(B) + 0.25 * messages
        assert table.total >= way - 1e-9
        each = [f + (b + w) * schedule.trains for f, b, w in zip(F, B, W, strict=True)]
        useful = [M * sum(each[s] for s in schedule.stages_of(r)) for r in range(len(table.busy))]
        assert table.busy == close(useful)
        assert table.total >= max(useful) - 1e-9
        assert 0 <= table.bubble < 1


def test_the_slowest_stage_sets_the_pace():
    for slow in range(4):
        durations = [3 if stage == slow else 1 for stage in range(4)]
        table = simulate(one_f_one_b(4, 64), durations, durations)
        # 64 times its 6, and at most once the way of a micro-batch through the others and back.
        assert 64 * 6 <= table.total <= 64 * 6 + 2 * 3
        assert [lost <= 6 for lost in idle(table)] == [stage == slow for stage in range(4)]


def test_a_slow_last_stage_holds_up_the_backwards_of_all():
    # F0 of stage 0 ends at 1, of stage 1 at 1 + 4; there follow 3 more forwards and 4 backwards.
    table = simulate(gpipe(2, 4), [1, 4], [1, 4])
    assert table.total == 1 + 4 * 4 + 4 * 4 + 1
    assert [start for start, _, action in table.spans[0] if action.kind == "B"] == [21, 25, 29, 33]


def test_a_transfer_delays_what_waits_for_it_and_costs_its_rank_nothing():
    table = simulate(one_f_one_b(2, 2), 1, 1, transfer=0.5)
    assert [(start, end, str(a)) for start, end, a in table.spans[0]] == [
        (0, 1, "0F0"),
        (1, 2, "0F1"),
        (4, 5, "0B0"),
        (6, 7, "0B1"),
    ]
    assert [(start, end, str(a)) for start, end, a in table.spans[1]] == [
        (1.5, 2.5, "1F0"),
        (2.5, 3.5, "1B0"),
        (3.5, 4.5, "1F1"),
        (4.5, 5.5, "1B1"),
    ]


def test_stages_of_one_rank_pass_on_at_once():
    assert simulate(interleaved(1, 3, 3), 1, 1, transfer=100).total == 18
    # Down the V and up again: the turn on the last rank needs no message.
    totals = [simulate(zbv(2, 1), 1, 1, 1, transfer=transfer).total for transfer in (0, 10)]
    assert totals[1] - totals[0] == 4 * 10


@every_builder
def test_longer_transfers_never_make_it_faster(name):
    for schedule in small(name):
        totals = [simulate(schedule, 3, 4, 2, transfer=t).total for t in (0, 0.1, 1, 2.5, 10)]
        assert totals == sorted(totals)
        slower = [
            simulate(schedule, 3, 4, 2, Cluster(4, 1, inter=SLOW), message_bytes=n).total
            for n in (0, 100, 1000, 5000)
        ]
        assert slower == sorted(slower)
        assert slower[0] == close(simulate(schedule, 3, 4, 2, transfer=0.5).total)


def test_messages_of_one_port_queue():
    table = simulate(forward_only(2, 3), [0.25, 0.125], transfer=Cluster(1, 2, intra=SLOW))
    assert [start for start, *_ in table.spans[1]] == close([0.75, 1.0, 1.25])
    table = simulate(
        forward_only(2, 3), [0.25, 0.125], transfer=Cluster(1, 2, intra=SLOW), message_bytes=1000
    )
    # Sent at 0.25, 0.5 and 0.75, but the port is free at 0.25, 1.25 and 2.25.
    assert [start for start, *_ in table.spans[1]] == close([1.75, 2.75, 3.75])
    assert table.total == close(3.875)


def test_the_two_ports_of_a_rank_do_not_queue_behind_each_other():
    # Rank 1 sends forwards to rank 2 for 4 s each, the last from 17 to 21, and has its first
    # gradient for rank 0 at 17.25.
    def backwards(cluster):
        table = simulate(mixed, 0.25, 0.25, 0, cluster, message_bytes=4000)
        return [start for start, _, action in table.spans[0] if action.kind == "B"]

    mixed = Schedule("mixed", [*gpipe(3, 4).ranks[:2], one_f_one_b(3, 4).ranks[2]])
    assert backwards(Cluster(1, 3, intra=SLOW)) == close([25.5, 29.5, 33.5, 37.5])
    assert backwards(Cluster(2, 2, intra=SLOW, inter=SLOW)) == close([21.75, 25.75, 29.75, 33.75])


def test_a_link_of_none_slows_nothing():
    table = simulate(one_f_one_b(4, 8), 1, 2, 0, Cluster(1, 4), message_bytes=10**12)
    assert table.spans == simulate(one_f_one_b(4, 8), 1, 2).spans
    # Only the boundary between the nodes costs.
    half = Cluster(2, 2, inter=SLOW)
    table = simulate(forward_only(4, 1), 1, transfer=half, message_bytes=1000)
    assert [line[0][0] for line in table.spans] == close([0, 1, 3.5, 4.5])


def test_a_cluster_may_be_larger_than_the_pipeline_but_not_smaller():
    assert simulate(gpipe(4, 2), transfer=Cluster(2, 4)).total == 15
    with pytest.raises(ValueError, match="Cluster 1 x 3.* is too small for 4 ranks"):
        simulate(gpipe(4, 2), transfer=Cluster(1, 3))
    # Ranks count, not stages.
    assert simulate(zbv(2, 4), 1, 1, 1, transfer=Cluster(1, 2)).total > 0


# Memory.


def test_peak_memory_is_that_of_the_paper():
    M_B, M_W = 34, 32
    for p in range(1, 8):
        M = 3 * p
        first, second = simulate(zb_h1(p, M), 1, 1, 1), simulate(zb_h2(p, M), 1, 1, 1)
        stages = range(1, p + 1)
        assert first.peak_memory(M_B, M_W) == [(p - i + 1) * M_B + (i - 1) * M_W for i in stages]
        assert second.peak_memory(M_B, M_W) == [
            (2 * p - 2 * i + 1) * M_B + (2 * i - 2) * M_W for i in stages
        ]
        plain = simulate(one_f_one_b(p, M), 1, 1, 1)
        assert plain.peak_memory(M_B, M_W) == [(p - i + 1) * M_B for i in stages]


def test_without_what_is_kept_for_the_weights_all_is_kept():
    for name in BUILDERS:
        for schedule in small(name):
            table = simulate(schedule)
            assert table.peak_in_flight == schedule.peak_in_flight
            assert table.peak_memory() == schedule.peak_in_flight
            assert table.peak_memory(7) == [7 * n for n in schedule.peak_in_flight]
    assert simulate(forward_only(2, 5)).peak_memory(7) == [7, 7]
    # With nothing kept between I and W only what waits for its I counts.
    assert simulate(zb_h1(4, 8)).peak_memory(1, 0) == [4, 3, 2, 1]


# What is refused.

wrong_durations = pytest.mark.parametrize(
    "value", [-1, -0.5, math.nan, math.inf, True, "1", None, [1, 1, 1, -1], [1, 1, 1, "1"]]
)


@pytest.mark.parametrize("which", ["forward", "backward", "weight"])
@wrong_durations
def test_durations_are_numbers_of_at_least_zero(which, value):
    if value is None and which != "forward":
        return  # their default
    with pytest.raises(ValueError, match=f"{which}=.*durations are numbers of at least 0") as error:
        simulate(gpipe(4, 4), **{which: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("which", ["forward", "backward", "weight"])
def test_there_is_one_duration_or_one_for_each_stage(which):
    for count in (0, 3, 5):
        with pytest.raises(ValueError, match=f"{which} has {count} durations for 4 stages"):
            simulate(interleaved(2, 4), **{which: [1] * count})
    assert simulate(interleaved(2, 4), **{which: (1, 1, 1, 1)}).total > 0


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1", None, Link(1), [1]])
def test_a_transfer_is_a_duration_or_a_cluster(value):
    told = re.escape(f"transfer={value!r}: give a duration of at least 0, or a Cluster")
    with pytest.raises(ValueError, match=told):
        simulate(gpipe(4, 4), transfer=value)


@pytest.mark.parametrize("value", [-1, math.nan, None, "1", True])
def test_a_message_has_a_number_of_bytes(value):
    with pytest.raises(ValueError, match=re.escape(f"message_bytes={value!r}")):
        simulate(gpipe(2, 2), transfer=Cluster(1, 2, intra=SLOW), message_bytes=value)


def test_something_must_take_time():
    for schedule, durations in (
        (gpipe(2, 2), (0, 0, 0)),
        (gpipe(2, 2), ([0, 0], 0, [0, 0])),
        (forward_only(2, 2), (0,)),
    ):
        with pytest.raises(ValueError, match="every duration is 0"):
            simulate(schedule, *durations)
    assert simulate(gpipe(2, 2), 0, [0, 0], [0, 1]).total == 2


# Measured.


def timelines(table, offset=0.0, steps=1, twist=lambda sections: sections):
    """What real ranks would have recorded, had they run so."""
    made = []
    for line in table.spans:
        sections = [Span(offset - 1, offset, "compute", "loading", 0)]
        for step in range(steps):
            late = offset + step * table.total
            sections += [Span(s + late, e + late, "compute", str(a), 0) for s, e, a in line]
        made.append(SimpleNamespace(sections=twist(sections)))
    return made


@every_builder
def test_a_measured_step_is_told_in_the_same_words(name):
    for schedule in small(name):
        table = simulate(schedule, 3, 4, 2, 0.5)
        real = measured(schedule, timelines(table, offset=1000))
        assert real.start == close(1000) and table.start == 0
        assert real.total == close(table.total)
        assert real.bubble == close(table.bubble)
        assert real.zero_bubble_rate == close(table.zero_bubble_rate)
        assert real.busy == close(table.busy)
        assert real.schedule is schedule and real.peak_in_flight == table.peak_in_flight
        assert [[a for *_, a in line] for line in real.spans] == list(map(list, schedule.ranks))


def test_a_measurement_starts_with_the_first_rank_to_begin():
    lines = timelines(simulate(forward_only(2, 1), 1))
    lines[0].sections = [span._replace(start=5.0, end=6.0) for span in lines[0].sections]
    lines[1].sections = [span._replace(start=2.0, end=3.0) for span in lines[1].sections]
    real = measured(forward_only(2, 1), lines)
    assert (real.start, real.total) == (2, 4)


def test_only_exactly_one_step_is_taken():
    table = simulate(gpipe(2, 2))
    for steps, count in ((0, 0), (2, 8)):
        told = f"rank 0's timeline has {count} of GPipe's 4 actions: record exactly one step"
        with pytest.raises(ValueError, match=told):
            measured(gpipe(2, 2), timelines(table, steps=steps))
    broken = timelines(table)
    broken[1].sections.pop()
    with pytest.raises(ValueError, match="rank 1's timeline has 3 of GPipe's 4 actions"):
        measured(gpipe(2, 2), broken)


def test_a_step_of_another_schedule_is_refused():
    with pytest.raises(ValueError, match="rank 0"):
        measured(one_f_one_b(2, 3), timelines(simulate(gpipe(2, 3))))


def test_every_rank_has_a_timeline():
    table = simulate(gpipe(3, 2))
    for lines in (timelines(table)[:2], timelines(table) * 2):
        with pytest.raises(ValueError, match=f"{len(lines)} timelines .*3 ranks"):
            measured(gpipe(3, 2), lines)


def test_a_timetable_says_its_total_and_its_bubble():
    assert repr(simulate(one_f_one_b(4, 8), 1, 1)) == "<1F1B: total 22, bubble 27.3% of it>"


@pytest.mark.parametrize(("P", "M"), [(1, 1), (2, 3), (2, 9), (3, 5), (4, 7), (4, 16), (6, 11)])
def test_zbv_leaves_no_rank_idle_between_its_first_action_and_its_last(P, M):
    table = simulate(zbv(P, M), 1, 1, 1)
    for line, busy in zip(table.spans, table.busy, strict=True):
        assert line[-1][1] - line[0][0] == busy


def test_the_shares_of_two_wholes_may_disagree_on_which_schedule_is_better():
    h1, h2 = (simulate(build(8, 12), 1, 1, 1) for build in (zb_h1, zb_h2))
    assert h1.bubble < h2.bubble and h1.zero_bubble_rate > h2.zero_bubble_rate
    table = simulate(gpipe(4, 8), 1, 1)
    shares = table.bubble, table.bubble_over_useful, table.zero_bubble_rate
    assert shares == pytest.approx((3 / 11, 3 / 8, 3 / 11))


# Work done.


@every_builder
def test_the_work_grows_with_the_number_of_actions_alone(name, monkeypatch):
    looks = []

    def counted(*args):
        looks.append(args)
        return original(*args)

    original = rules.needs
    monkeypatch.setattr(rules, "needs", counted)
    for P, M in ((4, 8), (4, 64), (16, 64)):
        looks.clear()
        made = BUILDERS[name](P, M)
        actions = sum(map(len, made.ranks))
        # Each once, and once more when what it waited for is there.
        assert actions <= len(looks) <= 3 * actions
        # Simulating looks nothing up again.
        looks.clear()
        assert len(simulate(made).schedule.walk) == actions
        assert not looks


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zbv", "dualpipev"])
def test_without_durations_the_halves_of_a_backward_take_one_each(name):
    plan = BUILDERS[name](2, 8)
    assert simulate(plan).spans == simulate(plan, 1, 1, 1).spans
    assert simulate(plan, forward=3).spans == simulate(plan, 3, 1, 1).spans
    # Given one of the two, the other is what it was for a whole backward.
    assert simulate(plan, backward=3).spans == simulate(plan, 1, 3, 0).spans
    assert simulate(plan, weight=1).spans == simulate(plan, 1, 2, 1).spans


def test_without_durations_a_whole_backward_takes_two():
    for plan in (gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8), forward_only(4, 8)):
        assert simulate(plan).spans == simulate(plan, 1, 2, 0).spans
    # So zero bubble is seen to bring something without a word about durations.
    assert (simulate(one_f_one_b(4, 8)).total, simulate(zb_h1(4, 8)).total) == (33, 27)


def test_what_is_no_schedule_is_told_what_to_give():
    for wrong in ("gpipe", gpipe, [gpipe(2, 2)], None):
        with pytest.raises(ValueError, match=r"give a Schedule, as schedule.gpipe\(4, 8\)"):
            simulate(wrong)
