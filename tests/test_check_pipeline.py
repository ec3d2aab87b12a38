"""The checks of lesson 04, and its row of the table.

Each wrong answer is one that a reader will write: a bubble over the useful time, ranks counted from
1, GPipe in the place of 1F1B, a rank's backward before its forward, a warm-up that is one too
short, a limit on what is held that only one rank keeps, a backward that is not split.
"""

import pytest

from s2s_lib.course import check
from s2s_lib.course.show import row_one_process, row_pipeline, row_zero


def one_f_one_b(rank, ranks, microbatches, warm_up=None):
    ahead = ranks - 1 - rank if warm_up is None else warm_up
    ahead = min(ahead, microbatches)
    line = [("F", micro) for micro in range(ahead)]
    for micro in range(microbatches):
        if micro + ahead < microbatches:
            line.append(("F", micro + ahead))
        line.append(("B", micro))
    return line


def gpipe(rank, ranks, microbatches):
    return [(kind, micro) for kind in "FB" for micro in range(microbatches)]


def at_most(ahead, rank, split):
    line = one_f_one_b(rank, 4, 8, min(3 - rank, ahead))
    if not split:
        return line
    halves = [[(k, m)] if k == "F" else [("I", m), ("W", m)] for k, m in line]
    return sum(halves, [])


def wrong(exercise, *answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(*answer)
    return str(raised.value)


def test_right_answers_pass(capsys):
    check.bubble_of_eight(7 / 31, 24, 6)
    check.bubble_of_eight(0.226, 24, 6)
    check.one_f_one_b(one_f_one_b)
    check.three_in_flight(lambda rank: at_most(2, rank, split=True))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rstrip(":") for line in said] == ["right"] * 4
    assert said[0] == "right: a bubble of 22.6%, and 24 or 6 in flight"
    assert said[3] == "right: at most 3 in flight, done at 38"


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(*given): ...

    def raises(*given):
        raise NotImplementedError

    check.bubble_of_eight(0.2, ..., ...)
    for stub in (returns_nothing, raises):
        check.one_f_one_b(stub)
        check.three_in_flight(stub)
    assert capsys.readouterr().out == 5 * "not attempted\n"


def test_a_wrong_guess_is_told_which_and_what_it_should_be():
    said = wrong(check.bubble_of_eight, 7 / 24, 24, 6)
    assert said == (
        "bubble of GPipe: got 0.2917, expected 0.2258 (7/31); 7/24 is the share of the useful time"
    )
    assert wrong(check.bubble_of_eight, 0.5, 24, 6).endswith("expected 0.2258 (7/31)")
    assert "got a str" in wrong(check.bubble_of_eight, "7/31", 24, 6)
    assert wrong(check.bubble_of_eight, 7 / 31, 8, 6).endswith("in GPipe: got 8, expected 24")
    assert wrong(check.bubble_of_eight, 7 / 31, 24, 7).endswith("in 1F1B: got 7, expected 6")


def test_another_schedule_is_told_by_what_it_holds_or_takes():
    said = wrong(check.one_f_one_b, gpipe)
    assert said == "for 1 rank and 3 micro-batches, rank 0: it holds 3 micro-batches; 1 will do"
    said = wrong(check.one_f_one_b, lambda rank, ranks, M: one_f_one_b(rank, ranks, M, 0))
    assert said == (
        "for 2 ranks and 4 micro-batches: it takes 24 where F lasts 1 and B 2; 1F1B takes 15"
    )


def test_an_order_that_cannot_run_names_the_action():
    def backwards_first(rank, ranks, microbatches):
        return one_f_one_b(rank, ranks, microbatches)[::-1]

    said = wrong(check.one_f_one_b, backwards_first)
    assert said.startswith("for 1 rank and 3 micro-batches: 0B2 of rank 0 can never run: it needs")

    def forgets_the_last(rank, ranks, microbatches):
        return one_f_one_b(rank, ranks, microbatches)[:-1]

    assert "stage 0 has F of micro-batch 2" in wrong(check.one_f_one_b, forgets_the_last)


def test_a_list_of_something_else_is_told_so():
    for lines in (["F0", "B0"], [3], 3):
        said = wrong(check.one_f_one_b, lambda *_, lines=lines: lines)
        assert said.endswith(f"micro-batches: give a list of pairs such as ('F', 0), got [{lines}]")
    assert "0X0 of rank 0 is no action" in wrong(check.one_f_one_b, lambda *_: [("X", 0)])
    said = wrong(check.one_f_one_b, lambda rank, ranks, M: one_f_one_b(rank, ranks, M + 1))
    assert said == "for 1 rank and 3 micro-batches: it has 4 micro-batches"
    said = wrong(check.three_in_flight, lambda rank: [("F", micro) for micro in range(8)])
    assert said == "with 4 ranks and 8 micro-batches: it has no backward"


def test_the_limits_of_the_third_exercise_are_both_kept():
    assert wrong(check.three_in_flight, lambda rank: one_f_one_b(rank, 4, 8)) == (
        "rank 0 holds 4 micro-batches at once, 3 are allowed"
    )
    said = wrong(check.three_in_flight, lambda rank: at_most(2, rank, split=False))
    assert said == "it takes 48, 38 are allowed; bubble 50.0%"
    said = wrong(check.three_in_flight, lambda rank: at_most(1, rank, split=True))
    assert said.startswith("it takes 53, 38 are allowed")


def test_a_pipeline_holds_a_part_and_sends_what_crosses():
    row = row_pipeline(1000, ranks=4, tokens=10, hidden=8)
    assert row.held == row_one_process(1000).held / 4 == row_zero(1000, 4, stage=3).held
    # Three boundaries, 10 x 8 numbers of 4 bytes each way, over four ranks.
    assert row.sent_per_step == 3 * 2 * 10 * 8 * 4 / 4
    assert row_pipeline(1000, ranks=1, tokens=10, hidden=8).sent_per_step == 0
    assert row.strategy == "pipeline, 4 ranks"
