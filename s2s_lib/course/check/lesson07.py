"""The checks of lesson 07: DiLoCo, islands that seldom talk."""

import functools
import math
from numbers import Real

import torch

from s2s_lib.collectives.codes import Codes
from s2s_lib.collectives.functions import all_reduce
from s2s_lib.course.check.answers import (
    NOT_ATTEMPTED,
    Wrong,
    attempted,
    run,
    same_number,
)
from s2s_lib.course.reference import adamw, batches, tiny_gpt, train, weights
from s2s_lib.meters.bill import bill
from s2s_lib.ranks.launch import launch
from s2s_lib.strategies.diloco.diloco import DiLoCo

# Exercise 1: seconds of a step, bytes per second of the line, the share of time for computing.
STEP, LINE, COMPUTING = 0.011, 100e6 / 8, 0.9


def line_of_islands(sent, every, gbit_s):
    """Your guess for `nn.Linear(1000, 1000, bias=False)` in float32 on four islands over 100 Mbit/s
    lines, 11 ms a step: bytes that each sends in a sync, the smallest `sync_every` with which 90 %
    of the time is computing, and the Gbit/s with which they are under DDP."""
    if not attempted(sent, every, gbit_s):
        return
    counted = _counted_sync()
    same_number("bytes that each island sends in a sync", sent, counted)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise Wrong(f"H is {every!r}: give a whole number of at least 1")
    share, before = (_computing(H, counted / LINE) for H in (every, every - 1))
    if share < COMPUTING:
        raise Wrong(
            f"H = {every}: an exchange takes {counted / LINE:.2f} s, so {share:.2%} of the time is "
            "computing: too little"
        )
    if before >= COMPUTING:
        raise Wrong(f"H = {every} is enough, and so is {every - 1}")
    right = counted * 8 / 1e9 / (STEP * (1 / COMPUTING - 1))
    if not isinstance(gbit_s, Real) or not math.isclose(gbit_s, right, rel_tol=1e-3):
        raise Wrong(f"Gbit/s for DDP: got {gbit_s!r}, expected {right:.1f}{_unit(gbit_s, right)}")
    print(
        f"right: bill() counts {counted:,} bytes, H = {every} leaves {share:.2%} for computing, "
        f"and DDP needs {right:.1f} Gbit/s"
    )


def _computing(every, exchange):
    return every * STEP / (every * STEP + exchange)


def _unit(got, right):
    factors = {
        1 / 8: "; a byte has 8 bits",
        1 / 9: "; the exchange may take a ninth of a step, not all of it",
        10 / 9: "; a tenth of the time is a ninth of a step: it is a tenth of step and exchange",
    }
    if not isinstance(got, Real):
        return ""
    near = (hint for f, hint in factors.items() if math.isclose(got, f * right, rel_tol=1e-3))
    return next(near, "")


@functools.cache
def _counted_sync():
    return launch(_count_a_sync, ranks=4)[0]


def _count_a_sync(world):
    layer = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    DiLoCo(layer, optimizer, world, sync_every=1)
    layer(torch.ones(1, 1000)).sum().backward()
    with bill() as sent:
        optimizer.step()
    return sent.bytes


def error_feedback(yours):
    """`yours(gradient, residual, rounded)`: what is sent of a pseudo-gradient, rounded, and the new
    residual; over any number of rounds what was sent and the last residual add up to all of it."""
    torch.manual_seed(0)
    gradients = [torch.randn(512, dtype=torch.float64) for _ in range(12)]
    residual = torch.zeros(512, dtype=torch.float64)
    total = torch.zeros_like(residual)
    for number, gradient in enumerate(gradients, 1):
        given = gradient.clone(), residual.clone()
        found = _answer(yours, *given)
        if found is None:
            print(NOT_ATTEMPTED)
            return
        where = f"round {number}"
        if not (torch.equal(given[0], gradient) and torch.equal(given[1], residual)):
            raise Wrong(f"{where}: it changed an argument; make new tensors")
        _same_sent(where, found, gradient, residual)
        total, residual = total + found[0], found[1]
    lost = (sum(gradients) - total - residual).norm()
    assert lost < 1e-9
    print(f"right: after {len(gradients)} rounds nothing is lost but what the residual holds")


def _rounded(x):
    codes = Codes(4, x.dtype)
    return codes.decode(codes.encode(x.reshape(-1)), x.numel()).view(x.shape)


def _answer(yours, *given):
    try:
        found = yours(*given, _rounded)
    except NotImplementedError:
        return None
    if found is None or found is ...:
        return None
    both = isinstance(found, (tuple, list)) and len(found) == 2
    if not both or not all(isinstance(x, torch.Tensor) and x.shape == (512,) for x in found):
        raise Wrong("give two tensors of the gradient's shape: what is sent, and the new residual")
    return found


