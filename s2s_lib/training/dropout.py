"""Dropout that drops the same numbers at every layout.

torch draws a mask from where its generator happens to be, which depends on what a rank computed
before: on another number of ranks, or another cut of the model, other numbers are dropped. Here the
mask of a row is a function of five things and nothing else:

    seed, step, name of the layer, number of the row in the global batch, place in the row

So a run that goes on at another layout drops what it would have dropped. `Places` seeds torch's own
generator at the beginning of every forward from the first two and the number of the micro-batch's
first row; `Dropout` reads that seed and draws from generators of its own. Recomputed activations
get the same mask, since checkpoints put torch's generator back. What else draws from torch's
generator inside is the same in every run at one layout.
"""

import hashlib

import torch
from torch import nn

from s2s_lib.strategies.tensor.inside import comes_from_column

# A seed of torch's generator: a mark, a number made from seed and step, the number of a row.
ROW_BITS, BITS = 24, 62
MARK = 1 << BITS


class Places:
    """Hooks around a stage's forward: which rows of which step its next micro-batch has.

    `begin(step, rows)` tells, before each step, the number of the first row of each micro-batch;
    micro-batches come in order. Torch's generator is put back after the forward.
    """

    def __init__(self, stage: nn.Module, seed: int):
        self.seed = seed
        self.coming, self.outside = iter(()), None
        # Around all other hooks: those of tensor parallelism look at the generator too.
        stage.register_forward_pre_hook(self.enter, prepend=True)
        stage.register_forward_hook(self.leave, always_call=True)

    def begin(self, step: int, rows: list[int]):
        self.coming = iter([seed_of(self.seed, step, row) for row in rows])

    def enter(self, stage, _):
        seed = next(self.coming, None) if stage.training else None
        if seed is not None:
            self.outside = torch.get_rng_state()
            torch.manual_seed(seed)

    def leave(self, *_):
        if self.outside is not None:
            torch.set_rng_state(self.outside)
            self.outside = None


def seed_of(seed, step, row):
    if row >= 1 << ROW_BITS:
        raise ValueError(f"row {row} of a global batch: dropout tells {1 << ROW_BITS} rows apart")
    return MARK | digest(seed, step, bits=BITS - ROW_BITS) << ROW_BITS | row


def digest(*what, bits):
    number = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(number, "big") >> (64 - bits)


class Dropout(nn.Module):
    """x [rows, T, ..] with numbers set to zero with probability `p` and the others divided by
    1 - p, in training and under `Places`; else x itself.

    `name` keeps layers apart; one that is called twice in a forward drops the same twice. Where
    each of `parts` ranks has T of the row's `parts` T places, this one has part `part`. ValueError
    for an x that tensor parallelism has cut along another dim: a rank's mask of its own columns or
    heads would depend on how many ranks there are.
    """

    def __init__(self, p: float, name: str, part: int = 0, parts: int = 1):
        super().__init__()
        self.p, self.name, self.part, self.parts = p, name, part, parts
        self.looked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = torch.initial_seed()
        if not self.training or not self.p or not key & MARK:
            return x
        self.refuse_cut(x)
        kept = torch.stack([self.kept(key + row, x.shape[1:]) for row in range(x.shape[0])])
        return x * kept / (1 - self.p)

    def refuse_cut(self, x):
        if not self.looked and x.grad_fn is not None and comes_from_column(x):
            raise ValueError(
                f"{self.name} drops between layers that tensor parallelism cuts, and what it drops "
                "would change with the number of ranks: drop after the row layer, or give it p=0"
            )
        self.looked = True

    def kept(self, key, shape):
        generator = torch.Generator().manual_seed(digest(key, self.name, bits=BITS))
        whole = torch.rand((shape[0] * self.parts, *shape[1:]), generator=generator)
        return whole.narrow(0, self.part * shape[0], shape[0]) >= self.p

    def extra_repr(self):
        return f"p={self.p}, {self.name}"


def place_dropout(model: nn.Module, part: int = 0, parts: int = 1):
    """Replace every nn.Dropout of the model, which must get rows that are whole, or cut along dim 1
    into `parts`. One that has several places gets a name, and so a mask, in each."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is nn.Dropout:
            model.set_submodule(name, Dropout(module.p, name, part, parts).train(module.training))
