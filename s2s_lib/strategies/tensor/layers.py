"""Layers of which each rank holds a part. Letters: B batch, T tokens, D in, F out, V vocabulary,
over W ranks; a lower-case w after a dim says that it is cut.

    layer                      weight     in                  out
    ColumnParallelLinear       [Fw, D]    whole [.., D]       cut [.., Fw]
    RowParallelLinear          [F, Dw]    cut [.., Dw]        whole [.., F]
    VocabParallelEmbedding     [Vw, D]    whole tokens [..]   whole [.., D]

    y_Fw = x_D @ w_FwD.T            F is cut: no sum is owed, each rank has its outputs
    y_F_partial = x_Dw @ w_FDw.T    D is cut and summed over: each rank has a term of the sum
    y_F = all_reduce(y_F_partial)

So a column and a row layer with anything between them that works on each output alone need one
all_reduce forward, at the end, and one backward, at the beginning. With `sequence_parallel` what is
whole above is cut along the sequence, [B, Tw, D]: column layers gather it and row layers leave only
this rank's part of the sum. (Shoeybi et al., arXiv:1909.08053; Korthikanti et al., 2205.05198.)

Bytes "a rank" are a mean over the ranks (pairs.py).

A layer is drawn whole and then cut, so that its values do not depend on W. All ranks must draw the
same: seed them alike, or use `tensor_parallel`, which takes the first rank's.
"""

import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib.ranks.group import Group, check_group
from s2s_lib.strategies.grads import cut_over, is_cut
from s2s_lib.strategies.tensor.cut import Cut
from s2s_lib.strategies.tensor.pairs import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_sequence,
)
from s2s_lib.strategies.tensor.region import Entrance


class Parallel:
    """What the layers share: a group, and the cuts of their parameters, by name."""

    cuts = None

    def cut(self, group: Group, **cuts: Cut):
        """Keep this rank's part of each parameter named. The Parameter objects stay."""
        self.group, self.cuts = group, cuts
        for name, cut in cuts.items():
            parameter = getattr(self, name)
            # A tied parameter has been cut with the layer that had it first.
            if parameter is not None and not is_cut(parameter):
                gradient, parameter.grad = parameter.grad, None
                parameter.data = cut.take(parameter.data, group.rank)
                if gradient is not None:
                    parameter.grad = cut.take(gradient, group.rank)
                cut_over(parameter, group)

    def reset_parameters(self):
        if self.cuts is not None:
            raise RuntimeError(
                "a part of a weight drawn alone would not be a part of the whole one drawn: draw "
                "first, then cut; or build on the meta device and let tensor_parallel draw"
            )
        super().reset_parameters()

    def __getstate__(self):
        if self.cuts is not None:
            raise TypeError(
                "a tensor-parallel layer cannot be copied or saved, it is tied to its ranks: save "
                "full_state_dict(module), or copy the module before it is cut"
            )
        return super().__getstate__()

    def extra_repr(self):
        part = "" if self.cuts is None else f", part {self.group.rank} of {self.group.size}"
        return super().extra_repr() + part


class ColumnParallelLinear(Parallel, nn.Linear):
    """A Linear cut by its outputs: x [.., D] -> this rank's part [.., Fw] of x @ weight.T + bias;
    with `gather` all of it.

    Holds 1/W of weight [F, D] and bias [F], each of `blocks` (a number of equal ones, or their
    sizes) cut by itself. Backward sends 2(W-1)/W of the input's bytes a rank, once for all
    layers of one module that got the same tensor. With `sequence_parallel` x is [B, Tw, D]: forward
    sends (W-1)/W of the whole sequence's bytes and backward the same; `regather` keeps only Tw
    tokens for backward, and sends as much a third time. `gather` adds (W-1)/W of the output's.
    ValueError where W does not divide F or a block.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool = True,
        blocks: int | tuple[int, ...] = 1,
        gather: bool = False,
        sequence_parallel: bool = False,
        regather: bool = False,
        dtype: torch.dtype | None = None,
    ):
        check_group(group)
        sizes = block_sizes(out_features, blocks)
        check_even(sizes, group.size, "outputs")
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.split(group, sizes, gather)
        self.entrance = Entrance([self], group, sequence_parallel, regather)

    def split(self, group, blocks, gather=False):
        """Make a whole nn.Linear this rank's part; an Entrance is still to be given."""
        cut = Cut(0, blocks, group.size)
        self.cut(group, weight=cut, bias=cut)
        self.gather = gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"a column-parallel layer takes all {self.in_features} inputs and got "
                f"{x.shape[-1]}: what a column-parallel layer gives is cut, and goes into a "
                "row-parallel one, or through gather_from_group(x, group)"
            )
        y = self.entrance.product(self, x)
        if not self.gather:
            return y
        cut = self.cuts["weight"]
        if len(cut.blocks) > 1:
            parts = gather_from_group(y.unsqueeze(0), self.group, 0)
            return Cut(-1, cut.blocks, cut.parts).join(parts.unbind())
        return gather_from_group(y, self.group, -1, [cut.size(r) for r in range(cut.parts)])


