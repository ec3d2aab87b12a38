"""A picture of a schedule shows the timetable that it was given, and stays on its card.

Boxes are read back from the SVG's paths: their lengths and places are the actions' times, the
white between them is the bubble that the title names. A label in a box too small, a row that is
shifted, a colour of another kind, a picture of megabytes: each fails here.
"""

import functools
import math
import re
import xml.etree.ElementTree as xml

import pytest
import torch
from processes import printed_by

from s2s_lib import draw, split
from s2s_lib.course import bubbles
from s2s_lib.strategies.pipeline import picture as pictures
from s2s_lib.strategies.pipeline import schedule as schedules
from s2s_lib.strategies.pipeline.actions import Schedule
from s2s_lib.strategies.pipeline.simulate import Timetable, simulate


def late(timetable, by=100.0, slower=1.25):
    """What a measurement might give: another start, other durations."""
    spans = [[(by + slower * a, by + slower * b, x) for a, b, x in r] for r in timetable.spans]
    return Timetable(timetable.schedule, tuple(map(tuple, spans)))


ONE = simulate(schedules.one_f_one_b(4, 8), 0.01, 0.02)
UNEVEN = simulate(schedules.gpipe(3, 5), [1, 2, 0.3], [2, 0.7, 3], 0.1, transfer=0.4)
TABLES = {
    "1F1B": (ONE,),
    "uneven": (UNEVEN, None, "ms"),
    "measured": (late(ONE), ONE, "s"),
    "measured, 20 ranks": (late(simulate(schedules.zb_h1(20, 30))),),
    "one action": (simulate(schedules.forward_only(1, 1)),),
    "no W": (simulate(schedules.zb_h1(3, 4), 1, 2, 0),),
    "64 x 512": (simulate(schedules.one_f_one_b(64, 512)),),
    "8 x 200, measured": (late(simulate(schedules.zbv(8, 200))), simulate(schedules.zbv(8, 200))),
    "8 chunks": (simulate(schedules.interleaved(64, 64, 8), transfer=0.3),),
    "long name": (simulate(Schedule("x" * 200, schedules.gpipe(2, 2).ranks)),),
}
PLANS = {
    name: build(*size)
    for name, build in schedules.BUILDERS.items()
    for size in [(4, 8) if name != "dualpipev" else (2, 8)]
}


@functools.cache
def drawn(name):
    if name in PLANS:
        return pictures.draw_schedule(PLANS[name])
    return pictures.draw_timetable(*TABLES[name])


def shapes(picture):
    return [(e.tag.split("}")[1], e.attrib, e.text) for e in xml.fromstring(picture.svg).iter()]


def words(picture):
    return [text for tag, _, text in shapes(picture) if tag == "text"]


def boxes(picture):
    """(left, top, width, height, colour) of every box, in reading order."""
    found = []
    for tag, given, _ in shapes(picture):
        if tag == "path" and given["d"].endswith("z") and given["fill"] != draw.FAINT:
            for x, y, wide, high, back in re.findall(
                r"M(\S+) (\S+?)h([\d.]+)v([\d.]+)h-([\d.]+)z", given["d"]
            ):
                assert wide == back
                found.append((float(x), float(y), float(wide), float(high), given["fill"]))
    return sorted(found, key=lambda box: (box[1], box[0]))


@pytest.mark.parametrize("name", [*TABLES, *PLANS])
def test_every_shape_and_word_is_on_the_card(name):
    picture = drawn(name)
    root = xml.fromstring(picture.svg)
    width, height = float(root.get("width")), float(root.get("height"))
    assert boxes(picture)
    for x, y, wide, high, _ in boxes(picture):
        assert draw.PAD < x and x + wide <= width - draw.PAD + 0.11
        assert draw.PAD < y and y + high <= height - draw.PAD and wide > 0 and high > 0
    lines = [given for tag, given, _ in shapes(picture) if tag == "line"]
    assert all(draw.PAD < float(line["x1"]) <= width - draw.PAD + 0.11 for line in lines)
    for tag, given, text in shapes(picture):
        if tag == "text":
            room = draw.text_width(text, float(given["font-size"]))
            left = float(given["x"]) - {"start": 0, "middle": room / 2}[given["text-anchor"]]
            assert 0 <= left and left + room <= width, text
            assert draw.PAD / 2 < float(given["y"]) < height


