"""What islands cost, by formula: against numbers worked by hand, and against published tables.

A wrong unit (bits for bytes, GB for GiB), a factor 2 (R-1)/R left out or an H that multiplies shows
in the worked numbers. A formula that forgets the backward pass, the last layer, a fragment or the
delay leaves the worked numbers of `Rounds` and the bounds of the bandwidth tables. A slip in a
table shows where the tables are held against what their papers say of them. The bounds are what the
formulas reach today with nothing fitted; a formula that does worse fails.
"""

import math
import subprocess
import sys
from statistics import median

import pytest

from s2s_lib import Link, cost
from s2s_lib.course.published_diloco import (
    BANDWIDTHS,
    DILOCO_REPLICAS,
    DILOCO_TABLE_2,
    OPEN_DILOCO_150M,
    SCALING_TABLE_4,
    STREAMING_METHODS,
    STREAMING_TABLE_5,
)
from s2s_lib.plan.islands import (
    NETWORKS,
    Rounds,
    all_reduce_seconds,
    bytes_per_sync,
    bytes_sent,
    utilisation,
    wall_clock,
)
from s2s_lib.plan.islands_compared import (
    GRID,
    bandwidth_agreement,
    bandwidth_rows,
    dolma_rows,
    grid_step,
    intellect_rows,
)

approx = pytest.approx


def near(number):
    return approx(number, rel=1e-12)


# Bytes and seconds of one exchange


def test_an_all_reduce_takes_the_worked_seconds():
    link = Link(gbit_s=8, latency_us=1000)  # 1e9 bytes a second
    # 4 ranks send 6/4 of 2e9 bytes and wait six times for a neighbour's first byte.
    assert all_reduce_seconds(2e9, 4, link) == near(3.006)
    assert all_reduce_seconds(2e9, 2, link) == near(2.002)
    assert all_reduce_seconds(2e9, 1, link) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_an_all_reduce_takes_what_the_library_counts_for_its_ring(ranks):
    link, ring = Link(gbit_s=3, latency_us=70), cost("all_reduce", "ring", 12_000, ranks)
    seconds = ring.steps * 70e-6 + ring.port_bytes / link.bytes_per_second
    assert all_reduce_seconds(12_000, ranks, link) == near(seconds)


def test_a_rank_sends_the_worked_bytes():
    assert bytes_per_sync(1000, 4) == 6000
    assert bytes_per_sync(1000, 4, bits=8) == 1500
    assert bytes_per_sync(1000, 1) == 0
    assert bytes_sent(1000, 2, steps=10) == 40_000
    # Two rounds of four steps and one of two.
    assert bytes_sent(1000, 2, steps=10, sync_every=4) == 12_000


def test_a_share_of_time_is_the_worked_one():
    assert utilisation(3, 1) == 0.75
    assert utilisation(3, 2, overlapped=1) == 0.75
    assert utilisation(3, 0) == utilisation(3, 2, overlapped=2) == 1


# Rounds of islands. Steps of 3 s: 1 s forward, 2 s backward. 1e9 bits a replica.

REPLICAS = {"parameters": 1e9 / 16, "step_seconds": 3, "bits": 16}


def waits(gbit_s, **more):
    rounds = Rounds(**REPLICAS, **more)
    return rounds.round_seconds(Link(gbit_s)) - rounds.compute_seconds


def test_a_round_waits_for_what_nothing_hides():
    assert waits(0.1, sync_every=10) == near(10)
    # Ten layers: the exchange begins when a tenth of the 2 s are over, 1.8 s before the end.
    assert waits(0.1, sync_every=10, layers=10) == near(8.2)
    # It takes 1 s, so that of the first layer, the last ready, is all that is left: a tenth.
    assert waits(1, sync_every=10, layers=10) == near(0.1)
    # Five fragments of 2 s, each with 1.8 s of a backward pass before its end.
    assert waits(0.1, sync_every=10, layers=10, fragments=5) == near(1)
    # A delay hides 3 s more of every fragment.
    assert waits(0.02, sync_every=20, layers=10, fragments=5, delay=1) == near(5 * (10 - 4.8))
    assert waits(0.02, sync_every=20, fragments=5, delay=1) == near(5 * (10 - 3))
    assert waits(0.1, sync_every=20, layers=10, fragments=5, delay=1) == 0


