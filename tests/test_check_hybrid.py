"""The checks of lesson 03 let the right answer pass and say where a wrong one is wrong; its
pictures and its row of the table say what they are given.

Each wrong answer here is one that a reader will write: one all_reduce over all ranks, whole tensors
between replicas, an axis left out or taken for the other, a k one too small or one too large. A
check that looked only at values, or only at one rank's bytes, would let one of them pass.
"""

import functools
import re
import xml.etree.ElementTree as xml

import pytest
import torch

from s2s_lib import all_gather, all_reduce, reduce_scatter
from s2s_lib.course import check, hybrid_pictures
from s2s_lib.course.check.lesson03 import _counted_on_eight
from s2s_lib.course.show import row_hybrid, row_one_process

RIGHT_GUESS = (1_000_000, 9_000_000, 4_000_000)


def hybrid_all_reduce(tensor, mesh, inside="shard", between="replicate"):
    shard = reduce_scatter(tensor, mesh[inside])
    return all_gather(all_reduce(shard, mesh[between]), mesh[inside])


def drift(model, mesh, mean_over="replicate", sum_over="shard"):
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    square = (mine - all_reduce(mine, mesh[mean_over], op="avg")).square().sum()
    return all_reduce(square, mesh[sum_over]).sqrt() if sum_over else square.sqrt()


def wrong(exercise, *answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(*answer)
    return str(raised.value)


def test_right_answers_pass(capsys):
    check.hybrid_of_eight(*RIGHT_GUESS)
    check.hybrid_all_reduce(hybrid_all_reduce)
    check.local_sgd(17, drift)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rstrip(":") for line in said] == ["right"] * 3
    assert "1,000,000 bytes between, 9,000,000 inside, 4,000,000 held" in said[0]


def test_a_drift_that_is_a_number_of_python_passes_too(capsys):
    check.local_sgd(17, lambda model, mesh: drift(model, mesh).item())
    assert capsys.readouterr().out.startswith("right")


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(one, mesh): ...

    def raises(one, mesh):
        raise NotImplementedError

    check.hybrid_of_eight(1_000_000, ..., ...)
    check.local_sgd(..., drift)
    for stub in (returns_nothing, raises):
        check.hybrid_all_reduce(stub)
        check.local_sgd(17, stub)
    assert capsys.readouterr().out == 6 * "not attempted\n"


@pytest.mark.parametrize(
    "place, what", list(enumerate(["sends between nodes", "sends inside its node", "holds"]))
)
def test_a_wrong_guess_is_told_which_and_what_was_counted(place, what):
    guess = list(RIGHT_GUESS)
    guess[place] += 5
    said = wrong(check.hybrid_of_eight, *guess)
    assert said == (
        f"bytes that each rank {what}: got {guess[place]:,}, expected {RIGHT_GUESS[place]:,}"
    )


def test_one_all_reduce_over_all_ranks_is_told_its_bytes():
    def flat(tensor, mesh):
        return all_reduce(tensor, mesh["replicate", "shard"])

    said = wrong(check.hybrid_all_reduce, flat)
    assert re.match(r"replicate=2, shard=2, rank 0: it sends \d+ bytes in groups other than", said)


def test_whole_tensors_between_replicas_are_told_how_many_bytes_are_enough():
    def whole(tensor, mesh):
        return all_reduce(all_reduce(tensor, mesh["shard"]), mesh["replicate"])

    said = wrong(check.hybrid_all_reduce, whole)
    assert said.endswith("bytes that all ranks send between replicas: got 256, expected 128")


def test_cutting_along_the_wrong_axis_is_noticed_where_the_axes_differ():
    swapped = functools.partial(hybrid_all_reduce, inside="replicate", between="shard")
    said = wrong(check.hybrid_all_reduce, swapped)
    assert "bytes that all ranks send between replicas" in said


def test_a_forgotten_axis_is_told_the_rank_and_the_element():
    def inside_only(tensor, mesh):
        return all_reduce(tensor, mesh["shard"])

    said = wrong(check.hybrid_all_reduce, inside_only)
    assert "rank 0, element 0: got 11, expected 1111" in said


def test_an_answer_that_changes_its_argument_is_refused():
    def in_place(tensor, mesh):
        tensor.copy_(hybrid_all_reduce(tensor, mesh))
        return tensor

    assert "changed its argument" in wrong(check.hybrid_all_reduce, in_place)


def test_k_must_be_the_smallest_that_is_enough():
    assert "62,500 a step: too many" in wrong(check.local_sgd, 16, drift)
    assert wrong(check.local_sgd, 18, drift) == "k=18 is enough, and so is 17"
    for odd in (0, 16.7, True):
        assert "give a whole number" in wrong(check.local_sgd, odd, drift)


@pytest.mark.parametrize(
    "axes",
    [
        {"sum_over": None},
        {"sum_over": ("replicate", "shard")},
        {"mean_over": "shard", "sum_over": "replicate"},
    ],
    ids=["own shard only", "over all ranks", "axes swapped"],
)
def test_a_wrong_drift_is_told_the_rank_and_both_numbers(axes):
    said = wrong(check.local_sgd, 17, functools.partial(drift, **axes))
    assert re.match(r"rank \d: the drift is .*, expected \d+\.\d+", said)


def test_the_row_of_the_table_is_what_a_step_is_counted_to_send_and_hold():
    between, inside, held = _counted_on_eight()
    row = row_hybrid(1_000_000, shard=4, replicate=2)
    assert (row.sent_per_step, row.held) == (between + inside, held)
    assert row_hybrid(12, shard=1, replicate=1).held == row_one_process(12).held
    assert row_hybrid(12, shard=1, replicate=1).sent_per_step == 0


def test_nodes_are_drawn_with_what_each_rank_holds():
    halves = [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    picture = hybrid_pictures.draw_nodes([("Hybrid", halves, "0.5 N")])
    assert picture.alt == (
        "Hybrid. node 0: rank 0 holds 0, 1; rank 1 holds 2, 3. node 1: rank 2 holds 0, 1; "
        "rank 3 holds 2, 3. Between nodes: 0.5 N."
    )
    texts = [e.text for e in xml.fromstring(picture.svg).iter() if e.tag.endswith("text")]
    assert [texts.count(part) for part in "0123"] == [2, 2, 2, 2]
    assert on_the_card(picture) and picture.svg == same_again(halves)


def same_again(halves):
    return hybrid_pictures.draw_nodes([("Hybrid", halves, "0.5 N")]).svg


def test_curves_rise_with_their_numbers_and_stay_on_the_card():
    picture = hybrid_pictures.draw_curves({"k = 1": [0.0] * 8, "k = 4": [1.0, 2, 3, 4] * 2}, "way")
    assert picture.alt == "way over 8 steps. k = 1: at most 0. k = 4: at most 4."
    lines = [e.attrib for e in xml.fromstring(picture.svg).iter() if e.tag.endswith("line")]
    drawn = [line for line in lines if line["stroke-width"] == "3"]
    assert len(drawn) == 2 * 7
    assert float(drawn[7]["y1"]) > float(drawn[7]["y2"])
    assert on_the_card(picture)
    assert hybrid_pictures.draw_curves({"still": [0.0, 0.0]}, "way").svg


def on_the_card(picture) -> bool:
    root = xml.fromstring(picture.svg)
    limits = {"x": float(root.get("width")), "y": float(root.get("height"))}
    places = [
        (key[0], float(value))
        for element in root.iter()
        for key, value in element.attrib.items()
        if re.fullmatch("[xy][12]?", key)
    ]
    return all(0 <= value <= limits[axis] for axis, value in places)
