"""The checks of lesson 05, its row of the table, and its pictures.

Each wrong answer is one that a reader will write: query heads counted where key-value heads decide,
sums counted both ways, the vocabulary or backward forgotten, a fused weight cut straight through
its blocks or as if they were equal, parts joined rank by rank, a loss with each rank's own maximum
or none, without a mask, with a sum left out, a sum whose gradient counts every rank, gathered
logits. A half-right answer is told which half is missing; a hint that fits another answer, or none,
fails here.
"""

import subprocess
import sys
import xml.etree.ElementTree as xml
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from s2s_lib import GPT, GPTConfig, all_gather, all_reduce, gather_from_group, reduce_from_group
from s2s_lib.course import check, tensor_pictures
from s2s_lib.course.show import row_one_process, row_tensor
from s2s_lib.draw import GREY, colour

X, W = [[1, 2], [3, 4]], [[1, 0, 2, 1], [0, 1, 1, 2]]


def cut(weight, sizes, rank, ranks):
    return torch.cat([block.chunk(ranks)[rank] for block in weight.split(sizes)])


def join(parts, sizes):
    blocks = [part.split([size // len(parts) for size in sizes]) for part in parts]
    return torch.cat([piece for block in zip(*blocks, strict=True) for piece in block])


def straight(weight, sizes, rank, ranks):
    return weight.chunk(ranks)[rank]


def rank_by_rank(parts, sizes):
    return torch.cat(parts)


def loss(logits, targets, world, top="max", add=reduce_from_group, **half):
    """`half` says what is left out: with "sum" or "target" that term is not added up."""
    rows, size = logits.shape
    top_N = logits.detach().amax(1)
    if top == "max":
        top_N = all_reduce(top_N, world, "max")
    z = logits - top_N[:, None] if top else logits
    local = targets - world.rank * size
    mine = (local >= 0) & (local < size)
    if half.get("mask") == "clamp":
        mine = True
    if half.get("mask") == "wrap":
        mine, local = True, local % size
    of_target = logits if half.get("shift") == "sum" else z
    picked = of_target[torch.arange(rows), local.clamp(0, size - 1)] * mine
    sum_N = z.exp().sum(1)
    if "sum" not in half.get("own", ()):
        sum_N = add(sum_N, world)
    if "target" not in half.get("own", ()):
        picked = half.get("add_target", add)(picked, world)
    loss_N = sum_N.log() - picked
    return loss_N.sum() if half.get("mean") is False else loss_N.mean()


def gathered(logits, targets, world):
    return F.cross_entropy(gather_from_group(logits, world), targets)


def gathers_backward(logits, targets, world):
    def gather(grad):
        all_gather(grad, world)

    logits.register_hook(gather)
    return loss(logits, targets, world)


def wrong(exercise, *answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(*answer)
    return str(raised.value)


def test_right_answers_pass(capsys):
    check.cut_gpt(4, 7, 344_064)
    check.cut_fused(cut, join)
    check.cut_loss(loss)
    assert capsys.readouterr().out.splitlines() == [
        "right: at most 4 ranks, 7 sums forward, 344,064 bytes sent",
        "right for four cuts, of weights and of biases: cut by block, and joined again",
        "right on 2, 3 and 4 ranks: one process's loss and gradient, three numbers a token",
    ]


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(*given): ...

    def raises(*given):
        raise NotImplementedError

    check.cut_gpt(4, ..., ...)
    for stub in (returns_nothing, raises):
        check.cut_fused(stub, stub)
        check.cut_loss(stub)
    assert capsys.readouterr().out == 5 * "not attempted\n"


def test_a_guess_is_told_what_was_forgotten_and_not_the_answer():
    said = wrong(check.cut_gpt, 12, 7, 0)
    assert said == (
        "ranks at most: 12 is not right; 12 ranks cannot have equal shares of 4 key-value heads "
        "nor of 160 numbers inside the MLP"
    )
    assert wrong(check.cut_gpt, 2, 7, 0).endswith("more ranks can have equal shares of everything")
    said = wrong(check.cut_gpt, 4, 14, 0)
    assert said.endswith("in a forward: 14 is not right; count those of forward alone")
    for sums, hint in ((6, "the embedding,"), (8, "logits stay cut,"), (3, "in a layer")):
        assert f"; {hint}" in wrong(check.cut_gpt, 4, sums, 0)
    vocabulary = "the vocabulary has two sums too, of the embedding and of the head's input"
    backward = "backward adds up as many activations as forward"
    for sent, hint in (
        (294_912, vocabulary),
        (344_064 // 2, backward),
        (294_912 // 2, f"{backward}; {vocabulary}"),
        (344_064 // 4, "a number in float32 has 4 bytes"),
        (344_064 * 2, "each rank sends 2(W-1)/W of a tensor for its sum, and 4 bytes a number"),
    ):
        said = wrong(check.cut_gpt, 4, 7, sent)
        assert said == f"bytes that each rank sends: {sent:,} is not right; {hint}"


def test_a_guess_without_a_hint_is_told_the_answer_and_a_string_is_refused():
    assert wrong(check.cut_gpt, 0, 7, 1) == "ranks at most: got 0, expected 4"
    assert wrong(check.cut_gpt, 4, 5, 1).endswith("in a forward: got 5, expected 7")
    assert wrong(check.cut_gpt, 4, 7, 1).endswith("got 1, expected 344,064")
    assert wrong(check.cut_gpt, "4", 7, 1) == "give three numbers, got '4'"


def test_rows_cut_straight_through_are_named_so():
    said = wrong(check.cut_fused, straight, join)
    assert said.startswith("3 blocks of 8, 8, 8 rows on 2 ranks, rank 0, element 4, 0: got 12, ")
    assert said.endswith("; these rows are cut straight through the blocks")
    said = wrong(check.cut_fused, lambda *given: cut(*given)[:-1], join)
    assert "got shape (11, 3)" in said and "straight" not in said
    assert "got a list" in wrong(check.cut_fused, lambda *given: cut(*given).tolist(), join)


def test_other_half_right_cuts_are_named_too():
    def first_block(weight, sizes, rank, ranks):
        return weight.split(sizes)[0].chunk(ranks)[rank]

    def every_second(weight, sizes, rank, ranks):
        return torch.cat([block[rank::ranks] for block in weight.split(sizes)])

    assert wrong(check.cut_fused, first_block, join).endswith("the rows of the first block alone")
    assert "; they are not next to each other; " in wrong(check.cut_fused, every_second, join)


UNEQUAL = "; blocks of equal sizes were right, these differ"


def test_a_cut_or_join_that_knows_equal_blocks_only_is_found():
    def thirds(weight, sizes, rank, ranks):
        return torch.cat([block.tensor_split(ranks)[rank] for block in weight.tensor_split(3)])

    def join_equal(parts, sizes):
        blocks = zip(*(part.chunk(len(sizes)) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block])

    said = wrong(check.cut_fused, thirds, join)
    assert said.startswith("3 blocks of 8, 4, 4 rows on 4 ranks, rank 0")
    assert said.endswith(UNEQUAL)
    said = wrong(check.cut_fused, cut, join_equal)
    assert said.startswith("3 blocks of 8, 4, 4 rows on 4 ranks, joined")
    assert said.endswith(UNEQUAL)


def test_an_answer_that_fails_says_where_with_its_own_traceback_alone():
    def fails_to_join(parts, sizes):
        return parts[len(sizes)]

    said = wrong(check.cut_fused, lambda weight, *_: weight[99], join)
    assert said.startswith("3 blocks of 8, 8, 8 rows on 2 ranks, rank 0: it failed\nTraceback")
    assert "IndexError" in said and "lesson05" not in said
    said = wrong(check.cut_fused, cut, fails_to_join)
    assert said.startswith("3 blocks of 8, 8, 8 rows on 2 ranks, joined: it failed")
    assert "in fails_to_join" in said


def test_parts_joined_rank_by_rank_and_not_joined_are_told_apart():
    said = wrong(check.cut_fused, cut, rank_by_rank)
    assert said.startswith("3 blocks of 8, 8, 8 rows on 2 ranks, joined, element 4, 0: got 24")
    assert said.endswith("; rows stand rank after rank; put block after block")
    assert wrong(check.cut_fused, cut, lambda *_: None).endswith("parts are right; now join them")


HALVES = {
    "subtract the largest logit of all ranks, not each rank's own": {"top": "own"},
    "a rank that does not have a target must add 0 for it": {"mask": "clamp"},
    " a rank that does not have a target must add 0 for it": {"mask": "wrap"},
    "the sum of exp is one rank's; add up over the ranks": {"own": ["sum"]},
    "the target's logit is one rank's; add up over the ranks": {"own": ["target"]},
    "both terms are one rank's; add up over the ranks": {"own": ["sum", "target"]},
    "both terms need the logits less the largest, not one of them": {"shift": "sum"},
    "it is the sum over tokens; take the mean": {"mean": False},
}


@pytest.mark.parametrize("hint", HALVES)
def test_a_half_right_loss_is_told_which_half_is_missing(hint):
    said = wrong(check.cut_loss, partial(loss, **HALVES[hint]))
    assert said.startswith("on 2 ranks, rank 0, loss: got ")
    assert said.endswith(f", expected 2.88081; {hint.strip()}")


def test_a_loss_without_a_maximum_is_found_where_logits_are_large():
    said = wrong(check.cut_loss, partial(loss, top=None))
    assert said.startswith("on 4 ranks, logits up to 10000, rank 0, loss: got inf")
    assert said.endswith("; subtract the largest of all ranks before")


def test_a_loss_of_another_kind_has_no_hint():
    assert wrong(check.cut_loss, lambda *given: 3 * loss(*given)).endswith("expected 2.88081")
    assert "got a float" in wrong(check.cut_loss, lambda *given: loss(*given).item())


def detached(x, world):
    return all_reduce(x.detach(), world)


def mean_of_gradients(x, world):
    x.register_hook(lambda grad: grad / world.size)
    return reduce_from_group(x, world)


GRADIENTS = {
    "it is 2 times the right one: the ranks compute one loss, not 2": {"add": all_reduce},
    "it is the right one divided by 2": {"add": mean_of_gradients},
    "the part of the sum of exp is 2 times the right one": {
        "add": all_reduce,
        "add_target": reduce_from_group,
    },
    "the part of the target's logit is 2 times the right one": {"add_target": all_reduce},
    "the part of the sum of exp is missing": {"add": detached, "add_target": reduce_from_group},
    "the part of the target's logit is missing": {"add_target": detached},
}


@pytest.mark.parametrize("hint", GRADIENTS)
def test_a_half_right_gradient_is_told_which_half_is_wrong(hint):
    said = wrong(check.cut_loss, partial(loss, **GRADIENTS[hint]))
    assert said.startswith("on 2 ranks, rank 0, gradient, element")
    assert said.endswith(f"; {hint}")


def test_a_loss_without_a_gradient_is_told_so():
    said = wrong(check.cut_loss, lambda *given: loss(*given).detach())
    assert said.endswith("the logits have no gradient after backward")


def test_bytes_are_counted_in_both_directions():
    said = wrong(check.cut_loss, gathered)
    assert said == (
        "on 2 ranks: all together sent 768 bytes forward; three numbers of 8 bytes for each of "
        "6 tokens are 288"
    )
    assert "bytes backward; each needs only its own part" in wrong(check.cut_loss, gathers_backward)


def test_a_row_holds_a_part_and_sends_each_sum_twice():
    row = row_tensor(1000, ranks=4, tokens=10, hidden=8, sums=6, whole=40)
    assert row.held == 16 * (960 / 4 + 40)
    assert row.sent_per_step == 6 * 2 * 3 / 4 * 10 * 8 * 4
    assert row.strategy == "tensor, 4 ranks"
    alone = row_tensor(1000, ranks=1, tokens=10, hidden=8, sums=6)
    assert alone.sent_per_step == 0 and alone.held == row_one_process(1000).held


PICTURES = {
    "products": (tensor_pictures.draw_products, X, W),
    "block": (tensor_pictures.draw_block,),
    "fused": (tensor_pictures.draw_fused,),
}


@pytest.mark.parametrize("name", PICTURES)
def test_shapes_stay_on_the_card(name):
    function, *given = PICTURES[name]
    card, *shapes = (
        e.attrib for e in xml.fromstring(function(*given).svg).iter() if "x" in e.attrib
    )
    for shape in shapes:
        assert 0 <= float(shape["x"]) <= float(card["width"])
        assert float(shape["x"]) + float(shape.get("width", 0)) <= float(card["width"])
        assert 0 <= float(shape["y"]) + float(shape.get("height", 0)) <= float(card["height"])


def test_another_process_draws_the_same():
    program = (
        "from s2s_lib.course.tensor_pictures import *\n"
        f"print(draw_products({X}, {W}).svg, draw_block().svg, draw_fused().svg)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    here = " ".join(function(*given).svg for function, *given in PICTURES.values())
    assert run.stdout == here + "\n"


def boxes(picture):
    """Colours of the boxes, and the words in them, in order."""
    shapes = list(xml.fromstring(picture.svg).iter())
    fills = [e.get("fill") for e in shapes if e.tag.endswith("rect")][1:]
    return fills, [e.text for e in shapes if e.tag.endswith("text")]


def test_a_product_by_rows_shows_both_terms_and_their_sum():
    fills, words = boxes(tensor_pictures.draw_products(X, W))
    # By columns: x whole, w and y in two colours; by rows: x and w, a term each, and y whole.
    assert fills[:4] == [GREY] * 4 and fills[4:8] == [colour(0)] * 2 + [colour(1)] * 2
    terms = fills[20 + 12 : 20 + 12 + 16]
    assert terms == [colour(0)] * 8 + [colour(1)] * 8
    assert fills[-8 - 3 : -3] == [GREY] * 8
    numbers = [int(word) for word in words if word.isdigit()]
    whole = torch.tensor(numbers[-8:]).view(2, 4)
    assert torch.equal(whole, torch.tensor(X) @ torch.tensor(W))
    assert words.count("y_BF_partial") == 2


def test_a_block_shows_each_message_where_the_library_sends_it():
    _, words = boxes(tensor_pictures.draw_block())
    assert [words.count(name) for name in ("all_reduce", "all_gather", "reduce_scatter")] == [4] * 3


def test_straight_through_a_rank_takes_keys_for_queries():
    said = tensor_pictures.draw_fused().alt
    assert "each block by itself, rank 1 takes q2 q3 as q, k2 k3 as k, v2 v3 as v" in said
    assert "straight through, rank 1 takes k2 k3 as q, v0 v1 as k, v2 v3 as v" in said


def test_the_model_of_the_first_exercise_is_the_one_described():
    from s2s_lib.course.check.lesson05 import PREDICTED

    model = GPT(PREDICTED)
    assert PREDICTED == GPTConfig(3, 48, 12, kv_heads=4, mlp_hidden=160, tied=False)
    assert model.blocks[0].mlp.gate.out_features == 160 and model.head.out_features == 256
