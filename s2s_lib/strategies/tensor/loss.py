"""Cross-entropy of logits that are cut along the vocabulary, and never gathered.

    z      logits of one token, [Vw] on each rank
    m      the largest of all V                 all_reduce (max) of a number a token
    s      sum over V of exp(z - m)             one all_reduce (sum) of two numbers a token,
    y      the target's z - m, on its rank      three with label smoothing: sum over V of z - m
    loss   log s - y

Backward needs no communication: softmax minus one-hot, each rank for its own logits.
(Shoeybi et al., arXiv:1909.08053, section 3.)
"""

from math import inf
from numbers import Real

import torch

from s2s_lib.collectives.autograd import first_order
from s2s_lib.collectives.functions import all_gather, all_reduce
from s2s_lib.collectives.pieces import cuts_of
from s2s_lib.ranks.group import Group, check_group
from s2s_lib.strategies.tensor.pairs import sends_least


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The mean over counted targets, as `F.cross_entropy(whole_logits, targets)` gives it: the same
    number on every rank.

    logits [.., Vw] are this rank's part, in rank order, of V = sum of Vw (whole ones, as a layer
    with `gather` gives them, go into F.cross_entropy). Targets [..] are whole, int64 in 0..V-1 or
    `ignore_index`. `label_smoothing` mixes the target with the uniform distribution; `z_loss` adds
    that times the mean of log(sum of exp z)^2 (PaLM, arXiv:2204.02311). In float32 or wider; the
    gradient has the dtype of the logits.

    A rank sends, on average, 2(W-1)/W of 3 numbers a token (4 with smoothing), and 16 bytes W-1
    times. All ignored: nan, as with torch. ValueError for shapes that do not fit and where ranks
    have other targets, IndexError for a target outside of the vocabulary.
    """
    check_group(group)
    check_shapes(logits, targets, label_smoothing, z_loss)
    cuts = cuts_of(compare(logits, targets, group))
    counted = targets != ignore_index
    wrong = targets[counted & ((targets < 0) | (targets >= cuts[-1]))]
    if wrong.numel():
        raise IndexError(
            f"a target is {wrong[0]}, and the vocabulary has 0..{cuts[-1] - 1} (ignored are "
            f"those of {ignore_index})"
        )
    settings = cuts, label_smoothing, z_loss
    return CrossEntropy.apply(logits, targets, counted, group, settings)


def compare(logits, targets, group):
    """How many logits of a token each rank has; ValueError where ranks have other targets."""
    places = torch.arange(1, targets.numel() + 1)
    mine = torch.tensor([[logits.shape[-1], (targets.flatten() * places).sum()]])
    sizes, sums = all_gather(mine, group, sends_least(group)).unbind(1)
    if (sums != sums[0]).any():
        raise ValueError(
            f"the ranks {list(group.ranks)} have different targets, and a tensor-parallel group "
            "works on one batch: give all its ranks the same tokens"
        )
    return sizes.tolist()


class CrossEntropy(torch.autograd.Function):
    """forward: all_reduce of max and sums    backward: this rank's part of the softmax"""

    @staticmethod
    def forward(ctx, logits, targets, counted, group, settings):
        cuts, smoothing, z_loss = settings
        wide = torch.promote_types(logits.dtype, torch.float32)
        z_NV = logits.reshape(targets.numel(), logits.shape[-1]).to(wide, copy=True)
        first, size = cuts[group.rank], z_NV.shape[1]
        local_N = (targets.flatten() - first).masked_fill(~counted.flatten(), -1)
        mine_N = (local_N >= 0) & (local_N < size)
        local_N = local_N.masked_fill(~mine_N, 0)
        # A rank may have no logits at all.
        top_N = z_NV.amax(1) if size else z_NV.new_full((len(z_NV),), -inf)
        top_N = all_reduce(top_N, group, "max")
        z_NV.sub_(top_N[:, None])
        target_N = z_NV.new_zeros(len(z_NV))
        if size:
            target_N = z_NV.gather(1, local_N[:, None])[:, 0].masked_fill(~mine_N, 0)
        sums = [target_N, z_NV.sum(1)] if smoothing else [target_N]
        exp_NV = z_NV.exp_()
        sums = all_reduce(torch.stack([exp_NV.sum(1), *sums]), group)
        log_N = sums[0].log()
        loss_N = log_N - sums[1]
        if smoothing:
            loss_N = (1 - smoothing) * loss_N + smoothing * (log_N - sums[2] / cuts[-1])
        log_z_N = log_N + top_N
        loss_N = loss_N + z_loss * log_z_N.square() if z_loss else loss_N
        count = counted.sum()
        ctx.save_for_backward(exp_NV, sums[0], log_z_N, local_N, mine_N, counted.flatten(), count)
        ctx.settings, ctx.shape, ctx.dtype = settings, logits.shape, logits.dtype
        return loss_N.masked_fill(~counted.flatten(), 0).sum() / count

    @staticmethod
    @first_order
    def backward(ctx, grad):
        exp_NV, sum_N, log_z_N, local_N, mine_N, counted_N, count = ctx.saved_tensors
        cuts, smoothing, z_loss = ctx.settings
        share_N = torch.where(counted_N, grad / count, 0)
        softmax_N = share_N * (1 + 2 * z_loss * log_z_N) / sum_N
        of_logits = exp_NV * softmax_N[:, None]
        if smoothing:
            of_logits -= (smoothing / cuts[-1]) * share_N[:, None]
        if of_logits.shape[1]:
            at_target_N = torch.where(mine_N, (1 - smoothing) * share_N, 0)
            of_logits.scatter_add_(1, local_N[:, None], -at_target_N[:, None])
        return of_logits.view(ctx.shape).to(ctx.dtype), None, None, None, None


def check_shapes(logits, targets, label_smoothing, z_loss):
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: give floating-point ones, and int64 targets")
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape or targets.dtype is not torch.int64:
        raise ValueError(
            f"logits {tuple(logits.shape)} need int64 targets of shape {tuple(logits.shape[:-1])}, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    for name, value, most in (("label_smoothing", label_smoothing, 1), ("z_loss", z_loss, inf)):
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError(f"{name}={value!r}: give a number from 0 to {most}")
