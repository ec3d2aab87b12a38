"""Which random numbers a forward draws: the same on all ranks, or each its own.

Where tensors are whole, every rank must drop the same numbers, or they are whole no longer; where
they are cut, each must drop its own, or masks repeat across the cut. And what a rank draws outside
of the module, for its data say, must not matter.

So each training forward begins with a number that the group's first rank draws, 8 bytes to each
other rank, and seeds torch's own generator from it and from the list of ranks: other groups, of
other data, draw others. Inside (inside.py) a rank seeds it anew from a number drawn there and from
its place, and puts it back after. With sequence parallel all is cut, and the place counts from the
beginning. Nothing but torch's generator has a state, so a checkpoint, which puts that back before
it computes again, gets the same masks. (The CPU's generator: another device's would have to
be seeded with it.)
"""

import hashlib

import torch
from torch import nn

from s2s_lib.collectives.functions import broadcast
from s2s_lib.strategies.backward import current_backward

# Of a number drawn, and of a seed: within what torch takes as one.
BITS = 56


class Draws:
    def __init__(self, group, sequence):
        self.group, self.sequence = group, sequence
        self.outside = self.shared = None

    def begin(self, module, _):
        self.shared = None
        if any(part.training for part in module.modules()):
            number = broadcast(draw_number(), self.group).item()
            self.outside = torch.get_rng_state()
            reseed(number, self.group.ranks, self.group.rank if self.sequence else None)

    def end(self, *_):
        if self.outside is not None:
            torch.set_rng_state(self.outside)
            self.outside = None

    def enter(self, layer):
        if layer.training:
            if self.outside is None and current_backward() is None:
                raise RuntimeError(
                    "a part of a tensor-parallel module is called by itself in training, and ranks "
                    "agree on random numbers when the whole module is called: call that, or apply "
                    "tensor_parallel to the part"
                )
            number = draw_number().item()
            self.shared = torch.get_rng_state()
            reseed(number, self.group.ranks, self.group.rank)

    def leave(self):
        if self.shared is not None:
            torch.set_rng_state(self.shared)
            self.shared = None


def draw_number():
    return torch.randint(2**BITS, (1,), device="cpu")


def reseed(*what):
    digest = hashlib.blake2b(repr(what).encode(), digest_size=BITS // 8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "big"))


def drops(module: nn.Module) -> bool:
    """Whether a part of the module says that it drops: it has a number above 0 that is called
    dropout, or p in a dropout layer."""
    for part in module.modules():
        dropout = isinstance(part, nn.modules.dropout._DropoutNd)
        for name, value in vars(part).items():
            if "drop" in name or dropout and name == "p":
                if isinstance(value, float) and value > 0:
                    return True
    return False


class Undrawn:
    """Notices that a module draws random numbers of which nothing was known."""

    def __init__(self):
        self.before = None

    def begin(self, module, _):
        self.before = torch.get_rng_state() if module.training else None

    def end(self, *_):
        before, self.before = self.before, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise RuntimeError(
                "this module draws random numbers, and none of its parts says so by an attribute "
                "with drop in its name and a number above 0: give it one, so that ranks draw the "
                "same where tensors are whole and their own where they are cut"
            )
