"""An exercise's check lets the right answer pass and says what is wrong with any other.

A check that compared only rank 0, only shapes, or not the bytes would let one of the wrong answers
below pass; one that took a stub for an answer, or a failure for a stub, would print the wrong word.
"""

import pytest
import torch

from s2s_lib import barrier
from s2s_lib.course import check
from s2s_lib.ranks.messages import irecv, isend, recv, send


def direct_reduce_scatter(tensor, world):
    pieces = tensor.chunk(world.size)
    others = [other for other in range(world.size) if other != world.rank]
    arrivals = [irecv(torch.empty_like(pieces[world.rank]), other, world) for other in others]
    for other in others:
        isend(pieces[other], other, world)
    return pieces[world.rank] + sum(arrival.wait() for arrival in arrivals)


def doubling_all_gather(piece, world):
    held, distance = piece, 1
    while distance < world.size:
        partner = world.rank ^ distance
        arrival = irecv(torch.empty_like(held), partner, world)
        send(held, partner, world)
        theirs = arrival.wait()
        held = torch.cat([held, theirs] if world.rank < partner else [theirs, held])
        distance *= 2
    return held


def wrong(answer) -> str:
    """What the check of reduce_scatter says of a wrong answer."""
    with pytest.raises(check.Wrong) as raised:
        check.reduce_scatter(answer)
    return str(raised.value)


def test_right_answers_pass_and_say_what_was_checked(capsys):
    check.ring_of_eight(14, 7_000_000)
    check.reduce_scatter(direct_reduce_scatter)
    check.all_gather_by_doubling(doubling_all_gather)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rstrip(":") for line in said] == ["right"] * 3
    assert "14 messages and 7,000,000 bytes" in said[0]


def test_a_stub_is_not_attempted_whatever_stands_in_it(capsys):
    def returns_none(tensor, world): ...

    def raises(tensor, world):
        raise NotImplementedError

    check.ring_of_eight(..., ...)
    check.ring_of_eight(14, None)
    check.reduce_scatter(returns_none)
    check.all_gather_by_doubling(raises)
    assert capsys.readouterr().out == 4 * "not attempted\n"


def test_a_guess_that_is_wrong_is_told_the_number_that_was_counted():
    with pytest.raises(check.Wrong, match="^messages that each rank sends: got 7, expected 14$"):
        check.ring_of_eight(7, 7_000_000)
    with pytest.raises(check.Wrong, match="^bytes .*: got 8,000,000, expected 7,000,000$"):
        check.ring_of_eight(14, 8_000_000)


def test_the_first_wrong_rank_and_element_are_named():
    def forgets_its_own(tensor, world):
        piece = direct_reduce_scatter(tensor, world)
        if world.size == 3 and world.rank == 1:
            piece[1] -= tensor.chunk(3)[1][1]
        return piece

    assert wrong(forgets_its_own) == (
        "on 3 ranks, rank 1, element 1: got 404, expected 444 (1 of 2 elements differ)"
    )


def test_a_wrong_shape_dtype_or_kind_is_named():
    right = "expected a tensor of shape (2,) and torch.int64"
    said = wrong(lambda tensor, world: tensor)
    assert said == f"on 2 ranks, rank 0: got shape (4,) and torch.int64, {right}"
    said = wrong(lambda tensor, world: direct_reduce_scatter(tensor, world).float())
    assert said == f"on 2 ranks, rank 0: got shape (2,) and torch.float32, {right}"
    assert wrong(lambda tensor, world: world.rank or None).endswith(f"got a NoneType, {right}")


def test_the_argument_must_be_left_alone():
    def adds_in_place(tensor, world):
        tensor.chunk(world.size)[world.rank].copy_(direct_reduce_scatter(tensor, world))
        return tensor.chunk(world.size)[world.rank].clone()

    assert "rank 0: the result is right, but it changed its argument" in wrong(adds_in_place)


def test_the_right_result_at_a_higher_price_is_wrong():
    def sends_everything(tensor, world):
        left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        total, passing = tensor, tensor
        for _ in range(world.size - 1):
            arrival = irecv(torch.empty_like(tensor), left, world)
            send(passing, right, world)
            passing = arrival.wait()
            total = total + passing
        return total.chunk(world.size)[world.rank]

    assert wrong(sends_everything) == "on 2 ranks, rank 0: bytes sent: got 32, expected 16"

    def sends_a_word_more(tensor, world):
        arrival = irecv(tensor[:1].clone(), (world.rank - 1) % world.size, world)
        send(tensor[:1], (world.rank + 1) % world.size, world)
        arrival.wait()
        return direct_reduce_scatter(tensor, world)

    assert wrong(sends_a_word_more) == "on 2 ranks, rank 0: messages sent: got 2, expected 1"


def test_an_answer_that_raises_shows_its_own_line():
    def divides_by_zero(tensor, world):
        return tensor / (1 // world.rank)

    said = wrong(divides_by_zero)
    assert said.startswith("on 2 ranks: rank 0 of 2 raised ZeroDivisionError")
    assert "in divides_by_zero" in said

    def meets_an_operation_that_torch_lacks(tensor, world):
        raise NotImplementedError("no such kernel")

    assert "NotImplementedError: no such kernel" in wrong(meets_an_operation_that_torch_lacks)


def test_an_answer_that_waits_in_vain_ends_with_the_table_of_waits(monkeypatch):
    monkeypatch.setattr(check.answers, "PATIENCE", 1)

    def waits(tensor, world):
        return recv(torch.empty_like(tensor), 1 - world.rank, world)

    said = wrong(waits)
    assert said.startswith("on 2 ranks: ranks waited for each other longer than 1 s")
    assert "receive from rank 1" in said


def test_a_notebook_shows_the_sentence_without_a_traceback():
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = interactive.instance()
    try:
        shown = []
        shell._showtraceback = lambda kind, error, lines: shown.extend(lines)
        shell.run_cell("from s2s_lib.course import check; check.ring_of_eight(1, 1)")
    finally:
        interactive.clear_instance()
    assert shown == ["Wrong: messages that each rank sends: got 1, expected 14"]


def test_an_answer_without_its_return_is_told_so():
    def forgetful(tensor, world):
        barrier(world)

    with pytest.raises(check.Wrong, match="is a return missing"):
        check.reduce_scatter(forgetful)