class RowParallelLinear(Parallel, nn.Linear):
    """A Linear cut by its inputs: its part x [.., Dw] -> x @ weight.T + bias, whole [.., F].

    Holds 1/W of weight [F, D] and all of the bias [F], which is added once, after the sum. Forward
    sends 2(W-1)/W of the output's bytes a rank, backward nothing. With `sequence_parallel`
    the output is [B, Tw, F], and forward and backward send (W-1)/W of the whole sequence's bytes;
    the bias, which then sees only Tw tokens, adds an all_reduce of its gradient. ValueError where W
    does not divide D, and for an input that is not cut.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ):
        check_group(group)
        check_even((in_features,), group.size, "inputs")
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.split(group, sequence_parallel)

    def split(self, group, sequence_parallel=False):
        self.cut(group, weight=Cut(1, (self.in_features,), group.size))
        self.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = self.weight.shape[1]
        if x.shape[-1] != mine:
            raise ValueError(
                f"a row-parallel layer on rank {self.group.rank} of {self.group.size} takes its "
                f"{mine} of {self.in_features} inputs, as a column-parallel layer gives them, and "
                f"got {x.shape[-1]}: cut what is whole with scatter_to_group(x, group)"
            )
        partial = F.linear(x, self.weight)
        summed = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
        y = summed(partial, self.group)
        if self.bias is None:
            return y
        # On a part of the tokens each rank has a part of the bias's gradient.
        bias = copy_to_group(self.bias, self.group) if self.sequence_parallel else self.bias
        # Under autocast the sum is narrower than the bias.
        return y + bias.to(y.dtype)


class VocabParallelEmbedding(Parallel, nn.Embedding):
    """An Embedding cut by its rows: tokens [B, T] -> rows of weight [V, D], whole [B, T, D].

    A rank holds about V/W rows and gives zeros for other tokens; the sum over ranks is the row.
    Forward sends 2(W-1)/W of the output's bytes a rank, backward nothing; with
    `sequence_parallel` the output is [B, Tw, D], and forward and backward send (W-1)/W of the whole
    one's. V need not divide by W. ValueError for fewer rows than ranks; IndexError for a token
    outside of 0..V-1.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Group,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ):
        check_group(group)
        check_vocabulary(num_embeddings, group.size)
        super().__init__(num_embeddings, embedding_dim, padding_idx, dtype=dtype)
        self.split(group, sequence_parallel)

    def split(self, group, sequence_parallel=False):
        cut = Cut(0, (self.num_embeddings,), group.size)
        self.cut(group, weight=cut)
        self.sequence_parallel = sequence_parallel
        ((self.first, self.end),) = cut.bounds(group.rank)
        if self.padding_idx is not None:
            inside = self.first <= self.padding_idx < self.end
            self.padding_idx = self.padding_idx - self.first if inside else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.num_embeddings:
            raise IndexError(
                f"tokens from {tokens.min()} to {tokens.max()}, and the vocabulary has "
                f"0..{self.num_embeddings - 1}"
            )
        elsewhere = (tokens < self.first) | (tokens >= self.end)
        rows = super().forward((tokens - self.first).masked_fill(elsewhere, 0))
        partial = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        summed = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
        return summed(partial, self.group)


def become(layer: nn.Module, kind: type):
    """Make a layer one of the classes above, which keeps what its own class adds: how it is drawn,
    and what an embedding does to its rows."""
    own = type(layer)
    plain = own in (nn.Linear, nn.Embedding)
    layer.__class__ = kind if plain else type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})


def block_sizes(features, blocks):
    """The sizes of the blocks of so many outputs, given their number or the sizes."""
    if isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 1:
        if features % blocks:
            raise ValueError(f"{features} outputs do not make {blocks} equal blocks: list them")
        return (features // blocks,) * blocks
    sizes = tuple(blocks) if isinstance(blocks, (tuple, list)) else ()
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"blocks={blocks!r}: give their number, or a tuple of their sizes")
    if sum(sizes) != features:
        raise ValueError(f"blocks {list(sizes)} add up to {sum(sizes)} outputs of {features}")
    return sizes


def check_even(sizes, ranks, what, unit=1):
    """ValueError unless so many ranks can share each of these sizes evenly, in whole units."""
    for size in sizes:
        if size % unit:
            raise ValueError(f"{size} {what} are no whole number of heads of {unit}")
    if any(size % (ranks * unit) for size in sizes):
        fits = range(1, min(sizes) // unit + 1)
        fits = [n for n in fits if not any(size % (n * unit) for size in sizes)]
        said = " and ".join(
            f"{size // unit} heads of {unit} ({size} {what})" if unit > 1 else f"{size} {what}"
            for size in dict.fromkeys(sizes)
        )
        raise ValueError(
            f"{said} do not cut into {ranks} equal parts; "
            f"{', '.join(map(str, fits[:8]))} ranks would do"
        )


def check_vocabulary(size, ranks):
    if size < ranks:
        raise ValueError(f"a vocabulary of {size} does not cut into {ranks} parts: use fewer ranks")
