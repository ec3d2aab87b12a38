"""The checks of lesson 00: ranks and collectives."""

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.course.check.answers import attempted, compare, digits, run, same_number
from s2s_lib.meters.bill import bill
from s2s_lib.ranks.launch import launch


def ring_of_eight(messages, nbytes):
    """Your guess of what each of 8 ranks sends when a ring all_reduces 4,000,000 bytes."""
    if not attempted(messages, nbytes):
        return
    counted, sent = launch(_what_a_ring_sends, ranks=8)[0]
    same_number("messages that each rank sends", messages, counted)
    same_number("bytes that each rank sends", nbytes, sent)
    print(f"right: bill() counts {counted} messages and {sent:,} bytes on each rank")


def _what_a_ring_sends(world):
    with bill() as sent:
        all_reduce(torch.ones(1_000_000), world, algorithm="ring")
    return sent.messages, sent.bytes


def reduce_scatter(yours):
    """`yours(tensor, world)`: the sum of all ranks' tensors, of which rank r returns piece r."""
    for size in (2, 3, 4):
        inputs = digits(size, 2 * size)
        ran = run(yours, inputs)
        if ran is None:
            return
        share = inputs[0].nbytes // size * (size - 1)
        compare(ran, sum(inputs).chunk(size), messages=size - 1, nbytes=share)
    print("right on 2, 3 and 4 ranks, and each rank sends (W-1)/W of its tensor in W-1 messages")


def all_gather_by_doubling(yours):
    """`yours(piece, world)`: all ranks' pieces in rank order, on each, after log2(W) exchanges."""
    for size in (2, 4, 8):
        inputs = [part.clone() for part in torch.arange(1, 2 * size + 1).chunk(size)]
        ran = run(yours, inputs)
        if ran is None:
            return
        others = inputs[0].nbytes * (size - 1)
        compare(ran, [torch.cat(inputs)] * size, messages=size.bit_length() - 1, nbytes=others)
    print("right on 2, 4 and 8 ranks, and each rank sends log2(W) messages")
