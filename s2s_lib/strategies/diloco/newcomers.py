"""An island that comes late, or comes back: what it has to have before it may take part.

It gets the live weights and buffers, the outer weights and their momentum, and the number of the
round and of the step in it; so the next average is of equals, and fragments are synced in one
order. Its inner optimizer begins anew.
"""

import torch

from s2s_lib.collectives.functions import broadcast
from s2s_lib.ranks.islands import Islands
from s2s_lib.strategies.replicas import described, difference


def refuse_others(model: torch.nn.Module, options: dict, islands: Islands):
    """ValueError on an island with another model, or other options, than the first that came.

    Local: the others need not stop for it.
    """
    lines = [f"{name}={value}" for name, value in options.items()]
    mine = "\n".join([*lines, described(model)])
    first = islands.store.compare_set(f"trains {islands.place}", "", mine).decode()
    if mine != first:
        words = difference(first.splitlines(), mine.splitlines(), islands.number)
        raise ValueError(f"island {islands.number} cannot take part: {words}")


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
    return [torch.tensor(diloco.counts), *rows, *live]


@torch.no_grad()
def take(diloco, received):
    counts, *tensors = received
    diloco.counts = counts.tolist()
    for mine, value in zip(needed(diloco)[1:], tensors, strict=True):
        mine.copy_(value)
    diloco.optimizer.state.clear()
    for row in diloco.rows:
        if row.residual is not None:
            row.residual.zero_()
