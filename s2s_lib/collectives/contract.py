"""What every collective promises about its arguments: checked here, in one way for all.

Any shape, strides and dtype; the argument is never changed; the result is `out` or a new tensor;
and what cannot work is refused before a byte moves, with the numbers and the way out.
"""

import functools
import math
from numbers import Integral

import torch

from s2s_lib.collectives.pieces import cuts_of
from s2s_lib.ranks.group import check_group
from s2s_lib.ranks.messages import check_tensor


class Result:
    """The tensor a collective returns: `out` if given, a new one otherwise.

    `flat` is contiguous memory for the algorithms; `done()` copies it back where `out` has gaps.
    """

    __slots__ = ("out", "dense", "flat")

    def __init__(self, out, shape, like, other_shape=None):
        self.dense = True
        if out is None:
            out = torch.empty(shape, dtype=like.dtype, device="cpu")
        elif not isinstance(out, torch.Tensor):
            raise TypeError(f"out is a tensor to write the result into, got {out!r}")
        elif out.shape not in (shape, other_shape) or out.dtype is not like.dtype or not out.is_cpu:
            raise ValueError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
                f"the result is {tuple(shape)} {like.dtype} on {like.device}"
            )
        else:
            self.dense = out.is_contiguous() and not (out.is_conj() or out.is_neg())
        self.out = out
        self.flat = flat(out if self.dense else like.new_empty(shape))

    def done(self):
        if not self.dense:
            with torch.no_grad():
                self.out.copy_(self.flat.view(self.out.shape))
        return self.out


def check(tensor, group):
    """Errors for what no collective can take."""
    check_group(group)
    check_tensor(tensor)


def flat(tensor):
    """The values as one contiguous row: no autograd, no strides, no lazy conjugate.

    A view of the same memory where that is possible.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dim() != 1 or not tensor.is_contiguous():
        tensor = tensor.contiguous().view(-1)
    return tensor


def refuse_gradient(tensor, name, instead):
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"no gradient is defined through {name}: use {instead}, or detach() the tensor"
        )


def rows_for(tensor, group, sizes):
    """How many rows of dim 0 go to each rank; ValueError where they cannot be cut so."""
    if tensor.dim() == 0:
        raise ValueError("cannot cut a number into parts: give a tensor with at least one dim")
    rows = tensor.shape[0]
    if sizes is None:
        if rows % group.size:
            raise ValueError(
                f"cannot cut {rows} rows into {group.size} equal parts: pad first, or give sizes"
            )
        return (rows // group.size,) * group.size
    check_sizes(sizes, group)
    if sum(sizes) != rows:
        raise ValueError(f"sizes {list(sizes)} add up to {sum(sizes)}, the tensor has {rows} rows")
    return tuple(sizes)


def check_sizes(sizes, group):
    if (
        not isinstance(sizes, (list, tuple))
        or len(sizes) != group.size
        or any(isinstance(n, bool) or not isinstance(n, Integral) or n < 0 for n in sizes)
    ):
        raise ValueError(
            f"sizes are {group.size} numbers of rows, one for each rank; got {sizes!r}"
        )


@functools.lru_cache(maxsize=4096)
def flat_cuts(rows, shape):
    """Where the parts lie in a flattened tensor of `shape`, so many rows of its dim 0 in each."""
    row = math.prod(shape[1:])
    return cuts_of(count * row for count in rows)
