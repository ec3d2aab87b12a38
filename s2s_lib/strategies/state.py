"""The state of a ZeRO and of its optimizer, whole and by the module's own names: what is saved at
one number of ranks and loaded at another."""

import pickle

import torch
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.strategies.replicas import exchange

# What torch's optimizers keep as one number for a parameter, beside what they keep for each of its
# elements; for a parameter that is a number itself the shapes do not tell.
NUMBERS = ("step", "mu_product", "eta", "mu")


def gather_weights(model) -> dict:
    """See `ZeRO.full_state_dict`."""
    whole = WeakIdKeyDictionary()
    for flat in model.flats:
        tensors = flat.gather_vectors(flat.master)
        for parameter, tensor in zip(flat.parameters, tensors, strict=True):
            whole[parameter] = tensor
    return {
        name: whole[value] if value in whole else value.detach().clone()
        for name, value in model.module.state_dict(keep_vars=True).items()
    }


def load_weights(model, state: dict):
    """See `ZeRO.load_full_state_dict`."""
    mine = model.module.state_dict(keep_vars=True)
    wrong = [f"missing {name}" for name in mine if name not in state]
    wrong += [f"unexpected {name}" for name in state if name not in mine]
    wrong += [
        complaint
        for name, value in mine.items()
        if name in state and (complaint := misfit(name, state[name], shape_of(model, value)))
    ]
    if wrong:
        raise ValueError(f"this state dict does not fit the module: {'; '.join(wrong)}")
    with torch.no_grad():
        for name, value in mine.items():
            flat = model.flat_of.get(value)
            if flat is None:
                value.copy_(state[name])
            else:
                i = flat.index(value)
                flat.shards[i].copy_(flat.part_of(state[name], i))
                flat.changed = True


def shape_of(model, value):
    flat = model.flat_of.get(value)
    return value.shape if flat is None else flat.shapes[flat.index(value)]


def misfit(name, value, shape):
    """What is wrong with a saved value, in words, or None."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return f"{name} is {value!r}, not a tensor with values"
    return f"{name} is {tuple(value.shape)}, not {tuple(shape)}" if value.shape != shape else None


def gather_optimizer(model, optimizer) -> dict:
    """See `ZeRO.full_optimizer_state_dict`.

    A tensor of a shard's shape becomes the whole tensor; anything else (a step count) is as it is.
    """
    names = WeakIdKeyDictionary()
    for name, parameter in model.module.named_parameters():
        names[parameter] = name
    entries = {}
    for flat in {
        id(f): f for f in map(model.flat_of.get, parameters_of(model, optimizer))
    }.values():
        for i, entry in gather_entries(flat, optimizer).items():
            entries[names[flat.parameters[i]]] = entry
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": entries, "param_groups": groups}


def gather_entries(flat, optimizer) -> dict:
    """Number of a parameter of this flat -> its whole entry: an exchange of what is not cut, and
    one gather for each key of what is."""
    mine = {i: optimizer.state.get(p, {}) for i, p in enumerate(flat.parameters)}
    cut, entries = {}, {}
    for i, entry in mine.items():
        for key, value in entry.items():
            if is_shard(value, flat.parameters[i]):
                cut.setdefault(key, {})[i] = value.dtype
            else:
                entries.setdefault(i, {})[key] = value
    # A rank that holds nothing of a parameter may have no state for it.
    said = [pickle.loads(s) for s in exchange(pickle.dumps((cut, entries)), flat.group)]
    merged = {}
    for theirs, others in said:
        for i, entry in others.items():
            entries.setdefault(i, {}).update(entry)
        for key, dtypes in theirs.items():
            merged.setdefault(key, {}).update(dtypes)
    for key, dtypes in merged.items():
        piece = torch.zeros(flat.piece, dtype=next(iter(dtypes.values())), device="cpu")
        for i in cut.get(key, {}):
            flat.shard(piece, i).copy_(mine[i][key])
        vectors = flat.gather_vectors(piece)
        for i in dtypes:
            entries.setdefault(i, {})[key] = vectors[i]
    return entries


def load_optimizer(model, optimizer, state: dict):
    """See `ZeRO.load_full_optimizer_state_dict`."""
    by_name = dict(model.module.named_parameters())
    parameters_of(model, optimizer)
    mine = [
        [n for n, p in by_name.items() if any(p is q for q in group["params"])]
        for group in optimizer.param_groups
    ]
    theirs = [sorted(group["params"]) for group in state["param_groups"]]
    if [sorted(names) for names in mine] != theirs:
        raise ValueError(f"the optimizer's groups hold {mine}, the saved ones {theirs}")
    loaded = {}
    for name, entry in state["state"].items():
        flat = model.flat_of[by_name[name]]
        i = flat.index(by_name[name])
        loaded[by_name[name]] = {
            key: loaded_value(f"{key} of {name}", key, value, flat, i)
            for key, value in entry.items()
        }
    optimizer.state.clear()
    optimizer.state.update(loaded)
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def loaded_value(what, key, value, flat, i):
    """This rank's part of a saved value; ValueError for a tensor of another shape."""
    if not isinstance(value, torch.Tensor):
        return value
    if key in NUMBERS or value.dim() == 0 and flat.shapes[i]:
        return value.clone()
    if complaint := misfit(what, value, flat.shapes[i]):
        raise ValueError(f"this state does not fit the module: {complaint}")
    return flat.part_of(value, i).clone()


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


def is_shard(value, parameter):
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
