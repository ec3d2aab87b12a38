"""Pictures of hybrid shard: plain data in, a `Picture` out.

draw_nodes   which quarters of the model the ranks of each node hold, and what crosses between nodes
draw_curves  numbers step by step, a line for each name
"""

from s2s_lib.course.charts import WIDTH
from s2s_lib.draw import EDGE, FAINT, PAD, Canvas, Picture, colour, text_width

BOX, ROW = 30, 38


def draw_nodes(layouts, parts: int = 4) -> Picture:
    """A card for each node, in it a row for each rank: the model in `parts` boxes, full or empty.

    `layouts` is a list of `(title, nodes, between)`: `nodes[node][rank]` lists the parts that a
    rank holds, and `between` says what crosses from node to node.
    """
    gap = max([90, *(text_width(between, 12) + 24 for _, _, between in layouts)])
    card = 76 + parts * (BOX + 3) + 12
    heights = [30 + ROW * max(len(node) for node in nodes) + 34 for _, nodes, _ in layouts]
    columns = max(len(nodes) for _, nodes, _ in layouts)
    canvas = Canvas(2 * PAD + columns * card + (columns - 1) * gap, PAD + sum(heights))
    top = PAD
    for (title, nodes, between), height in zip(layouts, heights, strict=True):
        canvas.text(PAD, top + 4, title, anchor="start", bold=True)
        first = 0
        for number, node in enumerate(nodes):
            left = PAD + number * (card + gap)
            _node(canvas, left, top + 18, card, first, node, parts)
            if number:
                _slow_link(canvas, left - gap, top + 18 + ROW * len(node) / 2, gap, between)
            first += len(node)
        top += height
    return canvas.picture(" ".join(_said(*layout) for layout in layouts))


def _node(canvas, left, top, width, first, node, parts):
    canvas.rect(left, top, width, ROW * len(node) + 8, "#ffffff", EDGE, radius=8)
    for rank, held in enumerate(node):
        y = top + ROW * rank + 8
        canvas.text(left + 12, y + BOX / 2, f"rank {first + rank}", 12, "start", FAINT)
        for part in range(parts):
            label, fill = (str(part), part) if part in held else ("", None)
            x = left + 76 + part * (BOX + 3)
            canvas.box(x, y, BOX, BOX, label, colour(fill), 12)


def _slow_link(canvas, left, y, gap, between):
    canvas.line(left + 6, y + 8, left + gap - 6, y + 8, FAINT, 1.5)
    canvas.text(left + gap / 2, y - 6, between, 12, fill=FAINT)


def _said(title, nodes, between):
    first, said = 0, []
    for number, node in enumerate(nodes):
        ranks = [
            f"rank {first + rank} holds {', '.join(map(str, held))}"
            for rank, held in enumerate(node)
        ]
        said.append(f"node {number}: {'; '.join(ranks)}")
        first += len(node)
    return f"{title}. {'. '.join(said)}. Between nodes: {between}."


def draw_curves(curves, what: str, height: float = 240) -> Picture:
    """A line for each name over steps 1, 2, ...: `curves` is `{name: [number, ...]}`."""
    steps = max(len(values) for values in curves.values())
    highest = max(max(values) for values in curves.values()) or 1
    left, right, top, bottom = PAD + 16, WIDTH - PAD, PAD + 24, height - 56
    canvas = Canvas(WIDTH, height)
    canvas.text(PAD, PAD - 2, what, 12, "start", FAINT)
    canvas.line(left, bottom, right, bottom, FAINT)
    across = (right - left) / steps
    for step in range(4, steps + 1, 4):
        canvas.line(left + across * step, top, left + across * step, bottom)
        canvas.text(left + across * step, bottom + 14, str(step), 11)
    canvas.text(left, bottom + 14, "step", 11)
    for index, values in enumerate(curves.values()):
        points = [
            (left + across * step, bottom - (bottom - top) * value / highest)
            for step, value in enumerate(values, start=1)
        ]
        for (x1, y1), (x2, y2) in zip(points, points[1:], strict=False):
            canvas.line(x1, y1, x2, y2, colour(index), 3)
    canvas.legend(left, height - 20, [(name, colour(i)) for i, name in enumerate(curves)])
    said = [f"{name}: at most {max(values):.3g}" for name, values in curves.items()]
    return canvas.picture(f"{what} over {steps} steps. {'. '.join(said)}.")
