"""What ZeRO can be asked for, and that all ranks ask for the same."""

import torch
from torch import nn

from s2s_lib.ranks.group import Group, check_group
from s2s_lib.strategies.grads import refuse_cut_over
from s2s_lib.strategies.replicas import (
    check_options_same,
    check_same,
    check_tiles,
    refuse_claimed,
)


def check_options(module, group, replicate, stage, param_dtype, sync_every):
    """Errors for what makes no sense whatever the other ranks say."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ZeRO wraps a torch.nn.Module, got {module!r}")
    if not any(True for _ in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to cut")
    check_group(group)
    if replicate is not None:
        check_group(replicate)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: 0 cuts nothing, 1 optimizer state, 2 gradients too, 3 weights too"
        )
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"sync_every={sync_every!r}: average the replicas every 1, 2, ... steps")
    if sync_every > 1 and replicate is None:
        raise ValueError(
            f"sync_every={sync_every} says how often replicas are averaged, and there are none: "
            "give replicate="
        )
    if param_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"param_dtype={param_dtype!r}: torch.bfloat16, torch.float16 or None")
    refuse_claimed(module.named_parameters())
    for averaged_over in filter(None, (group, replicate)):
        refuse_cut_over(module.named_parameters(), averaged_over)


def check_ranks(module, group: Group, replicate: Group | None, options: dict):
    """ValueError unless all ranks built one module, give the same options and lie in a box."""
    options = options | {"replicate": replicate and replicate.size}
    check_same(module, group)
    check_options_same(options, group, "ZeRO")
    if replicate is not None:
        check_options_same(options, replicate, "ZeRO")
        check_tiles(group, replicate)
        check_same(module, replicate)
