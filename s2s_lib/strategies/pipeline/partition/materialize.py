"""Weights for one stage of a model that is on the meta device, as if all of it had been built.

    with torch.device("meta"):
        model = GPT(config)                     # shapes without memory
    stages = split(model, group.size)
    stage = materialize(stages, group.rank, seed=0)

Construction draws the weights one module after the other from one stream of random numbers, so a
stage's weights depend on how many numbers the modules before it drew. Here every module of the
model draws in that order; what belongs to another stage goes into memory that is freed before the
next module draws. The peak is one stage and one module, never the model.

Equal to construction after the same `torch.manual_seed`, bit for bit, for a model in which

* every module that holds parameters draws them in its `reset_parameters`, once, when it is built,
  as the modules of torch.nn do (not MultiheadAttention). Others are refused by name;
* modules are registered in the order in which they are built, and nothing is drawn afterwards,
  as by `self.apply(init)` at the end of the model's constructor;
* of modules that share a parameter, the first one's draw is kept (`head.weight = embed.weight`);
* the dtype is that of construction: cast the stage afterwards, not the meta model before.

A buffer is filled if `reset_parameters` fills it (BatchNorm's are). Others, such as a mask made in
a constructor, have lost their values on the meta device; a stage that has one is refused.
"""

import torch
from torch import nn

from s2s_lib.strategies.pipeline.partition.stages import Stages, tensors_of

OTHERWISE = "Or build the model with real weights, split that and keep one stage"


def materialize(
    stages: Stages, index: int, seed: int | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Stage `index` with weights on `device`, those that construction there would have drawn.

    `seed` None goes on from the present state of the random numbers; either way they are left as
    construction leaves them. The stage's modules are the model's, which so gets these weights too;
    what is real already stays as it is. Needs the stage's bytes and the largest module's. Raises
    ValueError naming modules that hold parameters but cannot draw them, and buffers that have no
    values.
    """
    if index not in range(len(stages)):
        raise ValueError(f"there is no stage {index}: {len(stages)} stages count from 0")
    refuse_undrawable(stages.model)
    if seed is not None:
        torch.manual_seed(seed)
    waiting = {tensor for _, _, tensor in stages.places[index]}
    values = {}
    for module, originals in stages.origin:
        if hasattr(module, "reset_parameters"):
            values |= drawn(module, originals, waiting, device)
        # Of modules that share a parameter, the first one's draw counts; the others draw in vain.
        waiting -= set(originals.values())
    place(stages, index, values)
    return stages[index]


def refuse_undrawable(model):
    wrong = []
    for name, module in model.named_modules():
        inside = any(True for child in module.children() for _ in child.parameters())
        own = any(p is not None for p in module._parameters.values())
        drawing = hasattr(module, "reset_parameters")
        if own and not drawing:
            wrong.append(f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters")
        elif drawing and inside:
            wrong.append(
                f"{name or 'the model'} ({type(module).__name__}) may draw for its children"
            )
    if wrong:
        raise ValueError(
            f"these weights cannot be drawn as construction draws them: {'; '.join(wrong)}. "
            "Have each module that holds parameters, and no other, draw them in a "
            f"reset_parameters that it calls when it is built. {OTHERWISE}"
        )


def drawn(module, originals, waiting, device) -> dict:
    """Original tensor -> what reset_parameters made for it, for those that are waited for.

    The module is left as it was; what nobody waits for is freed on return.
    """
    before = tensors_of(module)
    fresh = {name: blank_like(tensor, device) for name, tensor in before.items()}
    try:
        assign(module, fresh)
        module.reset_parameters()
        made = tensors_of(module)
    finally:
        assign(module, before)
    return {
        tensor: made[name]
        for name, tensor in originals.items()
        if tensor in waiting and (name in module._parameters or filled(made[name], fresh[name]))
    }


def blank_like(tensor, device):
    blank = torch.empty_like(tensor, device=device)
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def filled(made, blank):
    """Torch counts the operations in place on a tensor."""
    return made is not blank or made._version > 0


def assign(module, tensors):
    for name, tensor in tensors.items():
        setattr(module, name, tensor)


def place(stages, index, values):
    """Put the values where the stage still has tensors without memory."""
    empty = [
        (module, name, tensor)
        for module, name, tensor in stages.places[index]
        if getattr(module, name).is_meta
    ]
    missing = [f"{type(m).__name__}.{name}" for m, name, tensor in empty if tensor not in values]
    if missing:
        raise ValueError(
            f"no reset_parameters fills {', '.join(missing)} of stage {index}, and on the meta "
            "device the values are lost: compute them in forward, or in reset_parameters. "
            f"{OTHERWISE}"
        )
    for module, name, tensor in empty:
        setattr(module, name, values[tensor])
