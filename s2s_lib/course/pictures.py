"""Pictures of ranks: who holds what, who sends what to whom. Plain data in, a `Picture` out.

draw_ranks   boxes of each rank, before and after a collective
draw_steps   boxes of each rank, after every step of one
draw_ring    ranks on a circle, and what each sends
draw_rounds  messages round by round
draw_tree    the binomial broadcast, as rounds
"""

import math

from s2s_lib.draw import FAINT, PAD, PALETTE, Canvas, Picture, colour, text_width


def draw_ranks(holdings, after=None, operation="") -> Picture:
    """A row of boxes for each rank; with `after`, both states and an arrow named `operation`.

    `holdings[rank]` is a list of `(label, chunk)`: the chunk's number chooses the colour, and None
    draws an empty place.
    """
    states = [holdings] if after is None else [holdings, after]
    labels = [label for state in states for row in state for label, _ in row]
    box = max([46, *(text_width(label) + 18 for label in labels)])
    widths = [(box + 6) * max((len(row) for row in state), default=0) - 6 for state in states]
    left, gap = PAD + 60, max(90, text_width(operation) + 50)
    height = 2 * PAD + 42 * len(holdings) - 8
    canvas = Canvas(left + sum(widths) + gap * (len(states) - 1) + PAD, height)
    for rank in range(len(holdings)):
        canvas.text(PAD, PAD + 42 * rank + 17, f"rank {rank}", anchor="start", fill=FAINT)
    for state, width in zip(states, widths, strict=True):
        _rows_of_boxes(canvas, left, box, state)
        left += width + gap
    if after is not None:
        _operation_arrow(canvas, PAD + 60 + widths[0] + gap / 2, height / 2, gap, operation)
    return canvas.picture(_who_holds(states, operation))


def _rows_of_boxes(canvas, left, box, state, top=PAD):
    for rank, row in enumerate(state):
        for place, (label, chunk) in enumerate(row):
            x, y = left + place * (box + 6), top + 42 * rank
            canvas.box(x, y, box, 34, label, colour(chunk))


def _operation_arrow(canvas, middle, y, gap, operation):
    canvas.arrow(middle - gap / 2 + 18, y, middle + gap / 2 - 18, y)
    canvas.text(middle, y - 14, operation, bold=True)


def _who_holds(states, operation):
    return f" After {operation or 'that'}: ".join(_held(state) + "." for state in states)


def _held(state):
    held = [", ".join(label for label, _ in row if label) or "nothing" for row in state]
    return "; ".join(f"rank {rank} holds {what}" for rank, what in enumerate(held))


def draw_steps(states) -> Picture:
    """The boxes of each rank at the start and after every step, a column for each.

    `states[step][rank]` is a list of `(label, chunk)`, as in `draw_ranks`.
    """
    ranks, titles = len(states[0]), ["start", *(f"step {i}" for i in range(1, len(states)))]
    labels = [label for state in states for row in state for label, _ in row]
    box = max([44, *(text_width(label) + 8 for label in labels)])
    widths = [max(54, (box + 6) * max(len(row) for row in state) - 6) for state in states]
    left, top = PAD + 68, PAD + 26
    canvas = Canvas(left + sum(widths) + 28 * (len(states) - 1) + PAD, top + 42 * ranks - 8 + PAD)
    for rank in range(ranks):
        canvas.text(PAD, top + 42 * rank + 17, f"rank {rank}", anchor="start", fill=FAINT)
    for title, state, width in zip(titles, states, widths, strict=True):
        canvas.text(left, PAD + 4, title, anchor="start", bold=True)
        _rows_of_boxes(canvas, left, box, state, top)
        left += width + 28
    said = [f"{title}: {_held(state)}." for title, state in zip(titles, states, strict=True)]
    return canvas.picture("What each rank holds. " + " ".join(said))


