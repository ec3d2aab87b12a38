"""The manifest of a checkpoint: which tensors there are, and in which file each piece is.

It is JSON, and people copy checkpoints and edit what they can read. So it is checked as a whole
when it is read, and an error names the file: whoever has a manifest need not ask again whether
something is there. What its numbers say of the other files, those who open them check (reader.py).
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    JsonValue,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from s2s_lib.ranks.wire import DTYPES
from s2s_lib.strategies.tensor.cut import Cut

FORMAT = 2
MANIFEST = "manifest.json"
WAY_OUT = (
    "Move this checkpoint out of its folder: --resume, load and export then take the one before "
    "it. Or give the step-... folder of another"
)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name; ValueError if there is none."""
    for dtype in DTYPES:
        if str(dtype) == f"torch.{name}":
            return dtype
    raise ValueError(f"torch has no dtype {name!r}")


Dtype = Annotated[str, AfterValidator(lambda name: dtype_of(name) and name)]


class Scalar(BaseModel):
    """A tensor of one number, as `encode` of optimizer_state.py writes it."""

    dtype: Dtype
    value: bool | int | float


Encoded = Scalar | None | bool | int | float | str | list[JsonValue]


class Group(BaseModel):
    """Parameters with the same settings."""

    settings: dict[str, Encoded]
    names: list[str]


class Optimizer(BaseModel):
    kind: Annotated[str, Field(alias="class")]
    groups: list[Group]


class Tensor(BaseModel):
    """`numbers` are what the optimizer keeps once; a piece is a file, a place in the cut, and where
    the elements begin and end."""

    shape: list[NonNegativeInt]
    dtypes: dict[str, Dtype]
    cut: Cut | None
    numbers: dict[str, Encoded]
    pieces: list[tuple[str, NonNegativeInt, NonNegativeInt, NonNegativeInt]]

    @model_validator(mode="after")
    def fits(self):
        cut, dims = self.cut, len(self.shape)
        if cut and not (0 <= cut.dim < dims and sum(cut.blocks) == self.shape[cut.dim]):
            raise ValueError(f"the shape {self.shape} is not that of the cut {cut}")
        there = sum(last - first for _, _, first, last in self.pieces)
        if there != math.prod(self.shape):
            raise ValueError(f"the pieces have {there} elements, the shape {self.shape} others")
        if "weight" not in self.dtypes:
            raise ValueError("no dtype of the weight")
        return self


class Manifest(BaseModel):
    """`saved` is the place in the order of saving, `save` is drawn anew for each: it is in the
    files too."""

    format: Literal[FORMAT]
    step: NonNegativeInt
    saved: int
    save: str
    progress: dict[str, Any]
    layout: dict[str, int]
    aliases: dict[str, str]
    optimizer: Optimizer
    tensors: dict[str, Tensor]

    @model_validator(mode="after")
    def aliases_of_something(self):
        for name, first in self.aliases.items():
            if first not in self.tensors:
                raise ValueError(f"{name} is the same as {first}, which is not there")
        return self


def read_manifest(path: Path) -> dict:
    """That of the checkpoint in this folder; ValueError, with its name, for a file that is none."""
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
        Manifest.model_validate_json(text, strict=True)
        return json.loads(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if where == "format":
            words = f"has format {first['input']}, this version reads format {FORMAT}"
        else:
            words = f"is no manifest of a checkpoint ({where}: {first['msg']})"
    except (OSError, ValueError) as error:
        words = f"is no manifest of a checkpoint ({type(error).__name__}: {error})"
    raise ValueError(f"{file} {words}. {WAY_OUT}")
