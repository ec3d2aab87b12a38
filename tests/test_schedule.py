"""Schedules as values: complete, in an order that can be run, and those that torch prints.

What an action waits for is written out here once more, from the meaning of the words, so a wrong
rule in the library does not agree with itself. A forgotten action fails `each_action_once`; a
backward before its forward, or before the next stage's, the orders; two neighbours who wait for
each other, the interpreter of synchronous sends; a warm-up of one too many, the activations in
flight.
"""

import functools
import pickle
import re
from collections import Counter

import pytest

from s2s_lib.strategies.pipeline.actions import Action, Schedule
from s2s_lib.strategies.pipeline.schedule import (
    BUILDERS,
    dualpipev,
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

LOOPED, IN_A_V = ("interleaved", "looped_bfs"), ("zbv", "dualpipev")
SPLIT = ("zb_h1", "zb_h2", "zbv")
every_builder = pytest.mark.parametrize("name", BUILDERS)


def allowed(name, ranks, microbatches):
    """Which sizes a schedule takes, by the papers."""
    if name == "dualpipev":
        return microbatches >= 2 * ranks
    return name != "interleaved" or microbatches % max(1, microbatches // ranks) == 0


@functools.cache
def sizes(name):
    """(ranks, microbatches, chunks, schedule) for every small size that the schedule takes."""
    return [
        (P, M, chunks, BUILDERS[name](P, M, **({"chunks": chunks} if name in LOOPED else {})))
        for P in range(1, 7)
        for M in range(1, 17)
        for chunks in ((1, 2, 3) if name in LOOPED else (2,) if name in IN_A_V else (1,))
        if allowed(name, P, M)
    ]


def gives(action):
    """What others can have of an action: its output, or its gradient of the input."""
    stage, kind, micro = action
    return stage, {"F": "output", "B": "gradient", "I": "gradient", "W": "weights"}[kind], micro


def takes(action, schedule):
    """What must have been given before it can run."""
    stage, kind, micro = action
    last = schedule.stages - 1
    if kind == "F":
        if stage > 0:
            return [(stage - 1, "output", micro)]
        again = schedule.feedback and micro >= schedule.feedback
        return [(last, "output", micro - schedule.feedback)] if again else []
    if kind == "W":
        return [(stage, "gradient", micro)]
    own = [(stage, "output", micro)]
    return own if stage == last else [*own, (stage + 1, "gradient", micro)]


def stuck(schedule, ahead=2, wait=False):
    """The actions that never run where a send ends only when its receiver has asked for it.

    A rank asks, in order, for what its action under way and the next `ahead` need of other ranks.
    It starts a send once it has computed; with `wait` it takes no further action till that ended.
    """
    lines = schedule.ranks
    home = {stage: rank for rank, line in enumerate(lines) for stage, *_ in line}
    receiver = {}
    for line in lines:
        for action in line:
            for need in takes(action, schedule):
                if home[need[0]] != home[action.stage]:
                    receiver[need] = home[action.stage]
    at, computed = [0] * len(lines), [set() for _ in lines]
    sending, here = [set() for _ in lines], [set() for _ in lines]

    def asked(rank, message):
        window = lines[rank][at[rank] : at[rank] + ahead + 1]
        return any(message in takes(action, schedule) for action in window)

    def step(rank):
        action = lines[rank][at[rank]]
        if action not in computed[rank]:
            if not here[rank].issuperset(takes(action, schedule)):
                return False
            computed[rank].add(action)
            here[rank].add(gives(action))
            if gives(action) in receiver:
                sending[rank].add(gives(action))
        if wait and sending[rank]:
            return False
        at[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(lines):
            while at[rank] < len(line) and step(rank):
                moved = True
            taken = {message for message in sending[rank] if asked(receiver[message], message)}
            for message in taken:
                here[receiver[message]].add(message)
            sending[rank] -= taken
            moved = moved or bool(taken)
    return [line[k] for line, k in zip(lines, at, strict=True) if k < len(line)]


def mine(*lines, name="mine"):
    """A schedule from texts like "0F0 0B0", one for each rank."""
    pattern = re.compile(r"(-?\d+)([A-Z])(-?\d+)")
    found = [[(int(s), kind, int(m)) for s, kind, m in pattern.findall(line)] for line in lines]
    return Schedule(name, found)


def words(line):
    return " ".join(map(str, line))


# What every schedule keeps.


@every_builder
def test_each_action_is_there_once_and_no_other(name):
    for P, M, chunks, schedule in sizes(name):
        assert (len(schedule.ranks), schedule.stages, schedule.microbatches) == (P, P * chunks, M)
        assert Counter(a for line in schedule.ranks for a in line).most_common(1)[0][1] == 1
        kinds = {}
        for stage, kind, micro in (a for line in schedule.ranks for a in line):
            kinds.setdefault((stage, micro), set()).add(kind)
        assert set(kinds) == {(s, m) for s in range(P * chunks) for m in range(M)}
        plain, split = {"F", "B"}, {"F", "I", "W"}
        whole = {"forward_only": [{"F"}], "dualpipev": [plain, split]}.get(
            name, [split if name in SPLIT else plain]
        )
        assert all(seen in whole for seen in kinds.values())


@every_builder
def test_stages_lie_round_the_ranks_or_to_the_last_and_back(name):
    for P, _, _, schedule in sizes(name):
        for stage, rank in enumerate(schedule.rank_of):
            back = name in IN_A_V and stage >= P
            assert rank == (2 * P - 1 - stage if back else stage % P)
        for rank, line in enumerate(schedule.ranks):
            assert {schedule.rank_of[a.stage] for a in line} == {rank}
            assert schedule.stages_of(rank) == sorted({a.stage for a in line})


@every_builder
def test_no_action_comes_before_what_it_needs(name):
    for P, _, _, schedule in sizes(name):
        done, lines = set(), [[] for _ in range(P)]
        for rank, action in schedule.order:
            assert done.issuperset(takes(action, schedule)), (schedule, action)
            done.add(gives(action))
            lines[rank].append(action)
        assert tuple(map(tuple, lines)) == schedule.ranks


@every_builder
def test_nobody_waits_for_ever_where_a_send_ends_when_it_is_received(name):
    for _, _, _, schedule in sizes(name):
        assert stuck(schedule) == [], schedule
    for ahead in (0, 1):
        assert stuck(sizes(name)[-1][-1], ahead) == []


def test_a_rank_that_waits_for_its_send_to_end_never_goes_on():
    # The same interpreter; neighbours send to each other at once and neither receives.
    for P, M, chunks in ((2, 2, 2), (2, 4, 2), (4, 8, 2), (3, 3, 1)):
        assert stuck(interleaved(P, M, chunks), ahead=0, wait=True)
    for P, M in ((2, 2), (4, 2), (4, 8), (6, 16)):
        assert stuck(one_f_one_b(P, M), ahead=0, wait=True)
    assert stuck(one_f_one_b(2, 2), ahead=0, wait=True) == [(0, "F", 1), (1, "B", 0)]
    # Where all messages of a time go one way it would do.
    assert not stuck(gpipe(4, 8), ahead=0, wait=True)
    assert not stuck(naive(4, 3), ahead=0, wait=True)


@every_builder
def test_micro_batches_take_their_turn_at_every_stage(name):
    for _, M, _, schedule in sizes(name):
        for line in schedule.ranks:
            turns = {}
            for stage, kind, micro in line:
                turns.setdefault((stage, kind), []).append(micro)
            for (_, kind), micros in turns.items():
                assert micros == sorted(micros, reverse=name == "looped_bfs" and kind == "B")
                assert name == "dualpipev" or len(micros) == M


def test_a_schedule_is_a_value():
    assert one_f_one_b(3, 4) == one_f_one_b(3, 4) != one_f_one_b(3, 5)
    assert gpipe(2, 2) != Schedule("other", gpipe(2, 2).ranks)
    assert hash(zbv(2, 4)) == hash(zbv(2, 4))
    again = pickle.loads(pickle.dumps(zbv(2, 4)))
    assert again == zbv(2, 4) and again.order == zbv(2, 4).order
    with pytest.raises(AttributeError):
        gpipe(2, 2).name = "mine"


# The orders themselves, small enough to check by eye.


def test_the_orders_of_one_stage_a_rank():
    assert words(naive(2, 2).ranks[0]) == "0F0 0B0 0F1 0B1"
    assert words(gpipe(2, 3).ranks[1]) == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert [words(line) for line in one_f_one_b(3, 4).ranks] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert [words(line) for line in zb_h1(3, 4).ranks] == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]
    assert words(zb_h2(2, 4).ranks[0]) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert words(zb_h2(2, 4).ranks[1]) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"
    assert words(forward_only(2, 3).ranks[1]) == "1F0 1F1 1F2"


def test_the_orders_of_several_stages_a_rank():
    assert words(interleaved(2, 2, 2).ranks[0]) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert words(interleaved(2, 2, 2).ranks[1]) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert words(looped_bfs(2, 2, 2).ranks[1]) == "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"


def test_micro_batches_fewer_than_the_stages_shorten_the_warm_up():
    assert words(one_f_one_b(4, 1).ranks[0]) == "0F0 0B0"
    assert words(one_f_one_b(4, 2).ranks[0]) == "0F0 0F1 0B0 0B1"
    assert words(zb_h1(4, 1).ranks[3]) == "3F0 3I0 3W0"


def test_one_chunk_is_1f1b_with_twice_the_warm_up():
    for P in range(1, 7):
        line = interleaved(P, 4 * P, 1).ranks[0]
        kinds = "".join(action.kind for action in line)
        assert kinds.index("B") == min(2 * (P - 1) + 1, 4 * P)


def test_the_forwards_of_any_schedule_are_a_schedule():
    for name in BUILDERS:
        P, M, _, schedule = sizes(name)[-1]
        alone = schedule.forward()
        assert schedule.trains == (name != "forward_only") and not alone.trains
        kept = [[a for a in line if a.kind == "F"] for line in schedule.ranks]
        assert [list(line) for line in alone.ranks] == kept
        assert alone.stages == schedule.stages and alone.microbatches == M
        assert schedule.name in alone.name


def test_a_schedule_prints_who_does_what():
    assert str(Action(2, "F", 0)) == "2F0"
    assert str(one_f_one_b(2, 2)).splitlines() == [
        "<1F1B: 2 stages, 2 micro-batches>",
        "rank 0: F0 F1 B0 B1",
        "rank 1: F0 B0 F1 B1",
    ]
    assert str(interleaved(1, 1, 2)).splitlines() == [
        "<interleaved 1F1B x2: 2 stages on 1 rank, 1 micro-batch>",
        "rank 0: 0F0 1F0 1B0 0B0",
    ]


def test_streamed_tokens_wait_for_the_one_before_of_their_own_request():
    assert words(streaming(2, 2, 2).ranks[1]) == "1F0 1F1 1F2 1F3"
    for P in range(1, 6):
        for requests in range(1, 6):
            for tokens in range(1, 5):
                made = streaming(P, requests, tokens)
                assert (made.stages, made.microbatches) == (P, requests * tokens)
                assert not made.trains and stuck(made) == []
                done = set()
                for _, action in made.order:
                    assert done.issuperset(takes(action, made))
                    done.add(gives(action))
                assert len(done) == P * requests * tokens


def test_an_output_that_goes_in_again_too_early_is_refused():
    told = "can never run: it needs 1F0, which stands after it"
    with pytest.raises(ValueError, match=told):
        Schedule("mine", [[(0, "F", 0), (0, "F", 1), (1, "F", 0), (1, "F", 1)]], feedback=1)
    assert stuck(Schedule("mine", [[(0, "F", 0), (1, "F", 0), (0, "F", 1), (1, "F", 1)]], 1)) == []


@pytest.mark.parametrize("feedback", [-1, True, 1.0, "1", None])
def test_feedback_is_a_whole_number(feedback):
    with pytest.raises(ValueError, match=re.escape(f"feedback={feedback!r}")):
        Schedule("mine", [[(0, "F", 0), (0, "F", 1)]], feedback)


def test_only_inference_feeds_back():
    with pytest.raises(ValueError, match="feedback"):
        Schedule("mine", naive(2, 2).ranks, feedback=1)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "4", None])
