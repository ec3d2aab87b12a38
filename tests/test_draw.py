"""Pictures are compared byte for byte when a lesson runs, so they must be the same everywhere.

Each picture is drawn in another process too; its SVG must be well-formed, keep every shape on the
card, and say in words what it shows. Where a picture computes (the tree, lanes, ticks), the
numbers are checked on their own.
"""

import base64
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from s2s_lib import draw
from s2s_lib.collectives.tree import family
from s2s_lib.course import charts, pictures

GIVEN = {
    "ranks": (pictures.draw_ranks, [[("a", 0), ("b", 1)], [("a", 0)]]),
    "collective": (
        pictures.draw_ranks,
        [[("a0", 0), ("b0", 1)], [("a1", 0), ("b1", 1)]],
        [[("Σa", 0), ("", None)], [("", None), ("Σb", 1)]],
        "reduce_scatter",
    ),
    "steps": (
        pictures.draw_steps,
        [[[("a0", 0)], [("b1", 1)]], [[("a0", 0), ("b1", 1)], [("a0", 0), ("b1", 1)]]],
    ),
    "long steps": (pictures.draw_steps, [[[("a sum of three", 2)]], [[]], [[("", None)]]]),
    "ring": (pictures.draw_ring, 5, [(r, (r + 1) % 5, f"chunk {r}", r) for r in range(5)]),
    "long labels": (pictures.draw_ring, 8, [(r, (r + 1) % 8, "sum of chunk") for r in range(8)]),
    "no messages": (pictures.draw_ring, 1, []),
    "tree": (pictures.draw_tree, 7, 3),
    "tree of one": (pictures.draw_tree, 1),
    "rounds": (pictures.draw_rounds, 2, [[(0, 1), (1, 0)]]),
    "timeline": (
        charts.draw_timeline,
        [("rank 0", [(0, 3, "compute", "forward"), (2, 4.7, "communication", "bucket 0")])],
    ),
    "empty timeline": (charts.draw_timeline, [("rank 0", [])]),
    "bars": (charts.draw_bars, [("rank 0", {"weights": 4e6, "gradients": 1e3, "buffers": 0})]),
    "no bars": (charts.draw_bars, [("rank 0", {})]),
    "buckets": (charts.draw_buckets, [[("head.weight", 4096), ("norm", 4)], [("embedding", 512)]]),
}


def drawn(name):
    function, *arguments = GIVEN[name]
    return function(*arguments)


def shapes(picture):
    return [(e.tag.split("}")[1], e) for e in xml.fromstring(picture.svg).iter()]


def words(picture):
    return [element.text for tag, element in shapes(picture) if tag == "text"]


@pytest.mark.parametrize("name", GIVEN)
def test_each_picture_stays_on_its_card_and_says_what_it_shows(name):
    picture = drawn(name)
    root = xml.fromstring(picture.svg)
    width, height = float(root.get("width")), float(root.get("height"))
    for tag, element in shapes(picture):
        at = {key: float(v) for key, v in element.attrib.items() if re.fullmatch(r"-?[\d.]+", v)}
        if tag == "rect":
            assert 0 <= at["x"] <= at["x"] + at["width"] <= width
            assert 0 <= at["y"] <= at["y"] + at["height"] <= height
        if tag == "circle":
            assert at["r"] <= at["cx"] <= width - at["r"]
            assert at["r"] <= at["cy"] <= height - at["r"]
        if tag == "text":
            room = draw.text_width(element.text, at["font-size"])
            before = {"start": 0, "middle": room / 2}[element.get("text-anchor")]
            assert 0 <= at["x"] - before and at["x"] - before + room <= width, element.text
            assert at["font-size"] / 2 <= at["y"] <= height
    assert len(picture.alt) > 10


def test_every_picture_is_the_same_in_another_process():
    program = (
        "import sys; sys.path.insert(0, 'tests'); import test_draw as t;"
        "print([t.drawn(name)._repr_html_() for name in t.GIVEN])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        cwd=Path(__file__).parents[1],
    )
    assert run.stdout.strip() == repr([drawn(name)._repr_html_() for name in GIVEN])


def test_numbers_have_at_most_one_decimal_and_a_last_digit_of_noise_does_not_show():
    for name in GIVEN:
        attributes = [v for _, e in shapes(drawn(name)) for k, v in e.attrib.items() if k != "d"]
        assert not [v for v in attributes if re.search(r"\.\d\d", v)]
    assert draw._value(0.05 + 1e-12) == draw._value(0.05 - 1e-12) == "0.1"
    assert draw._value(-1e-12) == draw._value(0.0) == "0"


def test_a_picture_shows_as_an_image_with_its_text():
    picture = draw.Canvas(30, 20).picture('"two" & <three>')
    found = re.fullmatch(
        r'<img alt="&quot;two&quot; &amp; &lt;three&gt;" src="data:image/svg\+xml;base64,(.*)">',
        picture._repr_html_(),
    )
    assert base64.b64decode(found[1]).decode() == picture.svg
    assert repr(picture) == 'Picture: "two" & <three>'


def test_steps_have_a_column_each_and_say_who_holds_what_after_each():
    picture = drawn("steps")
    assert [word for word in words(picture) if "st" in word] == ["start", "step 1"]
    assert "start: rank 0 holds a0; rank 1 holds b1. step 1: rank 0 holds a0, b1;" in picture.alt


