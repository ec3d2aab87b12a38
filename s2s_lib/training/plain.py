"""The weights as one process has them, a plain state dict: out of a checkpoint, and into ranks."""

import os

import torch
from safetensors import SafetensorError, safe_open

from s2s_lib.training.agree import refuse_misfits, told
from s2s_lib.training.disk import find
from s2s_lib.training.manifest import read_manifest
from s2s_lib.training.parallel import Parallel
from s2s_lib.training.pieces import Piece, pieces_of
from s2s_lib.training.reader import Reader


def export(folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The state dict of the plain model from a checkpoint at any layout: whole tensors, a tied one
    by each of its names. In one process, or any. Of the latest where the folder has several."""
    path = find(folder)
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    whole = {name: reader.whole("weight", name) for name in reader.tensors}
    return whole | {name: whole[first] for name, first in manifest["aliases"].items()}


def start_from(parallel: Parallel, source: dict | str | os.PathLike):
    """Take the weights of a plain state dict, whole tensors by the model's names, or of a
    safetensors file with one. The optimizer and the number of steps stay.

    Collective; each rank takes its pieces, in the model's dtype: a float in another, anything else
    in its own. A tied weight may be there by any of its names. ValueError, the same on all ranks
    and with nothing changed, naming what is missing, unexpected, misshapen or no plain tensor, or
    tied here and different there.
    """
    world, pieces = parallel.group, pieces_of(parallel)
    words = "cannot start from " + ("a state dict" if isinstance(source, dict) else str(source))
    opened = []

    def look():
        opened.append(plain := Plain(source, parallel.aliases))
        wrong = [found for piece in pieces if (found := plain.misfit(piece))]
        return {
            "held": [piece.name for piece in pieces],
            "wrong": wrong,
            "there": [*map(str, plain.names)],
        }

    def copy():
        for piece in pieces:
            piece.fill(piece.where.of(opened[0].get(piece.name)))

    everyone = told(world, look, ValueError, words)
    refuse_misfits(everyone, set(everyone[0]["there"]), words)
    told(world, copy, ValueError, words)


class Plain:
    """The tensors of a state dict or of a safetensors file, a tied one by its first name."""

    def __init__(self, source, aliases):
        self.file = None if isinstance(source, dict) else open_file(source)
        self.source = source
        # First name -> all the names that it has there.
        self.names = {}
        for name in source if self.file is None else self.file.keys():
            self.names.setdefault(aliases.get(name, name), []).append(name)

    def get(self, name, which=0) -> torch.Tensor:
        name = self.names[name][which]
        return self.source[name] if self.file is None else self.file.get_tensor(name)

    def misfit(self, piece: Piece) -> str | None:
        """What is wrong with a tensor, in words."""
        if piece.name not in self.names:
            return f"{piece.name} is missing"
        value, wanted = self.get(piece.name), piece.tensor.dtype
        if not is_plain(value):
            return f"{piece.name} is a {type(value).__name__}, no plain tensor with its values"
        if value.dtype != wanted and not (value.is_floating_point() and wanted.is_floating_point):
            return f"{piece.name} is {str(value.dtype)[6:]} there and {str(wanted)[6:]} here"
        if list(value.shape) != piece.shape:
            return f"{piece.name} is {list(value.shape)} there and {piece.shape} here"
        names = self.names[piece.name]
        if not all(torch.equal(value, self.get(piece.name, i)) for i in range(1, len(names))):
            return f"{' and '.join(names)} are one tensor here and differ there"
        return None


def is_plain(value) -> bool:
    """Whether it can be copied from: dense, with memory, and no kind of its own such as DTensor."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and value.layout is torch.strided and not value.is_meta


def open_file(path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"it is no safetensors file ({error}); load another kind, and give the state dict"
        ) from error