def test_streaming_takes_whole_numbers_of_at_least_one(count):
    for place, which in enumerate(("stages", "requests", "tokens")):
        counts = [2, 2, 2]
        counts[place] = count
        with pytest.raises(ValueError, match=re.escape(f"{which}={count!r}: give a whole number")):
            streaming(*counts)


# Activations in flight.


def test_activations_in_flight_are_those_of_the_papers():
    for P in range(1, 7):
        for M in range(1, 20):
            assert naive(P, M).peak_in_flight == [1] * P
            assert forward_only(P, M).peak_in_flight == [1] * P
            assert gpipe(P, M).peak_in_flight == [M] * P
            assert one_f_one_b(P, M).peak_in_flight == [min(M, P - s) for s in range(P)]
            assert zb_h1(P, M).peak_in_flight == [min(M, P)] * P
            assert zb_h2(P, M).peak_in_flight == [min(M, 2 * P - 1)] * P
            assert max(zbv(P, M).peak_in_flight) <= 2 * P
            for chunks in (1, 2, 3):
                assert looped_bfs(P, M, chunks).peak_in_flight == [chunks * M] * P
            if M >= 2 * P:
                assert zbv(P, M).peak_in_flight == [2 * P] * P
                assert dualpipev(P, M).peak_in_flight == [2 * P + 1] * P


