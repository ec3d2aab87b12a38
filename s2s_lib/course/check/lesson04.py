"""The checks of lesson 04: pipelines. Nothing is run on ranks: a schedule is a value."""

from fractions import Fraction
from numbers import Real

from s2s_lib.course.check.answers import NOT_ATTEMPTED, Wrong, attempted, same_number
from s2s_lib.strategies.pipeline import schedule
from s2s_lib.strategies.pipeline.actions import Action, Schedule
from s2s_lib.strategies.pipeline.simulate import simulate


def bubble_of_eight(bubble, gpipe_holds, one_f_one_b_holds):
    """Your guess for 8 ranks, 24 micro-batches, F of 1 and B of 2: GPipe's bubble as a share of the
    total time, and the most micro-batches in flight on rank 2, in GPipe and in 1F1B."""
    if not attempted(bubble, gpipe_holds, one_f_one_b_holds):
        return
    gpipe, one_f_one_b = schedule.gpipe(8, 24), schedule.one_f_one_b(8, 24)
    _same_share("bubble of GPipe", bubble, simulate(gpipe))
    same_number("in flight on rank 2 in GPipe", gpipe_holds, gpipe.peak_in_flight[2])
    same_number("in flight on rank 2 in 1F1B", one_f_one_b_holds, one_f_one_b.peak_in_flight[2])
    print(f"right: a bubble of {bubble:.1%}, and {gpipe_holds} or {one_f_one_b_holds} in flight")


def _same_share(what, got, timetable):
    if not isinstance(got, Real):
        raise Wrong(f"{what}: got a {type(got).__name__}, expected a number from 0 to 1")
    right, useful = (
        Fraction(share).limit_denominator(1000)
        for share in (timetable.bubble, timetable.bubble_over_useful)
    )
    if abs(got - right) > 5e-4:
        hint = f"; {useful} is the share of the useful time" if abs(got - useful) < 5e-4 else ""
        raise Wrong(f"{what}: got {got:.4f}, expected {float(right):.4f} ({right}){hint}")


def one_f_one_b(yours):
    """`yours(rank, ranks, microbatches)`: what this rank does in 1F1B, a list of (kind, number of
    the micro-batch), kind "F" or "B"."""
    for ranks, microbatches in ((1, 3), (2, 4), (4, 8), (4, 2), (5, 5)):
        right = schedule.one_f_one_b(ranks, microbatches)
        where = f"for {ranks} rank{'s' * (ranks > 1)} and {microbatches} micro-batches"
        got = _built(where, yours, ranks, microbatches)
        if got is None:
            return
        for rank, (held, most) in enumerate(
            zip(got.peak_in_flight, right.peak_in_flight, strict=True)
        ):
            if held > most:
                raise Wrong(f"{where}, rank {rank}: it holds {held} micro-batches; {most} will do")
        took, least = simulate(got).total, simulate(right).total
        if took > least:
            raise Wrong(f"{where}: it takes {took:g} where F lasts 1 and B 2; 1F1B takes {least:g}")
        for rank, (line, other) in enumerate(zip(got.ranks, right.ranks, strict=True)):
            _same_line(f"{where}, rank {rank}", line, other)
    print("right for five sizes: 1F1B, action for action")


def _same_line(where, line, right):
    for place, (got, expected) in enumerate(zip(line, right, strict=True)):
        if got != expected:
            got, expected = got.kind + str(got.micro), expected.kind + str(expected.micro)
            raise Wrong(f"{where}: action {place} is {got}, expected {expected}")


def three_in_flight(yours):
    """`yours(rank)`: what this one of 4 ranks does with 8 micro-batches, a list of (kind, number of
    the micro-batch), such that no rank ever holds more than 3 and all is done at 38, where F, I
    and W last 1 and B lasts 2."""
    got = _built("with 4 ranks and 8 micro-batches", lambda rank, *_: yours(rank), 4, 8)
    if got is None:
        return
    for rank, held in enumerate(got.peak_in_flight):
        if held > 3:
            raise Wrong(f"rank {rank} holds {held} micro-batches at once, 3 are allowed")
    timetable = simulate(got, forward=1, backward=1, weight=1)
    if timetable.total > 38:
        raise Wrong(f"it takes {timetable.total:g}, 38 are allowed; bubble {timetable.bubble:.1%}")
    print(f"right: at most {max(got.peak_in_flight)} in flight, done at {timetable.total:g}")


def _built(where, yours, ranks, microbatches):
    """The schedule of what `yours` returns for each rank; None if it is not attempted."""
    try:
        lines = [yours(rank, ranks, microbatches) for rank in range(ranks)]
    except NotImplementedError:
        lines = [None]
    if all(line is None or line is ... for line in lines):
        print(NOT_ATTEMPTED)
        return None
    try:
        actions = [[Action(rank, *pair) for pair in line] for rank, line in enumerate(lines)]
        whole_numbers = all(isinstance(a.micro, int) for line in actions for a in line)
    except TypeError:
        whole_numbers = False
    if not whole_numbers:
        raise Wrong(f"{where}: give a list of pairs such as ('F', 0), got {lines}")
    try:
        got = Schedule(where, actions)
    except ValueError as error:
        raise Wrong(str(error)) from None
    if (got.stages, got.microbatches) != (ranks, microbatches) or not got.trains:
        what = "no backward" if not got.trains else f"{got.microbatches} micro-batches"
        raise Wrong(f"{where}: it has {what}")
    return got
