"""Tensor parallelism: layers cut over the ranks, applied to an untouched module by a plan.

    who holds what    of each layer in the plan 1/W of the weights, their gradients and optimizer
                      state; all other parameters whole, on every rank
    who sends what    activations, in every layer: with b rows of s tokens of h numbers, a block of
                      attention and MLP sends 8 b s h (W-1)/W numbers a rank and micro-batch

All ranks of the group work on the same batch and compute the same loss.
"""

from torch import nn

from s2s_lib.ranks.group import Group, check_group
from s2s_lib.strategies.grads import is_cut
from s2s_lib.strategies.materialise import materialise
from s2s_lib.strategies.replicas import (
    check_options_same,
    check_same,
    copy_from,
    refuse_claimed,
)
from s2s_lib.strategies.tensor.draws import Draws, Undrawn, drops
from s2s_lib.strategies.tensor.inside import Place
from s2s_lib.strategies.tensor.layers import (
    ColumnParallelLinear,
    Parallel,
    RowParallelLinear,
    VocabParallelEmbedding,
    become,
)
from s2s_lib.strategies.tensor.pairs import equal_part
from s2s_lib.strategies.tensor.plan import Row, blocks_of, check_plan, holder_of, match
from s2s_lib.strategies.tensor.region import SEQUENCE_DIM, Entrance


def tensor_parallel(
    module: nn.Module,
    group: Group,
    plan: dict,
    sequence_parallel: bool = False,
    regather: bool = False,
) -> nn.Module:
    """The module itself, its layers cut over `group` as `plan` says (plan.py): names with `*`, and
    "column", "row", "vocab" or a `Column`, `Row`, `Vocab`.

    Parameters keep their names and stay the same objects, with this rank's part as data, cut from
    the weights of the group's first rank, which sends them to all: W-1 times the module's bytes,
    and the plan, to compare it. What is on the meta device is drawn layer by layer as construction
    draws it, and cut before the next: no rank holds the whole. The result does not depend on W.

    Forward and backward send, on average from each rank, for an input of b s h numbers: 2(W-1)/W of
    them for each row layer forward, and backward for each module whose column layers share an
    input; for an embedding forward as much; `vocab_parallel_cross_entropy` says what the loss
    sends. In training, if the module drops, W-1 messages of 8 bytes a forward.

    `sequence_parallel`: between a row layer and the next column layer tensors are [b, s/W, h]. The
    same bytes travel in other operations, and the gradient of each parameter that is not cut in an
    all_reduce. Embeddings give, and norms see, this rank's part of the tokens. What mixes tokens,
    attention above all, must begin with column layers. If no column layer is last, the output is
    this rank's tokens too: let each rank's loss be its term of one sum over all tokens, or put the
    output together by `gather_from_group(y, group, -2)`. `regather` keeps only s/W of a column
    layer's input for backward, and sends (W-1)/W of b s h once more for each module with column
    layers.

    Gradients are final when `backward()` returns. `clip_grad_norm_` knows what is cut. For data
    parallelism besides, wrap the result in DDP or ZeRO over the group of the ranks with the same
    part (`Mesh`). Layers are called, not read: a weight that a module reads without calling its
    layer is a part, and what it computes from that is wrong. An Embedding's own forward gets this
    rank's row numbers. An attention must count its heads by the width of what its layers give, as
    our GPT and the Llama of transformers do.

    ValueError, and nothing is changed: a pattern that matches nothing, a layer that two match, what
    is no Linear or Embedding, a Linear with a forward of its own, sizes that do not divide, weights
    shared with a layer that is cut otherwise, ranks that disagree. (Shoeybi et al.,
    arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198.)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"tensor_parallel takes a torch.nn.Module, got {module!r}")
    check_group(group)
    if regather and not sequence_parallel:
        raise ValueError("regather=True gathers what sequence_parallel cuts: give both, or neither")
    for name, parameter in module.named_parameters():
        if is_cut(parameter):
            raise ValueError(
                f"{name} is cut already, by tensor_parallel or ZeRO: give all layers to cut in one "
                "plan, and wrap in ZeRO afterwards"
            )
    styles = match(module, plan)
    check_plan(module, styles, group.size)
    refuse_claimed(module.named_parameters())
    options = {"plan": styles, "sequence_parallel": sequence_parallel, "regather": regather}
    options["something drops"] = drops(module)
    check_same(module, group)
    check_options_same(options, group, "tensor_parallel")
    sharing = sharers(module, styles)
    cut_up(module, group, styles, sequence_parallel)
    for holder, layers in sharing:
        entrance = Entrance(layers, group, sequence_parallel, regather)
        for layer in layers:
            layer.entrance = entrance
        # Where a layer was not called, what entered would be kept.
        holder.register_forward_hook(entrance.forget, always_call=True)
    follow(module, group, styles, sequence_parallel)
    return module


def sharers(module, styles):
    """The column layers that may get one tensor, with the module that holds them: its own layers of
    as many inputs, unless it calls them one after the other."""
    alike = {}
    for name in styles:
        layer = module.get_submodule(name)
        if isinstance(layer, nn.Linear) and not isinstance(styles[name], Row):
            parent = module.get_submodule(holder_of(module, name))
            in_a_row = isinstance(parent, nn.Sequential)
            key = name if in_a_row else (parent, layer.in_features)
            alike.setdefault(key, (parent, []))[1].append(layer)
    return list(alike.values())


def cut_up(module, group, styles, sequence):
    """Draw what is on the meta device, take the first rank's values and cut, layer by layer."""
    style_of = {module.get_submodule(name): style for name, style in styles.items()}
    copied = set()
    for part in list(module.modules()):
        materialise(part, module)
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        copy_from([tensor for tensor in own if id(tensor) not in copied], group)
        copied |= set(map(id, own))
        if part in style_of:
            make_parallel(part, group, style_of[part], sequence)


def make_parallel(layer, group, style, sequence):
    if isinstance(style, Row):
        become(layer, RowParallelLinear)
        layer.split(group, sequence)
    elif isinstance(layer, nn.Embedding):
        become(layer, VocabParallelEmbedding)
        layer.split(group, sequence)
    else:
        blocks = blocks_of(layer, style)
        become(layer, ColumnParallelLinear)
        layer.split(group, blocks, style.gather)


def follow(module, group, styles, sequence):
    """Hooks around the forward: see inside.py and draws.py."""
    columns, rows = {}, []
    for name in styles:
        layer = module.get_submodule(name)
        if isinstance(layer, RowParallelLinear):
            rows.append(layer)
        elif isinstance(layer, ColumnParallelLinear) and not layer.gather:
            columns.setdefault(holder_of(module, name), []).append(layer)
    dropping = drops(module)
    place = Place(group, sequence, Draws(group, sequence) if dropping else None)
    place.watch(module, columns, rows)
    place.watch_uncut(module, columns)
    if not dropping:
        undrawn = Undrawn()
        module.register_forward_pre_hook(undrawn.begin)
        module.register_forward_hook(undrawn.end)
    if sequence:
        for part in module.modules():
            if isinstance(part, nn.Embedding) and not isinstance(part, Parallel):
                part.register_forward_hook(OwnTokens(group))


class OwnTokens:
    """A hook of an embedding that is not cut: leaves this rank's part of the sequence."""

    def __init__(self, group):
        self.group = group

    def __call__(self, layer, _, rows):
        own = equal_part(rows.shape[SEQUENCE_DIM], self.group)
        return rows.narrow(SEQUENCE_DIM, own * self.group.rank, own)