def _same_sent(where, found, gradient, residual):
    sent, left = found
    right = _rounded(gradient + residual)
    if not torch.equal(sent, right):
        known = {
            "; the residual of the last round is missing in it": _rounded(gradient),
            "; it is not rounded": gradient + residual,
            "; what was left out is to be added, not taken away": _rounded(gradient - residual),
            "; round the sum: a sum of rounded numbers has no code of 4 bits": (
                _rounded(gradient) + _rounded(residual)
            ),
        }
        raise Wrong(f"{where}: what is sent is not right{_same_as(sent, known)}")
    known = {
        "; that is the wrong sign": right - gradient - residual,
        "; what the last round left out was meant to be sent too": gradient - right,
        "; the last one is in what was sent: what is left is new": gradient - right + 2 * residual,
    }
    if not torch.allclose(left, gradient + residual - right, rtol=0, atol=1e-12):
        raise Wrong(f"{where}: the new residual is not right{_same_as(left, known)}")


def _same_as(got, known):
    return next((h for h, x in known.items() if torch.allclose(got.double(), x)), "")


# Exercise 3

MISTAKES = {
    "copy": "outer weights must be copies: these are the live ones, so old minus new is 0",
    "sign": "a step goes against a gradient: it must be old minus new",
    "momentum": "momentum takes each island's own move: give it the average, or they drift apart",
    "last": "steps after the last full round are never synced",
    "plain": "that is momentum without Nesterov: the step is gradient + 0.9 * momentum",
}
EVERY, STEPS = 2, 5


def mended_diloco(yours):
    """`yours(model, optimizer, rows, group, H)` trains `model` on `rows` as the library's DiLoCo
    with an outer lr of 0.7 and momentum of 0.9 does, its last steps synced too."""
    ran = run(lambda _, world: _mended(yours, world), [torch.zeros(1)] * 3)
    if ran is None:
        return
    if all(_equal(one.result[0], one.result[1]) for one in ran):
        print(f"right: on 3 islands the library's weights after {STEPS} steps with H = {EVERY}")
        return
    if all(_equal(one.result[0], one.result[2]) for one in ran):
        print(NOT_ATTEMPTED)
        return
    known = launch(_all_mistaken, ranks=3)
    for names in known[0]:
        if all(_equal(one.result[0], k[names]) for one, k in zip(ran, known, strict=True)):
            raise Wrong("; ".join(MISTAKES[name] for name in names))
    mine = [one.result[0] for one in ran]
    same = all(_equal(one, mine[0]) for one in mine)
    end = "all islands agree, on other weights than" if same else "islands differ, and not as"
    raise Wrong(f"{end} the library's: change one thing after the other, each of its eight lines")


def _mended(yours, world):
    found = []
    for train_with in (yours, _library, None):
        model = _small()
        if train_with:
            train_with(model, adamw(model), _rows(world), world, EVERY)
        found.append(weights(model))
    return found


def _small():
    """A GPT that takes no time, since wrong answers are compared with all mistakes there are."""
    return tiny_gpt(layers=1, hidden=16, heads=2)


def _rows(world):
    return batches(world, steps=STEPS, samples=6, seq=8)


def _library(model, optimizer, rows, group, H):
    with DiLoCo(model, optimizer, group, H):
        train(model, rows, optimizer)


def _equal(mine, right):
    return all(torch.allclose(mine[n], right[n], rtol=0, atol=1e-10) for n in right)


def _all_mistaken(world):
    """Mistakes that are left -> the weights that they give, the fewest first."""
    found = {}
    for bits in sorted(range(1, 2 ** len(MISTAKES)), key=int.bit_count):
        names = tuple(name for i, name in enumerate(MISTAKES) if bits >> i & 1)
        model = _small()
        _mistaken(model, adamw(model), list(_rows(world)), world, EVERY, names)
        found[names] = weights(model)
    return found


def _mistaken(model, optimizer, rows, group, H, names):
    live = list(model.parameters())
    outer = [p.detach() if "copy" in names else p.detach().clone() for p in live]
    moves = [torch.zeros_like(p) for p in outer]
    sign = -1 if "sign" in names else 1
    for number, row in enumerate(rows, 1):
        train(model, [row], optimizer)
        if number % H == 0 or number == len(rows) and "last" not in names:
            for p, old, move in zip(live, outer, moves, strict=True):
                mine = sign * (old - p.detach())
                average = all_reduce(mine, group, "avg")
                move.mul_(0.9).add_(mine if "momentum" in names else average)
                step = move if "plain" in names else average + 0.9 * move
                old.sub_(0.7 * step)
                p.data.copy_(old)
