"""The checks of lesson 02, its row of the table, its picture, and the paper's table.

Each wrong answer is one that a reader will write: the optimizer on every weight, an all_reduce
where half of it is enough, the sum for the mean, padding left on, the norm of one rank's shards,
a group that is not the one over which the model is cut. A check that looked at one stage, at one
number of ranks or at values alone would let one of them pass.
"""

import pytest
import torch
import torch.nn.functional as F

from s2s_lib import all_gather, all_reduce, reduce_scatter
from s2s_lib.course import check
from s2s_lib.course.published import ZERO_TABLE_1
from s2s_lib.course.show import row_ddp, row_one_process, row_zero
from s2s_lib.course.zero_pictures import draw_stages


def step(weights, gradient, world, op="avg", whole=False, padded=False):
    part = -(-len(weights) // world.size)
    padding = (0, part * world.size - len(weights))
    mine = torch.nn.Parameter(F.pad(weights, padding).chunk(world.size)[world.rank])
    gradient = F.pad(gradient, padding)
    if whole:
        mine.grad = all_reduce(gradient, world, op=op).chunk(world.size)[world.rank].clone()
    else:
        mine.grad = reduce_scatter(gradient, world, op=op)
    torch.optim.AdamW([mine]).step()
    return all_gather(mine.detach(), world)[: None if padded else len(weights)]


def step_everything(weights, gradient, world):
    every = torch.nn.Parameter(weights)
    every.grad = all_reduce(gradient, world, op="avg")
    torch.optim.AdamW([every]).step()
    return every.detach()


def clip(model, max_norm, group=None, factor=None):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum(grad.square().sum() for grad in grads)
    norm = all_reduce(squares, group or model.shard_group).sqrt()
    for grad in grads:
        grad.mul_(factor or (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def clip_locally(model, max_norm):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def wrong(exercise, answer) -> str:
    with pytest.raises(check.Wrong) as raised:
        exercise(answer)
    return str(raised.value)


def test_right_answers_pass(capsys):
    check.zero_of_eight(5_500_000, 10_500_000, 17_500_000)
    check.sharded_adamw_step(step)
    check.clip_shards(clip)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rstrip(":") for line in said] == ["right"] * 3
    assert said[0] == "right: 5,500,000 bytes held, 10,500,000 sent at stage 3, 17,500,000 for four"


def test_stubs_are_not_attempted(capsys):
    def returns_nothing(*given): ...

    def raises(*given):
        raise NotImplementedError

    check.zero_of_eight(5_500_000, ..., ...)
    for stub in (returns_nothing, raises):
        check.sharded_adamw_step(stub)
        check.clip_shards(stub)
    assert capsys.readouterr().out == 5 * "not attempted\n"


def test_a_wrong_guess_is_told_which_and_what_was_counted():
    with pytest.raises(check.Wrong, match="at stage 2: got 2,000,000, expected 5,500,000"):
        check.zero_of_eight(2_000_000, 10_500_000, 17_500_000)
    with pytest.raises(check.Wrong, match="at stage 3: got 7,000,000, expected 10,500,000"):
        check.zero_of_eight(5_500_000, 7_000_000, 17_500_000)
    with pytest.raises(check.Wrong, match="micro-batches: got 28,000,000, expected 17,500,000"):
        check.zero_of_eight(5_500_000, 10_500_000, 28_000_000)


def test_a_wrong_step_is_told_where_and_why():
    said = wrong(check.sharded_adamw_step, lambda *given: step(*given, op="sum"))
    assert said.startswith("on 2 ranks, rank 0, element 0: got ")
    assert said.endswith("(40000 of 40000 elements differ)")
    said = wrong(check.sharded_adamw_step, lambda *given: step(*given, padded=True))
    assert said.startswith("on 3 ranks, rank 0: got shape (40002,)")
    said = wrong(check.sharded_adamw_step, step_everything)
    assert (
        said == "on 2 ranks, rank 0: its optimizer steps 40000 of 40000 weights; 20000 are enough"
    )
    said = wrong(check.sharded_adamw_step, lambda *given: step(*given, whole=True))
    assert said.startswith("on 2 ranks, rank 0: it sent 480,000 bytes; 2(W-1)/W of all are 320,000")


def test_a_wrong_norm_is_told_the_stage_and_a_wrong_scale_the_parameter():
    said = wrong(check.clip_shards, clip_locally)
    assert said.startswith("on 2 ranks, rank 0, stage 1, max_norm=1, norm"), "stage 0 is right"
    said = wrong(check.clip_shards, lambda *given: clip(*given, group=given[0].group))
    assert said.startswith("on 2 ranks, rank 0, stage 0, max_norm=1, norm")
    said = wrong(check.clip_shards, lambda *given: clip(*given, factor=0.5))
    assert "stage 0, max_norm=1, gradient of 0.weight, element 0, 0" in said

    def twice(model, max_norm):
        all_reduce(torch.ones(1), model.group)
        return clip(model, max_norm)

    assert "it called 2 collectives" in wrong(check.clip_shards, twice)


def test_each_stage_cuts_one_thing_more_and_only_the_last_sends_more():
    rows = [row_zero(1000, 4, stage) for stage in range(4)]
    assert [row.held for row in rows] == [16_000, 10_000, 7_000, 4_000]
    assert [row.weights for row in rows] == [4000, 4000, 4000, 1000]
    assert [row.gradients for row in rows] == [4000, 4000, 1000, 1000]
    ddp = row_ddp(1000, 4).sent_per_step
    assert [row.sent_per_step / ddp for row in rows] == [1, 1, 1, 1.5]
    assert row_zero(1000, 1, 3).held == row_one_process(1000).held
    assert rows[3].strategy == "ZeRO-3, 4 ranks"


def test_the_papers_table_has_all_cells_as_printed():
    assert len(ZERO_TABLE_1) == len({cell[:3] for cell in ZERO_TABLE_1}) == 54
    assert {cell.printed for cell in ZERO_TABLE_1 if cell.ranks == 1} == {"120", "2048", "16000"}
    assert ("41.3", "1.88", "2218") == tuple(
        cell.printed
        for cell in ZERO_TABLE_1
        if cell[:3] in {(7.5e9, 4, 2), (7.5e9, 64, 3), (1e12, 64, 2)}
    )


def test_the_picture_fills_what_is_held_and_says_it():
    picture = draw_stages(ranks=4)
    assert picture.svg.count("bytes a parameter") == 4
    for held in (16, 10, 7, 4):
        assert f">{held} bytes a parameter<" in picture.svg
    assert "stage 2: gradients and optimizer cut" in picture.alt
    assert picture.svg == draw_stages(ranks=4).svg
