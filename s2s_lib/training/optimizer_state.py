"""What an optimizer knows, parameter by parameter and by name, so that it fits any layout.

for each element    moments: cut as the parameter is, so a rank has those of its pieces
once                the count of a parameter's steps
settings            of a group of parameters: learning rate, decay, ...
"""

import json

import torch

from s2s_lib.strategies.state import NUMBERS
from s2s_lib.training.manifest import dtype_of
from s2s_lib.training.pieces import Piece
from s2s_lib.training.reader import Reader

# In front of an optimizer's own name for what it keeps.
KEY = "optimizer/"


def state_of(optimizer, piece: Piece) -> tuple[dict[str, torch.Tensor], dict]:
    """What it keeps for the elements of a piece, by key in the file, and what it keeps once.

    ValueError for a tensor that is neither (Adafactor's rows and columns).
    """
    rows, numbers = {}, {}
    for key, value in optimizer.state.get(piece.tensor, {}).items():
        tensor = isinstance(value, torch.Tensor) and key not in NUMBERS
        if tensor and value.shape == piece.tensor.shape:
            rows[KEY + key] = value
        elif tensor and value.dim():
            raise ValueError(
                f"the optimizer's {key} of {piece.name} is {list(value.shape)}, neither one number "
                f"nor one for each element of {list(piece.tensor.shape)}: it cannot be cut"
            )
        else:
            numbers[key] = encode(value)
    return rows, numbers


def groups_of(optimizer, pieces: list[Piece]) -> list[dict]:
    """The settings of each group, with the names of its parameters."""
    names = {id(piece.tensor): piece.name for piece in pieces}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not "
                    "this model's: build it with parallel.parameters()"
                )
        settings = {key: encode(value) for key, value in group.items() if key != "params"}
        groups.append({"settings": settings, "names": [names[id(p)] for p in group["params"]]})
    return groups


def joined(groups: list[dict]) -> list[dict]:
    """The groups of all ranks, those with the same settings in one: a rank of a pipeline has only
    some of the names."""
    names = {}
    for group in groups:
        key = json.dumps(group["settings"], sort_keys=True)
        names.setdefault(key, {}).update(dict.fromkeys(group["names"]))
    return [{"settings": json.loads(key), "names": list(names)} for key, names in names.items()]


def misfits(optimizer, pieces: list[Piece], saved: dict) -> list[str]:
    """Why this optimizer cannot go on from the saved one, in words."""
    here = type(optimizer).__name__
    if here != saved["class"]:
        return [f"the optimizer was {saved['class']} and is {here}"]
    groups = groups_of(optimizer, pieces)
    mine = {name for group in groups for name in group["names"]}
    had = {name for group in saved["groups"] for name in group["names"]}
    held = {piece.name for piece in pieces}
    wrong = [f"the optimizer did not have {name}, and has it now" for name in sorted(mine - had)]
    wrong += [f"the optimizer had {name}, and now has not" for name in sorted(had & held - mine)]
    for number, group in enumerate(groups):
        if len(settings_of(group["names"], saved)) > 1:
            wrong.append(
                f"group {number} of the optimizer has parameters that had different settings: "
                "group them as they were"
            )
    return wrong


def restore(optimizer, pieces: list[Piece], reader: Reader, saved: dict):
    """Read the state of this rank's pieces; take the saved settings."""
    groups = groups_of(optimizer, pieces)
    mine = {name for group in groups for name in group["names"]}
    optimizer.state.clear()
    for piece in pieces:
        numbers = reader.tensors[piece.name]["numbers"]
        entry = {key: decode(value) for key, value in numbers.items()}
        for key in reader.keys(piece.name):
            if key != "weight":
                row = reader.read(key, piece.name, piece.where)
                entry[key.removeprefix(KEY)] = row.view(piece.tensor.shape)
        if entry and piece.name in mine:
            optimizer.state[piece.tensor] = entry
    for group, now in zip(groups, optimizer.param_groups, strict=True):
        for settings in settings_of(group["names"], saved):
            now.update({key: decode(value) for key, value in settings.items()})


def settings_of(names, saved) -> list[dict]:
    """The settings of the saved groups that had any of these parameters."""
    return [group["settings"] for group in saved["groups"] if set(names) & set(group["names"])]


def encode(value):
    """A number or setting as JSON has it."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype)[6:], "value": value.item()}
    return value


def decode(value):
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=dtype_of(value["dtype"]), device="cpu")
    return tuple(value) if isinstance(value, list) else value
