"""What happens to a tensor on the way forward, and to its gradient on the way back.

Over the ranks of a group a tensor is in one of three states:

    whole      every rank has the same; its gradient is whole too
    cut        each rank has its part along one dim; so has its gradient
    partial    each rank has a term, and a sum is owed

A whole tensor that each rank uses in its own way gets a *partial* gradient: each rank knows only
what its own use asks for. So it must not be used so without a word: these functions are the words.
Each changes a state, and its backward is the transpose of its forward, with a whole tensor counted
once and not once a rank:

    function                   forward                           backward
    copy_to_group              whole -> used by each rank        all_reduce
    reduce_from_group          partial -> whole, by all_reduce   nothing: it is whole
    scatter_to_group           whole -> cut, by cutting          all_gather
    gather_from_group          cut -> whole, by all_gather       cutting
    gather_sequence            cut -> used by each rank          reduce_scatter
    reduce_scatter_sequence    partial -> cut                    all_gather

They differ from the gradients of plain collectives (collectives/autograd.py) in whose loss it is:
there the sum of every rank's, here one loss, which every rank has computed. That is why the
gradient of a sum is handed on as it is, and not added up again.

Sent by all ranks together: by an all_reduce 2(W-1) times the tensor's bytes, by an all_gather or
reduce_scatter W-1 times the whole one's. Each rank sends an equal share, 2(W-1)/W and (W-1)/W, but
for an all_reduce of up to 1 MiB on more than two ranks, which goes by a tree.

Source: Megatron-LM (arXiv:1909.08053), where the first two are f and g; for the last two
arXiv:2205.05198.
"""

import torch

from s2s_lib.collectives.autograd import linear
from s2s_lib.collectives.choose import FEW
from s2s_lib.collectives.contract import check
from s2s_lib.collectives.functions import all_gather, all_reduce, reduce_scatter
from s2s_lib.collectives.pieces import even_cuts
from s2s_lib.ranks.group import Group


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensor itself, whole, for each rank to use in its own way.

    forward: identity    backward: all_reduce
    """
    check(x, group)
    return linear(x, alias, lambda grad: all_reduce(grad, group), gives="as it was")


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of every rank's x, whole.

    forward: all_reduce    backward: identity
    """
    check(x, group)
    return linear(x, lambda x: all_reduce(x, group), alias)


def scatter_to_group(x: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """This rank's part of a whole x along `dim`; parts differ by at most one if W does not divide.

    forward: own part    backward: all_gather
    """
    check(x, group)
    cuts = even_cuts(x.shape[dim], group.size)
    sizes = [b - a for a, b in zip(cuts, cuts[1:], strict=False)]
    return linear(
        x,
        lambda x: own_part(x, group, dim, sizes).clone(),
        lambda grad: gathered(grad, group, dim, sizes),
        gives="cut",
    )


def gather_from_group(x: torch.Tensor, group: Group, dim: int = -1, sizes=None) -> torch.Tensor:
    """The whole tensor of which each rank has a part along `dim`; `sizes` lists uneven parts.

    forward: all_gather    backward: own part
    """
    check(x, group)
    sizes = sizes or [x.shape[dim]] * group.size
    return linear(
        x,
        lambda x: gathered(x, group, dim, sizes),
        lambda grad: own_part(grad, group, dim, sizes).clone(),
    )


def gather_sequence(x: torch.Tensor, group: Group, dim: int = -2) -> torch.Tensor:
    """The whole tensor of which each rank has an equal part, for each rank to use in its own way.

    forward: all_gather    backward: reduce_scatter
    """
    check(x, group)
    return linear(
        x, lambda x: gathered(x, group, dim), lambda grad: scattered_sum(grad, group, dim)
    )


def reduce_scatter_sequence(x: torch.Tensor, group: Group, dim: int = -2) -> torch.Tensor:
    """This rank's part along `dim` of the sum of every rank's x. ValueError unless W divides it.

    forward: reduce_scatter    backward: all_gather
    """
    check(x, group)
    return linear(
        x, lambda x: scattered_sum(x, group, dim), lambda grad: gathered(grad, group, dim)
    )


def alias(x):
    return x.view_as(x)


def own_part(x, group, dim, sizes):
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


def gathered(x, group, dim, sizes=None):
    """all_gather along any dim."""
    parts = all_gather(x.movedim(dim, 0), group, sends_least(group), sizes=sizes)
    # New memory, and no view for autograd, so that it may be changed in place.
    return parts.movedim(0, dim).contiguous().data


def scattered_sum(x, group, dim):
    """reduce_scatter along any dim, into equal parts."""
    equal_part(x.shape[dim], group)
    own = reduce_scatter(x.movedim(dim, 0), group, algorithm=sends_least(group))
    return own.movedim(0, dim).contiguous().data


def equal_part(tokens, group):
    """How many of so many tokens a rank has; ValueError where they do not divide."""
    if tokens % group.size:
        raise ValueError(
            f"a sequence of {tokens} does not cut into {group.size} equal parts: with "
            f"sequence_parallel give rows of tokens whose length is a multiple of {group.size}"
        )
    return tokens // group.size


def sends_least(group):
    """The algorithm that sends no more than the parts; the tree that `auto` takes for few bytes
    does."""
    return "direct" if group.size <= FEW else "ring"
