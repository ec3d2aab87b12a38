"""What this rank holds of each tensor of the whole model.

    whole      the tensor as one process has it, by its name there
    part       what tensor parallelism leaves of it here: piece `place` of a Cut
    stretch    what a ZeRO leaves of the part: elements `first` to `last` of it in one row
    name       pipeline parallelism leaves some names here and others elsewhere

Each element is *owned* by one rank, which writes it: of replicas, of tensor-parallel ranks that
hold the same, and of stages with a copy of one tied weight, it is the first. So the owned pieces of
all ranks are the model once, and none has to be sent to be saved.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from s2s_lib.strategies.tensor.cut import Cut
from s2s_lib.strategies.tensor.state import cuts_of
from s2s_lib.strategies.zero import ZeRO
from s2s_lib.training.parallel import Parallel


class Where(NamedTuple):
    """Elements of a tensor: the stretch from `first` to `last` of part `place` of `cut`."""

    cut: Cut | None
    place: int
    first: int
    last: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of the whole tensor, in one row."""
        part = whole if self.cut is None else self.cut.take(whole, self.place)
        return part.reshape(-1)[self.first : self.last]


@dataclass(eq=False)
class Piece:
    """What this rank holds of a tensor: `tensor` is the parameter or buffer, `shape` that of the
    whole."""

    name: str
    tensor: torch.Tensor
    shape: list[int]
    where: Where
    owned: bool

    @torch.no_grad()
    def fill(self, row: torch.Tensor):
        """Make these the values. In place, by which a ZeRO sees that its shards are others."""
        self.tensor.copy_(row.view(self.tensor.shape))


def pieces_of(parallel: Parallel) -> list[Piece]:
    """This rank's pieces, one for each parameter and each buffer that is saved.

    A tied weight has the first of its names, and a piece in each of this rank's stages that has a
    tensor of its own for it.
    """
    found = {}
    for number, stage in parallel.parts.items():
        module, cuts = parallel.pipeline.module_of[number], cuts_of(stage)
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) not in found:
                cut = cuts[name][0] if name in cuts else None
                name = parallel.aliases.get(name, name)
                found[id(tensor)] = piece_of(parallel, module, name, tensor, cut)
    return list(found.values())


def piece_of(parallel, module, name, tensor, cut):
    flat = module.flat_of.get(tensor) if isinstance(module, ZeRO) else None
    shape, span = tensor.shape, (0, tensor.numel())
    if flat is not None:
        i = flat.index(tensor)
        shape, span = flat.shapes[i], flat.span(i)
    shape = list(shape)
    if cut is not None:
        shape[cut.dim] = sum(cut.blocks)
    counted_elsewhere = any(tensor is copy for copy in parallel.pipeline.ties.copies)
    owned = (
        not counted_elsewhere
        and (cut is not None or parallel.tp.rank == 0)
        and is_first_replica(parallel.dp, module, flat)
    )
    where = Where(cut, 0 if cut is None else parallel.tp.rank, *span)
    return Piece(name, tensor, shape, where, owned)


def is_first_replica(dp, module, flat) -> bool:
    """Whether this rank is the first of those that hold the same elements."""
    if flat is None or flat.group.size == 1:
        return dp.rank == 0
    return module.replicate is None or module.replicate.rank == 0


def index(told: list[dict]) -> dict[str, dict]:
    """The tensors of a manifest, from what each rank tells of the pieces it wrote.

    ValueError unless the pieces of each are the whole: no element missing, none twice.
    """
    tensors = {}
    for rank in told:
        for name, what, piece in rank["pieces"]:
            entry = tensors.setdefault(name, what | {"pieces": []})
            if {**entry, "pieces": None} != {**what, "pieces": None}:
                raise ValueError(f"two ranks hold {name} differently: {entry} and {what}")
            # A buffer of a module that runs in two stages is in both.
            if piece not in [[place, *span] for _, place, *span in entry["pieces"]]:
                entry["pieces"].append([rank["file"], *piece])
    for name, entry in tensors.items():
        there = sum(last - first for _, _, first, last in entry["pieces"])
        if there != math.prod(entry["shape"]):
            raise ValueError(f"{there} of {math.prod(entry['shape'])} elements of {name} are owned")
    return tensors