def test_every_picture_is_the_same_in_another_process():
    program = (
        "import sys; sys.path.insert(0, 'tests'); import test_pipeline_pictures as t;"
        "print([t.drawn(name)._repr_html_() for name in [*t.TABLES, *t.PLANS]])"
    )
    assert printed_by(program) == repr([drawn(name)._repr_html_() for name in [*TABLES, *PLANS]])


def expected(timetable, total):
    """Where the boxes of one timetable should be from left to right: shares of the total."""
    start = timetable.start
    return [
        [((a - start) / total, (b - start) / total, pictures.KIND_COLOURS[x.kind]) for a, b, x in r]
        for r in timetable.spans
    ]


@pytest.mark.parametrize("name", ["1F1B", "uneven", "measured"])
def test_a_box_lies_where_its_action_lay_and_is_as_long(name):
    timetable, over, *_ = *TABLES[name], None
    tables = [timetable] if over is None else [over, timetable]
    total = max(table.total for table in tables)
    rows = zip(*(expected(table, total) for table in tables), strict=True)
    wanted = [box for rank in rows for row in rank for box in row]
    found = boxes(drawn(name))
    left, right = found[0][0], max(box[0] + box[2] for box in found)
    if over is None:
        assert left == min(box[0] for box in found)
    assert len(found) == len(wanted)
    for (x, _, wide, _, fill), (start, end, colour) in zip(found, wanted, strict=True):
        assert x == pytest.approx(left + start * (right - left), abs=0.2)
        assert wide == pytest.approx((end - start) * (right - left), abs=0.2)
        assert fill == colour


@pytest.mark.parametrize("name", ["1F1B", "64 x 512", "8 x 200, measured"])
def test_what_stays_white_is_the_bubble(name):
    timetable, over, *_ = *TABLES[name], None
    picture = drawn(name)
    tracks = [g for tag, g, _ in shapes(picture) if tag == "rect" and g["fill"] == "#ffffff"]
    white = 1 - sum(wide * high for _, _, wide, high, _ in boxes(picture)) / sum(
        float(g["width"]) * float(g["height"]) for g in tracks
    )
    # On one scale the shorter of two ends earlier: white as well, and the upper rows are lower.
    if over is None:
        assert white == pytest.approx(timetable.bubble, abs=0.01)
    else:
        share = over.total / timetable.total * (1 - over.bubble)
        assert 1 - white == pytest.approx((0.42 * share + 0.58 * (1 - timetable.bubble)), abs=0.02)


def test_the_kinds_of_a_column_are_as_high_as_their_share_of_its_time():
    # Rank 0 of 2: F from 0 to 2, B from 5 to 9; the last of the columns of 2 is half as long.
    spans = simulate(schedules.gpipe(2, 2)).spans[0]
    shares = pictures._shares(pictures.Row(spans, 0, 0, 0, 10, 1), total=9, each=2)
    assert [(s["F"], s["B"]) for s in shares] == [(1, 0), (0, 0), (0, 0.5), (0, 1), (0, 1)]
    assert pictures._stack({"F": 0.25, "B": 0.5}, 10) == [("F", 0, 2.5), ("B", 2.5, 7.5)]


