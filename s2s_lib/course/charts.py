"""Pictures of what was measured: plain data in, a `Picture` out.

draw_timeline  what each rank did when
draw_bars      bytes by kind, a bar for each rank
draw_buckets   gradients in the order of backward, grouped into buckets
"""

import math

from s2s_lib.draw import FAINT, GREY, PAD, PALETTE, Canvas, Picture, colour, text_width
from s2s_lib.meters.units import human_bytes

# The same kind has the same colour in every picture of the course.
KIND_COLOURS = {
    "weights": PALETTE[0],
    "gradients": PALETTE[1],
    "optimizer": PALETTE[2],
    "activations": PALETTE[3],
    "buffers": PALETTE[6],
    "temporary": GREY,
    "compute": PALETTE[0],
    "communication": PALETTE[1],
    "waiting": GREY,
}
WIDTH = 760


def draw_timeline(rows, unit: str = "ms") -> Picture:
    """What happened when: `rows` is a list of `(label, [(start, end, kind, text), ...])`.

    Compute, communication and waiting have their own colours, other kinds the next free ones.
    Spans of one row that overlap in time are drawn under each other.
    """
    laid_out = [(label, _lanes(spans)) for label, spans in rows]
    kinds = _colours(kind for _, spans in rows for _, _, kind, _ in spans)
    end = max((span[1] for _, spans in rows for span in spans), default=0) or 1
    left = PAD + max([40, *(text_width(label) for label, _ in rows)]) + 14
    scale = (WIDTH - PAD - left) / end
    bottom = PAD + sum(24 * len(lanes) + 10 for _, lanes in laid_out)
    canvas = Canvas(WIDTH, bottom + 62 + PAD / 2)
    _axis(canvas, left, bottom, end, scale, unit)
    y = PAD
    for label, lanes in laid_out:
        canvas.text(PAD, y + 12 * len(lanes), label, anchor="start")
        for lane in lanes:
            for span in lane:
                _span(canvas, left, y, scale, span, kinds)
            y += 24
        y += 10
    canvas.legend(left, bottom + 46, kinds.items())
    return canvas.picture(_spent(rows, unit))


def _lanes(spans):
    """The spans in as few lanes as hold them without overlap; at least one lane."""
    lanes = [[]]
    for span in sorted(spans, key=lambda span: span[:2]):
        free = next((lane for lane in lanes if not lane or lane[-1][1] <= span[0]), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def _span(canvas, left, y, scale, span, kinds):
    start, end, kind, text = span
    width = max(scale * (end - start), 0.5)
    label = text if text_width(text, 11) + 6 <= width else ""
    canvas.rect(left + scale * start, y + 1, width, 22, kinds[kind], "#ffffff", radius=3)
    canvas.text(left + scale * start + width / 2, y + 12, label, 11)


def _axis(canvas, left, bottom, end, scale, unit):
    step = next(s for s in _nice_steps(end) if end / s <= 8)
    for tick in range(int(end / step + 1e-9) + 1):
        x = left + scale * step * tick
        canvas.line(x, PAD - 8, x, bottom)
        canvas.text(x, bottom + 14, f"{step * tick:g}" + (f" {unit}" if tick == 0 else ""), 11)


def _nice_steps(end):
    power = math.floor(math.log10(end)) - 1
    return [factor * 10.0**exponent for exponent in (power, power + 1) for factor in (1, 2, 5)]


def _spent(rows, unit):
    sentences = []
    for label, spans in rows:
        totals = {}
        for start, end, kind, _ in spans:
            totals[kind] = totals.get(kind, 0) + end - start
        said = [f"{kind} {total:.3g} {unit}" for kind, total in totals.items()]
        sentences.append(f"{label}: {', '.join(said) or 'nothing'}.")
    return "Timeline. " + " ".join(sentences)


def draw_bars(rows, what: str = "held") -> Picture:
    """A bar for each rank, cut by kind: `rows` is a list of `(label, {kind: bytes})`.

    `what` happened to the bytes, for the text beside the picture: held, or sent.
    """
    kinds = _colours(kind for _, sizes in rows for kind, size in sizes.items() if size)
    totals = [sum(sizes.values()) for _, sizes in rows]
    left = PAD + max([40, *(text_width(label) for label, _ in rows)]) + 14
    scale = (WIDTH - PAD - 80 - left) / (max(totals, default=0) or 1)
    canvas = Canvas(WIDTH, PAD + 40 * len(rows) + 40)
    for number, ((label, sizes), total) in enumerate(zip(rows, totals, strict=True)):
        x, y = left, PAD + 40 * number
        canvas.text(PAD, y + 15, label, anchor="start")
        for kind in [kind for kind in kinds if sizes.get(kind)]:
            _segment(canvas, x, y, scale * sizes[kind], human_bytes(sizes[kind]), kinds[kind])
            x += scale * sizes[kind]
        canvas.text(x + 10, y + 15, human_bytes(total), anchor="start", bold=True)
    canvas.legend(left, PAD + 40 * len(rows) + 12, kinds.items())
    said = [
        f"{label}: " + ", ".join(f"{kind} {human_bytes(sizes.get(kind, 0))}" for kind in kinds)
        for label, sizes in rows
    ]
    return canvas.picture(f"Bytes {what}. " + ". ".join(said) + ".")


def _segment(canvas, x, y, width, label, fill):
    canvas.rect(x, y, width, 30, fill, "#ffffff", radius=3)
    if text_width(label, 12) + 8 <= width:
        canvas.text(x + width / 2, y + 15, label, 12)


def draw_buckets(buckets) -> Picture:
    """A row for each bucket, as long as its bytes; `buckets` is a list of `[(name, bytes), ...]`.

    In the order in which backward reaches them: the model's last parameters come first.
    """
    totals = [sum(size for _, size in bucket) for bucket in buckets]
    left, right = PAD + 84, PAD + 150
    scale = (WIDTH - left - right) / (max(totals, default=0) or 1)
    canvas = Canvas(WIDTH, PAD + 26 + 44 * len(buckets) + PAD / 2)
    order = "in the order of backward: left to right, then down"
    canvas.text(PAD, PAD, order, 12, "start", FAINT)
    for number, (bucket, total) in enumerate(zip(buckets, totals, strict=True)):
        x, y = left, PAD + 26 + 44 * number
        canvas.text(PAD, y + 15, f"bucket {number}", anchor="start")
        for name, size in bucket:
            _segment(canvas, x, y, scale * size, name, colour(number))
            x += scale * size
        count = f"{len(bucket)} tensors" if len(bucket) != 1 else "1 tensor"
        canvas.text(x + 10, y + 15, f"{human_bytes(total)}, {count}", 12, "start", FAINT)
    said = [
        f"bucket {number} ({human_bytes(total)}): " + ", ".join(name for name, _ in bucket)
        for number, (bucket, total) in enumerate(zip(buckets, totals, strict=True))
    ]
    return canvas.picture("Buckets in the order of backward. " + "; ".join(said) + ".")


def _colours(kinds):
    """A colour for each kind in the order of first appearance, known kinds in their own."""
    found = {}
    for kind in kinds:
        if kind not in found:
            spare = PALETTE[(3 + len(found)) % len(PALETTE)]
            found[kind] = KIND_COLOURS.get(kind, spare)
    return found
