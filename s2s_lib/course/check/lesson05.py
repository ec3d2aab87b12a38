"""The checks of lesson 05: tensor parallelism."""

import math
import traceback
from functools import cache
from numbers import Real

import torch
from torch.nn.functional import cross_entropy, one_hot

from s2s_lib.course.check import lesson05_hints as hints
from s2s_lib.course.check.answers import (
    NOT_ATTEMPTED,
    Wrong,
    attempted,
    rounded_to,
    run,
    same_number,
    same_tensor,
)
from s2s_lib.course.check.lesson05_hints import PREDICTED, ROWS, TOKENS
from s2s_lib.course.model import GPT
from s2s_lib.course.plans import GPT_PLAN
from s2s_lib.meters.bill import bill
from s2s_lib.meters.timeline import timeline
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.tensor.apply import tensor_parallel
from s2s_lib.strategies.tensor.cut import Cut
from s2s_lib.strategies.tensor.plan import check_plan, match


def cut_gpt(most_ranks, sums_forward, sent):
    """Your guess for a GPT of 3 layers, hidden 48, 12 heads that share 4 key-value heads, an MLP of
    160 and a vocabulary of 256, under GPT_PLAN: over how many ranks it can be cut at most, how many
    tensors [B, T, D] are added up in a forward, and how many bytes each of 2 ranks sends in forward
    and backward of 8 rows of 16 tokens in float32, without the loss."""
    if not attempted(most_ranks, sums_forward, sent):
        return
    for guess in (most_ranks, sums_forward, sent):
        if not isinstance(guess, Real):
            raise Wrong(f"give three numbers, got {guess!r}")
    most = max(ranks for ranks in range(1, 13) if _can_be_cut(ranks))
    _same_guess("ranks at most", most_ranks, most, hints.of_ranks(most_ranks))
    sums, counted = _sums_and_bytes()
    _same_guess("tensors added up in a forward", sums_forward, sums, hints.of_sums(sums_forward))
    _same_guess("bytes that each rank sends", sent, counted, hints.of_bytes(sent))
    print(f"right: at most {most} ranks, {sums} sums forward, {counted:,} bytes sent")


def _same_guess(what, got, expected, hint):
    """Where a hint says what is missing, the right number is left to be found."""
    if got != expected and hint:
        raise Wrong(f"{what}: {got:,} is not right; {hint}")
    same_number(what, got, expected)


def _can_be_cut(ranks):
    with torch.device("meta"):
        model = GPT(PREDICTED)
    try:
        check_plan(model, match(model, GPT_PLAN), ranks)
    except ValueError:
        return False
    return True


@cache
def _sums_and_bytes():
    return launch(_count_sums, ranks=2)[0]


def _count_sums(world):
    model = tensor_parallel(GPT(PREDICTED), world, GPT_PLAN)
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    with bill() as sent:
        with timeline() as line:
            logits = model(tokens)
        logits.sum().backward()
    sums = sum(span.name == "all_reduce" for span in line.operations)
    return sums, sent.by("collective")["all_reduce"]


def cut_fused(cut, join):
    """`cut(weight, sizes, rank, ranks)`: this rank's rows of a fused weight, or of its bias, whose
    blocks have `sizes` rows, each divisible by `ranks`. `join(parts, sizes)`: the whole weight from
    the parts of all ranks, in rank order."""
    for sizes, ranks in (((8, 8, 8), 2), ((8, 4, 4), 4), ((6, 6), 3), ((5,), 1)):
        where = f"{len(sizes)} blocks of {', '.join(map(str, sizes))} rows on {ranks} ranks"
        try:
            if not _weight_and_bias(where, cut, join, sizes, ranks):
                print(NOT_ATTEMPTED)
                return
        except Wrong as wrong:
            if len(set(sizes)) == 1:
                raise
            raise Wrong(f"{wrong}; blocks of equal sizes were right, these differ") from None
    print("right for four cuts, of weights and of biases: cut by block, and joined again")


def _weight_and_bias(where, cut, join, sizes, ranks):
    """Whether there is something to check."""
    for what, shape in (("", (sum(sizes), 3)), (", a bias", (sum(sizes),))):
        weight, rule, parts = _numbered(*shape), Cut(0, sizes, ranks), []
        for rank in range(ranks):
            here = f"{where}{what}, rank {rank}"
            parts.append(_call(here, cut, weight.clone(), sizes, rank, ranks))
            if _missing(parts[0]):
                return False
            right = rule.take(weight, rank)
            _same_rows(here, parts[-1], right, hints.of_rows(weight, right, sizes, ranks))
        whole = _call(f"{where}{what}, joined", join, parts, sizes)
        if _missing(whole):
            raise Wrong(f"{where}{what}: the parts are right; now join them")
        by_rank = {"rows stand rank after rank; put block after block": torch.cat(parts)}
        _same_rows(f"{where}{what}, joined", whole, weight, by_rank)
    return True


