"""ZeRO takes the steps of one process at every stop of the dial, and says so in bytes.

Parity is in float64 to 1e-10, of weights and of the gradient's norm, after steps with
weight-decay groups and clipping. A shard that begins in the wrong place, a divisor for one group
only, a stale weight, a norm of the shard alone: each shows in every weight. Bytes are compared
with the docstring's formula, padding and all, rank by rank; a unit gathered once too often or a
gradient averaged twice shows there. Modules that are hard to cut are in test_zero_cases.py, odd
uses in test_zero_uses.py and test_zero_refusals.py.
"""

import time

import pytest
import torch
from zero_training import (
    GROUPS,
    HYBRIDS,
    adamw,
    alone,
    assert_same,
    batch_for,
    build,
    gpt,
    hybrid,
    loss_of,
    mlp,
    part,
    train,
    trunk,
)

from s2s_lib import GPT, Cluster, GPTConfig, Link, Mesh, ZeRO, all_reduce, bill, launch, timeline


def test_stages_and_hybrids_equal_one_process_after_five_steps_of_adamw():
    def work(world):
        results = {}
        for make in (gpt, mlp, trunk):
            for stage in (0, 1, 2, 3):
                for group in filter(None, map(world.subgroup, GROUPS)):
                    model = ZeRO(build(make, seed=group.rank), group, stage)
                    norms = train(model, make, group)
                    results[make, stage, group.size] = model.full_state_dict(), norms
                for shape in HYBRIDS:
                    model = hybrid(world, *shape, build(make, seed=world.rank), stage)
                    norms = train(model, make, world)
                    results[make, stage, shape] = model.full_state_dict(), norms
        return results

    expected = {make: alone(make) for make in (gpt, mlp, trunk)}
    done = set()
    for results in launch(work, ranks=4):
        done |= results.keys()
        for (make, stage, ranks), (weights, norms) in results.items():
            what = f"{make.__name__}, stage {stage}, {ranks}"
            assert_same(weights, expected[make][0], what)
            assert norms == pytest.approx(expected[make][1], abs=1e-10), what
            assert min(norms) > 0.05, "clipping never acted"
    assert len(done) == 3 * 4 * 7


def test_names_and_parameter_objects_are_the_modules_own():
    def work(world):
        for stage in (0, 1, 2, 3):
            plain = build(gpt)
            before = dict(plain.named_parameters())
            model = ZeRO(plain, world, stage)
            assert plain.head.weight is plain.embed.weight
            train(model, gpt, world, steps=1)
            after = dict(model.module.named_parameters())
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before)
            assert all(p.dim() == before[n].dim() for n, p in after.items())
            assert list(model.full_state_dict()) == list(build(gpt).state_dict())

    launch(work, ranks=2)


# Bytes


