"""Reading a checkpoint at another layout than it was saved at.

What is wanted is a `Where`: part `place` of a cut, and of that, in one row, the elements `first` to
`last`. What there is are stretches of the parts of another cut, in the files of many ranks:

    the same cut     stretches that overlap the wanted one, and of each only what overlaps
    another cut      stretches -> parts -> the whole tensor, and of that what is wanted
"""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from s2s_lib.strategies.tensor.cut import Cut
from s2s_lib.training.disk import marks
from s2s_lib.training.manifest import MANIFEST, WAY_OUT, dtype_of
from s2s_lib.training.pieces import Where


class Reader:
    """The tensors of one checkpoint, of which only what is asked for is read.

    Which numbers of a parameter: `key` is "weight", or "optimizer/exp_avg" and the like.
    """

    def __init__(self, path: Path, manifest: dict):
        self.path, self.tensors = path, manifest["tensors"]
        self.step, self.save = manifest["step"], manifest["save"]
        self.files = {}

    def check(self, key: str, name: str, where: Where):
        """ValueError unless all that `read` will need is there. Reads no numbers."""
        for span in self.spans(name, where):
            self.rows(key, name, *span)

    def read(self, key: str, name: str, where: Where) -> torch.Tensor:
        """These elements in one row. Where they were cut over another number of ranks, the whole
        tensor is read and joined, and they are taken from that."""
        cut = self.cut(name)
        stretches = [self.stretch(key, name, *span) for span in self.spans(name, where)]
        if where.cut == cut:
            return stretches[0]
        parts = [row.view(self.part_shape(name, place)) for place, row in enumerate(stretches)]
        return where.of(parts[0] if cut is None else cut.join(parts))

    def whole(self, key: str, name: str) -> torch.Tensor:
        shape = self.tensors[name]["shape"]
        return self.read(key, name, Where(None, 0, 0, math.prod(shape))).view(shape)

    def cut(self, name) -> Cut | None:
        cut = self.tensors[name]["cut"]
        return cut and Cut(cut["dim"], tuple(cut["blocks"]), cut["parts"])

    def part_shape(self, name, place):
        shape, cut = list(self.tensors[name]["shape"]), self.cut(name)
        if cut is not None:
            shape[cut.dim] = cut.size(place)
        return shape

    def spans(self, name, where):
        """What to read for that: place, first and last for each part as it was saved."""
        saved = self.cut(name)
        if where.cut == saved:
            return [where[1:]]
        parts = range(1 if saved is None else saved.parts)
        return [(p, 0, math.prod(self.part_shape(name, p))) for p in parts]

    def stretch(self, key, name, place, first, last):
        """Elements `first` to `last` of a part as it was saved."""
        rows = self.rows(key, name, place, first, last)
        pieces = [row[max(first - a, 0) : min(last, b) - a] for row, a, b in rows]
        if not pieces:
            return torch.empty(0, dtype=dtype_of(self.dtype(key, name)), device="cpu")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rows(self, key, name, place, first, last):
        """The saved rows that have some of these elements, each with where it begins and ends."""
        found = sorted(
            (a, b, file)
            for file, there, a, b in self.tensors[name]["pieces"]
            if there == place and a < last and b > first
        )
        if sum(min(last, b) - max(first, a) for a, b, _ in found) != last - first:
            raise ValueError(
                f"{self.path / MANIFEST} does not say where all of {name} is. {WAY_OUT}"
            )
        return [(self.row(file, key, name, b - a), a, b) for a, b, file in found]

    def row(self, file, key, name, length):
        full, dtype = f"{key}/{name}", self.dtype(key, name)
        try:
            row = self.open(file).get_slice(full)
            found = f"{str(row[:0].dtype)[6:]} {row.get_shape()}"
            if found != f"{dtype} [{length}]":
                raise ValueError(f"{full} is {found}, and the manifest says {dtype} [{length}]")
            return row
        except FileNotFoundError:
            raise ValueError(f"{self.path / file} is missing. {WAY_OUT}") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{self.path / file} is broken: {error}. {WAY_OUT}") from error

    def open(self, file):
        if file not in self.files:
            opened = safe_open(self.path / file, framework="pt")
            said, right = opened.metadata() or {}, marks(file, self.step, self.save)
            if said != right:
                raise ValueError(f"it says that it is {said}, and the manifest wants {right}")
            self.files[file] = opened
        return self.files[file]

    def dtype(self, key, name):
        return self.tensors[name]["dtypes"][key]

    def keys(self, name) -> list[str]:
        """What there is of a parameter: "weight", "optimizer/exp_avg" and the like."""
        return list(self.tensors[name]["dtypes"])

    def said(self, name) -> str:
        return f"{self.dtype('weight', name)} {self.tensors[name]['shape']}"
