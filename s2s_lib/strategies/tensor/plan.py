"""Which layers of a module are cut, and how: names with stars, and a style for each.

    {"embed": "vocab", "blocks.*.attn.[qkv]": "column", "blocks.*.attn.o": "row", "head": "vocab"}

A pattern matches whole names, part by part between the dots: `*` stands for any one part.
"""

import difflib
import fnmatch
from dataclasses import dataclass

from torch import nn

from s2s_lib.strategies.tensor.layers import block_sizes, check_even, check_vocabulary


@dataclass(frozen=True)
class Column:
    """An nn.Linear cut by its outputs, which stay cut unless `gather`.

    `blocks`: the number of equal parts of a fused layer (gate and up: 2), or their sizes (q, k and
    v: three numbers); each is cut by itself. None is 1, refused where the layer looks fused.
    `head_dim`: how many outputs stay together; None takes it from the `head_dim` of the module that
    calls the layer, if that has one, and else 1.
    """

    blocks: int | tuple[int, ...] | None = None
    gather: bool = False
    head_dim: int | None = None


@dataclass(frozen=True)
class Row:
    """An nn.Linear cut by its inputs, which a column-parallel layer gives; `head_dim` as there."""

    head_dim: int | None = None


@dataclass(frozen=True)
class Vocab:
    """An nn.Embedding cut by its rows, or the nn.Linear that gives logits, cut by its outputs; the
    vocabulary need not divide by the number of ranks. The logits stay cut unless `gather`."""

    gather: bool = False


STYLES = {"column": Column(), "row": Row(), "vocab": Vocab()}


