"""What every strategy with replicas does first: make sure that they are replicas."""

import hashlib

import torch
from torch import nn

from s2s_lib.collectives.functions import all_gather, broadcast
from s2s_lib.ranks.group import Group


def check_same(module: nn.Module, group: Group):
    """ValueError on every rank, naming the first difference, unless all ranks of the group built
    the same module: the same parameters and buffers, in the same order, with the same shapes,
    dtypes and `requires_grad`. Each rank sends 8 bytes to the others if all is well."""
    mine = [
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        + (" trainable" if t.requires_grad else "")
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()[:8]
    number = torch.tensor([int.from_bytes(digest, "big", signed=True)])
    if len(set(all_gather(number, group).tolist())) == 1:
        return
    for rank, theirs in enumerate(_exchange("\n".join(mine), group)):
        if rank == 0:
            first = theirs
        elif theirs != first:
            raise ValueError(_difference(first.split("\n"), theirs.split("\n"), rank))


def _exchange(text, group):
    """Every rank's text, on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b"\n"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([data.numel()]), group).tolist()
    everything = all_gather(data, group, sizes=sizes)
    return [bytes(part.tolist()).decode() for part in everything.split(sizes)]


def _difference(first, theirs, rank):
    at = next(
        (i for i, pair in enumerate(zip(first, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(theirs)),
    )
    zero, other = (entries[at] if at < len(entries) else "nothing" for entries in (first, theirs))
    return (
        f"the ranks built different modules: entry {at} is {zero!r} on rank 0 and {other!r} on "
        f"rank {rank} ({len(first)} and {len(theirs)} entries); build the same module on each"
    )


def copy_from(tensors: list[torch.Tensor], group: Group, root: int = 0):
    """Overwrite the values of these tensors with those of one rank of the group.

    One broadcast for each dtype. Autograd is not told: a graph recorded before goes on with the
    memory as it is now.
    """
    by_dtype = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.data)
    for same in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        broadcast(flat, group, root, out=flat)
        for tensor, values in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(values.view(tensor.shape))
