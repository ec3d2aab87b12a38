"""How a weight is cut over a group: along which dim, and in which blocks."""

from dataclasses import dataclass

import torch

from s2s_lib.collectives.pieces import even_cuts


@dataclass(frozen=True)
class Cut:
    """`parts` pieces of a tensor along `dim`: piece r is the r-th piece of each block, in order.

    A fused weight has a block for each thing that it fuses: q, k and v, or gate and up. Cut across
    the blocks, rank 0 would get all of q and no v. Pieces of a block differ by at most one row.
    """

    dim: int
    blocks: tuple[int, ...]
    parts: int

    def bounds(self, rank: int) -> list[tuple[int, int]]:
        """Where the pieces of rank's part begin and end in the whole."""
        bounds, start = [], 0
        for block in self.blocks:
            cuts = even_cuts(block, self.parts)
            bounds.append((start + cuts[rank], start + cuts[rank + 1]))
            start += block
        return bounds

    def size(self, rank: int) -> int:
        return sum(end - start for start, end in self.bounds(rank))

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's part of the whole, in memory of its own."""
        pieces = [whole.narrow(self.dim, a, b - a) for a, b in self.bounds(rank)]
        return torch.cat(pieces, self.dim)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole from the parts of all ranks."""
        pieces = [
            part.split([b - a for a, b in self.bounds(rank)], self.dim)
            for rank, part in enumerate(parts)
        ]
        return torch.cat([p for block in zip(*pieces, strict=True) for p in block], self.dim)
