"""What the tests of ZeRO train: three small models, their batches, and one loop for all.

`train` takes the same steps whether the model is plain or a ZeRO: AdamW with two groups, one of
them decayed, and gradients clipped so tightly that clipping acts in every step.
"""

import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import GPT, GPTConfig, Mesh, ZeRO, clip_grad_norm_

CLOSE = {"rtol": 0, "atol": 1e-10}
# The world, a group out of order, one without rank 0, and one alone.
GROUPS = [[0, 1, 2, 3], [3, 0, 2], [2, 1], [3]]
# Number of copies and ranks that share one, on four ranks.
HYBRIDS = [(1, 4), (2, 2), (4, 1)]


def gpt():
    """The head is tied to the embedding."""
    return GPT(GPTConfig(layers=2, hidden=12, heads=3, kv_heads=1, vocab=17, seq=6))


def mlp():
    """Odd sizes throughout: no unit divides by the number of ranks."""
    return nn.Sequential(
        nn.Linear(7, 13),
        nn.Tanh(),
        nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 13)),
        nn.Tanh(),
        nn.Linear(13, 3),
    )


def trunk():
    """The first layers are frozen, and one bias behind them."""
    model = mlp()
    for part in (model[0].weight, model[0].bias, model[2][0].weight, model[2][1].bias):
        part.requires_grad_(False)
    return model


def build(make, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return make().to(dtype)


def batch_for(make, samples, step, dtype=torch.float64):
    random = torch.Generator().manual_seed(100 + step)
    if make is gpt:
        tokens = torch.randint(17, (samples, 7), generator=random)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(samples, 7, generator=random, dtype=dtype)
    return x, torch.randn(samples, 3, generator=random, dtype=dtype)


def loss_of(model, x, y):
    out = model(x)
    if y.dtype == torch.long:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())
    return F.mse_loss(out, y.to(out.dtype))


def part(batch, group):
    """This rank's rows."""
    return [t.chunk(group.size)[group.rank] for t in batch]


def adamw(model):
    """Matrices decay, the rest does not."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if p.dim() > 1]
    rest = [p for n, p in named if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)


def train(model, make, ranks=None, steps=5, optimizer=None, clip=clip_grad_norm_, first=0):
    """The norms before clipping; `ranks` is the group over all that share a batch."""
    optimizer = optimizer or adamw(model)
    norms = []
    for step in range(first, first + steps):
        batch = batch_for(make, 12, step)
        optimizer.zero_grad()
        loss_of(model, *(part(batch, ranks) if ranks else batch)).backward()
        norms.append(float(clip(model.parameters() if clip is TORCH else model, 0.05)))
        optimizer.step()
    return norms


TORCH = nn.utils.clip_grad_norm_


def alone(make, steps=5):
    """What one process computes: its state dict and norms."""
    model = build(make)
    norms = train(model, make, steps=steps, clip=TORCH)
    return {name: t.detach().clone() for name, t in model.state_dict().items()}, norms


def hybrid(world, copies, shards, make, stage, **settings):
    mesh = Mesh(world, replicate=copies, shard=shards)
    return ZeRO(make, mesh["shard"], stage, replicate=mesh["replicate"], **settings)


def assert_same(got, want, what="", close=CLOSE):
    """Two dictionaries of tensors: the same names in the same order, and values."""
    assert list(got) == list(want), what
    for name, tensor in got.items():
        torch.testing.assert_close(
            tensor, want[name], **close, msg=lambda m, name=name: f"{what}, {name}: {m}"
        )
