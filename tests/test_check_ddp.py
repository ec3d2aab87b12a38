"""The checks of lesson 01 let the right answer pass and say where a wrong one is wrong.

Each wrong answer here is one that a reader will write: the sum for the mean, an all_reduce for each
parameter, a gradient for the frozen one, the mean of means, an average in every micro-batch. A
check that saw only rank 0, or only shapes, or no bytes, would let one of them pass.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from s2s_lib import all_reduce
from s2s_lib.course import check


def average_gradients(model, world, op="avg", skip_frozen=True):
    chosen = [p for p in model.parameters() if p.requires_grad or not skip_frozen]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), world, op=op)
    for p, mean in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
        p.grad = mean.view_as(p)


def accumulate(model, micro_batches, world, factor=None, reduction="sum", silent=True):
    total = all_reduce(sum((targets != -100).sum() for _, targets in micro_batches), world)
    for number, (tokens, targets) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with model.no_sync() if silent and not last else contextlib.nullcontext():
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction=reduction)
            (loss.nan_to_num() * (factor or world.size / total)).backward()


def wrong(exercise, answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(answer)
    return str(raised.value)


def test_right_answers_pass(capsys):
    check.ddp_of_eight(7_000_000, 16_000_000, 7_000_000)
    check.average_gradients(average_gradients)
    check.accumulate(accumulate)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rstrip(":") for line in said] == ["right"] * 3
    assert "7,000,000 bytes sent, 16,000,000 held" in said[0]


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(model, *others): ...

    def raises(model, *others):
        raise NotImplementedError

    check.ddp_of_eight(7_000_000, ..., ...)
    for stub in (returns_nothing, raises):
        check.average_gradients(stub)
        check.accumulate(stub)
    assert capsys.readouterr().out == 5 * "not attempted\n"


def test_a_wrong_guess_is_told_which_and_what_was_counted():
    with pytest.raises(check.Wrong, match="in a step: got 8,000,000, expected 7,000,000"):
        check.ddp_of_eight(8_000_000, 16_000_000, 7_000_000)
    with pytest.raises(check.Wrong, match="holds: got 12,000,000, expected 16,000,000"):
        check.ddp_of_eight(7_000_000, 12_000_000, 7_000_000)
    with pytest.raises(check.Wrong, match="five micro-batches: got 35,000,000"):
        check.ddp_of_eight(7_000_000, 16_000_000, 35_000_000)


def test_a_wrong_average_is_told_the_rank_the_parameter_and_the_element():
    said = wrong(
        check.average_gradients, lambda model, world: average_gradients(model, world, "sum")
    )
    assert said == (
        "on 2 ranks, rank 0, gradient of 0.weight, element 0, 0: got 11.0, expected 5.5 "
        "(6 of 6 elements differ)"
    )

    def forgets_what_it_lacks(model, world):
        missing = [p for p in model.parameters() if p.requires_grad and p.grad is None]
        average_gradients(model, world)
        for p in missing:
            p.grad = None

    said = wrong(check.average_gradients, forgets_what_it_lacks)
    assert said.startswith("on 2 ranks, rank 0, gradient of 1.weight: got a NoneType")


def test_the_frozen_parameter_and_the_number_of_messages_are_looked_at():
    said = wrong(
        check.average_gradients,
        lambda model, world: average_gradients(model, world, skip_frozen=False),
    )
    assert said.startswith("on 2 ranks, rank 0: the frozen 2.weight has a gradient")

    def one_by_one(model, world):
        for layer in list(model)[:2]:
            average_gradients(layer, world)

    said = wrong(check.average_gradients, one_by_one)
    assert "it called ['all_reduce', 'all_reduce']" in said


def test_a_wrong_accumulation_is_told_where_and_how_many_bytes():
    said = wrong(
        check.accumulate, lambda *given: accumulate(*given, factor=1 / 3, reduction="mean")
    )
    assert said.startswith("on 2 ranks, rank 0, gradient of embed.weight, element 0, 0: got ")
    said = wrong(check.accumulate, lambda *given: accumulate(*given, silent=False))
    assert said.startswith("on 2 ranks, rank 0: it sent 1,675,784 bytes, and the gradients once")
