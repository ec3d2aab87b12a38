"""Who meets whom, where islands average in pairs and nobody waits for all.

One round leaves, of the variance between W weights, the share (W-2) / (2 (W-1)) on average over
all ways to draw pairs (W even): a third for four. (Boyd et al., "Randomized gossip algorithms",
2006.)
"""

import random

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.ranks.group import Group


def pairs(size: int, seed: int, number: int) -> list[tuple[int, int]]:
    """Pairs of `size` places, drawn from a seed that all share; one is left over where it is odd.

    Every way to pair them is equally likely, in each round `number` anew.
    """
    places = list(range(size))
    random.Random(f"{seed} {number}").shuffle(places)
    return [tuple(sorted(pair)) for pair in zip(places[::2], places[1::2], strict=False)]


def pair_of(group: Group, seed: int, number: int) -> Group | None:
    """This rank and the one that it meets in round `number`; None if it is left over."""
    for pair in pairs(group.size, seed, number):
        if group.rank in pair:
            return group.subgroup(pair)
    return None


def meet(outers: list, group: Group, seed: int, number: int) -> list:
    """The outer weights of this rank and of the one that it meets, averaged: each sends its own."""
    pair = pair_of(group, seed, number)
    return outers if pair is None else [all_reduce(o, pair, "avg", "doubling") for o in outers]
