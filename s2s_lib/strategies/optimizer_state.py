"""An optimizer's state, whole and by parameter name: what is saved at one number of ranks and
loaded at another."""

import pickle

import torch
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.strategies.replicas import exchange

# What torch's optimizers keep as one number for a parameter, beside what they keep for each of its
# elements; for a parameter that is a number itself the shapes do not tell.
NUMBERS = ("step", "mu_product", "eta", "mu")


def gather(model, optimizer) -> dict:
    """{"state": {name: {key: value}}, "param_groups": [...]}, the same on all ranks of the group.

    A tensor of a shard's shape becomes the whole tensor; anything else (a step count) is as it is.
    """
    names = WeakIdKeyDictionary()
    for name, parameter in model.module.named_parameters():
        names[parameter] = name
    state = {}
    for parameter in parameters_of(model, optimizer):
        flat, mine = model.flat_of[parameter], optimizer.state.get(parameter, {})
        i = place(flat, parameter)
        cut = {key: value.dtype for key, value in mine.items() if is_shard(value, parameter)}
        whole = {key: value for key, value in mine.items() if key not in cut}
        said = [pickle.loads(s) for s in exchange(pickle.dumps((cut, whole)), flat.group)]
        # A rank that holds nothing of a parameter may have no state for it.
        cut = {key: dtype for keys, _ in said for key, dtype in keys.items()}
        entry = {key: value for _, values in said for key, value in values.items()}
        for key, dtype in cut.items():
            piece = torch.zeros(flat.piece, dtype=dtype, device="cpu")
            if key in mine:
                flat.shard(piece, i).copy_(mine[key])
            entry[key] = flat.gather_vectors(piece)[i]
        if entry:
            state[names[parameter]] = entry
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load(model, optimizer, state: dict):
    """Local. ValueError where a group names other parameters than the optimizer has."""
    by_name = dict(model.module.named_parameters())
    parameters_of(model, optimizer)
    mine = [
        [n for n, p in by_name.items() if any(p is q for q in group["params"])]
        for group in optimizer.param_groups
    ]
    theirs = [sorted(group["params"]) for group in state["param_groups"]]
    if [sorted(names) for names in mine] != theirs:
        raise ValueError(f"the optimizer's groups hold {mine}, the saved ones {theirs}")
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for name, entry in state["state"].items():
        parameter = by_name[name]
        flat = model.flat_of[parameter]
        i = place(flat, parameter)
        optimizer.state[parameter] = {
            key: flat.part_of(value, i).clone()
            if isinstance(value, torch.Tensor)
            and value.shape == flat.shapes[i]
            and key not in NUMBERS
            else value.clone()
            if isinstance(value, torch.Tensor)
            else value
            for key, value in entry.items()
        }


def parameters_of(model, optimizer):
    """The optimizer's parameters; ValueError for one that the model does not own."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter not in model.flat_of:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not this "
                "model's: build it with model.parameters()"
            )
    return parameters


def place(flat, parameter):
    return next(i for i, p in enumerate(flat.parameters) if p is parameter)


def is_shard(value, parameter):
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