def test_interleaving_holds_more_on_the_first_ranks():
    for P in range(1, 7):
        for chunks in (1, 2, 3):
            for M in range(P, 5 * P, P):
                most = [(chunks - 1) * P + 2 * (P - 1 - rank) + 1 for rank in range(P)]
                assert interleaved(P, M, chunks).peak_in_flight == [
                    min(n, chunks * M) for n in most
                ]


def test_a_split_backward_holds_its_activations_until_the_weights():
    assert mine("0F0 0I0 0F1 0I1 0W0 0W1").peak_in_flight == [2]
    assert mine("0F0 0I0 0W0 0F1 0I1 0W1").peak_in_flight == [1]
    assert mine("0F0 0B0 0F1 0B1").peak_in_flight == [1]


# The same as torch's own.


def torchs(name, P, M, chunks=1):
    """torch.distributed.pipelining's action lists for one of its schedules.

    Made without its constructor, which wants processes and modules.
    """
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, name)
    made = object.__new__(kind)
    made.pp_group_size, made._n_microbatches, made.n_local_stages = P, M, chunks
    made._stages = [None] * chunks
    made._num_stages = made.num_stages = P * chunks
    made.number_of_rounds = max(1, M // P)
    made.microbatches_per_round = M // made.number_of_rounds
    if hasattr(kind, "_calculate_single_rank_operations"):
        lines = [made._calculate_single_rank_operations(rank) for rank in range(P)]
    else:
        lines = [made._get_pipeline_order()[rank] for rank in range(P)]
    return [[*flat(line)] for line in lines]


def flat(line):
    """(stage, kind, micro) of torch's actions, a pair that it overlaps one after the other."""
    for action in line:
        for part in (action.sub_actions or [action]) if action else []:
            if part.computation_type.value in ("F", "B", "I", "W"):
                yield part.stage_index, part.computation_type.value, part.microbatch_index


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (gpipe, "ScheduleGPipe"),
        (one_f_one_b, "Schedule1F1B"),
        (interleaved, "ScheduleInterleaved1F1B"),
        (looped_bfs, "ScheduleLoopedBFS"),
        (zb_h1, "ScheduleInterleavedZeroBubble"),
        (zbv, "ScheduleZBVZeroBubble"),
        (dualpipev, "ScheduleDualPipeV"),
    ],
)
def test_the_actions_are_those_of_torch(build, name):
    compared = 0
    for P, M, chunks, schedule in sizes(build.__name__):
        # torch takes no fewer micro-batches than stages for these two, and ZB-H1 as one of its
        # interleaved schedules, which share the micro-batches out in rounds.
        if build in (one_f_one_b, zb_h1) and M < P:
            continue
        if build is zb_h1 and not allowed("interleaved", P, M):
            continue
        theirs = torchs(name, P, M, chunks)
        if build is one_f_one_b:
            # What torch 2.13 prints for the last rank counts the forwards from 1.
            assert [m for _, kind, m in theirs[-1] if kind == "F"] == [*range(1, M + 1)]
            theirs[-1] = [(s, kind, m - (kind == "F")) for s, kind, m in theirs[-1]]
        assert [list(map(tuple, line)) for line in schedule.ranks] == theirs
        compared += 1
    assert compared > 30