def test_only_narrow_boxes_of_one_colour_become_one():
    times = [(0, 10), (10, 10.02), (10.02, 10.04), (10.04, 10.06), (10.06, 12), (12, 13)]
    schedule = schedules.gpipe(1, 3)
    spans = [(a, b, x) for (a, b), x in zip(times, schedule.ranks[0], strict=True)]
    found = boxes(pictures.draw_timetable(Timetable(schedule, (tuple(spans),))))
    forward, backward = pictures.KIND_COLOURS["F"], pictures.KIND_COLOURS["B"]
    assert [fill for *_, fill in found] == [forward, forward, backward, backward, backward]
    assert found[1][2] == pytest.approx(2 * found[2][2], abs=0.2)


def test_the_title_says_total_and_bubble_and_how_long_the_actions_of_a_schedule_last():
    assert words(drawn("one_f_one_b"))[:2] == [
        "1F1B: 4 stages, 8 micro-batches",
        "total 33, bubble 27.3 % of total; F lasts 1, B lasts 2",
    ]
    assert words(drawn("zb_h1"))[1].endswith("F lasts 1, I lasts 1, W lasts 1")
    assert words(drawn("dualpipev"))[1].endswith("F lasts 0.5, B lasts 1, I lasts 0.5, W lasts 0.5")
    assert words(drawn("forward_only"))[1] == "total 11, bubble 27.3 % of total; F lasts 1"
    assert words(drawn("measured"))[1:3] == [
        "upper rows, simulated: total 0.33 s, bubble 27.3 % of total",
        "lower rows, measured: total 0.4125 s, bubble 27.3 % of total",
    ]
    assert "0 s" in words(drawn("measured")) and "heights are shares" in words(drawn("64 x 512"))[1]
    assert words(drawn("one action"))[1] == "total 1, bubble 0.0 % of total"
    assert len(words(drawn("long name"))[0]) < 120


def test_schedules_of_one_model_are_drawn_in_one_unit():
    """A rank's forward of one micro-batch lasts 1, in however many stages it has them."""
    assert words(drawn("interleaved"))[1] == (
        "total 28.5, bubble 15.8 % of total; F lasts 0.5, B lasts 1"
    )
    for name in ("1F1B", "ZB-H2", "ZBV", "looped breadth-first", "interleaved 1F1B"):
        plan = bubbles.built(name, 4, 8)
        said = words(pictures.draw_schedule(plan))[1]
        assert said.startswith(f"total {bubbles.timed(plan).total:.4g}, bubble")
        assert f"bubble {100 * simulate(plan).bubble:.1f} %" in said


def test_the_table_of_stages_says_of_what_a_share_is():
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    for by, head in {"params": "share", "flops": "share of Mflop", "time": "share of ms"}.items():
        said = str(split(model, 2, by=by, example=torch.ones(1, 3))).splitlines()[0]
        assert head in re.split("  +", said)


def test_streaming_numbers_the_tokens_and_shades_the_requests():
    plan = schedules.streaming(2, requests=3, tokens=4)
    picture = pictures.draw_schedule(plan)
    assert {"request 0", "request 1", "request 2"} <= set(words(picture))
    assert words(picture)[1].endswith("F lasts 1; numbers are tokens, shades requests")
    labels = [
        text
        for tag, g, text in shapes(picture)
        if tag == "text" and g["font-size"] == str(pictures.LABEL)
    ]
    assert labels == 2 * [str(token) for token in range(4) for _ in range(3)]
    fills = [box[4] for box in boxes(picture)]
    assert len(set(fills)) == 3 and fills == 2 * 4 * fills[:3]
    alone = pictures.draw_schedule(schedules.streaming(2, requests=1, tokens=4))
    assert len({box[4] for box in boxes(alone)}) == 1 and "request" not in " ".join(words(alone))


def test_a_schedule_and_a_timetable_save_the_picture_they_show(tmp_path):
    plan = PLANS["zb_h1"]
    plan.save(tmp_path / "plan.svg")
    ONE.save(str(tmp_path / "times.svg"))
    assert (tmp_path / "plan.svg").read_text() == drawn("zb_h1").svg
    assert (tmp_path / "times.svg").read_text() == drawn("1F1B").svg


