"""What every strategy with replicas does first: make sure that they are replicas."""

import hashlib
import json
import pickle

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.collectives.functions import all_gather, broadcast
from s2s_lib.ranks.group import Group

# Parameter -> the groups over which a strategy averages its gradient.
_claimed = WeakIdKeyDictionary()


def check_same(module: nn.Module, group: Group):
    """ValueError on every rank, naming the first difference, unless all ranks of the group built
    the same module: the same parameters and buffers, in the same order, with the same shapes,
    dtypes, `requires_grad` and order in memory. Where all is well it costs an all_gather of 8
    bytes a rank."""
    mine = described(module).encode()
    digest = hashlib.sha256(mine).digest()[:8]
    number = torch.tensor([int.from_bytes(digest, "big", signed=True)], device="cpu")
    if len(set(all_gather(number, group).tolist())) == 1:
        return
    first, *others = [said.decode().splitlines() for said in exchange(mine, group)]
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise ValueError(_difference(first, theirs, rank))


def described(module: nn.Module) -> str:
    """A line for each parameter and buffer: all in which replicas must not differ."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return "\n".join(_entry(name, tensor) for name, tensor in named)


def _entry(name, tensor):
    strides = "" if tensor.is_contiguous() else f" strides {tensor.stride()}"
    trainable = " trainable" if tensor.requires_grad else ""
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}{strides}{trainable}"


def exchange(mine: bytes, group) -> list[bytes]:
    """Every rank's bytes, on every rank."""
    sizes = all_gather(torch.tensor([len(mine)], device="cpu"), group).tolist()
    data = torch.empty(len(mine), dtype=torch.uint8, device="cpu")
    data.numpy()[:] = bytearray(mine)
    parts = all_gather(data, group, sizes=sizes).split(sizes)
    return [part.numpy().tobytes() for part in parts]


def _difference(first: list[str], theirs: list[str], rank: int) -> str:
    """The first line in which a rank differs from rank 0, in words."""
    at = next(
        (i for i, pair in enumerate(zip(first, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(theirs)),
    )
    zero, other = (entries[at] if at < len(entries) else "nothing" for entries in (first, theirs))
    return (
        f"the ranks built different modules: entry {at} is {zero!r} on rank 0 and {other!r} on "
        f"rank {rank} ({len(first)} and {len(theirs)} entries); build the same module on each"
    )


def check_options_same(options, group, strategy: str):
    """ValueError on all ranks of the group, naming the first option that differs."""
    mine = [f"{name}={value}" for name, value in options.items()]
    said = [text.decode().splitlines() for text in exchange("\n".join(mine).encode(), group)]
    for rank, theirs in enumerate(said):
        for first, other in zip(said[0], theirs, strict=True):
            if first != other:
                raise ValueError(
                    f"the ranks give {strategy} different options: {first} on rank 0 and {other} "
                    f"on rank {rank} of group {list(group.ranks)}"
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


def copy_state(things: list, group: Group, root: int = 0):
    """Give each of these (what has `state_dict` and `load_state_dict`: optimizers, schedulers) the
    state that it has on one rank of the group, which sends it pickled."""
    mine = pickle.dumps([t.state_dict() for t in things]) if group.rank == root else b""
    states = pickle.loads(exchange(mine, group)[root])
    for thing, state in zip(things, states, strict=True):
        thing.load_state_dict(state)


def refuse_claimed(named):
    """ValueError, with its name, for a parameter that a strategy averages already."""
    for name, parameter in named:
        if parameter in _claimed:
            raise ValueError(
                f"{name} is in a DDP or ZeRO already, and would be averaged twice: go on with "
                "that, or build a fresh module"
            )


def claim(named, *groups: Group):
    """These parameters, given with their names, are averaged over these groups from now on."""
    for _, parameter in named:
        _claimed[parameter] = groups


def refuse_averaged_over(named, group: Group):
    """ValueError, with its name, for a parameter whose gradient is averaged in each step between
    ranks of this group."""
    for name, parameter in named:
        for averaged in _claimed.get(parameter, ()):
            both = [rank for rank in group.ranks if rank in averaged.ranks]
            if len(both) > 1:
                raise ValueError(
                    f"{name} is in a DDP or ZeRO over ranks {list(averaged.ranks)}, which averages "
                    f"its gradient between ranks {both} of this group in each step: islands train "
                    "by themselves, so give groups that have one rank in common"
                )


def check_tiles(group: Group, replicate: Group):
    """ValueError unless the ranks lie in a box, of which `group` is this rank's row and `replicate`
    its column, as far as those two can tell. An all_gather of some bytes over each."""
    rows = [json.loads(said) for said in exchange(_said(group), replicate)]
    columns = [json.loads(said) for said in exchange(_said(replicate), group)]
    same_place = {
        rows[i].index(replicate.ranks[i]) for i in range(len(rows)) if replicate.ranks[i] in rows[i]
    } == {group.rank}
    lengths = {len(row) for row in rows}, {len(column) for column in columns}
    everyone = [rank for row in rows for rank in row]
    box = len(everyone) == len(set(everyone)) == group.size * replicate.size
    if not (same_place and box and lengths == ({group.size}, {replicate.size})):
        raise ValueError(
            f"group {list(group.ranks)} and replicate {list(replicate.ranks)} do not tile a box of "
            f"{group.size} x {replicate.size} ranks: take both from one Mesh"
        )


def _said(group):
    return json.dumps(group.ranks).encode()
