"""The checks of lesson 05: tensor parallelism."""

import math

import torch

from s2s_lib.course.check.answers import (
    NOT_ATTEMPTED,
    Wrong,
    attempted,
    rounded_to,
    run,
    same_number,
    same_tensor,
)
from s2s_lib.course.model import GPT, GPTConfig
from s2s_lib.course.plans import GPT_PLAN
from s2s_lib.meters.bill import bill
from s2s_lib.meters.timeline import timeline
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.tensor.apply import tensor_parallel
from s2s_lib.strategies.tensor.cut import Cut
from s2s_lib.strategies.tensor.plan import check_plan, match

PREDICTED = GPTConfig(layers=3, hidden=48, heads=12, kv_heads=4, mlp_hidden=160, tied=False)
ROWS, TOKENS = 8, 16


def cut_gpt(most_ranks, sums_forward, sent):
    """Your guess for a GPT of 3 layers, hidden 48, 12 heads that share 4 key-value heads, an MLP of
    160 and a vocabulary of 256, under GPT_PLAN: over how many ranks it can be cut at most, how many
    tensors [B, T, D] are added up in a forward, and how many bytes each of 2 ranks sends in forward
    and backward of 8 rows of 16 tokens in float32, without the loss."""
    if not attempted(most_ranks, sums_forward, sent):
        return
    most = max(ranks for ranks in range(1, 13) if _can_be_cut(ranks))
    same_number("ranks at most", most_ranks, most)
    sums, counted = launch(_count_sums, ranks=2)[0]
    same_number("tensors added up in a forward", sums_forward, sums)
    hint = ""
    if sent == counted - 2 * _nbytes():
        hint = "; the vocabulary has two sums too, of the embedding and of the head's input"
    if sent == 2 * counted:
        hint = "; on two ranks each sends a tensor once for a sum, 2(W-1)/W of it"
    if sent != counted:
        raise Wrong(f"bytes that each rank sends: got {sent:,}, expected {counted:,}{hint}")
    print(f"right: at most {most} ranks, {sums} sums forward, {counted:,} bytes sent")


def _nbytes():
    return 4 * ROWS * TOKENS * PREDICTED.hidden


def _can_be_cut(ranks):
    with torch.device("meta"):
        model = GPT(PREDICTED)
    try:
        check_plan(model, match(model, GPT_PLAN), ranks)
    except ValueError:
        return False
    return True


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
        for weight in (_numbered(sum(sizes), 3), _numbered(sum(sizes))):
            where = f"{len(sizes)} blocks of {', '.join(map(str, sizes))} rows on {ranks} ranks"
            rule = Cut(0, sizes, ranks)
            try:
                parts = [cut(weight.clone(), sizes, rank, ranks) for rank in range(ranks)]
            except NotImplementedError:
                parts = [None]
            if all(part is None or part is ... for part in parts):
                print(NOT_ATTEMPTED)
                return
            for rank, part in enumerate(parts):
                _same_rows(f"{where}, rank {rank}", part, rule.take(weight, rank), weight, ranks)
            whole = join(parts, sizes)
            if whole is None or whole is ...:
                raise Wrong(f"{where}: the parts are right; now join them")
            same_tensor(f"{where}, joined", whole, weight)
    print("right for four cuts, of weights and of biases: cut by block, and joined again")


def _numbered(*shape):
    return torch.arange(math.prod(shape)).view(shape)


def _same_rows(where, part, right, weight, ranks):
    try:
        same_tensor(where, part, right)
    except Wrong as wrong:
        rows = part.tolist() if isinstance(part, torch.Tensor) else None
        straight = rows in [piece.tolist() for piece in weight.chunk(ranks)]
        hint = "; these rows are cut straight through the blocks" if straight else ""
        raise Wrong(f"{wrong}{hint}") from None


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
        whole = logits_NV.clone().requires_grad_()
        right = torch.nn.functional.cross_entropy(whole, targets_N)
        right.backward()
        where = f"on {size} ranks" + (f", logits up to {scale:g}" if scale > 1 else "")
        for rank, (one, gradient) in enumerate(zip(ran, whole.grad.chunk(size, 1), strict=True)):
            _same_loss(f"{where}, rank {rank}", one.result, right.detach(), gradient, size)
        # By any algorithm a sum over W ranks sends 2(W-1) times its bytes, all ranks together.
        most, sent = 2 * (size - 1) * 3 * 8 * len(targets_N), sum(one.result[2] for one in ran)
        if sent > most:
            raise Wrong(
                f"{where}: they sent {sent:,} bytes forward; three numbers a token are {most:,}"
            )
        back = sum(one.result[3] for one in ran)
        if back:
            raise Wrong(f"{where}: they sent {back:,} bytes backward; each needs only its own part")
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


def _same_loss(where, result, right, gradient, size):
    loss, got, *_ = result
    if isinstance(loss, torch.Tensor) and loss.shape == () and not torch.isclose(loss, right):
        raise Wrong(f"{where}, loss: got {loss:.6g}, expected {right:.6g}")
    same_tensor(f"{where}, loss", rounded_to(loss, right), right)
    if got is None:
        raise Wrong(f"{where}: the loss is right, but the logits have no gradient after backward")
    try:
        same_tensor(f"{where}, gradient", rounded_to(got, gradient), gradient)
    except Wrong as wrong:
        times = torch.allclose(got, size * gradient, rtol=1e-6, atol=1e-10)
        hint = f"; it is {size} times the right one: the ranks compute one loss, not {size}"
        raise Wrong(f"{wrong}{hint if times else ''}") from None