def test_bars_say_what_happened_to_the_bytes():
    assert charts.draw_bars([("rank 0", {"a": 5})]).alt == "Bytes held. rank 0: a 5 B."
    assert charts.draw_bars([("rank 0", {"a": 5})], "sent").alt == "Bytes sent. rank 0: a 5 B."


def test_labels_are_escaped_and_the_file_is_the_svg(tmp_path):
    picture = pictures.draw_ranks([[("<b> & Σ", 0)]])
    assert "<b> & Σ" in words(picture)
    picture.save(tmp_path / "ranks.svg")
    assert (tmp_path / "ranks.svg").read_text(encoding="utf-8") == picture.svg


def test_before_and_after_are_told_in_words():
    assert drawn("collective").alt == (
        "rank 0 holds a0, b0; rank 1 holds a1, b1. "
        "After reduce_scatter: rank 0 holds Σa; rank 1 holds Σb."
    )
    assert "rank 4 sends chunk 4 to rank 0" in drawn("ring").alt
    assert drawn("tree").alt.startswith("7 ranks, 3 rounds. Round 1: 3 to 0. Round 2: 3 to 5, 0 to")


def test_the_drawn_tree_is_the_one_that_broadcast_walks():
    for ranks in range(1, 18):
        for root in {0, ranks // 2, ranks - 1}:
            hops = [hop for hops in pictures.tree_rounds(ranks, root) for hop in hops]
            children = {
                rank: [to for source, to in hops if source == rank] for rank in range(ranks)
            }
            # `family` lists the nearest child first; the furthest is served first.
            assert children == {r: list(family(r, ranks, root)[1][::-1]) for r in range(ranks)}


def test_a_dot_is_filled_once_its_rank_has_the_data():
    dots = [e.get("fill") for tag, e in shapes(pictures.draw_tree(4)) if tag == "circle"]
    full = [[fill != "#ffffff" for fill in dots[row : row + 4]] for row in (0, 4, 8)]
    assert full == [[True, False, False, False], [True, False, True, False], [True] * 4]


def test_a_chunk_has_one_colour_and_an_empty_place_is_white():
    boxes = [e.get("fill") for tag, e in shapes(drawn("collective")) if tag == "rect"][1:]
    a, b, empty = draw.PALETTE[0], draw.PALETTE[1], "#ffffff"
    assert boxes == [a, b, a, b, a, empty, empty, b]
    assert draw.colour(9) == draw.colour(1)


def test_spans_that_overlap_are_drawn_under_each_other():
    spans = [(0, 3, "compute", ""), (3, 5, "compute", ""), (2, 4, "communication", "")]
    assert charts._lanes(spans) == [[spans[0], spans[1]], [spans[2]]]
    assert charts._lanes([]) == [[]]


def test_a_timeline_has_round_ticks_a_legend_and_only_labels_that_fit():
    rows = [("rank 0", [(0, 41, "compute", "forward"), (41, 41.2, "waiting", "too long a word")])]
    said = words(charts.draw_timeline(rows))
    assert [word for word in said if word[0].isdigit()] == ["0 ms", "10", "20", "30", "40"]
    assert {"forward", "compute", "waiting"} <= set(said) and "too long a word" not in said
    assert charts.draw_timeline(rows).alt == "Timeline. rank 0: compute 41 ms, waiting 0.2 ms."


@pytest.mark.parametrize("end", [0.003, 0.1, 1, 7, 10, 99.9, 1000, 123456])
def test_an_axis_has_three_to_nine_ticks(end):
    said = words(charts.draw_timeline([("r", [(0, end, "compute", "")])], unit="s"))
    assert 3 <= len([word for word in said if re.fullmatch(r"[\d.e+-]+( s)?", word)]) <= 9


def test_unknown_kinds_get_colours_that_no_known_kind_before_them_has():
    colours = charts._colours(["compute", "F", "B", "W"])
    assert list(colours) == ["compute", "F", "B", "W"] and len(set(colours.values())) == 4
    assert charts._colours(["compute", "F", "B", "W", "F"]) == colours
    assert len(charts._colours([f"kind {i}" for i in range(20)])) == 20


def test_bars_are_as_long_as_their_bytes():
    rows = [("rank 0", {"weights": 3e6, "gradients": 1e6}), ("rank 1", {"weights": 2e6})]
    picture = charts.draw_bars(rows)
    bars = [e for tag, e in shapes(picture) if tag == "rect" and e.get("height") == "30"]
    lengths = [float(bar.get("width")) for bar in bars]
    assert lengths == pytest.approx([3 * lengths[1], lengths[1], 2 * lengths[1]], abs=0.3)
    assert {"4 MB", "2 MB", "weights", "gradients"} <= set(words(picture))


def test_buckets_are_told_with_their_parameters_and_bytes():
    picture = drawn("buckets")
    assert "bucket 0 (4.1 kB): head.weight, norm; bucket 1 (512 B): embedding" in picture.alt
    assert {"bucket 1", "head.weight", "4.1 kB, 2 tensors", "512 B, 1 tensor"} <= set(
        words(picture)
    )
