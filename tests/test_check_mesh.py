"""The checks of lesson 06, its row of the table, and its picture.

Each wrong answer is one that a reader will write: the first axis fastest, neighbours taken for a
group along every axis, the rank left out of its group, parts joined before their shards, the
padding kept, always dim 0, a rank's own norm, what is whole on tp ranks counted once for each,
stages or parts or the root forgotten, replicas counted. The row must be the sum of the rows of the
three strategies, each on what the others leave; the picture must show the groups of `Mesh`.
"""

import math
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest
import torch

from s2s_lib import all_reduce
from s2s_lib.course import check
from s2s_lib.course.mesh_pictures import draw_mesh
from s2s_lib.course.show import row_ddp, row_mesh, row_pipeline, row_tensor
from s2s_lib.draw import colour

EIGHT = {"dp": 2, "pp": 2, "tp": 2}


def place(rank, sizes):
    found = {}
    for axis in reversed(sizes):
        rank, found[axis] = divmod(rank, sizes[axis])
    return found


def group(rank, axis, sizes):
    mine, everyone = place(rank, sizes), range(math.prod(sizes.values()))
    return [other for other in everyone if place(other, sizes) | {axis: mine[axis]} == mine]


def join(rows, shape, dim):
    size = part_shape(rows, shape, dim)
    return torch.cat([torch.cat(row)[: math.prod(size)].view(size) for row in rows], dim)