# What cannot be.


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["0F0 0F0 0B0"], "mine: 0F0 is there twice"),
        (["0F0 0B0", "1F0 1B0 1B0"], "mine: 1B0 is there twice"),
        (["0F0 0F1 0B0"], "stage 0 has F of micro-batch 1; it needs F and B, or F, I and W"),
        (["0F0 0B0", "1F0"], "stage 1 has F of micro-batch 0; it needs"),
        (["0F0 0I0"], "stage 0 has F and I of micro-batch 0; it needs"),
        (["0F0 0W0"], "stage 0 has F and W of micro-batch 0; it needs"),
        (["0B0"], "stage 0 has B of micro-batch 0; it needs"),
        (["0F0 0B0 0F2 0B2"], "stage 0 has nothing of micro-batch 1; it needs"),
        (["0F0 0B0", "2F0 2B0"], "stage 1 has nothing of micro-batch 0; it needs"),
        (["1F0 1B0"], "stage 0 has nothing of micro-batch 0; it needs"),
        (["0F0 0B0 0I0 0W0"], "stage 0 has F and B and I and W of micro-batch 0; it needs"),
        (["0F0 0B0 0W0"], "stage 0 has F and B and W of micro-batch 0; it needs"),
        (["0F0 0F1 0B1"], "stage 0 has F of micro-batch 0; it needs"),
        (["0F0 0F1", "1F0"], "stage 1 has nothing of micro-batch 1; it needs"),
        (["0F0 0B0", "0F1 0B1"], "mine: 0F1 is on rank 1, but rank 0 runs stage 0"),
        (["0F0", "0B0"], "mine: 0B0 is on rank 1, but rank 0 runs stage 0"),
        (["0F0 0X0"], "mine: 0X0 of rank 0 is no action: a stage, F, B, I or W, a micro"),
        (["0F0 0B0", "-1F0"], "mine: -1F0 of rank 1 is no action"),
        (["0F0 0B-2"], "mine: 0B-2 of rank 0 is no action"),
        (["0F0 0B0", ""], "mine: rank 1 has nothing to do; use fewer ranks"),
        ([], "mine: a schedule needs at least one rank"),
    ],
)
def test_a_schedule_with_too_much_or_too_little_is_refused_by_name(lines, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        mine(*lines)


@pytest.mark.parametrize(
    ("lines", "first", "needed"),
    [
        (["0B0 0F0"], "0B0 of rank 0", "0F0"),
        (["0F0 0B0", "1B0 1F0"], "1B0 of rank 1", "1F0"),
        (["0B0 0F0", "1F0 1B0"], "0B0 of rank 0", "0F0"),
        (["0F0 0W0 0I0"], "0W0 of rank 0", "0I0"),
        (["0F0 0B0", "1F0 1W0 1I0"], "1W0 of rank 1", "1I0"),
        (["1F0 1B0", "0B0 0F0"], "0B0 of rank 1", "0F0"),
        (["0F0 0B0 1F0 1B0"], "0B0 of rank 0", "1B0"),
        (["1F0 0F0 1B0 0B0"], "1F0 of rank 0", "0F0"),
        (["0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1", "2F0 2B1 2F1 2B0"], "2B1 of rank 2", "2F1"),
    ],
)
def test_an_action_before_what_it_needs_on_its_own_rank_is_named(lines, first, needed):
    told = f"{first} can never run: it needs {needed}, which stands after it"
    with pytest.raises(ValueError, match=re.escape(told)):
        mine(*lines)


def test_ranks_that_wait_for_each_other_are_told():
    with pytest.raises(ValueError) as error:
        mine("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert "0B0 of rank 0 can never run: it needs 1B0" in str(error.value)
    assert "; ranks 0, 1, 0 wait in a ring, each for the next (rank 0: " in str(error.value)
    assert "(rank 0: 0B0 waits for 1B0; rank 1: 1F1 waits for 0F1)" in str(error.value)


def test_the_action_named_is_on_the_ring_not_behind_it():
    # Ranks 1 and 2 wait for each other, and rank 0 for rank 1.
    with pytest.raises(ValueError, match="1B0 of rank 1 .* it needs 2B0; ranks 1, 2, 1 wait"):
        mine("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")


def test_a_ring_of_three_ranks_is_found():
    lines = ("0F0 3F0 0B0 3B0", "1F0 4F0 4B0 1B0", "2F0 5F0 5B0 2B0")
    with pytest.raises(ValueError, match="it needs 1B0; ranks 0, 1, 2, 0 wait in a ring"):
        mine(*lines)


def test_a_refusal_says_which_schedule():
    for lines in (["0B0 0F0"], ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], ["0F0 0F0"]):
        with pytest.raises(ValueError, match="^by hand: "):
            mine(*lines, name="by hand")


@pytest.mark.parametrize(
    "action", [(0.5, "F", 0), ("0", "F", 0), (0, "F", None), (0, ["F"], 0), (True, "F", 0), 7]
)
def test_what_has_no_numbers_or_no_kind_is_refused_as_no_action(action):
    with pytest.raises(ValueError, match="is no action"):
        Schedule("mine", [[action]])


def test_a_far_off_number_is_refused_without_the_memory_for_it():
    for lines in ([[(0, "F", 0), (0, "F", 10**12)]], [[(0, "F", 0)], [(10**6, "F", 0)]]):
        with pytest.raises(ValueError, match="mine: "):
            Schedule("mine", lines)


def test_lines_may_be_any_iterables():
    lines = gpipe(2, 3).ranks
    assert Schedule("GPipe", (list(line) for line in lines)) == gpipe(2, 3)
    assert Schedule("GPipe", [iter(line) for line in lines]) == gpipe(2, 3)


def test_any_two_actions_exchanged_are_refused_or_still_in_order():
    schedule = zb_h1(3, 3)
    refused = 0
    for rank, line in enumerate(schedule.ranks):
        for k in range(len(line)):
            for j in range(k):
                other = list(line)
                other[j], other[k] = other[k], other[j]
                lines = [*schedule.ranks[:rank], other, *schedule.ranks[rank + 1 :]]
                try:
                    changed = Schedule("mine", lines)
                except ValueError as error:
                    assert "can never run" in str(error)
                    refused += 1
                else:
                    assert stuck(changed) == []
    assert refused > 50


@every_builder
@pytest.mark.parametrize("count", [0, -1, True, 2.0, "4", None])
def test_counts_are_whole_numbers_of_at_least_one(name, count):
    first = "ranks" if name in (*LOOPED, *IN_A_V) else "stages"
    wrong = [((count, 8), first), ((2, count), "microbatches")]
    if name in LOOPED:
        wrong.append(((2, 8, count), "chunks"))
    for counts, which in wrong:
        told = f"{which}={count!r}: give a whole number of at least 1"
        with pytest.raises(ValueError, match=re.escape(told)):
            BUILDERS[name](*counts)


def test_interleaved_names_the_nearest_numbers_that_can_be_shared_out():
    for P in range(1, 7):
        works = [M for M in range(1, 40) if allowed("interleaved", P, M)]
        for M in sorted({*range(1, 31)} - {*works}):
            below, above = max(n for n in works if n < M), min(n for n in works if n > M)
            with pytest.raises(ValueError, match=f"takes {M} .* work are {below} and {above}$"):
                interleaved(P, M)
            assert interleaved(P, below).microbatches == below
            assert interleaved(P, above).microbatches == above
    assert [M for M in range(1, 14) if allowed("interleaved", 4, M)] == [*range(1, 9), 10, 12]


def test_dualpipev_names_the_smallest_number_that_works():
    for P in range(1, 7):
        for M in range(1, 2 * P):
            told = f"on {P} ranks has {2 * P} stages .* got {M}; .* that works is {2 * P}$"
            with pytest.raises(ValueError, match=told):
                dualpipev(P, M)
        assert dualpipev(P, 2 * P).microbatches == 2 * P
