"""What a line of the log counts: seconds, bytes sent by link and by axis, bytes held by kind."""

from collections import Counter

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.meters.memory import KINDS, memory
from s2s_lib.ranks.group import Group

LINKS = ("intra", "inter", "wire")


class Since:
    """What the steps since the last line of the log have taken, on average: seconds, and bytes sent
    by this rank, by class of link and by axis. Not what reading, logging and saving took."""

    def __init__(self, parallel):
        self.parallel = parallel
        self.steps, self.total, self.sent = 0, 0.0, Counter()

    def add(self, seconds, sent):
        self.steps += 1
        self.total += seconds
        self.sent.update({("link", link): n for link, n in sent.by("link").items()})
        along = along_axes(sent, self.parallel)
        self.sent.update({("axis", axis): n for axis, n in along.items()})

    @property
    def seconds(self) -> float:
        return self.total / self.steps

    def by(self, key, names) -> list[float]:
        return [self.sent[key, name] / self.steps for name in names]


def counted(world: Group, since: Since, parallel, optimizer, diloco) -> dict:
    """Bytes sent a step by all ranks since the last line, by class of link and by axis, with those
    of a save in the background meanwhile; the most that a rank holds, by kind and in all. Two
    all_reduces of some numbers."""
    axes = [*axes_of(parallel), "other"]
    counts = [*since.by("link", LINKS), *since.by("axis", axes)]
    with memory(parallel, optimizer, *([diloco] if diloco else [])) as held:
        pass
    kinds = [held.live[kind] for kind in KINDS]
    counts = whole_numbers(all_reduce(torch.tensor(counts, dtype=torch.float64), world))
    most = torch.tensor([*kinds, sum(kinds)], dtype=torch.float64)
    *kinds, total = whole_numbers(all_reduce(most, world, "max"))
    return {
        "sent": {link: n for link, n in zip(LINKS, counts, strict=False) if n},
        "sent_along": {axis: n for axis, n in zip(axes, counts[len(LINKS) :], strict=True) if n},
        "held": {kind: n for kind, n in zip(KINDS, kinds, strict=True) if n},
        "held_total": total,
    }


def axes_of(parallel) -> dict[str, Group]:
    """The groups along the axes of the mesh; "dp" is over replicas and shards alike."""
    return {axis: parallel.mesh[axis] for axis in parallel.mesh.axes} | {"dp": parallel.dp}


def along_axes(sent, parallel) -> dict[str, int]:
    """This rank's bytes by the axis along which they went: those of the mesh, "dp" for what goes
    over replicas and shards alike, "other" for what goes along no single one."""
    axes = axes_of(parallel)
    found = dict.fromkeys([*axes, "other"], 0)
    for ranks, nbytes in sent.by("group").items():
        # Two stages that share a tied weight are some of the ranks along pp.
        along = (axis for axis, group in axes.items() if set(ranks) <= set(group.ranks))
        found[next(along, "other")] += nbytes
    return found


def whole_numbers(tensor) -> list[int]:
    return [round(number) for number in tensor.tolist()]
