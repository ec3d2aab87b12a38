"""How long a schedule takes, without running it.

Given how long a forward, the two halves of a backward and a message take, every action starts as
soon as its rank is free and what it needs is there. The result is a `Timetable`: what each rank
did when. One measured on real ranks is a `Timetable` too, so a prediction and a measurement are
compared by the same arithmetic and drawn by the same picture.

The word *bubble* is used for shares of different wholes. Here, with P ranks and U the useful time
of all together:

    bubble               1 - U / (P total)       idle time, as a share of all the time there was
    bubble_over_useful   P total / U - 1         idle time, as a share of the useful time
    zero_bubble_rate     1 - u / c               the Zero Bubble paper's (arXiv:2401.10241, section
                         5.3): c the longest that a rank takes from its own first action to its
                         last, u what it computes meanwhile

For GPipe with 4 stages and 8 micro-batches they are 3/11, 3/8 and 3/11. They may disagree on which
schedule is better: with F = I = W on 8 ranks and 12 micro-batches ZB-H2 is worse than ZB-H1 by the
first and better by the last, which leaves out that its ranks start and end at different times.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from s2s_lib.cluster import Cluster
from s2s_lib.strategies.pipeline.actions import Action, Schedule, check_schedule
from s2s_lib.strategies.pipeline.order import goes_to


@dataclass(frozen=True, repr=False)
class Timetable:
    """When each action of a schedule ran; `spans[r]` is rank r's (start, end, action), in order.

    In seconds if it was measured, else in the unit of the durations given.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float, Action], ...], ...]

    @property
    def start(self) -> float:
        return min(line[0][0] for line in self.spans)

    @property
    def total(self) -> float:
        """From the first action's start to the last one's end."""
        return max(end for line in self.spans for _, end, _ in line) - self.start

    @property
    def busy(self) -> list[float]:
        """For each rank, how long it computed."""
        return [sum(end - start for start, end, _ in line) for line in self.spans]

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' total time."""
        return 1 - sum(self.busy) / (len(self.spans) * self.total)

    @property
    def bubble_over_useful(self) -> float:
        """Idle time of all ranks over their useful time."""
        return len(self.spans) * self.total / sum(self.busy) - 1

    @property
    def zero_bubble_rate(self) -> float:
        """Idle share of the longest time that one rank takes, first action to last."""
        taken = [line[-1][1] - line[0][0] for line in self.spans]
        longest = max(range(len(taken)), key=taken.__getitem__)
        return 1 - self.busy[longest] / taken[longest]

    @property
    def peak_in_flight(self) -> list[int]:
        """For each rank, the most micro-batches (times stages) whose activations it holds."""
        return self.schedule.peak_in_flight

    def peak_memory(self, activation: float = 1, kept: float | None = None) -> list[float]:
        """For each rank, the most bytes of activations at once.

        A stage's forward leaves `activation` bytes; a B frees them; an I leaves `kept` of them
        (all, if not given) until its W. The Zero Bubble paper's M_B and M_W. In inference one
        stage's are there at a time.
        """
        if not self.schedule.trains:
            return [activation for _ in self.schedule.ranks]
        kept = activation if kept is None else kept
        change = {"F": activation, "B": -activation, "I": kept - activation, "W": -kept}
        peaks = []
        for line in self.schedule.ranks:
            held = highest = 0
            for action in line:
                held += change[action.kind]
                highest = max(highest, held)
            peaks.append(highest)
        return peaks

    def save(self, path) -> None:
        """Write the picture, an SVG, to a file."""
        from s2s_lib.strategies.pipeline.picture import draw_timetable

        draw_timetable(self).save(path)

    def _repr_html_(self):
        from s2s_lib.strategies.pipeline.picture import draw_timetable

        return draw_timetable(self)._repr_html_()

    def __repr__(self):
        return f"<{self.schedule.name}: total {self.total:.4g}, bubble {self.bubble:.1%} of it>"


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] | None = None,
    weight: float | Sequence[float] | None = None,
    transfer: float | Cluster = 0,
    message_bytes: int = 0,
) -> Timetable:
    """When each action runs if F takes `forward`, I `backward`, W `weight`, B the last two summed.

    B takes 2 if not told otherwise. Where there are I and W and neither `backward` nor `weight` is
    given, each takes 1, as in the schedule's own picture; with one of them given, `backward` is
    else 2 and `weight` 0.

    Each is one number for all stages or one for each. `transfer` is how long after an action its
    result is on the next rank, or a `Cluster` whose rank r is the pipeline's rank r: then times are
    in seconds, messages have `message_bytes`, and those of one port queue. Sending takes none of a
    rank's own time, and stages of one rank pass on at once.
    """
    check_schedule(schedule)
    S, M = schedule.stages, schedule.microbatches
    if backward is None and weight is None and schedule.has_halves:
        backward = weight = 1
    backward, weight = 2 if backward is None else backward, 0 if weight is None else weight
    seconds = _durations(S, schedule.trains, forward=forward, backward=backward, weight=weight)
    arrive = _arrivals(schedule, transfer, message_bytes)
    here = [[0.0] * (2 * S * M + 1) for _ in schedule.ranks]
    free, spans = [0.0] * len(schedule.ranks), [[] for _ in schedule.ranks]
    for rank, action, needed, given in schedule.walk:
        start = free[rank]
        for need in needed:
            if here[rank][need] > start:
                start = here[rank][need]
        free[rank] = end = start + seconds[action.kind][action.stage]
        spans[rank].append((start, end, action))
        here[rank][given] = end
        stage = goes_to(action, schedule)
        if stage is not None:
            to = schedule.rank_of[stage]
            if to != rank:
                here[to][given] = arrive(end, rank, to)
    return Timetable(schedule, tuple(map(tuple, spans)))


