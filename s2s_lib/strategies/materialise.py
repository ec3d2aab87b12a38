"""Weights for what was built on the meta device as shapes without memory."""

import torch
from torch import nn


def materialise(module: nn.Module, root: nn.Module):
    """Make and draw the module's own parameters and buffers that are on the meta device.

    ValueError where the module has no `reset_parameters` to draw them.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    meta = [name for name, tensor in own if tensor.is_meta]
    if not meta:
        return
    if not hasattr(module, "reset_parameters"):
        where = next(name for name, m in root.named_modules() if m is module) or "the module itself"
        raise ValueError(
            f"{where} ({type(module).__name__}) has {', '.join(meta)} on the meta device and no "
            "reset_parameters() to fill them: add one, or build the module on the CPU"
        )
    done = {name: tensor.detach().clone() for name, tensor in own if not tensor.is_meta}
    for name, tensor in own:
        if name not in meta:
            continue
        made = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            # The Parameter object stays, so what is tied stays tied.
            torch.utils.swap_tensors(tensor, nn.Parameter(made, tensor.requires_grad))
        else:
            module._buffers[name] = made
    module.reset_parameters()
    with torch.no_grad():
        for name, tensor in done.items():
            getattr(module, name).copy_(tensor)