def draw_ring(ranks: int, transfers) -> Picture:
    """Ranks on a circle, clockwise from the top, and an arrow for each transfer.

    A transfer is `(source, to, label)`, or `(source, to, label, chunk)` to colour the label.
    """
    radius = round(70 / math.sin(math.pi / max(ranks, 2)))
    widest = max((text_width(transfer[2], 12) for transfer in transfers), default=0)
    middle = radius + 28 + PAD + max(16, widest / 2 + 8)
    canvas = Canvas(2 * middle, 2 * middle)
    angles = [2 * math.pi * rank / ranks for rank in range(ranks)]
    at = [(middle + radius * math.sin(a), middle - radius * math.cos(a)) for a in angles]
    for source, to, label, *chunk in transfers:
        start, end = _shortened(at[source], at[to], 35)
        _label_beside(canvas, start, end, canvas.arrow(*start, *end, bend=0.2), label, *chunk)
    for rank, (x, y) in enumerate(at):
        canvas.circle(x, y, 28, "#ffffff")
        canvas.text(x, y, f"rank {rank}", 12, bold=True)
    said = [f"rank {source} sends {label} to rank {to}" for source, to, label, *_ in transfers]
    return canvas.picture(f"A ring of {ranks} ranks: " + "; ".join(said or ["no messages"]) + ".")


def _label_beside(canvas, start, end, middle, label, chunk=None):
    """A small box that touches the bowed arrow from outside, at its middle."""
    out_x, out_y = (middle[i] - (start[i] + end[i]) / 2 for i in (0, 1))
    away, width = math.hypot(out_x, out_y) or 1, text_width(label, 12) + 14
    # Half the box, seen in that direction, and a little air.
    push = (abs(out_x) * width / 2 + abs(out_y) * 11) / away + 4
    x, y = middle[0] + push * out_x / away, middle[1] + push * out_y / away
    canvas.box(x - width / 2, y - 11, width, 22, label, colour(chunk), 12)


def _shortened(start, end, by):
    """The line from start to end without its first and last `by` pixels."""
    (x1, y1), (x2, y2) = start, end
    share = by / max(math.hypot(x2 - x1, y2 - y1), 2 * by)
    step_x, step_y = share * (x2 - x1), share * (y2 - y1)
    return (x1 + step_x, y1 + step_y), (x2 - step_x, y2 - step_y)


def draw_tree(ranks: int, root: int = 0) -> Picture:
    """The binomial broadcast: in every round, each rank that has the data passes it on."""
    return draw_rounds(ranks, tree_rounds(ranks, root), holders=[root], first=root)


def tree_rounds(ranks: int, root: int = 0) -> list[list[tuple[int, int]]]:
    """The (source, to) of each round of a binomial broadcast: the longest way goes first."""
    rounds, distance = [], 1 << max(ranks - 1, 0).bit_length()
    while distance > 1:
        starts, distance = range(0, ranks, distance), distance // 2
        hops = [(start, start + distance) for start in starts if start + distance < ranks]
        rounds.append([((a + root) % ranks, (b + root) % ranks) for a, b in hops])
    return rounds


def draw_rounds(ranks: int, rounds, holders=None, first: int = 0) -> Picture:
    """A column for each rank (rank `first` leftmost), a row for each round of messages.

    `rounds` is a list of lists of `(source, to)`. A dot is filled once the rank has the data:
    `holders` have it at the start (all, if not given), the others when they receive it.
    """
    have = set(range(ranks) if holders is None else holders)
    column = {(first + i) % ranks: PAD + 100 + 76 * i for i in range(ranks)}
    canvas = Canvas(PAD + 100 + 76 * (ranks - 1) + 38 + PAD, PAD + 60 + 58 * len(rounds) + PAD)
    for rank, x in column.items():
        canvas.text(x, PAD + 6, f"rank {rank}", fill=FAINT)
        canvas.line(x, PAD + 40, x, PAD + 40 + 58 * len(rounds))
    for number, hops in enumerate([[], *rounds]):
        y = PAD + 40 + 58 * number
        canvas.text(PAD, y, f"round {number}" if number else "start", anchor="start", fill=FAINT)
        for source, to in hops:
            (x1, y1), (x2, y2) = _shortened((column[source], y - 58), (column[to], y), 14)
            canvas.arrow(x1, y1, x2, y2)
            have.add(to)
        for rank, x in column.items():
            canvas.circle(x, y, 9, PALETTE[0] if rank in have else "#ffffff")
    said = [", ".join(f"{source} to {to}" for source, to in hops) for hops in rounds]
    sentences = [f"Round {number}: {hops}." for number, hops in enumerate(said, 1)]
    return canvas.picture(f"{ranks} ranks, {len(rounds)} rounds. " + " ".join(sentences))
