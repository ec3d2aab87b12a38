"""The picture of a schedule: a row for each rank, time to the right, a box for each action.

A box is as long as its action lasts and bears the number of the micro-batch; its colour is the kind
of action. Where a rank runs several stages, the lighter a box the later the stage. In streaming the
number is the token, and the shade the request. What stays white is the bubble.

Where there is no room for a box an action (64 ranks with 512 micro-batches have 65,536), time is
cut into columns instead, and in each the kinds are stacked, as high as their share of its time.
"""

import math
from collections import Counter, defaultdict
from itertools import groupby
from typing import NamedTuple

from s2s_lib.draw import EDGE, FAINT, INK, PAD, PALETTE, Canvas, Picture, text_width
from s2s_lib.strategies.pipeline.actions import KIND_WORDS, KINDS, Schedule
from s2s_lib.strategies.pipeline.simulate import Timetable, simulate

WIDTH, LABEL = 960, 10
KIND_COLOURS = dict(zip(KINDS, PALETTE, strict=False))
# Beyond so many boxes, or below this mean width, there are columns: at most so many in all rows.
MOST_BOXES, NARROWEST, CELLS = 12_000, 1.5, 6_000


class Row(NamedTuple):
    """One rank's actions on one timetable, and where they are drawn: pixels, and pixels a unit."""

    spans: tuple
    start: float
    left: float
    top: float
    height: float
    scale: float


class Box(NamedTuple):
    left: float
    right: float
    top: float
    height: float
    fill: str
    seam: bool = False
    label: str = ""


def draw_schedule(schedule: Schedule) -> Picture:
    """The schedule where a rank's forwards of one micro-batch last 1 together and its backwards 2,
    so that a rank with two stages takes 1/2 for a forward of each; I and W are half of B."""
    each = len(schedule.ranks) / schedule.stages
    back = (each, each) if schedule.has_halves else (2 * each, 0)
    timetable = simulate(schedule, each, *back)
    length = {"F": each, "B": 2 * each, "I": each, "W": each}
    lasts = ", ".join(f"{kind} lasts {length[kind]:.3g}" for kind in _kinds(schedule))
    return _draw([("", timetable)], "", f"; {lasts}")


def draw_timetable(timetable: Timetable, over: Timetable | None = None, unit: str = "") -> Picture:
    """What each rank did when. With `over` each rank has two rows on one scale: the upper one is
    `over`, the simulated timetable, the lower one `timetable`, the measured one.

    `unit` is written beside the times. ValueError if the two are not of the same schedule.
    """
    if over is None:
        return _draw([("", timetable)], unit)
    if over.schedule != timetable.schedule:
        raise ValueError(
            f"{over.schedule!r} cannot be drawn over {timetable.schedule!r}: "
            "give two timetables of one schedule"
        )
    return _draw([("upper rows, simulated: ", over), ("lower rows, measured: ", timetable)], unit)


def _draw(tables, unit, note=""):
    """`tables` is a list of (what it is, timetable): one row each for every rank."""
    schedule = tables[0][1].schedule
    ranks, total = len(schedule.ranks), max(table.total for _, table in tables) or 1
    left, top = PAD + text_width(f"rank {ranks - 1}", 12) + 8, PAD + 20 * len(tables) + 16
    scale, pitch = (WIDTH - PAD - left) / total, _pitch(ranks, len(tables))
    rows, bottom = list(_rows(tables, left, top, pitch, scale)), top + pitch * ranks
    crowded = _crowded(rows)
    tint_of, tints = ((lambda action: 0), [""]) if crowded else _tints(schedule)
    legend = _legend(schedule, tints)
    canvas = Canvas(WIDTH, bottom + 28 + 22 * len(legend) + PAD / 2)
    note += "; heights are shares of the time" if crowded else ""
    if len(tints) > 1 and schedule.feedback:
        note += "; numbers are tokens, shades requests"
    said = [f"{what}{_numbers(table, unit)}{note}" for what, table in tables]
    _title(canvas, [f"{schedule!r}"[1:-1], *said])
    _tracks(canvas, rows, total, pitch)
    _axis(canvas, (left, top, bottom), total, scale, unit)
    period = sum(tables[0][1].busy) / ranks / schedule.microbatches
    if crowded:
        boxes = _columns(rows, total, period)
    else:
        boxes = _boxes(rows, tint_of, len(tints), schedule.feedback or 1)
    _paint(canvas, list(boxes))
    for line, entries in enumerate(legend):
        canvas.legend(left, bottom + 38 + 22 * line, entries)
    return canvas.picture(_told(schedule, said))


