"""What DiLoCo refuses, each with the numbers and the way out."""

import warnings
import weakref
from numbers import Real

import torch
from torch import nn

from s2s_lib.ranks.group import Group, check_group
from s2s_lib.ranks.islands import Islands

# Optimizer -> the ranks of each DiLoCo that watches its steps, those with Islands as None.
_watched = weakref.WeakKeyDictionary()
BITS = ((int, 8), (int, 4))
MOMENTS = ("keep", "average", "reset")


def check_options(model, group: Group | Islands, options: dict):
    """Errors for options that cannot be; a warning where there is nobody to talk to."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"DiLoCo trains a torch.nn.Module, got {model!r}")
    if isinstance(group, Islands):
        if options["delay"]:
            raise ValueError(
                f"delay={options['delay']}: what travels when an island joins or dies would be "
                "lost; with Islands give delay=0"
            )
    else:
        check_group(group)
    check_numbers(options)
    whole("seed", options["seed"], 0)
    if isinstance(group, Group) and group.size == 1:
        warnings.warn(
            "DiLoCo over one island sends nothing: it is an outer step every sync_every steps, as "
            "in Lookahead",
            stacklevel=3,
        )


def check_numbers(options: dict):
    """ValueError, which begins with a name and its value, for options that cannot be together."""
    whole("fragments", options["fragments"], 1)
    whole("delay", options["delay"], 0)
    sync_interval(options["sync_every"], options["fragments"], options["delay"])
    share("mixing", options["mixing"])
    share("outer_momentum", options["outer_momentum"])
    rate = options["outer_lr"]
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < rate < float("inf"):
        raise ValueError(
            f"outer_lr={rate!r}: give a number above 0; 1 starts the next round from the mean"
        )
    for key in ("nesterov", "error_feedback", "gossip"):
        if not isinstance(options[key], bool):
            raise ValueError(f"{key}={options[key]!r}: give True or False")
    if options["mixing"] and not options["delay"]:
        raise ValueError(
            f"mixing={options['mixing']} keeps a share of the steps taken while weights travel, "
            "and with delay=0 there are none: give a delay, or mixing=0"
        )
    if options["bits"] is not None and (type(options["bits"]), options["bits"]) not in BITS:
        raise ValueError(f"bits={options['bits']!r}: give 8, 4, or None to send full numbers")
    if options["error_feedback"] and options["bits"] is None:
        raise ValueError("error_feedback=True sends what rounding left out: give bits=8 or 4 too")
    if options["moments"] not in MOMENTS:
        raise ValueError(f"moments={options['moments']!r}: give one of {', '.join(MOMENTS)}")
    if options["gossip"] and (options["delay"] or options["bits"]):
        raise ValueError(
            "gossip=True averages weights, not their moves, at once and in full: leave out "
            f"delay={options['delay']} and bits={options['bits']}"
        )


def whole(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")


def share(name, value):
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: give a number of at least 0 and below 1")


def sync_interval(sync_every, fragments: int, delay: int):
    """ValueError unless each of the fragments can be synced once in so many steps."""
    whole("sync_every", sync_every, 1)
    if sync_every % fragments:
        below = sync_every // fragments * fragments
        near = f"{below} or {below + fragments}" if below else f"{fragments}"
        raise ValueError(
            f"sync_every={sync_every} steps do not divide by fragments={fragments}, so some would "
            f"be synced more often than others: {near} steps would do"
        )
    if delay >= sync_every:
        raise ValueError(
            f"delay={delay}: a fragment must be back before it is sent again, sync_every="
            f"{sync_every} steps later: give a delay of at most {sync_every - 1}"
        )


def refuse_complex(named, bits: int | None):
    """ValueError for complex parameters that would travel as whole numbers."""
    for name, parameter in named:
        if bits is not None and parameter.is_complex():
            raise ValueError(f"{name} is complex, and bits={bits} are for real numbers: bits=None")


def check_optimizer(model: nn.Module, optimizer) -> list[tuple[str, nn.Parameter]]:
    """The model's trainable parameters with their names; errors unless the optimizer steps them,
    and nothing else."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DiLoCo watches the steps of a torch.optim.Optimizer, got {optimizer!r}")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    ours = {id(p) for p in model.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in theirs if id(p) not in ours]
    if foreign:
        raise ValueError(
            f"the inner optimizer steps a parameter of shape {tuple(foreign[0].shape)} that is not "
            "this model's: build it with model.parameters()"
        )
    stepped = {id(p) for p in theirs}
    missing = [name for name, p in named if id(p) not in stepped]
    if missing:
        raise ValueError(
            f"{missing[0]} requires a gradient and the inner optimizer does not step it: build it "
            "with model.parameters(), or freeze that parameter"
        )
    return named


def claim_optimizer(optimizer, group: Group | Islands):
    """RuntimeError where a DiLoCo between the same ranks watches it already: both would step. (One
    inside groups of islands and another between the groups may.)"""
    ranks = set(group.ranks) if isinstance(group, Group) else None
    for others in _watched.get(optimizer, ()):
        if ranks is None or others is None or len(ranks & others) > 1:
            raise RuntimeError("this optimizer has a DiLoCo already: close() that one first")
    _watched.setdefault(optimizer, []).append(ranks)


def release(optimizer, group: Group | Islands):
    _watched[optimizer].remove(set(group.ranks) if isinstance(group, Group) else None)
