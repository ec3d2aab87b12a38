"""Cross-entropy of cut logits is torch's of whole ones, in value and in gradient.

In float64 to 1e-10 on 1, 2, 3 and 4 ranks, each with its own part, uneven, or empty. A maximum
taken on one rank alone shows with large logits only (in a value that is inf or nan); a target taken
for another rank's in the gradient at its place; ignored targets that count in the mean; a gradient
that is added up over ranks in every number, W times.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tensor_training import CLOSE, in_groups

from s2s_lib import RankError, bill, launch, vocab_parallel_cross_entropy

GROUPS = [[0, 1, 2, 3], [3, 1], [2, 0, 3], [1]]
VOCAB = 17
# How many logits each rank has, by the number of ranks.
EVEN = {1: [17], 2: [8, 9], 3: [5, 6, 6], 4: [4, 4, 4, 5]}
UNEVEN = {1: [17], 2: [1, 16], 3: [9, 2, 6], 4: [3, 7, 1, 6]}
SOME_EMPTY = {1: [17], 2: [17, 0], 3: [0, 17, 0], 4: [0, 9, 0, 8]}


def logits_of(shape=(3, 5), scale=3.0, dtype=torch.float64):
    random = torch.Generator().manual_seed(1)
    return (torch.randn(*shape, VOCAB, generator=random, dtype=torch.float64) * scale).to(dtype)


def targets_of(shape=(3, 5), ignored=(), ignore_index=-100):
    targets = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(2))
    for place in ignored:
        targets.view(-1)[place] = ignore_index
    return targets


def expected(logits, targets, z_loss=0.0, ignore_index=-100, **settings):
    """torch's own, and the z-loss by hand; and the gradient of twice that."""
    logits = logits.detach().clone().requires_grad_()
    flat, marks = logits.reshape(-1, VOCAB), targets.reshape(-1)
    loss = F.cross_entropy(flat, marks, ignore_index=ignore_index, **settings)
    if z_loss:
        loss = loss + z_loss * flat.logsumexp(1)[marks != ignore_index].square().mean()
    (2 * loss).backward()
    return loss.detach(), logits.grad


def own_part(logits, sizes, group):
    return logits.split(sizes[group.size], -1)[group.rank].clone().requires_grad_()


def check(*cases, close=CLOSE):
    """Each case: logits, targets, how many logits a rank has, settings. Returns the losses."""

    def work(world):
        found = []
        for group in in_groups(world, GROUPS):
            for number, (logits, targets, sizes, settings) in enumerate(cases):
                own = own_part(logits, sizes, group)
                loss = vocab_parallel_cross_entropy(own, targets, group, **settings)
                (2 * loss).backward()
                found.append((number, group.ranks, group.rank, loss.detach(), own.grad))
        return found

    wanted = [expected(logits, targets, **more) for logits, targets, _, more in cases]
    results = [one for found in launch(work, ranks=4) for one in found]
    assert len(results) == len(cases) * sum(map(len, GROUPS))
    for number, ranks, rank, loss, grad in results:
        want, gradient = wanted[number]
        _, _, sizes, settings = cases[number]
        part = gradient.split(sizes[len(ranks)], -1)[rank]
        told = f"case {number}, ranks {ranks}, parts {sizes[len(ranks)]}, {settings}: "
        for ours, theirs in ((loss, want), (grad, part)):
            torch.testing.assert_close(
                ours, theirs, equal_nan=True, **close, msg=lambda m, told=told: told + m
            )
    return [want.item() for want, _ in wanted]


SETTINGS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed away": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 0.1},
}


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, SOME_EMPTY], ids=["even", "uneven", "some empty"])
def test_loss_and_gradient_are_those_of_torch(sizes):
    cases = [(logits_of(), targets_of(ignored=(0, 7)), sizes, more) for more in SETTINGS.values()]
    assert len(set(check(*cases))) == len(cases)


def test_ignored_targets_do_not_count():
    settings = {}, {"label_smoothing": 0.2, "z_loss": 0.1}
    cases = [
        (logits_of(), targets_of(ignored=(1, 2, 14), ignore_index=index), EVEN, more)
        for index in (-100, -1, 3, VOCAB)
        for more in ({"ignore_index": index} | more for more in settings)
    ]
    check(*cases)


def test_without_a_counted_target_the_loss_is_nan_as_with_torch():
    ignored = logits_of(), targets_of(ignored=range(15)), EVEN, {}
    no_tokens = logits_of((0,)), targets_of((0,)), EVEN, {}
    assert all(map(math.isnan, check(ignored, no_tokens)))


def test_any_shape_of_logits():
    shapes = (), (1,), (4,), (2, 3, 2)
    cases = [(logits_of(shape), targets_of(shape), EVEN, {}) for shape in shapes]
    check(*cases, (logits_of((5, 3)).transpose(0, 1), targets_of((3, 5)), EVEN, {}))


def extreme():
    """A target's logit far above the others, another's, none, all of them."""
    logits, targets = logits_of((6,), scale=1.0), targets_of((6,))
    logits[0, targets[0]] = 1e4
    logits[1, 5] = 1e4
    logits[2] = -1e4
    logits[3, (targets[3] + 1) % VOCAB] = -torch.inf
    logits[4] = 1e4
    logits[5] += 1e4
    return logits, targets