def _missing(answer):
    return answer is None or answer is ...


def _call(where, yours, *given):
    """What `yours` returns, None if it is a stub; Wrong, with its traceback, if it fails."""
    try:
        return yours(*given)
    except NotImplementedError:
        return None
    except Exception as error:
        yours_alone = error.__traceback__.tb_next
        raised = "".join(traceback.format_exception(type(error), error, yours_alone)).rstrip()
        raise Wrong(f"{where}: it failed\n{raised}") from None


def _numbered(*shape):
    return torch.arange(math.prod(shape)).view(shape)


def _same_rows(where, got, right, known):
    try:
        same_tensor(where, got, right)
    except Wrong as wrong:
        rows = got.tolist() if isinstance(got, torch.Tensor) else None
        for hint, cut in known.items():
            if rows == cut.tolist():
                raise Wrong(f"{wrong}; {hint}") from None
        raise


def cut_loss(yours):
    """`yours(logits_NVw, targets_N, world)`: the mean cross-entropy of logits of which each rank
    has as many columns, in rank order: the same number on every rank, and this rank's part of the
    gradient after backward. Sends three numbers a token forward, and nothing backward."""
    for size, scale in ((2, 1.0), (3, 1.0), (4, 1e4)):
        logits_NV, targets_N = _logits(size, scale)
        inputs = list(logits_NV.chunk(size, 1))
        ran = run(
            lambda mine, world, targets_N=targets_N: _loss(yours, mine, targets_N, world), inputs
        )
        if ran is None:
            return
        where = f"on {size} ranks" + (f", logits up to {scale:g}" if scale > 1 else "")
        right = cross_entropy(logits_NV, targets_N)
        known = hints.of_loss(logits_NV, targets_N, size)
        terms = logits_NV.softmax(1), one_hot(targets_N, logits_NV.shape[1]).double()
        terms = [(term / len(targets_N)).chunk(size, 1) for term in terms]
        for rank, (one, softmax, target) in enumerate(zip(ran, *terms, strict=True)):
            _same_loss(f"{where}, rank {rank}, loss", one.result[0], right, known)
            wrong = hints.of_gradient(softmax, target, size)
            _same_gradient(f"{where}, rank {rank}", one.result[1], softmax - target, wrong)
        # By any algorithm a sum over W ranks sends 2(W-1) times its bytes, all ranks together.
        most, sent = 2 * (size - 1) * 3 * 8 * len(targets_N), sum(one.result[2] for one in ran)
        if sent > most:
            raise Wrong(
                f"{where}: all together sent {sent:,} bytes forward; three numbers of 8 bytes for "
                f"each of {len(targets_N)} tokens are {most:,}"
            )
        back = sum(one.result[3] for one in ran)
        if back:
            raise Wrong(
                f"{where}: all together sent {back:,} bytes backward; each needs only its own part"
            )
    print("right on 2, 3 and 4 ranks: one process's loss and gradient, three numbers a token")


def _logits(size, scale):
    """Six rows of logits with eight columns for each rank, and targets on every rank."""
    logits_NV = torch.linspace(-7, 7, 48 * size, dtype=torch.float64).view(6, -1).sin() * scale
    return logits_NV, torch.arange(6) * 5 % (8 * size)


def _loss(yours, mine, targets_N, world):
    """The loss, this rank's gradient, and the bytes sent forward and backward."""
    mine.requires_grad_()
    with bill() as forward:
        loss = yours(mine, targets_N.clone(), world)
    if loss is None:
        return None
    with bill() as backward:
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
            loss.backward()
    loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
    return loss, mine.grad, forward.bytes, backward.bytes


def _same_loss(where, loss, right, known):
    try:
        same_tensor(where, rounded_to(loss, right), right)
    except Wrong:
        if not isinstance(loss, torch.Tensor) or (loss.shape, loss.dtype) != ((), right.dtype):
            raise
        missing = [hint for hint, value in known if torch.isclose(loss, value)]
        if not loss.isfinite():
            missing = ["exp of a large logit is infinite; subtract the largest of all ranks before"]
        said = f"{where}: got {loss:.6g}, expected {right:.6g}"
        raise Wrong("; ".join([said, *missing[:1]])) from None


def _same_gradient(where, got, right, known):
    if got is None:
        raise Wrong(f"{where}: the loss is right, but the logits have no gradient after backward")
    try:
        same_tensor(f"{where}, gradient", rounded_to(got, right), right)
    except Wrong as wrong:
        for hint, gradient in known:
            if torch.allclose(got, gradient, rtol=1e-6, atol=1e-10):
                raise Wrong(f"{wrong}; {hint}") from None
        raise
