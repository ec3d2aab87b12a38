"""A training step of the 5 M GPT with our DDP beside torch's, and what the meters cost."""

import contextlib

import torch
from torch import nn

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import DDP, GPT, GPTConfig, bill, launch, next_token_loss, timeline


def step_of(model, tokens, measured=False):
    def step():
        with contextlib.ExitStack() as stack:
            if measured:
                stack.enter_context(bill())
                stack.enter_context(timeline())
            model.zero_grad()
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()

    return step


def compare(world, batch, repeats):
    config = GPTConfig.small()
    torch.manual_seed(0)
    ours, theirs = DDP(GPT(config), world), nn.parallel.DistributedDataParallel(GPT(config))
    tokens = torch.randint(config.vocab, (batch, 65))
    runs = {"ours": step_of(ours, tokens), "torch": step_of(theirs, tokens)}
    return alternate(world, runs, repeats, warm_up=3)


def meters(world, batch, repeats):
    model = DDP(GPT(GPTConfig.small()), world)
    tokens = torch.randint(256, (batch, 65))
    runs = {"off": step_of(model, tokens), "on": step_of(model, tokens, measured=True)}
    return alternate(world, runs, repeats, warm_up=3)


def main():
    for batch, repeats in ((1, 40), (8, 15)):
        times = launch(compare, batch, repeats, ranks=4, timeout=120)[0]
        what = f"DDP step, 4 ranks, batch {batch} x 64 ({times['ours'] * 1e3:.0f} ms)"
        result(f"{what}: torch / ours", times["torch"] / times["ours"], at_least=0.95)
    times = launch(meters, 1, 40, ranks=4, timeout=120)[0]
    result("bill and timeline on / off, batch 1 x 64", times["on"] / times["off"], at_most=1.05)