def _is_duration(value):
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def _durations(stages, trains, **given):
    """Seconds by kind and stage."""
    for name, value in given.items():
        values = list(value) if isinstance(value, Iterable) else [value] * stages
        if not all(map(_is_duration, values)):
            raise ValueError(f"{name}={value!r}: durations are numbers of at least 0")
        if len(values) != stages:
            raise ValueError(f"{name} has {len(values)} durations for {stages} stages")
        given[name] = values
    F, back, W = given["forward"], given["backward"], given["weight"]
    if not any(F + (back + W if trains else [])):
        raise ValueError("every duration is 0: give one above, forward=1 say")
    return {"F": F, "I": back, "W": W, "B": [i + w for i, w in zip(back, W, strict=True)]}


def _arrivals(schedule, transfer, message_bytes):
    """The function that says when a message sent at a time by a rank is on another one."""
    if _is_duration(transfer):
        return lambda when, rank, to: when + transfer
    if not isinstance(transfer, Cluster):
        raise ValueError(f"transfer={transfer!r}: give a duration of at least 0, or a Cluster")
    if not _is_duration(message_bytes):
        raise ValueError(f"message_bytes={message_bytes!r}: give a number of at least 0")
    if transfer.size < len(schedule.ranks):
        raise ValueError(f"{transfer} is too small for {len(schedule.ranks)} ranks")
    free = {}

    def arrive(when, rank, to):
        link, port = transfer.link(rank, to), (rank, transfer.link_class(rank, to))
        if link is None:
            return when
        free[port] = max(when, free.get(port, 0.0)) + message_bytes / link.bytes_per_second
        return free[port] + link.latency_us * 1e-6

    return arrive


def measured(schedule: Schedule, timelines) -> Timetable:
    """The timetable of a step that ran: `timelines[r]` is rank r's `timeline()` round one step."""
    if len(timelines) != len(schedule.ranks):
        raise ValueError(
            f"{len(timelines)} timelines for {schedule.name} on {len(schedule.ranks)} ranks"
        )
    spans = []
    for rank, (line, timeline) in enumerate(zip(schedule.ranks, timelines, strict=True)):
        actions = {str(action): action for action in line}
        found = [(s.start, s.end, actions[s.name]) for s in timeline.sections if s.name in actions]
        if [action for *_, action in found] != list(line):
            raise ValueError(
                f"rank {rank}'s timeline has {len(found)} of {schedule.name}'s {len(line)} actions:"
                " record exactly one step of it"
            )
        spans.append(tuple(found))
    return Timetable(schedule, tuple(spans))
