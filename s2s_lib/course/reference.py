"""The training that every lesson repeats: the tiny GPT, real text, a few steps of AdamW.

`reference()` does it in one process. A lesson does the same with the same parts on several ranks,
and must arrive at the same weights:

    def work(world):
        model = DDP(tiny_gpt(), world)
        train(model, batches(world))
        return weights(model.module)

In float64, where the order of a sum shows only in the last digits, so that two ways of computing
agree to 1e-10 and a mistake does not. The text is the standard library's own, which differs
between versions of Python: compare the numbers, and print none of them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from s2s_lib.course.data import Batch, Batches, hold_out, text
from s2s_lib.course.model import GPT, GPTConfig, next_token_loss
from s2s_lib.ranks.group import Group

# A global batch that 2, 3, 4, 6, 8 and 12 ranks share equally.
SAMPLES = 24
SEQ = 32


@dataclass(frozen=True)
class Reference:
    """What one process computed: `weights` after the last step and `gradients` of the first, by
    name, and the loss of each step."""

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    losses: list[float]


def reference(steps: int = 5, optimizer: Callable | None = None, **changes) -> Reference:
    """Train the tiny GPT in one process for `steps` steps.

    `optimizer` makes one from a model (the default is `adamw`); `changes` go to `tiny_gpt`.
    """
    first = next(batches())
    with one_thread():
        model = tiny_gpt(**changes)
        next_token_loss(model(first[0]), first[1]).backward()
        gradients_of_first = gradients(model)
        losses = train(model, batches(steps=steps), (optimizer or adamw)(model))
    return Reference(weights(model), gradients_of_first, losses)


def tiny_gpt(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> GPT:
    """`GPTConfig.tiny(**changes)` with the weights that `seed` gives, wherever it is called.

    Does not touch torch's own random numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(GPTConfig.tiny(**changes)).to(dtype)


def batches(
    group: Group | None = None, steps: int = 5, samples: int = SAMPLES, seq: int = SEQ
) -> Iterator[Batch]:
    """This rank's part of the first `steps` global batches of `samples` rows; all of it alone.

    `group` is the data-parallel one: every rank of it gets `samples / group.size` rows of its own.
    """
    rank, size = (group.rank, group.size) if group else (0, 1)
    if samples % size:
        raise ValueError(
            f"a global batch of {samples} samples does not share out equally among {size} ranks; "
            f"take a multiple of {size}"
        )
    tokens, _ = hold_out(text())
    mine = Batches(tokens, seq, samples // size, rank, size).epoch(0)
    return (batch for _, batch in zip(range(steps), mine, strict=False))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as every lesson uses it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def train(
    model: nn.Module, batches: Iterable[Batch], optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """The plain loop, one step for each batch; returns the losses of this process's batches."""
    optimizer = optimizer or adamw(model)
    losses = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters by name; a tied one once."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients by parameter name, where there is one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def one_thread():
    """Operations this small gain nothing from more threads, and wait for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
