"""The reference of the lessons: what one process computes is what ranks can be compared with.

A rank that draws other weights, or reads another part of the batch, would make every lesson fail
for a reason that is not its own; and a reference that does not learn would prove nothing.
"""

import pytest
import torch

from s2s_lib import DDP, GPTConfig, Group, launch
from s2s_lib.course.reference import (
    adamw,
    batches,
    gradients,
    reference,
    tiny_gpt,
    train,
    weights,
)

CLOSE = {"rtol": 0, "atol": 1e-10}


def group(rank, size):
    return Group(range(size), rank)


def test_the_reference_learns_and_says_the_same_twice():
    first, second = reference(), reference()
    assert len(first.losses) == 5 and first.losses == sorted(first.losses, reverse=True)
    assert first.losses == second.losses
    torch.testing.assert_close(first.weights, second.weights, rtol=0, atol=0)
    assert set(first.gradients) == set(first.weights) == set(weights(tiny_gpt()))


def test_steps_optimizer_and_model_can_be_chosen():
    found = reference(2, lambda model: torch.optim.SGD(model.parameters(), lr=0.5), layers=1)
    assert len(found.losses) == 2 and "blocks.1.attn.q.weight" not in found.weights
    one = reference(1, lambda model: torch.optim.SGD(model.parameters(), lr=0.5), layers=1)
    before = weights(tiny_gpt(layers=1))
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, before[name] - 0.5 * one.gradients[name], **CLOSE)


def test_a_seed_gives_the_same_weights_everywhere_and_disturbs_no_random_numbers():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model = tiny_gpt(seed=7)
    assert torch.equal(torch.rand(3), expected)
    torch.testing.assert_close(weights(tiny_gpt(seed=7)), weights(model), rtol=0, atol=0)
    assert not torch.equal(tiny_gpt(seed=8).embed.weight, model.embed.weight)
    assert model.embed.weight.dtype == torch.float64
    assert model.config == GPTConfig.tiny()
    assert tiny_gpt(dtype=torch.float32, tied=False).head.weight.dtype == torch.float32


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_parts_of_all_ranks_are_the_batch_of_one_process(size):
    parts = [list(batches(group(rank, size), steps=3)) for rank in range(size)]
    for step, (x, y) in enumerate(batches(steps=3)):
        assert x.shape == (24, 32)
        assert torch.equal(torch.cat([part[step][0] for part in parts]), x)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), y)


def test_a_batch_that_cannot_be_shared_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="24 samples does not share out.* 5 ranks.*multiple of 5"):
        batches(group(0, 5))
    assert next(batches(group(0, 5), samples=10))[0].shape == (2, 32)


def test_only_gradients_that_exist_are_listed():
    model = tiny_gpt(layers=1)
    assert gradients(model) == {}
    model.norm.weight.grad = torch.ones(64, dtype=torch.float64)
    copy = gradients(model)
    model.norm.weight.grad.zero_()
    assert list(copy) == ["norm.weight"] and copy["norm.weight"].sum() == 64


def test_the_number_of_threads_is_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reference(1, layers=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_strategy_is_compared_as_the_docstring_says():
    def work(world):
        model = DDP(tiny_gpt(seed=world.rank), world)
        train(model, batches(world), adamw(model))
        return weights(model.module)

    expected = reference().weights
    for found in launch(work, ranks=2):
        torch.testing.assert_close(found, expected, **CLOSE)
