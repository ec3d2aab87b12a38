"""Who is who: a group is a list of ranks, a mesh is a box of them with named axes.

Making either is arithmetic on this rank alone. Nothing is sent, nobody has to agree on an order
of creation, and a 64-rank mesh costs the same as a pair.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral


@dataclass(frozen=True)
class Group:
    """Some ranks of the world in a fixed order, seen from one of them.

    `ranks` are world ranks in the group's order, `rank` is this process's place among them and
    `size` their number. Wherever a function takes a root, a source or a destination next to a
    group, it means a place in that group, never a world rank.
    """

    ranks: tuple[int, ...]
    rank: int
    size: int = field(init=False, repr=False, compare=False)
    # A short number for the list of ranks, the same in every process: part of each message's tag.
    key: int = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not all(isinstance(rank, Integral) for rank in self.ranks):
            raise ValueError(f"a group is a list of whole numbers, got {list(self.ranks)}")
        object.__setattr__(self, "ranks", tuple(map(int, self.ranks)))
        object.__setattr__(self, "size", len(self.ranks))
        object.__setattr__(self, "key", zlib.crc32(repr(self.ranks).encode()))
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a group names each rank once, got {list(self.ranks)}")
        if not 0 <= self.rank < len(self.ranks):
            raise ValueError(f"rank {self.rank} is not a place in a group of {len(self.ranks)}")

    def subgroup(self, members) -> "Group | None":
        """The group of these places of this group, in this order; None on a rank outside it.

        Local: no communication. An empty list, a repeated member or one that is not a place in
        this group raises ValueError.
        """
        if not isinstance(members, Iterable):
            raise TypeError(f"a subgroup needs a list of ranks, got {members!r}")
        members = [self.check_member(member, "member") for member in members]
        if not members or len(set(members)) != len(members):
            raise ValueError(f"a subgroup needs at least one rank, and each once; got {members}")
        if self.rank not in members:
            return None
        return Group(tuple(self.ranks[m] for m in members), members.index(self.rank))

    def check_member(self, place: int, role: str) -> int:
        """`place` itself if it is one of 0..size-1, else a ValueError that says which role."""
        whole = type(place) is int or isinstance(place, Integral) and not isinstance(place, bool)
        if not (whole and 0 <= place < self.size):
            raise ValueError(
                f"{role} {place!r} is not a rank of this group of {self.size}: "
                f"give its place in the group, 0..{self.size - 1}"
            )
        return place


def check_group(group):
    """TypeError unless this is a Group; None is what a rank outside a subgroup has."""
    if not isinstance(group, Group):
        hint = ": this rank is not in the subgroup, so it must not call" if group is None else ""
        raise TypeError(f"expected a Group, got {group!r}{hint}")


class Mesh:
    """The ranks of a group laid out in a box: `Mesh(world, dp=2, pp=2, tp=2)`.

    Axes are named in order and the last varies fastest. `mesh["tp"]` is this rank's group along
    one axis, `mesh["dp", "tp"]` the group over both (the last named varies fastest). The order of
    `group.ranks` is kept, so a permuted group gives a permuted mesh. Sizes that do not multiply
    to the group's size raise ValueError with the factors.
    """

    def __init__(self, group: Group, **axes: int):
        check_group(group)
        for axis, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {axis} needs a whole number of at least 1, got {size!r}")
        if math.prod(axes.values()) != group.size:
            factors = " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "no axes"
            raise ValueError(
                f"{factors} makes {math.prod(axes.values())} ranks, the group has {group.size}"
            )
        self.group = group
        self.axes = dict(axes)
        self.coordinate = self.coordinate_of(group.rank)

    def coordinate_of(self, place: int) -> dict[str, int]:
        """Axis name -> index, for the rank at this place of the group."""
        self.group.check_member(place, "rank")
        coordinate = {}
        for axis, size in reversed(self.axes.items()):
            place, coordinate[axis] = divmod(place, size)
        return {axis: coordinate[axis] for axis in self.axes}

    def place_of(self, coordinate: dict[str, int]) -> int:
        """The inverse of `coordinate_of`: the place in the group of a full coordinate."""
        place = 0
        for axis, size in self.axes.items():
            place = place * size + coordinate[axis]
        return place

    def __getitem__(self, names: str | tuple[str, ...]) -> Group:
        names = names if isinstance(names, tuple) else (names,)
        unknown = [name for name in names if name not in self.axes]
        if unknown or len(set(names)) != len(names):
            raise KeyError(f"{unknown or list(names)}: name each of {list(self.axes)} at most once")
        coordinates = [dict(self.coordinate)]
        for name in names:
            coordinates = [c | {name: i} for c in coordinates for i in range(self.axes[name])]
        return self.group.subgroup([self.place_of(c) for c in coordinates])

    def __repr__(self):
        axes = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return f"Mesh({axes}) at {self.coordinate}"
