"""Plots of what a pipeline wastes: its bubble against micro-batches and ranks, and what it holds.

Each function draws on `axes` (or new ones) and returns the numbers drawn, `{name: {x: number}}`, so
that a lesson can assert what it shows. Points are simulated (`timed`), on the same model for every
schedule; thin lines are the published formulas. A number of micro-batches that a schedule refuses
has no point.
"""

import inspect

from s2s_lib.strategies.pipeline.actions import Schedule
from s2s_lib.strategies.pipeline.schedule import BUILDERS
from s2s_lib.strategies.pipeline.simulate import Timetable, simulate

# By the names that schedules give themselves: GPipe, 1F1B, ZB-H1, ...
SCHEDULES = {build(2, 4).name.removesuffix(" x2"): build for build in BUILDERS.values()}

USUAL = ("naive", "GPipe", "1F1B", "interleaved 1F1B", "ZB-H1")
SHARE = "bubble: idle share of total time"
MARKS = "os^vDxP*"


def built(schedule: str, ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The schedule of this name in SCHEDULES; ValueError if there is none or it refuses."""
    if schedule not in SCHEDULES:
        raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    more = {"chunks": chunks} if has_chunks(schedule) else {}
    return SCHEDULES[schedule](ranks, microbatches, **more)


def timed(
    schedule: Schedule, backward: float = 2, weight_share: float = 0.5, transfer: float = 0
) -> Timetable:
    """Simulated on the same model for every schedule: a micro-batch's forwards on one rank last 1
    together, its backwards there `backward`, of which W is `weight_share`, a message `transfer`.

    So a rank that runs two stages takes 1/2 for a forward of each.
    """
    stages = schedule.stages / len(schedule.ranks)
    weight = backward * weight_share / stages
    return simulate(schedule, 1 / stages, backward / stages - weight, weight, transfer)


def has_chunks(name):
    return "chunks" in inspect.signature(SCHEDULES[name]).parameters


def bubble_formula(schedule: str, ranks: int, microbatches: int, chunks: int = 2) -> float | None:
    """The idle share of the total time without transfer, P ranks, M micro-batches, v stages a rank:
    (P-1)/P for naive, (P-1)/(M+P-1) for GPipe and 1F1B, (P-1)/(vM+P-1) for interleaved (where M is
    a multiple of P) and looped (where M >= P); None where it depends on the durations."""
    if schedule == "naive":
        return (ranks - 1) / ranks
    one, several = ("GPipe", "1F1B", "forward only"), ("interleaved 1F1B", "looped breadth-first")
    if schedule not in one + several:
        return None
    rounds = microbatches * (chunks if schedule in several else 1)
    return (ranks - 1) / (rounds + ranks - 1)


def plot_bubble_by_microbatches(
    schedules=USUAL, ranks: int = 4, microbatches=range(1, 33), chunks: int = 2, axes=None, **times
) -> dict[str, dict[int, float]]:
    """The bubble of each schedule against the number of micro-batches; `times` as for `timed`."""
    sizes = {count: (ranks, count, chunks) for count in microbatches}
    points = _points(schedules, sizes, lambda schedule: timed(schedule, **times).bubble)
    return _plot(points, _formulas(points, sizes), f"micro-batches ({ranks} ranks)", SHARE, axes)


def plot_bubble_by_ranks(
    schedules=USUAL, ranks=range(1, 17), microbatches: int = 16, chunks: int = 2, axes=None, **times
) -> dict[str, dict[int, float]]:
    """The bubble of each schedule against the number of ranks; `times` as for `timed`."""
    sizes = {count: (count, microbatches, chunks) for count in ranks}
    points = _points(schedules, sizes, lambda schedule: timed(schedule, **times).bubble)
    xlabel = f"ranks ({microbatches} micro-batches)"
    return _plot(points, _formulas(points, sizes), xlabel, SHARE, axes)


def plot_peak_by_microbatches(
    schedules=USUAL, ranks: int = 4, microbatches=range(1, 33), chunks: int = 2, axes=None
) -> dict[str, dict[int, float]]:
    """The most micro-batches whose activations one rank holds, against the number of them all.

    One counts as the activations of all of a rank's layers: of two stages a rank, each is 1/2.
    """
    sizes = {count: (ranks, count, chunks) for count in microbatches}
    points = _points(schedules, sizes, lambda s: max(s.peak_in_flight) * ranks / s.stages)
    label = "most micro-batches in flight on a rank"
    return _plot(points, {}, f"micro-batches ({ranks} ranks)", label, axes)


def _points(names, sizes, number):
    """{name: {x: number(schedule)}} without the sizes that a schedule refuses; if it refuses all,
    its ValueError."""
    points = {}
    for name in names:
        points[name], refusal = {}, None
        for x, size in sizes.items():
            try:
                schedule = built(name, *size)
            except ValueError as error:
                refusal = error
            else:
                points[name][x] = number(schedule)
        if refusal and not points[name]:
            raise refusal
    return points


def _formulas(names, sizes):
    lines = {name: {x: bubble_formula(name, *size) for x, size in sizes.items()} for name in names}
    return {name: line for name, line in lines.items() if None not in line.values()}


def _plot(points, lines, xlabel, ylabel, axes):
    axes = axes or _new_axes()
    for index, (name, values) in enumerate(points.items()):
        mark, colour = MARKS[index % len(MARKS)], f"C{index}"
        # Earlier marks are larger, so that one right behind another still shows.
        look = {"ms": 3 + 1.2 * (len(points) - index), "mfc": "none", "color": colour}
        axes.plot(values.keys(), values.values(), mark, label=name, **look)
        line = lines.get(name, {})
        axes.plot(line.keys(), line.values(), "-", lw=0.8, color=colour)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    # Outside: inside there is always a curve that runs through it.
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return points


def _new_axes():
    # Here, since it takes half a second and who passes axes has it already.
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7.5, 3.8), layout="constrained")[1]