def part_shape(rows, shape, dim):
    return [n // len(rows) if i == dim else n for i, n in enumerate(shape)]


def norm(gradients, cut, mesh, over_tp=True, over_pp=True, over_dp=False, root=True):
    square = {name: g.square().sum() for name, g in gradients.items()}
    total = sum(square[name] for name in cut)
    if over_tp == "all":
        return (all_reduce(all_reduce(sum(square.values()), mesh["tp"]), mesh["pp"])).sqrt()
    if over_tp:
        total = all_reduce(total, mesh["tp"])
    total = total + sum(x for name, x in square.items() if name not in cut)
    for axis, asked in (("pp", over_pp), ("dp", over_dp)):
        if asked:
            total = all_reduce(total, mesh[axis])
    return total.sqrt() if root else total


def wrong(exercise, *answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(*answer)
    return str(raised.value)


def test_right_answers_pass(capsys):
    check.mesh_places(place, group)
    check.join_pieces(join)
    check.norm_of_mesh(norm)
    assert capsys.readouterr().out.splitlines() == [
        "right in three meshes of 8 and 24 ranks: the place of each rank, and its three groups",
        "right for three weights: shards to parts, parts to the whole, nothing of the padding",
        "right on two meshes of 8 ranks: one process's norm, everywhere",
    ]


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(*given): ...

    def raises(*given):
        raise NotImplementedError

    for stub in (returns_nothing, raises):
        check.mesh_places(stub, stub)
        check.join_pieces(stub)
        check.norm_of_mesh(stub)
    assert capsys.readouterr().out == 6 * "not attempted\n"


def test_a_place_with_the_first_axis_fastest_is_named_so():
    said = wrong(check.mesh_places, lambda rank, s: place(rank, dict(reversed(s.items()))), group)
    assert said == (
        "place of rank 1 in dp 2 x pp 2 x tp 2: got {'dp': 1, 'pp': 0, 'tp': 0}, expected "
        "{'dp': 0, 'pp': 0, 'tp': 1}; the last axis varies fastest, in yours the first does"
    )
    assert "give a dict with the axes dp, pp, tp" in wrong(check.mesh_places, lambda *_: 3, group)


def test_places_that_know_two_on_each_axis_only_are_found():
    def by_two(rank, sizes):
        return dict(zip(sizes, (rank // 4, rank // 2 % 2, rank % 2), strict=True))

    assert wrong(check.mesh_places, by_two, group).startswith("place of rank 2 in pp 2 x dp 3")


def test_right_places_without_groups_are_said_to_be_right():
    said = wrong(check.mesh_places, place, lambda *_: None)
    assert said == "place is right; now the groups"


def test_wrong_groups_are_named_by_what_is_wrong():
    def neighbours(rank, axis, sizes):
        start = rank // sizes[axis] * sizes[axis]
        return list(range(start, start + sizes[axis]))

    said = wrong(check.mesh_places, place, neighbours)
    assert said.startswith("group of rank 0 along dp in dp 2 x pp 2 x tp 2: got [0, 1], expected")
    assert said.endswith("; neighbours are a group along the last axis only")
    said = wrong(check.mesh_places, place, lambda *given: group(*given)[::-1])
    assert said.endswith("; the ranks are right, their order is not")
    said = wrong(
        check.mesh_places, place, lambda r, *given: [o for o in group(r, *given) if o != r]
    )
    assert said.endswith("; the rank itself is in its group")


def test_padding_that_is_kept_is_named():
    def keeps(rows, shape, dim):
        return torch.cat([torch.cat(s).view(part_shape(rows, shape, dim)) for s in rows], dim)

    said = wrong(check.join_pieces, keeps)
    assert said.startswith("a weight [3, 10], cut along dim 1 into 5 parts, 4 shards: RuntimeError")
    assert said.endswith("of a part have 8 numbers, the part has 6: the rest is padding")


def test_pieces_joined_in_the_wrong_order_are_told_apart():
    def parts_first(rows, shape, dim):
        turned = [torch.cat(shards) for shards in zip(*rows, strict=True)]
        return torch.cat(turned)[: math.prod(shape)].view(shape)

    def in_a_row(rows, shape, dim):
        return torch.cat([torch.cat(shards) for shards in rows])[: math.prod(shape)].view(shape)

    def along_dim_0(rows, shape, dim):
        return (
            join(rows, (shape[0] * len(rows), shape[1] // len(rows)), 0)
            if dim
            else in_a_row(rows, shape, dim)
        )

    said = wrong(check.join_pieces, parts_first)
    assert said.endswith("; first join what was cut last, the shards of a part")
    said = wrong(check.join_pieces, in_a_row)
    assert "cut along dim 1" in said and said.endswith("stand side by side along dim 1")
    assert "side by side along dim 1" in wrong(check.join_pieces, along_dim_0)


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ({"over_tp": False, "over_pp": False}, "; that is this rank's own"),
        ({"over_pp": False}, "; that is one stage's: what about the others?"),
        (
            {"over_tp": False},
            "; that is of one part of each layer: add up over tp what is cut",
        ),
        ({"over_tp": "all"}, "; what is whole on every tp rank is counted once for each"),
        ({"root": False}, "; that is its square"),
    ],
)
def test_a_wrong_norm_is_named_by_what_was_forgotten(mistake, hint):
    said = wrong(check.norm_of_mesh, lambda *given: norm(*given, **mistake))
    assert said.startswith("on a mesh dp 2 x pp 2 x tp 2, rank 0: got ") and said.endswith(hint)


def test_a_norm_that_counts_replicas_or_sends_gradients_is_found():
    said = wrong(check.norm_of_mesh, lambda *given: norm(*given, over_dp=True))
    assert "got " in said

    def gathers(gradients, cut, mesh):
        for gradient in gradients.values():
            all_reduce(gradient.repeat(9, 9) if gradient.dim() == 2 else gradient, mesh["pp"])
        return norm(gradients, cut, mesh)

    assert wrong(check.norm_of_mesh, gathers).endswith("bytes; squares are numbers")


def test_a_row_is_what_each_strategy_sends_on_what_the_others_leave():
    batch = {"tokens": 96, "hidden": 8}
    row = row_mesh(4000, dp=4, pp=2, tp=2, **batch, sums=6, whole=40)
    assert row.held == 16 * ((2000 - 40) / 2 + 40)
    part = {"tokens": 96 / 4, "hidden": 8}
    terms = [
        row_ddp((2000 - 40) / 2 + 40, ranks=4),
        row_pipeline(4000, ranks=2, **part),
        row_tensor(2000, ranks=2, **part, sums=6, whole=40),
    ]
    assert row.sent_per_step == sum(term.sent_per_step for term in terms)
    assert row.strategy == "mesh 4 x 2 x 2, 16 ranks"
    assert row_mesh(4000, 1, 1, 1, **batch, sums=6).sent_per_step == 0


def shapes(picture):
    return [e for e in xml.fromstring(picture.svg).iter() if "x" in e.attrib]


@pytest.mark.parametrize("sizes", [EIGHT, {"tp": 2, "pp": 2, "dp": 2}, {"pp": 4, "dp": 1, "tp": 2}])
def test_shapes_stay_on_the_card(sizes):
    card, *others = (shape.attrib for shape in shapes(draw_mesh(sizes, 4)))
    for shape in others:
        assert 0 <= float(shape["x"]) <= float(card["width"])
        assert float(shape["x"]) + float(shape.get("width", 0)) <= float(card["width"])
        assert 0 <= float(shape["y"]) + float(shape.get("height", 0)) <= float(card["height"])


def test_ranks_of_one_colour_are_a_group():
    boxes = [s for s in shapes(draw_mesh(EIGHT, 4)) if s.get("width") == "40"]
    boxes.sort(key=lambda box: (float(box.get("y")), float(box.get("x"))))
    fills = [box.get("fill") for box in boxes]
    for number, axis in enumerate(EIGHT):
        line = fills[8 * number :][:8]
        for rank in range(8):
            same = [other for other in range(8) if line[other] == line[rank]]
            assert same == group(rank, axis, EIGHT)
    assert fills[0] == colour(0)


def test_the_words_of_a_picture_say_who_is_between_nodes():
    said = draw_mesh({"pp": 2, "dp": 2, "tp": 2}, 4).alt
    assert "Groups along pp, between nodes: 0 4, 1 5, 2 6, 3 7; dp, inside nodes: 0 2," in said


def test_another_process_draws_the_same():
    program = (
        f"from s2s_lib.course.mesh_pictures import draw_mesh\nprint(draw_mesh({EIGHT}, 4).svg)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert run.stdout == draw_mesh(EIGHT, 4).svg + "\n"