def test_no_delay_hides_more_than_the_steps_between_two_fragments():
    # The link is busy all the time: 20 s for the bits of a round of 2 steps.
    assert waits(0.05, sync_every=2, fragments=2, delay=5) == near(20 - 6)


def test_every_fragment_pays_the_latency():
    rounds = Rounds(**REPLICAS, sync_every=10, fragments=5)
    slow, fast = Link(1, latency_us=10_000), Link(1)
    assert rounds.round_seconds(slow) - rounds.round_seconds(fast) == near(5 * 2 * 0.01)


@pytest.mark.parametrize("more", [{}, {"layers": 12}, {"layers": 12, "delay": 1}])
@pytest.mark.parametrize("sync_every, fragments", [(1, 1), (30, 1), (30, 6)])
@pytest.mark.parametrize("target", [0.1, 0.5, 0.9, 0.99])
def test_the_bandwidth_for_a_utilisation_gives_that_utilisation(
    more, sync_every, fragments, target
):
    rounds = Rounds(1e9, 0.25, sync_every, ranks=3, fragments=fragments, **more)
    assert rounds.utilisation(Link(rounds.gbit_s(target))) == near(target)


def test_full_utilisation_needs_a_delay():
    assert Rounds(**REPLICAS).gbit_s(1) == Rounds(**REPLICAS, layers=9).gbit_s(1) == math.inf
    # The whole round's bits in one step of 3 s.
    assert Rounds(**REPLICAS, sync_every=10, delay=1).gbit_s(1) == near(1 / 3)
    assert Rounds(**REPLICAS, ranks=1).gbit_s(1) == 0


def test_a_plain_exchange_is_the_formula_that_it_is_known_by():
    # CU = H t / (H t + 16 bit N / BW), for two replicas.
    compute, exchange = 100 * 0.8, 16 * 10e9 / 4e9
    rounds = Rounds(10e9, 0.8, sync_every=100, bits=16)
    assert rounds.utilisation(Link(4)) == near(compute / (compute + exchange))


# The wall-clock model of the scaling-laws paper

RUN = {"parameters": 1e9, "tokens": 20e9, "steps": 100, "chips": 4}


def test_the_wall_clock_model_gives_the_worked_seconds():
    high, low = NETWORKS["high"], NETWORKS["low"]
    # 6 x 1e9 x 20e9 operations, four chips of 300e12. All of 4: 24e9 bits through the port.
    plain = wall_clock(**RUN, across=low)
    assert plain.compute == near(1e5)
    assert plain.communication == near(100 * (2.4 + 0.01))
    assert plain.total == plain.compute + plain.communication
    one = wall_clock(**RUN, across=low, sync_every=10)
    assert one.communication == near(110 * (2.4 + 0.01))
    # Two replicas of 2 chips: 16e9 bits inside at each step, 24e9 across at every tenth.
    two = wall_clock(**RUN, across=low, inside=high, replicas=2, sync_every=10)
    assert two.communication == near(100 * (0.04 + 1e-4) + 10 * (2.4 + 0.01))
    # A chip alone has nothing to exchange inside.
    four = wall_clock(**RUN, across=low, inside=high, replicas=4, sync_every=10)
    assert four.communication == near(10 * (2.4 + 0.01))


def test_the_networks_are_those_of_the_paper():
    rates = {name: (link.gbit_s, link.latency_us / 1e6) for name, link in NETWORKS.items()}
    assert rates == {"high": (400, 1e-4), "medium": (100, 1e-3), "low": (10, 1e-2)}


@pytest.mark.parametrize("name", ["high", "medium", "low"])
def test_with_h_at_the_ratio_of_bandwidths_the_outer_steps_are_half_as_the_paper_notes(name):
    across, inside = Link(NETWORKS[name].gbit_s), Link(NETWORKS["high"].gbit_s)
    many = {**RUN, "chips": 10**6, "inside": inside, "replicas": 2}
    every = int(inside.gbit_s / across.gbit_s)
    outer = wall_clock(**many, across=across, sync_every=every).communication
    # A round longer than the run: inner steps alone, but for a hundred-millionth.
    inner = wall_clock(**many, across=across, sync_every=10**12).communication
    assert (outer - inner) / outer == approx(0.5, abs=1e-4)


# Against what is printed