def padded(model, size, trainable=None):
    """Bytes of all flats, each filled up to a multiple of the ranks that cut it."""
    total = 0
    for unit in model.units:
        kinds = {}
        for parameter, shape in shapes(unit):
            if trainable is None or parameter.requires_grad == trainable:
                key = parameter.dtype, parameter.requires_grad
                kinds[key] = kinds.get(key, 0) + shape.numel()
        total += sum(-(-n // size) * size * dtype.itemsize for (dtype, _), n in kinds.items())
    return total


def shapes(unit):
    return [pair for f in unit.flats for pair in zip(f.parameters, f.shapes, strict=True)]


def bytes_of_a_step(model, make, group, optimizer):
    """Bytes sent in forward and in backward of a step after another, as a bill each."""
    optimizer.zero_grad()
    with bill() as forward:
        loss = loss_of(model, *part(batch_for(make, 12, 0), group))
    with bill() as backward:
        loss.backward()
    with bill() as step:
        optimizer.step()
    assert step.bytes == 0
    return forward, backward


def test_each_rank_sends_what_the_docstring_says_padding_included():
    def work(world):
        for make in (gpt, mlp):
            for group in filter(None, map(world.subgroup, GROUPS)):
                for stage in (0, 1, 2, 3):
                    model = ZeRO(build(make), group, stage)
                    optimizer = adamw(model)
                    bytes_of_a_step(model, make, group, optimizer)
                    forward, backward = bytes_of_a_step(model, make, group, optimizer)
                    what = f"{make.__name__}, stage {stage}, {group.size} ranks"
                    share = padded(model, group.size) // group.size * (group.size - 1)
                    if stage == 0:
                        numel = sum(p.numel() for p in build(make).parameters())
                        sent = all_reduce(torch.tensor(backward.bytes), group).item()
                        assert sent == 2 * (group.size - 1) * numel * 8, what
                        assert forward.bytes == 0, what
                        continue
                    assert forward.bytes == share, what
                    assert backward.bytes == share * (2 if stage == 3 else 1), what

    launch(work, ranks=4)


def test_the_first_forward_and_a_second_one_without_a_step_send_nothing_unless_weights_are_cut():
    def work(world):
        counts = []
        for stage in (0, 1, 2, 3):
            model = ZeRO(build(mlp), world, stage)
            for _ in range(3):
                with bill() as sent:
                    model(batch_for(mlp, 2, 0)[0])
                counts.append(sent.bytes)
            share = padded(model, world.size) // world.size * (world.size - 1)
        return counts, share

    for counts, share in launch(work, ranks=3):
        assert counts == [0] * 9 + [share] * 3


def test_frozen_weights_are_sent_only_where_weights_are_cut_and_their_gradients_never():
    def work(world):
        for optimized in ("all", "trainable"):
            for stage in (1, 2, 3):
                model = ZeRO(build(trunk), world, stage)
                chosen = [p for p in model.parameters() if optimized == "all" or p.requires_grad]
                optimizer = torch.optim.AdamW(chosen, lr=1e-2)
                bytes_of_a_step(model, mlp, world, optimizer)
                forward, backward = bytes_of_a_step(model, mlp, world, optimizer)
                ours, others = (padded(model, world.size, t) // 3 * 2 for t in (True, False))
                what = f"stage {stage}, the optimizer has {optimized} parameters"
                assert forward.bytes == (ours + others if stage == 3 else ours), what
                most = 2 * ours + others if stage == 3 else ours
                assert ours <= backward.bytes <= most, what
                scattered = backward.by("collective")["reduce_scatter"]
                assert scattered == ours, what

    launch(work, ranks=3)


def test_mixed_precision_sends_sixteen_bits_a_number():
    def work(world):
        for stage in (1, 2, 3):
            model = ZeRO(build(mlp, dtype=torch.float32), world, stage, param_dtype=torch.bfloat16)
            optimizer = adamw(model)
            bytes_of_a_step(model, mlp, world, optimizer)
            sent = bytes_of_a_step(model, mlp, world, optimizer)
            share = padded(model, 3) // 3 * 2 // 2
            assert [s.bytes for s in sent] == [share, share * (2 if stage == 3 else 1)]

    launch(work, ranks=3)


def test_hybrid_sends_weights_and_gradients_inside_and_shards_of_gradients_between():
    def work(world):
        results = {}
        for copies, shards in HYBRIDS:
            mesh = Mesh(world, replicate=copies, shard=shards)
            for stage in (1, 2, 3):
                model = hybrid(world, copies, shards, build(gpt), stage)
                optimizer = adamw(model)
                bytes_of_a_step(model, gpt, world, optimizer)
                sent = bytes_of_a_step(model, gpt, world, optimizer)
                inside = [b.by("group").get(mesh["shard"].ranks, 0) for b in sent]
                whole = padded(model, shards)
                share = whole // shards * (shards - 1)
                assert inside == [share, share * (2 if stage == 3 else 1)], (shards, stage)
                between = sent[1].bytes - inside[1]
                total = all_reduce(torch.tensor(between), mesh["replicate"]).item()
                assert total == 2 * (copies - 1) * whole // shards, (copies, shards)
                assert sent[0].bytes == inside[0]
                if shards == 2 and stage == 3:
                    links = [b.by("link") for b in sent]
                    results = {k: sum(b.get(k, 0) for b in links) for k in ("intra", "inter")}
                    assert results == {"intra": sum(inside), "inter": between}
        return results

    cluster = Cluster(2, 2, intra=Link(100, 1), inter=Link(10, 1))
    for result in launch(work, ranks=4, cluster=cluster):
        # Two copies of two: 3/2 of the model inside, half a model between.
        assert result["intra"] == pytest.approx(3 * result["inter"], rel=0.02)


# Prefetch


def forward_with_pauses(world, prefetch):
    """The marks of a forward in which each of four blocks computes for 0.1 s, and its waits."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig(layers=4, hidden=12, heads=3, vocab=17, seq=6)).double()
    model = ZeRO(plain, world, 3, prefetch=prefetch)
    train(model, gpt, world, steps=2)
    with timeline() as line:
        for block in plain.blocks:
            block.mlp.register_forward_hook(lambda *_: time.sleep(0.1))
            block.attn.register_forward_pre_hook(lambda *_: line.mark("runs", 0.0))
        model(batch_for(gpt, 2, 0)[0])
    assert line.tracks() == [0, 2], "gathers run on the second background thread"
    return [name for name, _ in line.marks], line.seconds("waiting"), model.full_state_dict()


def test_prefetch_changes_no_number_and_gathers_while_the_unit_before_computes():
    # A gather takes 40 ms, because that is how long a message takes.
    cluster = Cluster(2, 1, inter=Link(10, 40_000))
    runs = [launch(forward_with_pauses, p, ranks=2, cluster=cluster)[0] for p in (True, False)]
    (ahead, short, weights), (behind, long, same) = runs
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    root, *blocks = ["gather the root", *(f"gather blocks.{i}" for i in range(4))]
    assert behind == [root, *(mark for block in blocks for mark in (block, "runs"))]
    assert ahead == [root, *blocks[:2], "runs", blocks[2], "runs", blocks[3], "runs", "runs"]
    # Of five waits only the first two are left.
    assert 0.04 < short < 0.6 * long