def _tracks(canvas, rows, total, pitch):
    """An empty strip for every row, and the name of its rank."""
    for row in rows:
        canvas.rect(row.left, row.top, row.scale * total, row.height, "#ffffff", EDGE, radius=2)
    top, ranks = rows[0].top, 1 + round((rows[-1].top - rows[0].top) // pitch)
    for rank in range(ranks):
        middle, size = top + pitch * (rank + 0.5) - 1, min(12, pitch - 2)
        canvas.text(PAD, middle, f"rank {rank}", size, "start", FAINT)


def _title(canvas, lines):
    for number, line in enumerate(lines):
        size, fill = (12, FAINT) if number else (13, INK)
        room = int((WIDTH - 2 * PAD) / text_width("x", size))
        line = line if len(line) <= room else line[: room - 1] + "…"
        canvas.text(PAD, PAD + 20 * number, line, size, "start", fill, bold=not number)


def _numbers(table, unit):
    total = f"{table.total:.4g} {unit}".strip()
    return f"total {total}, bubble {max(0.0, 100 * table.bubble):.1f} % of total"


def _pitch(ranks, rows):
    """From one rank to the next: pixels."""
    return max(12, min(34, 480 // ranks)) if rows == 1 else max(14, min(48, 720 // ranks))


def _rows(tables, left, top, pitch, scale):
    """A row of each rank and timetable; of two, the measured one is the higher."""
    room = pitch - 2 - pitch // 10
    shares = (1,) if len(tables) == 1 else (0.42, 0.58)
    for rank in range(len(tables[0][1].spans)):
        y = top + pitch * rank
        for (_, table), share in zip(tables, shares, strict=True):
            height = room * share - (len(tables) - 1)
            yield Row(table.spans[rank], table.start, left, y, height, scale)
            y += room * share


def _crowded(rows):
    spans = [span for row in rows for span in row.spans]
    busy = sum(end - start for start, end, _ in spans)
    return len(spans) > MOST_BOXES or rows[0].scale * busy / len(spans) < NARROWEST


def _boxes(rows, tint_of, tints, requests):
    """A box for each action, with a white seam where it is wide enough for one; narrow neighbours
    of one colour are one box."""
    for row in rows:
        last = None
        for start, end, action in row.spans:
            left, right = (_tenth(row.left + row.scale * (t - row.start)) for t in (start, end))
            if left == right:
                continue
            width, label = row.scale * (end - start), str(action.micro // requests)
            fits = text_width(label, LABEL) + 2 <= width and row.height >= LABEL + 2
            fill = _shade(KIND_COLOURS[action.kind], tint_of(action), tints)
            looks = fill, width >= 3, label if fits else ""
            box = Box(left, right, row.top, row.height, *looks)
            if last and not box.seam and last.right == left and last[4:] == looks:
                box = box._replace(left=last.left)
            elif last:
                yield last
            last = box
        if last:
            yield last


def _columns(rows, total, period):
    """Time in columns, and in each the kinds, stacked from below; equal neighbours are one.

    A column lasts a multiple of `period`, so that what repeats looks even.
    """
    scale, most = rows[0].scale, CELLS // len(rows)
    each = period * math.ceil(max(total / most, 4 / scale) / period)
    for row in rows:
        stacks = [_stack(shares, row.height) for shares in _shares(row, total, each)]
        column = 0
        for stack, equal in groupby(stacks):
            left, column = column, column + len(list(equal))
            x = [_tenth(row.left + scale * min(edge * each, total)) for edge in (left, column)]
            for kind, low, high in stack:
                yield Box(*x, row.top + row.height - high, high - low, KIND_COLOURS[kind])


def _shares(row, total, each):
    """For each column, `each` long (the last may be shorter): {kind: its share of the time}."""
    count = math.ceil(total / each - 1e-9)
    shares = [dict.fromkeys(KINDS, 0.0) for _ in range(count)]
    lengths = [1.0] * (count - 1) + [total / each - (count - 1)]
    for start, end, action in row.spans:
        low, high = ((t - row.start) / each for t in (start, end))
        for column in range(int(low), min(int(high), count - 1) + 1):
            inside = min(high, column + 1) - max(low, column)
            shares[column][action.kind] += inside / lengths[column]
    return shares


def _stack(shares, height):
    """(kind, from, to) of the kinds of a column, in half pixels from its bottom."""
    stack, reached = [], 0.0
    for kind, share in shares.items():
        low, reached = reached, reached + share * height
        edges = [min(round(2 * _tenth(y)) / 2, height) for y in (low, reached)]
        if edges[0] < edges[1]:
            stack.append((kind, *edges))
    return stack


def _paint(canvas, boxes):
    """One path for all boxes of a colour, which takes a fifth of the bytes."""
    paths = defaultdict(list)
    for left, right, top, height, fill, seam, _ in boxes:
        x, y, wide, high = (f"{_tenth(v):g}" for v in (left, top, right - left, height))
        paths[fill, seam].append(f"M{x} {y}h{wide}v{high}h-{wide}z")
    for (fill, seam), path in paths.items():
        canvas.add("path", d="".join(path), fill=fill, stroke="#ffffff" if seam else "none")
    for box in boxes:
        middle = (box.left + box.right) / 2
        canvas.text(middle, box.top + box.height / 2, box.label, LABEL)


def _axis(canvas, frame, total, scale, unit):
    left, top, bottom = frame
    power = 10.0 ** math.floor(math.log10(total) - 1)
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if total / power <= 12 * factor)
    for tick in range(int(total / step + 1e-9) + 1):
        x = left + scale * step * tick
        canvas.line(x, top, x, bottom + 2)
        canvas.text(x, bottom + 14, f"{step * tick:g} {unit if not tick else ''}".strip(), 11)


def _tints(schedule):
    """Which shade an action has, from 0, and what each is: the request in streaming, else which of
    its rank's stages it is of."""
    if schedule.feedback:
        requests = min(schedule.feedback, schedule.microbatches)
        return (lambda action: action.micro % requests), [f"request {r}" for r in range(requests)]
    seen, chunk_of = Counter(), []
    for rank in schedule.rank_of:
        chunk_of.append(seen[rank])
        seen[rank] += 1
    chunks = range(1 + max(chunk_of))
    names = [_range([s for s, chunk in enumerate(chunk_of) if chunk == c]) for c in chunks]
    return (lambda action: chunk_of[action.stage]), names


def _kinds(schedule):
    return [k for k in KINDS if any(a.kind == k for line in schedule.ranks for a in line)]


def _legend(schedule, tints):
    """Lines of (word, colour): the kinds, and where there are several shades, what each is."""
    kinds = [(f"{kind} {KIND_WORDS[kind]}", KIND_COLOURS[kind]) for kind in _kinds(schedule)]
    count = len(tints)
    shown = range(count) if count <= 5 else (0, count - 1)
    return [kinds, [(tints[n], _shade(FAINT, n, count)) for n in shown]] if count > 1 else [kinds]


def _range(stages):
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {stages[0]} to {stages[-1]}"


def _shade(fill, chunk, chunks):
    """The later the stage, the lighter: up to half way to white."""
    if not chunk:
        return fill
    share = 0.5 * chunk / (chunks - 1)
    parts = [int(fill[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def _told(schedule, said):
    """For those who do not see it: what the ranks do first, and the bubble."""
    words = [
        f"rank {rank}: {', '.join(_words(schedule, line[:12]))}{', ...' if line[12:] else ''}"
        for rank, line in enumerate(schedule.ranks[:8])
    ]
    rest = [f"{len(schedule.ranks) - 8} more ranks"] if schedule.ranks[8:] else []
    return f"{repr(schedule)[1:-1]}; {'; '.join(said)}. In order: {'; '.join(words + rest)}."


def _words(schedule, line):
    one = schedule.rank_of == tuple(range(len(schedule.ranks)))
    return [f"{a.kind}{a.micro}" if one else str(a) for a in line]


def _tenth(number):
    """To one decimal; twice rounded, so that a last digit of noise cannot show."""
    return round(round(number, 6), 1)
