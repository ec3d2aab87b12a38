"""What passes between stages: tensors, alone or in tuples, lists and dicts, and what to know of
them before they come."""

import json
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from s2s_lib.ranks.wire import DTYPE_CODE, DTYPES


class Shape(NamedTuple):
    """What a receiver must know of a tensor; `trained` if its gradient goes back."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


class Description(NamedTuple):
    """What a receiver must know of a value: how it is nested, and of each leaf its Shape, or None
    for a None."""

    nesting: str
    leaves: tuple[Shape | None, ...]

    def to_bytes(self) -> bytes:
        leaves = [
            leaf and (leaf.dims, DTYPE_CODE[leaf.dtype], leaf.trained) for leaf in self.leaves
        ]
        return json.dumps([self.nesting, leaves]).encode()

    @classmethod
    def from_bytes(cls, said: bytes) -> "Description":
        nesting, leaves = json.loads(said)
        shapes = (leaf and Shape(tuple(leaf[0]), DTYPES[leaf[1]], leaf[2]) for leaf in leaves)
        return cls(nesting, tuple(shapes))

    def of_gradients(self) -> "Description":
        """Of the gradients that go back for this value."""
        return Description("", tuple(leaf for leaf in self.leaves if leaf and leaf.trained))

    def __str__(self):
        shown = (leaf and f"{list(leaf.dims)} {str(leaf.dtype)[6:]}" for leaf in self.leaves)
        return ", ".join(str(leaf) for leaf in shown)


def flatten(value, who: str) -> tuple[list, Description]:
    """The leaves of what `who` gives, and their description.

    TypeError names a leaf that is neither a tensor nor None.
    """
    paths, nesting = pytree.tree_flatten_with_path(value)
    for path, leaf in paths:
        if not isinstance(leaf, torch.Tensor | None):
            at = f" at {pytree.keystr(path)}" if path else ""
            raise TypeError(
                f"{who} gives {leaf!r}, of type {type(leaf).__name__}{at}: between stages only "
                "tensors and None travel; make it a tensor, or compute it where it is used"
            )
    leaves = [leaf for _, leaf in paths]
    shapes = (
        None if leaf is None else Shape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        for leaf in leaves
    )
    try:
        return leaves, Description(pytree.treespec_dumps(nesting), tuple(shapes))
    except NotImplementedError:
        raise TypeError(
            f"{who} gives a {type(value).__name__}, or has one inside: between stages tensors "
            "travel alone, or in tuples, lists and dicts"
        ) from None


def build(leaves, description: Description):
    """The value again."""
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(description.nesting))


def tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def cut(value, count: int, what: str) -> list:
    """A batch as `count` micro-batches, as equal as they can be, cut along dim 0 of every tensor.

    A list is taken as micro-batches already. ValueError where there are too few rows, or the
    tensors of one batch have different numbers of them.
    """
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError(f"{what} is a list of {len(value)}: give {count} micro-batches")
        return list(value)
    leaves, nesting = pytree.tree_flatten(value)
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors(value)}
    if len(sizes) != 1:
        raise ValueError(
            f"{what} has tensors of {sorted(sizes) or 'no'} rows on the rank that gives it: give "
            "one batch, with the samples along dim 0, or a list of micro-batches"
        )
    if min(sizes) < count:
        raise ValueError(
            f"{what} has {min(sizes)} rows for {count} micro-batches: give at least {count} rows, "
            f"or a schedule of at most {min(sizes)} micro-batches"
        )
    parts = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(part), nesting) for part in zip(*parts, strict=True)]


def rows(value) -> int:
    """The rows of the first tensor of a micro-batch; 1 of a single number, 0 of nothing."""
    found = tensors(value)
    return 0 if not found else found[0].shape[0] if found[0].dim() else 1


def join_rows(values: list):
    """Micro-batches' values as one batch's, along dim 0 (numbers are put in a row)."""
    flat = [pytree.tree_flatten(value) for value in values]
    leaves = [
        torch.cat([leaf.reshape(1) if leaf.dim() == 0 else leaf for leaf in column])
        if isinstance(column[0], torch.Tensor)
        else column[0]
        for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])
