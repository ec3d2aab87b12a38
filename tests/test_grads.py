"""`clip_grad_norm_` is the norm that one process would have, the same number on all ranks.

A norm of the shards alone gives each rank another number; one summed over replicas is too large by
the root of their number; one that sums what every rank has whole counts it W times; padding or a
tied weight counted twice shows against torch's own norm on one process.
"""

import math

import pytest
import torch
from torch import nn
from zero_training import (
    CLOSE,
    GROUPS,
    HYBRIDS,
    batch_for,
    build,
    gpt,
    hybrid,
    loss_of,
    mlp,
    part,
    trunk,
)

from s2s_lib import DDP, RankError, ZeRO, all_gather, bill, clip_grad_norm_, launch

NORMS = (2.0, math.inf, 1, 3.5)


class Vector(nn.Module):
    """Its gradient is whatever `forward` is given."""

    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=torch.float64))

    def forward(self, gradient):
        return (self.weight * torch.tensor(gradient, dtype=torch.float64)).sum()


def test_sharded_three_and_four_are_five_and_with_a_replicated_twelve_thirteen():
    def work(world):
        results = []
        for stage in (1, 2, 3):
            model = nn.Module()
            model.cut = ZeRO(Vector(2), world, stage)
            model.cut([3.0, 4.0]).backward()
            results.append(clip_grad_norm_(model, 100).item())
            model.whole = Vector(1)
            model.whole([12.0]).backward()
            results.append(clip_grad_norm_(model, 100).item())
            results.append(clip_grad_norm_(model, 100, math.inf).item())
            results.append(clip_grad_norm_(model, 6.5).item())
            grads = [p.grad.tolist() for p in model.parameters()]
            assert grads[0] == pytest.approx([(1.5, 2.0)[world.rank]], rel=1e-6)
            assert grads[1] == pytest.approx([6.0], rel=1e-6)
        return results

    assert launch(work, ranks=2) == [pytest.approx([5.0, 13.0, 12.0, 13.0] * 3)] * 2


def test_replicas_of_a_shard_are_not_summed_and_averages_divide_once():
    def work(world):
        results = []
        for shape in HYBRIDS:
            model = hybrid(world, *shape, Vector(2), 3)
            model([3.0, 4.0]).backward()
            results.append(clip_grad_norm_(model, 100).item())
            model.zero_grad()
            model([world.rank + 1.0, 0.0]).backward()
            results.append(clip_grad_norm_(model, 100).item())
        return results

    # Of gradients 1, 2, 3, 4 the average is 2.5.
    assert launch(work, ranks=4) == [pytest.approx([5.0, 2.5] * 3)] * 4


def test_it_equals_torchs_norm_and_clipped_gradients_of_one_process():
    def work(world):
        wraps = [lambda m, s=s: hybrid(world, *s, m, 3) for s in HYBRIDS]
        wraps += [lambda m, s=s: ZeRO(m, world, s) for s in (0, 1, 2, 3)]
        wraps += [lambda m: DDP(m, world)]
        for make in (gpt, mlp, trunk):
            for norm_type in NORMS:
                for wrap in wraps if norm_type in (2.0, math.inf) else wraps[1:2]:
                    check_against_torch(make, wrap, norm_type, world)

    launch(work, ranks=4)


def check_against_torch(make, wrap, norm_type, world):
    batch = batch_for(make, 12, 0)
    plain = build(make)
    loss_of(plain, *batch).backward()
    raw = nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
    model = wrap(build(make))
    loss_of(model, *part(batch, world)).backward()
    # Far above, nothing changes; then half of it is cut off.
    for limit in (1e9, raw / 2):
        want = nn.utils.clip_grad_norm_(plain.parameters(), float(limit), norm_type)
        got = clip_grad_norm_(model, float(limit), norm_type)
        said = all_gather(got.view(1), world)
        assert (said == got).all(), "each rank has its own norm"
        torch.testing.assert_close(got, want, **CLOSE)
    for (name, mine), theirs in zip(
        model.module.named_parameters(), plain.parameters(), strict=True
    ):
        if mine.grad is not None and isinstance(model, ZeRO):
            flat = model.flat_of[mine]
            i = flat.names.index(name)
            torch.testing.assert_close(mine.grad, flat.part_of(theirs.grad, i), **CLOSE)


def test_parameters_without_a_gradient_count_for_nothing_and_all_ranks_may_lack_some():
    def work(world):
        model = ZeRO(nn.ModuleList([Vector(1), Vector(5)]), world, 2)
        before = clip_grad_norm_(model, 1.0).item()
        model.module.forward = lambda: model.module[0]([3.0])
        model().backward()
        return before, clip_grad_norm_(model, 100.0).item(), clip_grad_norm_(model, 1.0).item()

    assert launch(work, ranks=4) == [(0.0, pytest.approx(3.0), pytest.approx(3.0))] * 4


def test_sixteen_bit_gradients_are_squared_in_float32():
    def work(world):
        plain = nn.Linear(300, 300, bias=False)
        model = ZeRO(plain, world, 3, param_dtype=torch.float16)
        (model(torch.full((1, 300), 300.0)).sum()).backward()
        assert plain.weight.grad.dtype == torch.float16
        norm = clip_grad_norm_(model, 1.0).item()
        return norm, clip_grad_norm_(model, 1.0).item()

    for norm, after in launch(work, ranks=2):
        # 300 in each of 300 x 300 places; its square is above what 16 bits hold.
        assert norm == pytest.approx(300.0 * 300, rel=1e-3)
        assert after == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("group_of", GROUPS[:3])
def test_it_sends_two_numbers_for_each_rank_but_one(group_of):
    def work(world):
        group = world.subgroup(group_of)
        if group is None:
            return 0
        model = ZeRO(build(mlp), group, 3)
        loss_of(model, *batch_for(mlp, 2, 0)).backward()
        with bill() as sent:
            clip_grad_norm_(model, 1.0)
        assert sent.by("collective").keys() == {"all_reduce"}
        return sent.bytes

    assert sum(launch(work, ranks=4)) == 2 * (len(group_of) - 1) * 8


def test_a_norm_that_is_no_number_shows_on_every_rank():
    def work(world):
        results = []
        for bad in (math.nan, math.inf):
            model = ZeRO(Vector(4), world, 2)
            model([1.0, 1.0, 1.0, bad]).backward()
            results.append(clip_grad_norm_(model, 1.0).item())
        return results

    for results in launch(work, ranks=2):
        assert math.isnan(results[0]) and results[1] == math.inf


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, "1", True, None])
def test_limits_and_kinds_of_norm_that_are_none_are_refused(bad):
    model = Vector(2)
    with pytest.raises(ValueError, match="above 0"):
        clip_grad_norm_(model, bad)
    with pytest.raises(ValueError, match="above 0"):
        clip_grad_norm_(model, 1.0, bad)


def test_parameters_instead_of_the_module_are_refused():
    with pytest.raises(ValueError, match="not its parameters"):
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


def test_a_rank_that_does_not_call_it_is_told_of_at_the_timeout():
    def work(world):
        model = ZeRO(Vector(4), world, 2)
        model([1.0] * 4).backward()
        if world.rank == 0:
            clip_grad_norm_(model, 1.0)

    with pytest.raises(RankError, match="all_reduce|receive"):
        launch(work, ranks=2, timeout=2)