def match(module: nn.Module, plan: dict) -> dict[str, Column | Row | Vocab]:
    """The name of each layer to cut and its style, in the module's order.

    ValueError for a pattern that matches nothing, a layer that two match, and a style that is none.
    """
    if not isinstance(plan, dict) or not plan:
        raise ValueError(f"a plan is a dictionary of names and styles, got {plan!r}")
    names = [name for name, _ in module.named_modules() if name]
    found, by = {}, {}
    for pattern, style in plan.items():
        matched = [name for name in names if matches(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(str(pattern), names, n=1, cutoff=0.5)
            raise ValueError(
                f"{pattern!r} in the plan matches no layer"
                + (f"; did you mean {near[0]!r}?" if near else f": there are {names or 'none'}")
            )
        for name in matched:
            if name in found:
                raise ValueError(
                    f"{name} is matched twice in the plan, by {by[name]!r} and {pattern!r}: give "
                    "each layer one style"
                )
            found[name], by[name] = style_of(pattern, style), pattern
    return {name: found[name] for name in names if name in found}


def matches(name, pattern):
    parts, patterns = name.split("."), str(pattern).split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def style_of(pattern, style):
    if isinstance(style, (Column, Row, Vocab)):
        return style
    if not isinstance(style, str) or style not in STYLES:
        raise ValueError(
            f"{pattern!r} in the plan has the style {style!r}: give one of {', '.join(STYLES)}, or "
            "a Column(blocks=, gather=, head_dim=), Row() or Vocab(gather=)"
        )
    return STYLES[style]


def check_plan(module: nn.Module, styles: dict, ranks: int):
    """ValueError, naming the layer, for what cannot be cut so over this many ranks."""
    for name in styles:
        try:
            check_layer(module, name, styles, ranks)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    check_shared(module, styles)
    check_owners(module, styles)


def check_layer(module, name, styles, ranks):
    style = styles[name]
    layer, parent = module.get_submodule(name), module.get_submodule(holder_of(module, name))
    kinds = (nn.Linear, nn.Embedding) if isinstance(style, Vocab) else (nn.Linear,)
    what = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    if not isinstance(layer, kinds):
        raise ValueError(f"{type(style).__name__} cuts an {what}, not a {type(layer).__name__}")
    own = isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward
    if own or "forward" in vars(layer):
        raise ValueError(
            f"this {type(layer).__name__} has a forward of its own, which would be lost"
        )
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        raise ValueError(
            "its weight is computed from other parameters (weight_norm, a parametrization, "
            "pruning): remove that first"
        )
    if isinstance(parent, nn.MultiheadAttention):
        raise ValueError(
            "nn.MultiheadAttention reads its layers' weights and never calls them: use an "
            "attention whose q, k, v and o are layers that it calls"
        )
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise ValueError("an embedding with max_norm, scale_grad_by_freq or sparse is not cut")
        check_vocabulary(layer.num_embeddings, ranks)
    elif isinstance(style, Vocab):
        check_vocabulary(layer.out_features, ranks)
    elif isinstance(style, Row):
        check_even((layer.in_features,), ranks, "inputs", style.head_dim or head_dim(parent))
    else:
        if style.head_dim is None:
            refuse_counted_heads(parent)
        unit = style.head_dim or head_dim(parent)
        if style.blocks is None:
            refuse_fused(module, name, styles)
        try:
            check_even(blocks_of(layer, style), ranks, "outputs", unit)
        except ValueError as error:
            hint = "; where outputs belong to heads, say Column(head_dim=...)" if unit == 1 else ""
            raise ValueError(f"{error}{hint}") from None


def blocks_of(layer, style):
    """The sizes of the blocks in which a Linear is cut by its outputs."""
    blocks = getattr(style, "blocks", None)
    return block_sizes(layer.out_features, 1 if blocks is None else blocks)


def refuse_fused(module, name, styles):
    """ValueError for a column layer that gives more than the row layers beside it take."""
    holder, outputs = holder_of(module, name), module.get_submodule(name).out_features
    taken = [
        module.get_submodule(other).in_features
        for other, style in styles.items()
        if isinstance(style, Row) and holder_of(module, other) == holder
    ]
    if taken and outputs > max(taken):
        raise ValueError(
            f"it gives {outputs} numbers, and the row-parallel layer beside it takes {max(taken)}: "
            "a fused layer, whose parts are to be cut each by itself? Say Column(blocks=...), or "
            "Column(blocks=1) if it is not"
        )


def refuse_counted_heads(parent):
    """ValueError for what looks like an attention that knows how many heads it has."""
    for name in ("num_heads", "n_heads", "n_head", "num_attention_heads"):
        heads = getattr(parent, name, None)
        if type(heads) is int and heads > 1 and head_dim(parent) == 1:
            raise ValueError(
                f"{type(parent).__name__} has {name}={heads} and no head_dim: if it cuts what this "
                f"layer gives into {heads} heads, each rank's part would make as many narrower "
                "ones, and no shape tells. Have it count heads by their width, then say "
                "Column(head_dim=...) in the plan"
            )


def head_dim(parent):
    number = getattr(parent, "head_dim", None)
    return number if type(number) is int and number > 0 else 1


def check_shared(module, styles):
    """A parameter that several layers share must be cut alike in each."""
    holders = {}
    for name, layer in module.named_modules():
        for parameter in layer.parameters(recurse=False):
            holders.setdefault(parameter, []).append(name)
    for names in holders.values():
        ways = {name: way(module.get_submodule(name), styles.get(name)) for name in names}
        if len(set(ways.values())) > 1:
            said = ", ".join(f"{name}: {styles[name]}" for name in names if name in styles)
            raise ValueError(
                f"{' and '.join(names)} share a weight, and the plan has {said}: give all of them "
                "the same style, so that it is cut in one way"
            )


def way(layer, style):
    """How a style cuts the weight of a layer."""
    if isinstance(style, Column):
        return blocks_of(layer, style)
    if isinstance(style, Vocab):
        return (layer.weight.shape[0],)
    return type(style)


def check_owners(module, styles):
    """A parameter of a module between its own layers may be used on what is cut: nobody can see."""
    for name in styles:
        parent = module.get_submodule(holder_of(module, name))
        own = [key for key, _ in parent.named_parameters(recurse=False)]
        if own and isinstance(styles[name], Column) and not styles[name].gather:
            raise ValueError(
                f"{holder_of(module, name) or 'the module'} ({type(parent).__name__}) has {own[0]} "
                f"beside the column-parallel {name}, and it cannot be seen whether it is used on "
                "whole or on cut tensors: put it into a module of its own, which the other calls"
            )


def holder_of(module, name):
    """The name of the module that calls a layer: the nearest around it that is no container."""
    path = name.rpartition(".")[0]
    while isinstance(module.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
        path = path.rpartition(".")[0]
    return path
