"""An island that comes late, or comes back: what it has to have before it may take part.

It gets the live weights and buffers, the outer weights and their momentum, and the number of the
round and of the step in it; so the next average is of equals, and fragments are synced in one
order. Its inner optimizer begins anew.
"""

import itertools

import torch

from s2s_lib.collectives.functions import broadcast
from s2s_lib.ranks.islands import Islands
from s2s_lib.strategies.replicas import described


def refuse_others(model: torch.nn.Module, options: dict, islands: Islands):
    """ValueError on an island with another model, or other options, than the first that came; but
    for `sync_every`, which may have changed since, and is told to who comes late.

    Local: the others need not stop for it.
    """
    lines = [f"{name}={value}" for name, value in options.items() if name != "sync_every"]
    mine = "\n".join([*lines, described(model)])
    islands.trained += 1
    key = f"trains {islands.trained} at place {islands.place}"
    first = islands.store.compare_set(key, "", mine).decode()
    for theirs, own in itertools.zip_longest(first.splitlines(), mine.splitlines()):
        if theirs != own:
            raise ValueError(
                f"island {islands.number} cannot take part: it has {own or 'nothing'!r} where the "
                f"first that came has {theirs or 'nothing'!r}: give all the same"
            )


def let_in(diloco, islands: Islands):
    """Give all that is needed to the islands that have just joined, until none is new."""
    while islands.joined:
        new = islands.joined

        def share(group, new=new):
            old = [number for number in islands.members if number not in new]
            if not old:
                raise RuntimeError("all islands that knew the weights are gone")
            root = islands.members.index(old[0])
            return [broadcast(tensor.detach(), group, root) for tensor in needed(diloco)]

        received = islands.together(share)
        if islands.number in new:
            take(diloco, received)


def needed(diloco) -> list[torch.Tensor]:
    """All that a newcomer has to know, in an order that is the same on all islands."""
    rows = [tensor for row in diloco.rows for tensor in (row.outer, row.momentum)]
    live = [*diloco.model.parameters(), *diloco.model.buffers()]
    counts = torch.tensor([diloco.sync_every, *diloco.counts])
    return [counts, *rows, *live, *diloco.buffers.outer]


@torch.no_grad()
def take(diloco, received):
    counts, *tensors = received
    # Not by the setter, which is for one's own change between two rounds.
    diloco._sync_every, *diloco.counts = counts.tolist()
    for mine, value in zip(needed(diloco)[1:], tensors, strict=True):
        mine.copy_(value)
    diloco.optimizer.state.clear()
    for row in diloco.rows:
        if row.residual is not None:
            row.residual.zero_()
