"""What the tests of tensor parallelism train: small models with plans, their batches, and one loop.

`train` takes the same steps on one process and on several: AdamW with weight decay, and gradients
clipped so tightly that clipping acts in every step. It notes what one rank sees. `joined` puts
what the ranks saw together without asking the library where it cuts: tensors of the whole one's
shape must be equal on all ranks, others are laid side by side along the dim in which they differ.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import (
    GPT,
    GPT_PLAN,
    GPTConfig,
    clip_grad_norm_,
    gather_from_group,
    scatter_to_group,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from s2s_lib.course.reference import one_thread

CLOSE = {"rtol": 0, "atol": 1e-10}
# The world, a group out of order that has no rank 0, three, which is no power of two, and one.
GROUPS = [[0, 1, 2, 3], [3, 1], [2, 0, 3], [1]]
OPTIONS = {
    "whole": {},
    "sequence": {"sequence_parallel": True},
    "regather": {"sequence_parallel": True, "regather": True},
}
CLIP = 1e-3
BATCH, TOKENS, HIDDEN, VOCAB = 2, 12, 24, 17


def gpt(**changes):
    """12 heads and an odd vocabulary: attention and MLP cut over 1, 2, 3 and 4 ranks."""
    sizes = {"layers": 2, "hidden": HIDDEN, "heads": 12, "vocab": VOCAB, "seq": TOKENS}
    model = GPT(GPTConfig(**sizes | {"mlp_hidden": 36} | changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # As a GPT is drawn, attention hardly looks, and mistakes in it would be small.
            parameter.data.mul_(8)
    return model


def mlp():
    """Two pairs of nn.Linear, with biases."""
    layers = [nn.Linear(HIDDEN, 36), nn.Tanh(), nn.Linear(36, HIDDEN), nn.LayerNorm(HIDDEN)]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 12), nn.Tanh(), nn.Linear(12, HIDDEN))


MLP_PLAN = {"[04]": "column", "[26]": "row"}


def tokens(step):
    """Tokens and targets, of which some do not count."""
    random = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=random)
    targets = rows[:, 1:].clone()
    targets[0, 3:5] = -100
    return rows[:, :-1], targets


def numbers(step):
    random = torch.Generator().manual_seed(200 + step)
    shape = 2, BATCH, TOKENS, HIDDEN
    return torch.randn(shape, generator=random, dtype=torch.float64).unbind()


def entropy(logits, targets, group):
    """Of whole logits alone, of this rank's part in a group."""
    if group:
        return vocab_parallel_cross_entropy(logits, targets, group)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole_entropy(logits, targets, group):
    return entropy(logits, targets, None)


def square(y, target, group):
    return (y - target).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, its plan, and what is trained on; `frozen` are patterns of parameter names."""

    make: Callable = gpt
    plan: dict = field(default_factory=lambda: GPT_PLAN)
    data: Callable = tokens
    loss: Callable = entropy
    frozen: tuple = ()

    def build(self, seed=0, dtype=torch.float64):
        torch.manual_seed(seed)
        model = self.make().to(dtype)
        for name, parameter in model.named_parameters():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.frozen):
                parameter.requires_grad_(False)
        return model

    def cut(self, group, dtype=torch.float64, **options):
        """Every rank builds another model, and all get that of the group's first."""
        model = tensor_parallel(self.build(group.rank, dtype), group, self.plan, **options)
        if options and self.data is numbers:
            model.register_forward_pre_hook(lambda _, x: scatter_to_group(x[0], group, 1))
            model.register_forward_hook(lambda *args: gather_from_group(args[-1], group, 1))
        return model


def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def gradients(model, prefix="grad "):
    return {prefix + n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(case, model, group=None, steps=5):
    """Of the first step the output, the loss and all gradients, that of x or of its embedding too;
    of each step the norm before clipping; the weights after the last."""
    saw, entered = {}, []
    first = next(m for m in model.modules() if not list(m.children()))
    handle = first.register_forward_hook(lambda *args: entered.append(args[-1]))
    optimizer = adamw(model)
    for step in range(steps):
        x, y = case.data(step)
        if x.is_floating_point():
            entered = [x.requires_grad_()]
        optimizer.zero_grad()
        output = model(x)
        loss = case.loss(output, y, group)
        if step == 0:
            handle.remove()
            if entered[0].requires_grad:
                entered[0].retain_grad()
        loss.backward()
        if step == 0:
            saw |= {"output": output.detach(), "loss": loss.detach(), **gradients(model)}
            saw["grad of what enters"] = entered[0].grad
        saw[f"norm {step}"] = clip_grad_norm_(model, CLIP)
        optimizer.step()
    saw = {name: tensor for name, tensor in saw.items() if tensor is not None}
    return saw | {name: p.detach().clone() for name, p in model.named_parameters()}


def alone(case, steps=5):
    with one_thread():
        saw = train(case, case.build(), steps=steps)
    assert min(saw[f"norm {step}"] for step in range(steps)) > CLIP, "clipping never acted"
    return saw


def joined(parts, whole, blocks=(), what=""):
    """What the ranks have, in rank order, as one tensor of the shape of `whole`.

    `blocks` are the sizes of the blocks of a fused one, each of which is cut by itself.
    """
    if all(part.shape == whole.shape for part in parts):
        for part in parts:
            assert torch.equal(part, parts[0]), f"{what} differs between ranks"
        return parts[0]
    pairs = zip(parts[0].shape, whole.shape, strict=True)
    (dim,) = (dim for dim, (mine, all_of_it) in enumerate(pairs) if mine != all_of_it)
    sizes = [size // len(parts) for size in blocks] or None
    pieces = [part.split(sizes, dim) if sizes else [part] for part in parts]
    return torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], dim)


def assert_same(parts, want, what="", close=CLOSE, blocks=None):
    """`parts` are dictionaries of tensors, one of each rank, `want` that of one process."""
    for part in parts:
        assert part.keys() == want.keys(), what
    for name, whole in want.items():
        where = f"{what}, {name}"
        sizes = next((s for end, s in (blocks or {}).items() if name.endswith(end)), ())
        got = joined([part[name] for part in parts], whole, sizes, where)
        torch.testing.assert_close(got, whole, **close, msg=lambda m, w=where: f"{w}: {m}")


def in_groups(world, lists=GROUPS):
    """The groups of these lists that this rank is in, one after the other."""
    return filter(None, map(world.subgroup, lists))


def by_group(results):
    """Results of `launch`, each a dictionary of (.., ranks) -> value: the values of each group's
    ranks, in the group's order."""
    return {key: [results[rank][key] for rank in key[-1]] for result in results for key in result}