def test_the_numbers_in_the_boxes_are_the_micro_batches_in_the_order_of_the_schedule():
    numbers = [
        (float(g["y"]), float(g["x"]), text)
        for tag, g, text in shapes(drawn("1F1B"))
        if tag == "text" and g["font-size"] == str(pictures.LABEL)
    ]
    said = [text for *_, text in sorted(numbers)]
    assert said == [str(a.micro) for line in ONE.schedule.ranks for a in line]


@pytest.mark.parametrize("name", [*TABLES, *PLANS])
def test_a_label_has_room_in_its_box(name):
    picture = drawn(name)
    room = {(round(x + w / 2, 1), round(y + h / 2 + 3.5, 1)): w for x, y, w, h, _ in boxes(picture)}
    for tag, given, text in shapes(picture):
        if tag == "text" and given["font-size"] == str(pictures.LABEL) and "rank" not in text:
            x, y = float(given["x"]), float(given["y"])
            near = [w for at, w in room.items() if math.dist(at, (x, y)) < 0.3]
            assert near and draw.text_width(text, pictures.LABEL) <= max(near), text


def test_each_kind_has_one_colour_everywhere_and_only_what_occurs_is_in_the_legend():
    assert len(set(pictures.KIND_COLOURS.values())) == 4
    for name, kinds in {"gpipe": "FB", "zb_h2": "FIW", "forward_only": "F"}.items():
        assert {box[4] for box in boxes(drawn(name))} == {pictures.KIND_COLOURS[k] for k in kinds}
        legend = {f"{kind} {pictures.KIND_WORDS[kind]}" for kind in kinds}
        assert {word for word in words(drawn(name)) if re.match("[FBIW] ", word)} == legend


def test_later_stages_of_a_rank_are_lighter_and_the_legend_names_them():
    for name in ("interleaved", "zbv"):
        assert {"stages 0 to 3", "stages 4 to 7"} <= set(words(drawn(name)))
        fills = [box[4] for box in boxes(drawn(name))[: len(PLANS[name].ranks[0])]]
        early, late = "#77aadd", "#bbd4ee"
        forwards = [fill for fill in fills if fill in (early, late)]
        wanted = [a.stage for a in PLANS[name].ranks[0] if a.kind == "F"]
        assert forwards == [early if stage == 0 else late for stage in wanted]
    assert "stage 0" not in " ".join(words(drawn("gpipe")))
    shades = [pictures._shade("#112233", chunk, 3) for chunk in range(3)]
    assert shades[0] == "#112233" and shades == sorted(set(shades))


def test_the_alternative_text_tells_the_first_actions_and_the_bubble():
    assert drawn("gpipe").alt.startswith(
        "GPipe: 4 stages, 8 micro-batches; total 33, bubble 27.3 % of total; F lasts 1, B lasts 2. "
        "In order: rank 0: F0, F1, F2, F3, F4, F5, F6, F7, B0, B1, B2, B3, ...; rank 1: F0, "
    )
    assert "rank 3: 3F0, 4F0, 3F1, 4F1" in drawn("zbv").alt
    assert drawn("64 x 512").alt.endswith("; 56 more ranks.") and len(drawn("64 x 512").alt) < 1000


def test_the_largest_pictures_stay_small():
    for name in ("64 x 512", "8 x 200, measured", "8 chunks"):
        assert len(drawn(name).svg) < 400_000, name
    uneven = [1 + 0.1 * (stage * 7 % 11) for stage in range(128)]
    ragged = simulate(schedules.zbv(64, 512), uneven, uneven[::-1], uneven, transfer=0.3)
    assert len(pictures.draw_timetable(ragged).svg) < 400_000


def test_schedules_and_timetables_draw_themselves():
    assert PLANS["gpipe"]._repr_html_() == drawn("gpipe")._repr_html_()
    assert ONE._repr_html_() == drawn("1F1B")._repr_html_()


