"""The 5 M GPT cut by one plan, forward and backward, beside torch's parallelize_module."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import (
    GPT,
    GPT_PLAN,
    GPTConfig,
    launch,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)

BATCHES = {1: 2.5, 8: 1.5}


def torchs_step(config, mesh, x, y):
    model = GPT(config)
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    plan = {name: styles[style]() for name, style in GPT_PLAN.items() if style in styles}
    plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, plan)

    def step():
        model.zero_grad()
        with loss_parallel():
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    return step


def our_step(config, group, x, y):
    model = tensor_parallel(GPT(config), group, GPT_PLAN)

    def step():
        model.zero_grad()
        vocab_parallel_cross_entropy(model(x), y, group).backward()

    return step


def compare(world, batch, repeats):
    # Not tied: torch would cut the embedding and the head apart.
    config = GPTConfig.small(tied=False)
    tokens = torch.randint(config.vocab, (batch, 65), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]
    torch.manual_seed(0)
    theirs = torchs_step(config, init_device_mesh("cpu", (world.size,)), x, y)
    runs = {"torch": theirs, "ours": our_step(config, world, x, y)}
    return alternate(world, runs, repeats, warm_up=3)


def main():
    for ranks in (2, 4):
        for batch, bound in BATCHES.items():
            times = launch(compare, batch, 21, ranks=ranks, timeout=120)[0]
            print(", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items()))
            result(
                f"step, {ranks} ranks, {batch} x 64 tokens: torch / ours",
                times["torch"] / times["ours"],
                bound,
            )
