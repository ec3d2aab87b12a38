"""What training on islands costs: bytes and seconds where replicas meet over a slow link.

Data parallel exchanges one model's worth of gradients in every step, DiLoCo one of pseudo-gradients
every H steps (`sync_every`). Streaming DiLoCo cuts it into P `fragments` that take turns, and may
go on for `delay` steps before it needs what it has sent. `Rounds` is all of them: data parallel
is H = 1, P = 1, delay = 0.

    exchange of a fragment   c = 2 (R-1)/R N bits / (8 P bandwidth) + 2 (R-1) latency   seconds
    hidden of it             h = (delay + 2/3 (L-1)/L) t, at most the H t / P between two fragments
    H steps                  H t + P max(0, c - h), and at least H t + P c / L without a delay

with a step of t seconds. The 2/3 is a backward pass: 4 of the 6 operations for each weight and
token. Of L `layers` that are exchanged one by one, the first leaves when its gradient is there,
after 1/L of the pass, and that of the model's first layer, ready last, is seen in full. Without
`layers` a replica computes, then exchanges: h = delay t.

Formulas leave out what real networks add: jitter, TCP's start, several islands on one line. How
near they come to published tables is in `islands_compared.py`.

Sources: Douillard et al., "Streaming DiLoCo" (arXiv:2501.18512), section 3.1, for what hides what;
Charles et al., "Scaling Laws for DiLoCo" (arXiv:2503.09799), appendix, for `wall_clock`.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

from s2s_lib.cluster import Link

BACKWARD = 2 / 3

# The three networks of `wall_clock`'s paper: made up by its authors as examples.
NETWORKS = {
    "high": Link(400, 100, "high", "arXiv:2503.09799, appendix"),
    "medium": Link(100, 1_000, "medium", "arXiv:2503.09799, appendix"),
    "low": Link(10, 10_000, "low", "arXiv:2503.09799, appendix"),
}


def _check(least=0, whole=False, **values):
    """Raise ValueError unless each value is a finite number of at least `least`; 0: above it."""
    kind, wanted = (Integral, "a whole number") if whole else (Real, "a number")
    bound = f"of at least {least}" if least else "above 0"
    for name, value in values.items():
        good = isinstance(value, kind) and not isinstance(value, bool) and value < math.inf
        if not (good and (value >= least if least else value > 0)):
            raise ValueError(f"{name}={value!r}: give {wanted} {bound}")


def _check_seconds(**values):
    for name, value in values.items():
        if not (isinstance(value, Real) and 0 <= value < math.inf):
            raise ValueError(f"{name}={value!r}: give a number of seconds, 0 or more")


def all_reduce_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """Seconds of a ring all-reduce of `nbytes`: 2 (R-1)/R nbytes / bandwidth + 2 (R-1) latency.

    As `cost("all_reduce", "ring", ...)` counts it: 2 (R-1) steps, each a message to the next rank.
    The papers' lower bound has the same bytes and a single latency, see `wall_clock`.
    """
    _check(1, whole=True, ranks=ranks)
    if nbytes < 0:
        raise ValueError(f"nbytes={nbytes!r}: give a number of bytes, 0 or more")
    traffic = 2 * (ranks - 1) / ranks * nbytes
    return traffic / link.bytes_per_second + 2 * (ranks - 1) * link.latency_us * 1e-6


def bytes_per_sync(parameters: float, ranks: int, bits: int = 32) -> float:
    """Bytes that each rank sends to average one model: 2 (R-1)/R parameters bits / 8."""
    _check(parameters=parameters, bits=bits)
    _check(1, whole=True, ranks=ranks)
    return 2 * (ranks - 1) / ranks * parameters * bits / 8


def bytes_sent(
    parameters: float, ranks: int, steps: int, sync_every: int = 1, bits: int = 32
) -> float:
    """Bytes that each rank sends in `steps` steps: data parallel at 1, DiLoCo at H = `sync_every`.

    A last round of fewer steps ends in an exchange too: ceil(steps / H) of them.
    """
    _check(1, whole=True, steps=steps, sync_every=sync_every)
    return math.ceil(steps / sync_every) * bytes_per_sync(parameters, ranks, bits)


def utilisation(
    compute_seconds: float, communication_seconds: float, overlapped: float = 0.0
) -> float:
    """The share of time spent computing, 0 to 1: compute / (compute + what is not `overlapped`).

    `overlapped` is how many seconds of the communication run beside the computation.
    """
    _check(compute_seconds=compute_seconds)
    _check_seconds(communication_seconds=communication_seconds, overlapped=overlapped)
    if overlapped > min(compute_seconds, communication_seconds):
        raise ValueError(
            f"{overlapped} s overlapped of {communication_seconds} s of communication and "
            f"{compute_seconds} s of computing: it is part of both"
        )
    return compute_seconds / (compute_seconds + communication_seconds - overlapped)


@dataclass(frozen=True)
class Rounds:
    """R replicas of `parameters` weights that meet every `sync_every` steps over one slow link.

    `step_seconds` is one step without exchange, `bits` what a weight takes on the wire, `layers`
    the number of layers if their exchange starts during the last backward pass; see the module's
    docstring. ValueError for counts below 1 or numbers that are not above 0.
    """

    parameters: float
    step_seconds: float
    sync_every: int = 1
    bits: int = 32
    ranks: int = 2
    layers: int | None = None
    fragments: int = 1
    delay: int = 0

    def __post_init__(self):
        _check(parameters=self.parameters, step_seconds=self.step_seconds, bits=self.bits)
        counts = {key: getattr(self, key) for key in ("sync_every", "ranks", "fragments")}
        if self.layers is not None:
            counts["layers"] = self.layers
        _check(1, whole=True, **counts)
        if not (isinstance(self.delay, Integral) and self.delay >= 0):
            raise ValueError(f"delay={self.delay!r}: give a whole number of steps, 0 or more")

    @property
    def compute_seconds(self) -> float:
        """Computing of one round, H steps."""
        return self.sync_every * self.step_seconds

    @property
    def bytes_per_round(self) -> float:
        """Bytes that each rank sends in H steps."""
        return bytes_per_sync(self.parameters, self.ranks, self.bits)

    @property
    def hidden_seconds(self) -> float:
        """How long one fragment's exchange may take before a replica waits for it."""
        behind = BACKWARD * (self.layers - 1) / self.layers if self.layers else 0.0
        gap = self.compute_seconds / self.fragments
        return min((self.delay + behind) * self.step_seconds, gap)

    @property
    def _last_layer(self) -> float:
        """The share of the exchange that comes after the last backward pass at the earliest."""
        return 1 / self.layers if self.layers and not self.delay else 0.0

    def round_seconds(self, link: Link) -> float:
        """Seconds of one round, H steps and the waiting for their exchange."""
        nbytes = self.parameters * self.bits / 8 / self.fragments
        each = all_reduce_seconds(nbytes, self.ranks, link)
        in_view = max(each - self.hidden_seconds, each * self._last_layer, 0.0)
        return self.compute_seconds + self.fragments * in_view

    def utilisation(self, link: Link) -> float:
        """The share of time spent computing with this link, 0 to 1."""
        return self.compute_seconds / self.round_seconds(link)

    def gbit_s(self, target: float) -> float:
        """The link's Gbit/s at which `utilisation` is `target` (above 0, at most 1), no latency.

        Infinite where no link is fast enough: all of the time for computing, and a part of the
        exchange that nothing hides.
        """
        if not (isinstance(target, Real) and 0 < target <= 1):
            raise ValueError(
                f"target={target!r}: a utilisation is above 0 and at most 1 (90 %: 0.9)"
            )
        wait = self.compute_seconds * (1 / target - 1)
        seconds = wait + self.fragments * self.hidden_seconds
        if self._last_layer:
            seconds = min(seconds, wait / self._last_layer)
        if self.bytes_per_round == 0:
            return 0.0
        return 8e-9 * self.bytes_per_round / seconds if seconds else math.inf


