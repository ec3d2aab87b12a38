"""The checks of lesson 04: pipelines. Nothing is run on ranks: a schedule is a value."""

import dis
from fractions import Fraction
from numbers import Real

from s2s_lib.course.check.answers import NOT_ATTEMPTED, Wrong
from s2s_lib.strategies.pipeline import schedule
from s2s_lib.strategies.pipeline.actions import Action, Schedule
from s2s_lib.strategies.pipeline.simulate import simulate


def bubble_of_eight(bubble, gpipe_holds, one_f_one_b_holds):
    """Your guess for 8 ranks, 24 micro-batches, F of 1 and B of 2: GPipe's bubble as a share of the
    total time, and the most micro-batches in flight on rank 2, in GPipe and in 1F1B.

    What is wrong is told without the answer, so that there is a second try.
    """
    given = {
        "bubble": bubble,
        "gpipe_holds": gpipe_holds,
        "one_f_one_b_holds": one_f_one_b_holds,
    }
    missing = [name for name, number in given.items() if number is None or number is ...]
    if len(missing) == len(given):
        print(NOT_ATTEMPTED)
        return
    if missing:
        raise Wrong(f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} still missing")
    for name, number in given.items():
        if not isinstance(number, Real):
            raise Wrong(f"{name}: give a number, got a {type(number).__name__}")
    gpipe, one_f_one_b = schedule.gpipe(8, 24), schedule.one_f_one_b(8, 24)
    _same_share(bubble, simulate(gpipe))
    before = "how many forwards does rank 2 run before its first backward?"
    if gpipe_holds != gpipe.peak_in_flight[2]:
        raise Wrong(f"gpipe_holds: {gpipe_holds} is not right; {before}")
    if one_f_one_b_holds != one_f_one_b.peak_in_flight[2]:
        hint = f"{before} Ranks count from 0"
        raise Wrong(f"one_f_one_b_holds: {one_f_one_b_holds} is not right; {hint}")
    print(f"right: a bubble of {bubble:.1%}, and {gpipe_holds} or {one_f_one_b_holds} in flight")


def _same_share(got, timetable):
    if not 0 <= got <= 1:
        raise Wrong(f"bubble: got {got}; give a share from 0 to 1, so 0.5 for 50 %")
    if abs(got - timetable.bubble) < 5e-4:
        return
    useful = Fraction(timetable.bubble_over_useful).limit_denominator(1000)
    if abs(got - useful) < 5e-4:
        why = f"{useful} is the share of the useful time"
    elif abs(got - timetable.bubble) < 1e-2:
        why = "it is near; give three decimals, or the fraction"
    else:
        why = "how long does a rank wait, of how long in all?"
    raise Wrong(f"bubble: {got:.4g} is not right; {why}")


def one_f_one_b(yours):
    """`yours(rank, ranks, microbatches)`: what this rank does in 1F1B, a list of (kind, number of
    the micro-batch), kind "F" or "B"."""
    for ranks, microbatches in ((1, 3), (2, 4), (4, 8), (4, 2), (5, 5)):
        right = schedule.one_f_one_b(ranks, microbatches)
        where = f"for {ranks} rank{'s' * (ranks > 1)} and {microbatches} micro-batches"
        arguments = [(rank, ranks, microbatches) for rank in range(ranks)]
        got = _built(where, yours, arguments, microbatches)
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
    got = _built("with 4 ranks and 8 micro-batches", yours, [(rank,) for rank in range(4)], 8)
    if got is None:
        return
    for rank, held in enumerate(got.peak_in_flight):
        if held > 3:
            raise Wrong(f"rank {rank} holds {held} micro-batches at once, 3 are allowed")
    timetable = simulate(got, forward=1, backward=1, weight=1)
    if timetable.total > 38:
        raise Wrong(f"it takes {timetable.total:g}, 38 are allowed; bubble {timetable.bubble:.1%}")
    print(f"right: at most {max(got.peak_in_flight)} in flight, done at {timetable.total:g}")


def _built(where, yours, arguments, microbatches):
    """The schedule of what `yours` returns, for each rank with its arguments; None if it is not
    attempted."""
    try:
        lines = [yours(*given) for given in arguments]
    except NotImplementedError:
        lines = [...]
    if all(line is None or line is ... for line in lines):
        if lines[0] is None and not _is_stub(yours):
            raise Wrong("your function returned None; is a return missing?")
        print(NOT_ATTEMPTED)
        return None
    try:
        actions = [[Action(rank, *pair) for pair in line] for rank, line in enumerate(lines)]
        pairs = all(type(a.kind) is str and type(a.micro) is int for line in actions for a in line)
    except TypeError:
        pairs = False
    if not pairs:
        raise Wrong(f"{where}: give a list of pairs such as ('F', 0), got {lines}")
    for rank, line in enumerate(actions):
        _check_all_there(where, rank, line, microbatches)
    try:
        return Schedule(where, actions)
    except ValueError as error:
        raise Wrong(str(error)) from None


def _is_stub(yours):
    """Whether the body is empty, as in the exercise."""
    code = getattr(yours, "__code__", None)
    return code is not None and _operations(code) == _operations((lambda: None).__code__)


def _operations(code):
    return [instruction.opname for instruction in dis.get_instructions(code)]


def _check_all_there(where, rank, line, microbatches):
    """Wrong unless this rank has a forward and a backward of every micro-batch and of no other."""
    if not line:
        raise Wrong(f"{where}: rank {rank} does nothing, its list is empty")
    numbers = f"0 to {microbatches - 1}" if microbatches > 2 else "0 and 1"
    for _, kind, micro in line:
        if not 0 <= micro < microbatches:
            raise Wrong(
                f"{where}: the micro-batches are {numbers}; rank {rank} runs {kind} of {micro}"
            )
    done = {(kind, micro) for _, kind, micro in line}
    for micro in range(microbatches):
        needed = "FIW" if ("I", micro) in done or ("W", micro) in done else "FB"
        for kind in needed:
            if (kind, micro) not in done:
                raise Wrong(f"{where}: rank {rank} never runs {kind} of {micro}")
