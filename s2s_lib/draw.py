"""A small canvas for pictures that are the same, byte for byte, on every machine.

Lessons are tests: a picture in a stored output is compared with the one drawn again. So every
number is rounded to one decimal, nothing is measured with a font, and no date or random id enters.

A picture shows itself as an image with a text for those who do not see it. Inside an image, colours
of the page do not apply; so it brings its own light card, which reads on a light and a dark page.
"""

import base64
import html
from pathlib import Path

INK, FAINT, CARD, EDGE = "#20242c", "#667080", "#f8f9fb", "#d3d8e0"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"

# Paul Tol's "light" scheme: told apart by colour-blind readers, and dark text reads on each.
PALETTE = (
    "#77aadd",
    "#ee8866",
    "#eedd88",
    "#44bb99",
    "#ffaabb",
    "#99ddff",
    "#bbcc33",
    "#bbaadd",
)
GREY = "#dddddd"
PAD = 24


def colour(index: int | None) -> str:
    """The colour of chunk `index` (they repeat after eight); white for None, an empty place."""
    return "#ffffff" if index is None else PALETTE[index % len(PALETTE)]


def text_width(text: str, size: float = 13) -> float:
    """Room for `text` in pixels, generous for any sans-serif font."""
    return 0.6 * size * len(text)


class Picture:
    """An SVG and the sentence that says what is in it; the last line of a cell shows it."""

    def __init__(self, svg: str, alt: str):
        self.svg = svg
        self.alt = alt

    def _repr_html_(self):
        # Not image/svg+xml: a notebook that is not trusted yet shows only images.
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{html.escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'

    def __repr__(self):
        return f"Picture: {self.alt}"

    def save(self, path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


class Canvas:
    """Collects shapes on a card of `width` x `height` pixels; y grows downwards."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.shapes = []
        self.rect(0.5, 0.5, width - 1, height - 1, CARD, EDGE, radius=12)

    def add(self, name, content="", **attributes):
        written = "".join(f' {k.replace("_", "-")}="{_value(v)}"' for k, v in attributes.items())
        self.shapes.append(f"<{name}{written}>{content}</{name}>")

    def rect(self, x, y, width, height, fill, stroke="none", radius=4, dashed=False):
        dash = {"stroke_dasharray": "4 3"} if dashed else {}
        place = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
        self.add("rect", **place, fill=fill, stroke=stroke, **dash)

    def circle(self, x, y, radius, fill, stroke=FAINT):
        self.add("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke)

    def text(self, x, y, text, size=13, anchor="middle", fill=INK, bold=False):
        """`y` is the middle of the line."""
        if not text:
            return
        weight = {"font_weight": 600} if bold else {}
        place = {"x": x, "y": y + 0.35 * size, "font_size": size, "text_anchor": anchor}
        self.add("text", html.escape(text), **place, fill=fill, **weight)

    def box(self, x, y, width, height, label, fill, size=13):
        """A filled box with its label in the middle; a white one is an empty place."""
        empty = fill == colour(None)
        self.rect(x, y, width, height, fill, EDGE if empty else "none", dashed=empty)
        self.text(x + width / 2, y + height / 2, label, size)

    def line(self, x1, y1, x2, y2, stroke=EDGE, width=1):
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width)

    def arrow(self, x1, y1, x2, y2, bend=0, stroke=FAINT):
        """From 1 to 2, bowed to its left by `bend` times its length; returns its middle point."""
        mid_x, mid_y = (x1 + x2) / 2 + bend * (y2 - y1), (y1 + y2) / 2 - bend * (x2 - x1)
        # The control point of a quadratic curve lies twice as far out as its middle.
        control_x, control_y = 2 * mid_x - (x1 + x2) / 2, 2 * mid_y - (y1 + y2) / 2
        points = [_value(float(v)) for v in (x1, y1, control_x, control_y, x2, y2)]
        path = "M{} {} Q{} {} {} {}".format(*points)
        self.add("path", d=path, fill="none", stroke=stroke, stroke_width=1.5, marker_end=HEAD)
        return mid_x, mid_y

    def legend(self, x, y, entries):
        """Small squares with words, in one line from `x`; entries are (word, fill)."""
        for word, fill in entries:
            self.rect(x, y - 6, 12, 12, fill, radius=3)
            self.text(x + 18, y, word, 12, "start", FAINT)
            x += 18 + text_width(word, 12) + 16

    def picture(self, alt: str) -> Picture:
        size = f'width="{_value(self.width)}" height="{_value(self.height)}"'
        view = f'viewBox="0 0 {_value(self.width)} {_value(self.height)}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family="{FONT}">'
        return Picture("\n".join([start, ARROW_HEAD, *self.shapes, "</svg>"]), alt)


HEAD = "url(#head)"
ARROW_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"'
    f' orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>'
)


def _value(value):
    # Twice rounded: sines differ in their last digit between machines, and 0.05 must not.
    return f"{round(value, 6) + 0.0:.1f}".removesuffix(".0") if isinstance(value, float) else value