def test_two_timetables_of_different_schedules_are_refused_by_name():
    other = simulate(schedules.gpipe(4, 8))
    with pytest.raises(ValueError, match="<GPipe: 4 stages.*over <1F1B: 4 stages"):
        pictures.draw_timetable(ONE, over=other)


# The plots.


class Axes:
    """What a plot asks of matplotlib's axes, written down."""

    def __init__(self):
        self.lines, self.labels = [], {}

    def plot(self, x, y, mark, **look):
        self.lines.append((mark, list(x), list(y), look.get("label")))

    def set(self, **labels):
        self.labels = labels

    def set_ylim(self, bottom):
        assert bottom == 0

    def grid(self, alpha):
        pass

    def legend(self, **look):
        self.at = look["bbox_to_anchor"]


def test_simulated_bubbles_lie_on_the_formulas_and_the_axis_names_the_denominator():
    axes = Axes()
    found = bubbles.plot_bubble_by_microbatches(axes=axes)
    for name in ("naive", "GPipe", "1F1B"):
        for count, bubble in found[name].items():
            assert bubble == pytest.approx(bubbles.bubble_formula(name, 4, count))
    assert found["GPipe"][8] == pytest.approx(3 / 11) and found["naive"][8] == pytest.approx(3 / 4)
    interleaved = found["interleaved 1F1B"]
    assert interleaved[8] == pytest.approx(3 / 19) and 9 not in interleaved
    assert bubbles.bubble_formula("interleaved 1F1B", 4, 8) == pytest.approx(3 / 19)
    assert bubbles.bubble_formula("interleaved 1F1B", 4, 8, chunks=3) == pytest.approx(3 / 27)
    assert found["ZB-H1"][8] == pytest.approx(3 / 27)
    assert axes.labels["ylabel"] == "bubble: idle share of total time"
    drawn = [(x, y) for mark, x, y, label in axes.lines if label == "GPipe"]
    assert drawn == [(list(found["GPipe"]), list(found["GPipe"].values()))]
    curves = [(x, y) for mark, x, y, _ in axes.lines if mark == "-" and x]
    assert len(curves) == 4 and curves[1][1][7] == pytest.approx(3 / 11)
    # The legend lies right of the axes: no curve runs through it.
    assert axes.at[0] >= 1


def test_bubbles_grow_with_ranks_and_with_transfer():
    found = bubbles.plot_bubble_by_ranks(["1F1B"], microbatches=8, axes=Axes())["1F1B"]
    assert [found[p] for p in (1, 4)] == pytest.approx([0, 3 / 11])
    slow = bubbles.plot_bubble_by_ranks(["1F1B"], microbatches=8, transfer=0.5, axes=Axes())
    assert all(slow["1F1B"][p] > found[p] for p in range(2, 17))


def test_peaks_are_told_in_whole_ranks():
    found = bubbles.plot_peak_by_microbatches(["GPipe", "1F1B", "ZB-H2", "ZBV"], axes=Axes())
    assert found["GPipe"] == {m: m for m in range(1, 33)}
    assert found["1F1B"] == {m: min(m, 4) for m in range(1, 33)}
    assert found["ZB-H2"][32] == 7 and found["ZBV"][32] == 4


def test_a_schedule_that_refuses_every_size_says_why():
    with pytest.raises(ValueError, match="at least as many micro-batches"):
        bubbles.plot_bubble_by_microbatches(["DualPipeV"], microbatches=range(1, 8), axes=Axes())
    with pytest.raises(ValueError, match="no schedule 'gpipe'; there are naive, GPipe, 1F1B"):
        bubbles.plot_bubble_by_ranks(["gpipe"], axes=Axes())


def test_without_axes_a_plot_makes_its_own():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    bubbles.plot_peak_by_microbatches(["GPipe"], microbatches=[1, 2])
    assert [line.get_label() for line in plt.gca().lines][0] == "GPipe"
    plt.close("all")
