"""DDP takes the steps of one process, and says so in bytes.

Parity is in float64 to 1e-10. A wrong divisor shows in every gradient; a bucket sent before its
last gradient, in the parameters of that bucket; a missing initial broadcast, in the weights of
all ranks but the first; gradients of an unused parameter, in the step that weight decay takes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import DDP, GPT, GPTConfig, RankError, all_gather, all_reduce, bill, launch

CLOSE = {"rtol": 0, "atol": 1e-10}


def mlp():
    """Odd sizes throughout, so that no bucket divides by the number of ranks."""
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def gpt():
    config = GPTConfig(layers=2, hidden=24, heads=3, kv_heads=1, vocab=31, seq=8)
    return GPT(config)


def build(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def batch_for(make, samples, step):
    random = torch.Generator().manual_seed(100 + step)
    if make is gpt:
        tokens = torch.randint(31, (samples, 9), generator=random)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(samples, 7, generator=random, dtype=torch.float64)
    return x, torch.randn(samples, 3, generator=random, dtype=torch.float64)


def loss_of(model, x, y):
    out = model(x)
    return F.cross_entropy(out.flatten(0, 1), y.flatten()) if y.dtype == torch.long else F.mse_loss(out, y)


def train(model, make, samples=12, steps=5, rank=0, size=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    share = samples // size
    for step in range(steps):
        x, y = batch_for(make, samples, step)
        mine = slice(rank * share, (rank + 1) * share)
        optimizer.zero_grad()
        loss_of(model, x[mine], y[mine]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [mlp, gpt])
def test_five_adamw_steps_equal_one_process_and_torch(make, ranks):
    def work(world):
        results = {}
        for name, settings in {
            "ours": {},
            "no overlap": {"overlap": False},
            "small buckets": {"bucket_mb": 1e-3},
        }.items():
            model = DDP(build(make, seed=world.rank), world, **settings)
            results[name] = train(model, make, rank=world.rank, size=world.size)
        torchs = nn.parallel.DistributedDataParallel(build(make))
        results["torch"] = train(torchs, make, rank=world.rank, size=world.size)
        return results

    expected = train(build(make), make)
    for results in launch(work, ranks=ranks):
        for name, weights in results.items():
            for got, want in zip(weights, expected, strict=True):
                torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
