"""The checks of lesson 04, and its row of the table.

Each wrong answer is one that a reader will write: a bubble over the useful time, ranks counted from
1, GPipe in the place of 1F1B, a rank's backward before its forward, a warm-up that is one too
short, a limit on what is held that only one rank keeps, a backward that is not split, a number left
out, a return forgotten, a micro-batch that is not there. The first wrong try must not be told the
answer, or there is no second.
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

    def says_what_it_will_do(*given):
        """A stub with words in it."""

    check.bubble_of_eight(..., ..., ...)
    for stub in (returns_nothing, raises, says_what_it_will_do):
        check.one_f_one_b(stub)
        check.three_in_flight(stub)
    assert capsys.readouterr().out == 7 * "not attempted\n"


def test_half_of_an_answer_is_told_what_is_missing():
    assert wrong(check.bubble_of_eight, 7 / 31, ..., 6) == "gpipe_holds is still missing"
    said = wrong(check.bubble_of_eight, 7 / 31, ..., ...)
    assert said == "gpipe_holds and one_f_one_b_holds are still missing"

    def forgets_to_return(rank, *given):
        [("F", micro) for micro in range(8)]

    for exercise in (check.one_f_one_b, check.three_in_flight):
        said = wrong(exercise, forgets_to_return)
        assert said == "your function returned None; is a return missing?"


def test_a_wrong_guess_is_told_which_and_why_and_not_the_answer():
    bubble, gpipe, one_f_one_b = 7 / 31, 24, 6
    for guess, told in {
        (7 / 24, gpipe, one_f_one_b): "0.2917 is not right; 7/24 is the share of the useful time",
        (22.6, gpipe, one_f_one_b): "got 22.6; give a share from 0 to 1, so 0.5 for 50 %",
        (0.23, gpipe, one_f_one_b): "0.23 is not right; it is near; give three decimals, or the",
        (0.5, gpipe, one_f_one_b): "0.5 is not right; how long does a rank wait",
        ("7/31", gpipe, one_f_one_b): "give a number, got a str",
        (bubble, 8, one_f_one_b): "gpipe_holds: 8 is not right; how many forwards does rank 2",
        (bubble, gpipe, 7): "one_f_one_b_holds: 7 is not right; how many forwards",
    }.items():
        said = wrong(check.bubble_of_eight, *guess)
        assert told in said
        assert not {"7/31", "0.2258", "24", "6"} & set(said.replace(";", "").split())


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

    said = wrong(check.one_f_one_b, forgets_the_last)
    assert said == "for 1 rank and 3 micro-batches: rank 0 never runs B of 2"

    def forgets_a_weight_gradient(rank):
        return [action for action in at_most(2, rank, split=True) if action != ("W", 5)]

    said = wrong(check.three_in_flight, forgets_a_weight_gradient)
    assert said == "with 4 ranks and 8 micro-batches: rank 0 never runs W of 5"


def test_a_micro_batch_too_many_is_told_so():
    said = wrong(check.one_f_one_b, lambda *given: [("F", 2), *one_f_one_b(*given)][::-1])
    assert "there twice" in said
    said = wrong(check.one_f_one_b, lambda rank, ranks, M: one_f_one_b(rank, ranks, max(M, 3)))
    assert said == (
        "for 4 ranks and 2 micro-batches: the micro-batches are 0 and 1; rank 0 runs F of 2"
    )
    said = wrong(check.three_in_flight, lambda rank: [] if rank == 2 else at_most(2, rank, True))
    assert said == "with 4 ranks and 8 micro-batches: rank 2 does nothing, its list is empty"


def test_a_list_of_something_else_is_told_so():
    for lines in (["F0", "B0"], [3], [([1], 0)], 3):
        said = wrong(check.one_f_one_b, lambda *_, lines=lines: lines)
        assert said.endswith(f"micro-batches: give a list of pairs such as ('F', 0), got [{lines}]")
    assert "0X0 of rank 0 is no action" in wrong(
        check.one_f_one_b, lambda *given: [*one_f_one_b(*given), ("X", 0)]
    )
    said = wrong(check.one_f_one_b, lambda rank, ranks, M: one_f_one_b(rank, ranks, M + 1))
    assert said == (
        "for 1 rank and 3 micro-batches: the micro-batches are 0 to 2; rank 0 runs F of 3"
    )
    said = wrong(check.three_in_flight, lambda rank: [("F", micro) for micro in range(8)])
    assert said == "with 4 ranks and 8 micro-batches: rank 0 never runs B of 0"


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