class WallClock(NamedTuple):
    """Seconds of a whole run."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.communication


def wall_clock(
    parameters: float,
    tokens: float,
    steps: int,
    chips: int,
    across: Link,
    inside: Link | None = None,
    replicas: int = 1,
    sync_every: int | None = None,
    flops: float = 300e12,
    bits: int = 16,
) -> WallClock:
    """The idealised run time of arXiv:2503.09799: nothing overlaps, an all-reduce has one latency.

    Computing takes 6 N D / (R Q) for N `parameters`, D `tokens`, R `chips` of Q `flops` a second;
    an all-reduce over r chips 2 N (1 - 1/r) / W + latency. In each of T `steps`:
    data parallel (no `sync_every`): one over all chips, `across`;
    DiLoCo of 1 replica: the same, and one more every H steps;
    DiLoCo of M >= 2: one over the R/M chips of a replica, `inside`; every H steps one over all,
    `across`.
    The paper writes 2N/W with W in Gbit/s and leaves open what a parameter weighs: `bits`, here 16.
    """
    _check(parameters=parameters, tokens=tokens, flops=flops, bits=bits)
    _check(1, whole=True, steps=steps, chips=chips, replicas=replicas)
    if replicas > chips:
        raise ValueError(f"{replicas} replicas on {chips} chips: a replica needs at least one")
    if sync_every is not None:
        _check(1, whole=True, sync_every=sync_every)
    elif replicas > 1:
        raise ValueError(f"{replicas} replicas of DiLoCo need sync_every, the steps of a round")
    if replicas > 1 and inside is None:
        raise ValueError(f"{replicas} replicas need inside, the link between the chips of one")

    def all_reduce(ranks, link):
        if ranks == 1:
            return 0.0
        seconds = 2 * (1 - 1 / ranks) * parameters * bits / (link.gbit_s * 1e9)
        return seconds + link.latency_us * 1e-6

    outer = all_reduce(chips, across)
    inner = outer if replicas == 1 else all_reduce(chips / replicas, inside)
    syncs = 0 if sync_every is None else steps / sync_every
    compute = 6 * parameters * tokens / (chips * flops)
    return WallClock(compute, steps * inner + syncs * outer)
