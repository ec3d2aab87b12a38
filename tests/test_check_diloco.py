"""The checks of lesson 07, and its row of the table.

Each wrong answer is one that a reader will write: bits for bytes, an H that is too small or larger
than need be, a line for a tenth of the time where it is a ninth of a step; a residual that is not
sent, or is not renewed; outer weights that are the live ones, the sign, a momentum of its own on
each island, the last steps forgotten. The row must hold two copies more than DDP's and send an
H-th.
"""

import pytest
import torch

from s2s_lib import all_reduce
from s2s_lib.course import check
from s2s_lib.course.reference import train
from s2s_lib.course.show import row_ddp, row_diloco

SENT, EVERY, GBIT_S = 6_000_000, 393, 39.272727


def send(gradient, residual, rounded):
    sent = rounded(gradient + residual)
    return sent, gradient + residual - sent


def diloco(model, optimizer, rows, group, H, copy=True, sign=1, own=False, last=True, plain=False):
    live, rows = list(model.parameters()), list(rows)
    outer = [p.detach().clone() if copy else p.detach() for p in live]
    moves = [torch.zeros_like(p) for p in live]
    for number, row in enumerate(rows, 1):
        train(model, [row], optimizer)
        if number % H == 0 or last and number == len(rows):
            for p, old, move in zip(live, outer, moves, strict=True):
                mine = sign * (old - p.detach())
                gradient = all_reduce(mine, group, "avg")
                move.mul_(0.9).add_(mine if own else gradient)
                old.sub_(0.7 * (move if plain else gradient + 0.9 * move))
                p.data.copy_(old)


def wrong(exercise, *answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(*answer)
    return str(raised.value)


def wrong_diloco(**mistakes) -> str:
    return wrong(check.mended_diloco, lambda *given: diloco(*given, **mistakes))


def test_right_answers_pass(capsys):
    check.line_of_islands(SENT, EVERY, GBIT_S)
    check.error_feedback(send)
    check.mended_diloco(diloco)
    assert capsys.readouterr().out.splitlines() == [
        "right: bill() counts 6,000,000 bytes, H = 393 leaves 90.01% for computing, and DDP needs "
        "39.3 Gbit/s",
        "right: after 12 rounds nothing is lost but what the residual holds",
        "right: on 3 islands the library's weights after 5 steps with H = 2",
    ]


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(*given): ...

    def raises(*given):
        raise NotImplementedError

    check.line_of_islands(..., ..., ...)
    for stub in (returns_nothing, raises):
        check.error_feedback(stub)
        check.mended_diloco(stub)
    assert capsys.readouterr().out == 5 * "not attempted\n"


def test_wrong_numbers_of_a_line_are_told_apart():
    guess = check.line_of_islands
    assert wrong(guess, 48_000_000, EVERY, GBIT_S).endswith("got 48,000,000, expected 6,000,000")
    assert "a whole number of at least 1" in wrong(guess, SENT, 393.0, GBIT_S)
    said = wrong(guess, SENT, 44, GBIT_S)
    assert said.startswith("H = 44: an exchange takes 0.48 s, so 50.21% of the time is computing")
    assert wrong(guess, SENT, 394, GBIT_S) == "H = 394 is enough, and so is 393"
    assert wrong(guess, SENT, EVERY, 48 / 11).endswith("a ninth of a step, not all of it")
    assert wrong(guess, SENT, EVERY, 480 / 11).endswith("it is a tenth of step and exchange")
    assert wrong(guess, SENT, EVERY, GBIT_S / 8).endswith("; a byte has 8 bits")


def test_what_is_sent_wrongly_is_named():
    def forgets(gradient, residual, rounded):
        return rounded(gradient), gradient - rounded(gradient)

    def in_full(gradient, residual, rounded):
        return gradient + residual, 0 * residual

    def adds_rounded(gradient, residual, rounded):
        sent = rounded(gradient) + rounded(residual)
        return sent, gradient + residual - sent

    def takes_away(gradient, residual, rounded):
        return rounded(gradient - residual), gradient - rounded(gradient - residual)

    said = wrong(check.error_feedback, forgets)
    assert said.startswith("round 2: ") and said.endswith("of the last round is missing in it")
    assert wrong(check.error_feedback, in_full).endswith("; it is not rounded")
    assert wrong(check.error_feedback, takes_away).endswith("to be added, not taken away")
    assert "round the sum" in wrong(check.error_feedback, adds_rounded)
    assert "give two tensors" in wrong(check.error_feedback, lambda g, *_: g)


def test_a_residual_that_is_not_renewed_is_named():
    def of_the_gradient(gradient, residual, rounded):
        sent = rounded(gradient + residual)
        return sent, gradient - sent

    def keeps(gradient, residual, rounded):
        sent = rounded(gradient + residual)
        return sent, gradient + 2 * residual - sent

    def turned(gradient, residual, rounded):
        sent = rounded(gradient + residual)
        return sent, sent - gradient - residual

    said = wrong(check.error_feedback, of_the_gradient)
    assert said.startswith("round 2: the new residual") and "was meant to be sent too" in said
    assert wrong(check.error_feedback, keeps).endswith("what is left is new")
    assert wrong(check.error_feedback, turned).endswith("; that is the wrong sign")


def test_an_argument_that_is_changed_is_found():
    def in_place(gradient, residual, rounded):
        sent = rounded(gradient.add_(residual))
        return sent, gradient.sub_(sent)

    assert "changed an argument" in wrong(check.error_feedback, in_place)


def test_each_mistake_of_a_diloco_is_named():
    assert wrong_diloco(copy=False).startswith("outer weights must be copies")
    assert wrong_diloco(sign=-1) == "a step goes against a gradient: it must be old minus new"
    assert wrong_diloco(own=True).startswith("momentum takes each island's own move")
    assert wrong_diloco(last=False) == "steps after the last full round are never synced"
    assert wrong_diloco(plain=True).startswith("that is momentum without Nesterov")


def test_several_mistakes_are_all_named():
    said = wrong_diloco(sign=-1, last=False)
    assert said.startswith("a step goes against a gradient") and said.endswith("never synced")


def test_other_wrong_weights_are_said_to_be_that():
    def averages(model, optimizer, rows, group, H):
        train(model, rows, optimizer)
        for p in model.parameters():
            p.data.copy_(all_reduce(p.detach(), group, "avg"))

    assert wrong(check.mended_diloco, averages).startswith("all islands agree, on other weights")

    def alone(model, optimizer, rows, group, H):
        train(model, list(rows)[:3], optimizer)

    assert wrong(check.mended_diloco, alone).startswith("islands differ, and not as the library's")


def test_a_row_holds_two_copies_more_than_ddp_and_sends_an_hth():
    row, ddp = row_diloco(1000, islands=4, sync_every=50), row_ddp(1000, ranks=4)
    assert row.held == ddp.held + 2 * 4000 and row.weights == ddp.weights
    assert row.sent_per_step == ddp.sent_per_step / 50
    assert row.strategy == "DiLoCo, 4 islands, H = 50"
