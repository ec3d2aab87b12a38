"""The norm of the whole gradient, whatever strategy holds which part of it where.

    who holds what    every rank its gradients, or its shards of them
    who sends what    a number up and down a tree, for each group over which some gradient is cut

A strategy that cuts gradients over a group says so with `cut_over`, one that gives each rank other
layers with `spread_over`; all others are held whole, and the same, by every rank. The square of a
norm is a sum over elements, so each element is to be counted once: cut gradients are summed over
their group and never over replicas, whole ones are not summed over ranks at all.
"""

import math
from numbers import Real

import torch
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.ranks.group import Group

# Parameter -> the groups over which its gradient is cut into shards, first cut first.
_cut_over = WeakIdKeyDictionary()
# Parameters of which a rank has a stretch of elements, where the cuts depend on other parameters.
_in_flats = WeakIdKeyDictionary()
# Module -> the group whose ranks each have other layers of one model, and copies that do not count.
_spread_over = WeakIdKeyDictionary()
# Parameters that are in layers of several ranks.
_shared = WeakIdKeyDictionary()


def cut_over(parameter: torch.nn.Parameter, group: Group, flat: bool = False):
    """Say that each rank of `group` holds a different part of this parameter and its gradient.

    What a rank has so far is what is cut: by tensor parallelism first, and a part of that by ZeRO,
    which cuts a buffer with other parameters in it (`flat`).
    """
    if flat:
        _in_flats[parameter] = True
    _cut_over[parameter] = (*_cut_over.get(parameter, ()), group)


def is_cut(parameter: torch.nn.Parameter) -> bool:
    """Whether ranks hold different parts of this parameter and its gradient."""
    return parameter in _cut_over


def is_in_flat(parameter: torch.nn.Parameter) -> bool:
    """Whether it is cut in places that depend on other parameters."""
    return parameter in _in_flats


def refuse_cut_over(named, group: Group):
    """ValueError, with its name, for a parameter of which other ranks of this group have other
    parts: to be averaged over the group, all would have to hold the same."""
    for name, parameter in named:
        for cut in _cut_over.get(parameter, ()):
            both = [rank for rank in group.ranks if rank in cut.ranks]
            if len(both) > 1:
                raise ValueError(
                    f"{name} is cut over ranks {list(cut.ranks)}, and ranks {both} of this group "
                    "hold different parts of it: average over ranks that hold the same part, say "
                    'the "dp" axis of a Mesh(world, dp=..., tp=...)'
                )


def spread_over(module: torch.nn.Module, group: Group, copies: list, shared: list):
    """Say that each rank of `group` holds other layers of one model, this one those of `module`.

    `shared` are those of its parameters that other ranks have too, `copies` those of them that
    another rank counts.
    """
    _spread_over[module] = group, {id(parameter) for parameter in copies}
    for parameter in shared:
        _shared[parameter] = True


def is_shared(parameter: torch.nn.Parameter) -> bool:
    """Whether another rank has a copy of it in its own layers, which must stay the same."""
    return parameter in _shared


def clip_grad_norm_(model: torch.nn.Module, max_norm: float, norm_type: float = 2.0):
    """Scale all gradients of `model` so that their norm together is at most `max_norm`.

    Returns the norm before, a float64 tensor and the same number on all ranks: the `norm_type`
    norm (2, another number above 0, or inf) of the gradient as one process would have it. Padding
    counts for nothing, a tied parameter once, one without a gradient not at all. All ranks of the
    groups over which gradients are cut or layers spread must call it; the ranks of each such group
    together send 2(W-1) numbers of 8 bytes. With a pipeline, give the `Pipeline`: one of its stages
    alone would give the norm of that stage.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model={type(model).__name__}: give the module itself, not its parameters as torch's "
            "clip_grad_norm_ takes them; with a pipeline, the Pipeline"
        )
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
            raise ValueError(f"{name}={value!r}: give a number above 0")
    worst = math.isinf(norm_type)
    spread = [_spread_over[module] for module in model.modules() if module in _spread_over]
    copies = set().union(*(copies for _, copies in spread))
    totals = {}
    for parameter in model.parameters():
        if id(parameter) in copies:
            continue
        groups = _cut_over.get(parameter, ())
        if parameter.requires_grad or parameter.grad is not None:
            terms = totals.setdefault(groups, [torch.zeros((), dtype=torch.float64)])
            if parameter.grad is not None and parameter.grad.numel():
                terms.append(power(parameter.grad, norm_type))
    whole = torch.zeros((), dtype=torch.float64)
    for groups, terms in totals.items():
        total = torch.stack(terms).max() if worst else torch.stack(terms).sum()
        for group in groups:
            total = all_reduce(total, group, "max" if worst else "sum")
        whole = torch.maximum(whole, total) if worst else whole + total
    for group, _ in spread:
        whole = all_reduce(whole, group, "max" if worst else "sum")
    norm = whole if worst else whole ** (1 / norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.item())
    return norm


def power(gradient, norm_type):
    """The sum of |g|^norm_type, in float64; for inf the largest |g|."""
    wide = torch.promote_types(gradient.dtype, torch.float64)
    norm = torch.linalg.vector_norm(gradient.detach(), norm_type, dtype=wide)
    return norm if math.isinf(norm_type) else norm**norm_type