def test_intellect_1_utilisation_and_mfu_come_out_within_a_tenth_of_a_point():
    for row in intellect_rows():
        assert row.utilisation_percent == approx(row.printed.utilisation_percent, abs=0.1)
        assert row.mfu_percent == approx(row.printed.mfu_percent, abs=0.1)


def test_intellect_1_sends_the_400_times_less_that_it_claims():
    data_parallel = bytes_sent(10e9, 14, steps=1000)
    assert data_parallel / bytes_sent(10e9, 14, 1000, sync_every=100, bits=8) == near(400)


def test_diloco_sends_8n_over_h_where_data_parallel_sends_8n():
    for table in (DILOCO_TABLE_2, OPEN_DILOCO_150M):
        data_parallel, diloco = table[1], table[-1]
        assert (data_parallel.communication, diloco.communication) == ("8N", "8N/H")
        assert diloco.perplexity < table[0].perplexity
    steps, every = 88_000 - 24_000, 500
    ratio = bytes_sent(150e6, 8, steps) / bytes_sent(150e6, 8, steps, sync_every=every)
    assert ratio == near(every)
    assert all(abs(row["iid"] - row["non_iid"]) < 0.12 for row in DILOCO_REPLICAS.values())
    assert DILOCO_REPLICAS[8]["non_iid"] == DILOCO_TABLE_2[-1].perplexity
    assert DILOCO_REPLICAS[1]["iid"] == DILOCO_TABLE_2[0].perplexity


def test_losses_of_the_later_papers_lie_close_to_those_of_data_parallel():
    for losses in STREAMING_TABLE_5.values():
        reference, *others = losses
        assert len(losses) == len(STREAMING_METHODS)
        assert all(abs(loss - reference) < 0.051 for loss in others if loss is not None)
    for column in zip(*SCALING_TABLE_4.values(), strict=True):
        assert max(column) / min(column) < 1.006


def test_every_printed_bandwidth_lies_on_the_grid():
    assert len(GRID) == 50 and (GRID[0], GRID[-1]) == (0.1, 1000)
    for row in bandwidth_rows():
        assert min(abs(row.printed - tried) for tried in GRID) < 0.06
    assert [grid_step(x) for x in (0.01, 0.1, 0.11, 1000, 1001)] == [0, 0, 1, 49, 50]


def test_the_two_tables_differ_by_two_steps_of_the_grid_where_they_share_a_case():
    shared = {}
    for cell in BANDWIDTHS:
        if (cell.parameters, cell.method, cell.sync_every) == (10e9, "DiLoCo", 100):
            shared.setdefault(cell.percent, []).append(grid_step(float(cell.printed) / 1.1))
    assert [one - other for one, other in shared.values()] == [1, 1, 1, 2, 1]


def test_bandwidths_of_streaming_diloco_come_out_within_two_steps_of_the_grid():
    rows = [row for row in bandwidth_rows() if row.cell.paper.startswith("Streaming")]
    assert len(rows) == 75
    assert 1 < median(row.ratio for row in rows) < 1.1
    assert 0.68 < min(row.ratio for row in rows) and max(row.ratio for row in rows) < 1.21
    assert max(abs(row.steps) for row in rows) == 2
    assert sum(abs(row.steps) <= 1 for row in rows) == 73


def test_bandwidths_of_the_scaling_laws_come_out_up_to_half_too_high():
    rows = [row for row in bandwidth_rows() if row.cell.paper.startswith("scaling")]
    assert len(rows) == 90
    assert 1 < median(row.ratio for row in rows) < 1.2
    assert 0.87 < min(row.ratio for row in rows) and max(row.ratio for row in rows) < 1.5
    assert sum(abs(row.steps) <= 2 for row in rows) == 89
    assert max(abs(row.steps) for row in rows) == 3
    # Where none of the authors' bandwidths was enough, the formula is content with their last.
    beyond = [row for row in rows if row.cell.printed == "1000.0+"]
    assert [row.steps for row in beyond] == [-1, -1]


def test_the_plain_formula_holds_for_diloco_up_to_80_percent_and_is_an_upper_bound():
    plain = {}
    for row in bandwidth_rows():
        assert row.plain >= row.printed and row.plain >= row.layered
        if row.cell.method == "DiLoCo" and row.cell.sync_every == 100:
            plain.setdefault((row.cell.paper[:9], row.cell.percent), []).append(
                row.plain / row.printed
            )
    assert all(max(plain["Streaming", percent]) < 1.2 for percent in (50, 80))
    assert all(max(plain["scaling l", percent]) < 1.5 for percent in (50, 80))
    # Beyond, what the backward pass hides is no longer small beside what may be seen.
    assert min(plain["Streaming", 99]) > 1.7


