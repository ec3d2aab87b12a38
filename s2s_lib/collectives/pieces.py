"""Cutting a flat tensor into one piece for each rank, and memory to receive pieces into."""

import itertools
import threading
from collections.abc import Iterable

import torch

MOST_KEPT = 64 * 2**20

_kept = threading.local()


def even_cuts(numel: int, size: int) -> tuple[int, ...]:
    """`size + 1` positions that cut `numel` elements into pieces that differ by at most one."""
    return tuple(numel * i // size for i in range(size + 1))


def cuts_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Positions that cut a flat tensor into pieces of these sizes."""
    return tuple(itertools.accumulate(sizes, initial=0))


def blocks(x: torch.Tensor, out: torch.Tensor, most: int, size: int):
    """Two flat tensors cut alike into blocks of at most `most` elements, each with its cuts into a
    piece for each rank; one block where there is nothing in it."""
    for start in range(0, max(1, x.numel()), most):
        part = x[start : start + most]
        yield part, out[start : start + most], even_cuts(part.numel(), size)


def piece(flat: torch.Tensor, cuts: list[int], first: int, last: int | None = None):
    """Piece `first` of a flat tensor, or pieces `first` up to and without `last`, as a view."""
    return flat[cuts[first] : cuts[first + 1 if last is None else last]]


def own_piece(x: torch.Tensor, out: torch.Tensor, cuts, rank: int):
    """Copy what a rank brings into its piece of `out`, unless it lies there already.

    Best done once the messages are on their way.
    """
    mine = piece(out, cuts, rank)
    if mine.data_ptr() != x.data_ptr():
        mine.copy_(x)


def scratch(slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised flat tensor; the same memory at the next call with the same slot.

    Kept for each thread, as long as the slots of a thread stay under 64 MiB in all. Nothing in
    it survives an operation.
    """
    pool = _kept.__dict__
    key = (slot, dtype)
    buffer = pool.get(key)
    if buffer is not None and buffer.numel() == numel:
        return buffer
    if buffer is None or buffer.numel() < numel:
        others = sum(kept.nbytes for kept in pool.values()) - (buffer.nbytes if key in pool else 0)
        # Made under inference_mode, it could not be written outside of it.
        with torch.inference_mode(False):
            buffer = torch.empty(numel, dtype=dtype, device="cpu")
        if others + buffer.nbytes > MOST_KEPT:
            return buffer
        pool[key] = buffer
    return buffer[:numel]
