"""Pipeline schedules under your hands: choose one, drag a slider, and the picture is drawn again.

`explore()` shows the controls where a kernel runs, and elsewhere (on a page, in a notebook that has
not been run) the picture as an image. `scene(...)` is what it draws, without the controls.
"""

import html
import inspect

import ipywidgets as widgets

from s2s_lib.course.bubbles import SCHEDULES, built, has_chunks, timed
from s2s_lib.draw import Picture
from s2s_lib.strategies.pipeline.picture import draw_timetable

LOOK = {"style": {"description_width": "130px"}, "layout": {"width": "350px"}}


def scene(
    schedule: str = "1F1B",
    ranks: int = 4,
    microbatches: int = 8,
    chunks: int = 2,
    backward: float = 2,
    weight_share: float = 0.5,
    transfer: float = 0,
) -> tuple[Picture, str]:
    """The picture of a schedule by its name in SCHEDULES, and a line with its numbers.

    `chunks` counts only where the schedule has them; for the times see `timed` (bubbles.py).
    ValueError if there is no such schedule.
    """
    plan = built(schedule, ranks, microbatches, chunks)
    timetable = timed(plan, backward, weight_share, transfer)
    return draw_timetable(timetable), _numbers(timetable)


def _has_halves(name):
    return any(a.kind in "IW" for line in SCHEDULES[name](2, 4).ranks for a in line)


def _numbers(timetable):
    schedule, peaks = timetable.schedule, timetable.peak_in_flight
    stages = schedule.stages // len(schedule.ranks)
    shown = ", ".join(map(str, peaks[:16])) + (", ..." if peaks[16:] else "")
    size = f" stages of 1/{stages} of a rank's layers" if stages > 1 else ""
    return (
        f"total {timetable.total:.4g} (1 is a rank's forward of one micro-batch); "
        f"bubble {_percent(timetable.bubble)} of the total time, "
        f"{_percent(timetable.bubble_over_useful)} over the useful time; "
        f"in flight at most, rank by rank: {shown}{size}"
    )


def _percent(share):
    # What rounding leaves of no bubble may be below 0.
    return f"{max(0.0, 100 * share):.1f} %"


def explore(**chosen) -> "Explorer":
    """A picture of a schedule with controls; `chosen` are their first values, as in `scene`."""
    return Explorer(**chosen)


class Explorer(widgets.VBox):
    """Controls above a picture; `controls[name].value` is what `scene` gets as `name`."""

    def __init__(self, **chosen):
        arguments = inspect.signature(scene).bind(**chosen)
        arguments.apply_defaults()
        self.controls = _controls(arguments.arguments)
        self.view = widgets.HTML(layout={"width": "100%"})
        wrapped = widgets.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        super().__init__([wrapped, self.view])
        for control in self.controls.values():
            control.observe(self._draw_again, names="value")
        self._draw_again()

    def _draw_again(self, change=None):
        now = {name: control.value for name, control in self.controls.items()}
        for name, there in [("chunks", has_chunks), ("weight_share", _has_halves)]:
            self.controls[name].layout.display = None if there(now["schedule"]) else "none"
        try:
            picture, numbers = scene(**now)
            # JupyterLab shrinks images to a narrow window, but not those in a widget.
            shown = picture._repr_html_().replace("<img", '<img style="max-width: 100%"', 1)
            self.said = picture.alt
        except ValueError as refusal:
            self.said, shown, numbers = str(refusal), "", str(refusal)
        self.view.value = f"{shown}<p>{html.escape(numbers)}</p>"

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        # For pages and notebooks where the widget does not live.
        hint = "Run this cell to get the controls."
        return bundle | {
            "text/html": f"{self.view.value}<p><em>{hint}</em></p>",
            "text/plain": f"Explorer: {self.said}",
        }


def _controls(chosen):
    """A control for each argument of `scene`; a slider reaches at least to its first value."""

    def slider(kind, name, low, high, step, text):
        first = chosen[name]
        high = max(high, first)
        return kind(first, min=low, max=high, step=step, description=text, **LOOK)

    whole, share, names = widgets.IntSlider, widgets.FloatSlider, list(SCHEDULES)
    return {
        "schedule": widgets.Dropdown(
            options=names, value=chosen["schedule"], description="schedule", **LOOK
        ),
        "ranks": slider(whole, "ranks", 1, 16, 1, "ranks"),
        "microbatches": slider(whole, "microbatches", 1, 64, 1, "micro-batches"),
        "chunks": slider(whole, "chunks", 1, 4, 1, "stages a rank"),
        "backward": slider(share, "backward", 0.5, 4, 0.25, "B lasts (F lasts 1)"),
        "weight_share": slider(share, "weight_share", 0, 1, 0.05, "share of W in B"),
        "transfer": slider(share, "transfer", 0, 2, 0.05, "a message lasts"),
    }