def test_the_agreement_counts_every_number_once():
    agreements = bandwidth_agreement()
    assert sum(one.cells for one in agreements) == len(BANDWIDTHS) == 165
    assert [one.cells for one in agreements] == [15] * 6 + [75]
    for one in agreements:
        assert one.lowest <= one.median <= one.highest and one.within_a_step <= one.cells
    streaming = agreements[2:5]
    assert [one.method for one in streaming] == [
        "Streaming",
        "Streaming overlapped",
        "Streaming overlapped FP4",
    ]
    assert all(one.median == approx(1.03, abs=0.03) for one in streaming)
    # A formula without overlap is off by far more there.
    assert all(one.plain_median > 1.9 and one.plain_highest > 16 for one in streaming)


def test_hours_on_a_1_gbit_s_line_come_out_within_four_percent():
    errors = [row.hours / row.printed.hours_1_gbit_s - 1 for row in dolma_rows()]
    assert all(-0.015 < error < 0 for error in errors[:3])
    assert all(-0.035 < error < 0 for error in errors[3:])


def test_the_printed_terabytes_are_ten_times_what_a_replica_sends():
    for row in dolma_rows():
        assert row.printed.terabytes == approx(10 * row.tebibytes, rel=0.006)
        if row.printed.method == "Data-Parallel":
            # 1 Gbit/s carries 0.45e12 bytes an hour: the printed hours are too few for them.
            assert row.printed.terabytes / 0.45 > 8.9 * row.printed.hours_1_gbit_s


# Bad input


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Link(gbit_s=0), "a rate above 0"),
        (lambda: all_reduce_seconds(8, 0, Link(1)), "ranks=0: give a whole number of at least 1"),
        (lambda: all_reduce_seconds(-8, 2, Link(1)), "nbytes=-8"),
        (lambda: bytes_per_sync(0, 2), "parameters=0: give a number above 0"),
        (lambda: bytes_per_sync(1e9, 2.0), "ranks=2.0: give a whole number"),
        (lambda: bytes_per_sync(1e9, 2, bits=0), "bits=0"),
        (lambda: bytes_sent(1e9, 2, steps=0), "steps=0"),
        (lambda: bytes_sent(1e9, 2, 10, sync_every=0), "sync_every=0: give a whole number of at"),
        (lambda: utilisation(0, 1), "compute_seconds=0"),
        (lambda: utilisation(1, -1), "communication_seconds=-1"),
        (lambda: utilisation(1, math.nan), "communication_seconds=nan"),
        (lambda: utilisation(9, 1, overlapped=2), "2 s overlapped of 1 s of communication"),
        (lambda: utilisation(1, 9, overlapped=2), "1 s of computing: it is part of both"),
        (lambda: Rounds(1e9, 0), "step_seconds=0"),
        (lambda: Rounds(math.nan, 1), "parameters=nan"),
        (lambda: Rounds(1e9, 1, sync_every=0.5), "sync_every=0.5: give a whole number"),
        (lambda: Rounds(1e9, 1, layers=0), "layers=0"),
        (lambda: Rounds(1e9, 1, fragments=0), "fragments=0"),
        (lambda: Rounds(1e9, 1, delay=-1), "delay=-1: give a whole number of steps"),
        (lambda: Rounds(1e9, 1).gbit_s(0), "target=0: a utilisation is above 0 and at most 1"),
        (lambda: Rounds(1e9, 1).gbit_s(90), r"target=90: .* \(90 %: 0.9\)"),
        (lambda: wall_clock(**RUN, across=Link(1), replicas=2), "2 replicas .* need sync_every"),
        (
            lambda: wall_clock(**RUN, across=Link(1), replicas=2, sync_every=9),
            "2 replicas need inside, the link",
        ),
        (
            lambda: wall_clock(**RUN, across=Link(1), replicas=5, sync_every=9),
            "5 replicas on 4 chips",
        ),
    ],
)
def test_bad_input_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_formulas_and_their_comparison_do_not_load_torch():
    program = (
        "import sys, s2s_lib.plan.islands, s2s_lib.plan.islands_compared; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