def masked():
    """-inf where no target is: in all of some ranks' parts, in a part of one's."""
    logits, targets = logits_of((6,)), torch.tensor([0, 1, 2, 3, 9, 16])
    logits[:4, 4:] = -torch.inf
    logits[4, :8] = -torch.inf
    return logits, targets


def test_extreme_logits_neither_overflow_nor_vanish():
    cases = [
        (*made, sizes, more)
        for made in (extreme(), masked())
        for sizes in (EVEN, UNEVEN, SOME_EMPTY)
        for more in ({}, {"z_loss": 1e-4})
    ]
    assert all(map(math.isfinite, check(*cases)))


def test_what_is_infinite_or_no_number_with_torch_is_so_here():
    logits, targets = logits_of((4,)), targets_of((4,))
    impossible = logits.clone()
    impossible[2, targets[2]] = -torch.inf
    assert check((impossible, targets, EVEN, {})) == [math.inf]
    assert check((*masked(), EVEN, {"label_smoothing": 0.1})) == [math.inf]
    for value in (math.nan, math.inf):
        wrong = logits.clone()
        wrong[1, 6] = value
        assert math.isnan(*check((wrong, targets, EVEN, {})))


def test_sixteen_bit_logits_are_summed_in_float32_and_get_sixteen_bit_gradients():
    """torch's own result of the same logits in float32 is met to the last rounding."""
    for dtype, near in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-6)):
        logits, targets = logits_of(dtype=dtype), targets_of(ignored=(3,))
        want, gradient = expected(logits.float(), targets)

        def work(world, logits=logits, targets=targets):
            own = own_part(logits, EVEN, world)
            loss = vocab_parallel_cross_entropy(own, targets, world)
            (2 * loss).backward()
            return loss.detach(), own.grad

        losses, grads = zip(*launch(work, ranks=4), strict=True)
        for loss in losses:
            torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
        grad = torch.cat(grads, -1)
        assert grad.dtype is dtype
        torch.testing.assert_close(grad.float(), gradient, rtol=near, atol=1e-7)


def test_every_rank_gets_the_same_number_and_the_logits_stay_as_they_are():
    def work(world):
        logits = own_part(logits_of(), EVEN, world)
        before = logits.detach().clone()
        loss = vocab_parallel_cross_entropy(logits, targets_of(), world)
        loss.backward(retain_graph=True)
        once = logits.grad.clone()
        loss.backward()
        assert torch.equal(logits.grad, 2 * once)
        assert torch.equal(logits.detach(), before)
        with torch.no_grad():
            assert vocab_parallel_cross_entropy(logits, targets_of(), world) == loss
        return loss.item()

    assert len(set(launch(work, ranks=4))) == 1


def test_a_rank_sends_three_numbers_a_token_and_backward_nothing():
    """Four with smoothing; on two ranks an all_reduce sends each rank's numbers once."""

    def work(world):
        counts = []
        for settings in SETTINGS.values():
            logits = own_part(logits_of((6, 10)), EVEN, world)
            with bill() as forward:
                loss = vocab_parallel_cross_entropy(logits, targets_of((6, 10)), world, **settings)
            with bill() as backward:
                loss.backward()
            counts.append((forward.bytes, backward.bytes))
        return counts

    tokens, float64, size = 60, 8, 16
    three, four = ((size + n * tokens * float64, 0) for n in (3, 4))
    assert launch(work, ranks=2) == [[three, four, four, three, four]] * 2


def test_what_does_not_fit_is_refused_in_words():
    y = targets_of()

    def work(world):
        z = own_part(logits_of(), EVEN, world)
        calls = {
            "need int64 targets of shape (3, 5), got torch.int64 (15,)": (z, y.flatten()),
            "got torch.int32": (z, y.int()),
            "got torch.float64": (z, torch.ones_like(z)),
            "need int64 targets of shape ()": (z[0, 0], y),
            "a target is 17, and the vocabulary has 0..16": (z, y + 17 - y.max()),
            "a target is -1": (z, y * 0 - 1),
            "label_smoothing=2": (z, y, {"label_smoothing": 2}),
            "label_smoothing=True": (z, y, {"label_smoothing": True}),
            "z_loss=-1": (z, y, {"z_loss": -1}),
            "z_loss=nan": (z, y, {"z_loss": math.nan}),
            "int64": (z.long(), y),
        }
        said = {}
        for words, (logits, targets, *more) in calls.items():
            try:
                vocab_parallel_cross_entropy(logits, targets, world, **dict(*more))
            except (ValueError, IndexError, TypeError) as error:
                said[words] = str(error)
            else:
                said[words] = "accepted"
        # Nobody waits for anybody: all have said no.
        vocab_parallel_cross_entropy(z, y, world)
        return said

    for said in launch(work, ranks=4):
        assert {words: told for words, told in said.items() if words not in told} == {}


def test_ranks_with_logits_of_other_tokens_are_not_added_up():
    def work(world):
        z = torch.zeros(3 + world.rank, 4)
        return vocab_parallel_cross_entropy(
            z, torch.zeros(3 + world.rank, dtype=torch.int64), world
        )

    with pytest.raises(RankError):
        launch(work, ranks=2, check=True)


def test_ranks_with_other_targets_are_told():
    def work(world):
        logits, targets = torch.randn(6, 4), torch.arange(6) % 8
        if world.rank == 1:
            targets = targets.flip(0)
        vocab_parallel_cross_entropy(logits, targets, world)

    with pytest.raises(RankError, match="works on one batch"):
        launch(work, ranks=2)
