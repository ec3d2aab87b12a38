"""The 5 M GPT with its blocks cut, forward and backward, beside torch's parallelize_module."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import GPT, GPT_PLAN, GPTConfig, launch, next_token_loss, tensor_parallel

# Embedding and head stay whole: torch's loss on cut logits is another function than ours.
PLAN = {name: style for name, style in GPT_PLAN.items() if name.startswith("blocks")}
BATCHES = {1: 2.5, 8: 1.5}


def step_of(model, tokens):
    def step():
        model.zero_grad()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()

    return step


def torchs(config, mesh):
    model = GPT(config)
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    return parallelize_module(model, mesh, {name: styles[style]() for name, style in PLAN.items()})


def compare(world, batch, repeats):
    config = GPTConfig.small()
    tokens = torch.randint(config.vocab, (batch, 65), generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    runs = {"torch": step_of(torchs(config, mesh), tokens)}
    torch.manual_seed(0)
    runs["ours"] = step_of(tensor_parallel(GPT(config), world, PLAN), tokens)
    return alternate(world, runs, repeats, warm_up=3)


def main():
    for ranks in (2, 4):
        for batch, bound in BATCHES.items():
            times = launch(compare, batch, 15, ranks=ranks, timeout=120)[0]
            print(", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items()))
            result(
                f"step, {ranks} ranks, {batch} x 64 tokens: torch / ours",
                times["torch"] / times["ours"],
                bound,
            )
