"""All strategies at once: whatever the layout, the steps of one process.

The judge is the plain GPT in a plain loop with torch's clipping, in float64 to 1e-9: each loss and
each norm on every rank, and every weight at its place in the mesh. A loss that is not averaged over
replicas, or is over all ranks; batches drawn by the rank in the world; a norm that leaves an axis
out or counts a copy twice; an average over ranks with other parts; a group in another order than
that of the mesh: each ends in another number on some rank. Bytes are counted axis by axis, and
every parameter is looked for in what averages it. `tools/parity.py` runs all layouts, here are as
few as have every pair of settings.
"""

from collections import Counter

import pytest
import torch
from parallel_training import (
    CLIP,
    ORDERS,
    ROWS,
    SHAPE,
    TOLERANCE,
    Layout,
    adamw,
    alone,
    assert_parity,
    assert_same,
    assert_weights,
    batch,
    built,
    cannot_be,
    matrix,
    plain,
    plain_steps,
    refusal,
    rows_of,
    spread,
    trained,
    trained_at,
)
from torch import nn

from s2s_lib import (
    DDP,
    GPT,
    Batches,
    Group,
    ZeRO,
    bill,
    clip_grad_norm_,
    launch,
    next_token_loss,
)
from s2s_lib.course.plans import GPT_PLAN
from s2s_lib.training.parallel import mesh_of

MORE = {"tied": [False, True], "recompute": [False, True], "order": ["dp-pp-tp", "tp-dp-pp"]}


# The matrix


def test_every_pair_of_settings_takes_the_steps_of_one_process():
    possible = [layout for layout in matrix(4, **MORE) if not cannot_be(layout)]
    assert_parity(*spread(possible))


def test_three_axes_at_once_take_the_steps_of_one_process():
    assert_parity(
        Layout(2, 2, 2, tied=True),
        Layout(2, 2, 2, zero=1, schedule="interleaved", sequence=True),
        Layout(2, 2, 2, zero=3, sequence=True, order="tp-pp-dp"),
        Layout(2, 2, 2, schedule="zb_h1", recompute=True),
        # ZeRO inside pairs, copies between them, over parts and over stages.
        Layout(4, 2, 1, zero=3, hybrid=2, sequence=True),
        Layout(4, 1, 2, zero=2, hybrid=2, order="pp-tp-dp"),
        # One rank has a whole shard, and the copies are apart.
        Layout(2, 2, 2, zero=3, hybrid=1),
        steps=2,
    )


def test_what_cannot_be_is_refused_with_the_keys_to_change_and_all_else_is_not():
    for ranks in (4, 8):
        layouts = matrix(ranks, tied=[False, True])
        said = {layout: refusal(layout) for layout in layouts}
        assert {layout for layout in layouts if said[layout]} == set(filter(cannot_be, layouts))
        for layout in filter(cannot_be, layouts):
            if layout.zero and layout.schedule in ("zb_h1", "zbv"):
                keys = ["pipeline_schedule:", f"zero_stage {layout.zero}", "use one_f_one_b"]
            elif layout.zero:
                keys = ["model.tied:", f"zero_stage {layout.zero}", "give model.tied: false"]
            else:
                keys = ["model.tied:", "zbv", "give model.tied: false"]
            assert all(key in said[layout] for key in keys), (str(layout), said[layout])


# Who is where


def groups_of(parallel):
    return {axis: parallel.mesh[axis].ranks for axis in ("dp", "pp", "tp")}


def expected_groups(layout, ranks, number):
    """Of the rank at this place of the list `ranks`: the ranks that differ in one axis alone."""
    places = [layout.place(other) for other in range(len(ranks))]
    return {
        axis: tuple(
            rank
            for rank, place in zip(ranks, places, strict=True)
            if place | {axis: 0} == places[number] | {axis: 0}
        )
        for axis in ("dp", "pp", "tp")
    }


def test_the_order_of_the_axes_says_who_is_a_neighbour_and_changes_no_result():
    layouts = [Layout(2, 2, 2, order=order) for order in ORDERS]

    def work(world):
        results = []
        for layout in layouts:
            parallel = built(layout, world)
            results.append((groups_of(parallel), trained(world, None, parallel, steps=1)))
        return results

    for layout, *of_ranks in zip(layouts, *launch(work, ranks=8, timeout=120), strict=True):
        for rank, (groups, _) in enumerate(of_ranks):
            assert groups == expected_groups(layout, range(8), rank), (str(layout), rank)
        assert_same(layout, [result for _, result in of_ranks], alone(steps=1))


def test_a_world_in_another_order_or_of_some_ranks_is_laid_out_in_that_order():
    lists = [(3, 1, 0, 2), (5, 1, 4, 2)]
    layouts = [Layout(2, 2, 1, zero=3, sequence=True), Layout(2, 1, 2, zero=2)]

    def work(world):
        results = {}
        for ranks, layout in zip(lists, layouts, strict=True):
            group = world.subgroup(ranks)
            if group is not None:
                parallel = built(layout, group)
                results[ranks] = groups_of(parallel), trained(group, None, parallel, steps=2)
        return results

    results = launch(work, ranks=6, timeout=120)
    for ranks, layout in zip(lists, layouts, strict=True):
        of_ranks = [results[rank][ranks] for rank in ranks]
        for place, (groups, _) in enumerate(of_ranks):
            assert groups == expected_groups(layout, ranks, place)
        assert_same(layout, [result for _, result in of_ranks], alone(layout.layers, steps=2))


def test_a_mesh_of_another_size_than_the_world_is_refused_with_the_factors():
    with pytest.raises(ValueError, match="dp 2 x pp 2 x tp 2 makes 8 ranks, the group has 2"):
        mesh_of(Layout(2, 2, 2).config(), Group((0, 1), 0))


def test_ranks_of_one_replica_get_the_same_rows_and_replicas_disjoint_ones():
    layouts = [Layout(2, 2, 1), Layout(2, 1, 2, order="pp-dp-tp")]
    text = torch.arange(401)

    def work(world):
        given = []
        for layout in layouts:
            group = built(layout, world).dp
            batches = Batches(text, 8, ROWS // layout.dp, rank=group.rank, size=group.size)
            given.append(torch.stack([x for x, _ in batches.epoch(0)]))
        return given

    whole = torch.stack([x for x, _ in Batches(text, 8, ROWS).epoch(0)])
    for layout, *given in zip(layouts, *launch(work, ranks=4), strict=True):
        for rank, rows in enumerate(given):
            # In the order of the replicas, they are the batches of one process.
            assert torch.equal(rows, whole.chunk(layout.dp, dim=1)[layout.place(rank)["dp"]])


# The loss and the norm


def test_the_loss_is_that_of_the_global_batch_on_every_rank_and_not_a_rank_s_own():
    """Replicas have other rows, so each has another loss; targets that do not count make
    micro-batches unequal, and replicas not."""
    layout = Layout(2, 1, 2)

    def targets(y):
        y = y.clone()
        for rows in y.chunk(2):
            rows[0, :6] = -100
        return y

    def work(world):
        parallel = built(layout, world)
        x, y = batch(0)
        x, y = (t.chunk(2)[parallel.dp.rank] for t in (x, targets(y)))
        loss = parallel.step(x, y)
        return float(loss), loss.dtype, loss.requires_grad, float(clip_grad_norm_(parallel, CLIP))

    model = plain().double()
    x, y = batch(0)
    own = next_token_loss(model(x[:4]), targets(y)[:4]).item()
    loss = next_token_loss(model(x), targets(y))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    results = launch(work, ranks=4)
    assert results == [results[0]] * 4 and results[0][1:3] == (torch.float64, False)
    assert results[0][0] == pytest.approx(loss.item(), rel=0, abs=TOLERANCE)
    assert results[0][3] == pytest.approx(norm.item(), rel=0, abs=TOLERANCE)
    assert abs(own - loss.item()) > 1e-4


def test_evaluation_changes_nothing_and_drops_nothing():
    layout = Layout(2, 1, 2, zero=2, dropout=0.5)

    def work(world):
        parallel = built(layout, world)
        before, number = torch.get_rng_state(), parallel.number
        losses = [float(parallel.evaluate(*rows_of(parallel.dp, 0))) for _ in range(2)]
        assert parallel.number == number and torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in parallel.parameters())
        return losses

    for losses in launch(work, ranks=4):
        assert losses == pytest.approx([alone()[0][0]] * 2, rel=0, abs=TOLERANCE)


# Other models


class Unused(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.spare = nn.Parameter(torch.ones(3))


def test_what_no_stage_uses_is_refused_by_name_frozen_or_not():
    layout = Layout(1, 1, 2)

    def work(world):
        told = []
        for frozen in (False, True):
            model = Unused(layout.config().gpt())
            model.spare.requires_grad_(not frozen)
            try:
                built(layout, world, model)
            except ValueError as error:
                told.append(str(error))
        return told

    for told in launch(work, ranks=2):
        assert len(told) == 2 and all(t.startswith("spare is used by no stage") for t in told)


class Scaled(nn.Module):
    """Layers with biases, a buffer that counts and one that is read."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.embed = nn.Embedding(SHAPE["vocab"], 16)
        self.up, self.down, self.drop = nn.Linear(16, 24), nn.Linear(24, 16), nn.Dropout(drop)
        self.head = nn.Linear(16, SHAPE["vocab"])
        self.register_buffer("scale", torch.linspace(0.5, 2, 16))
        self.register_buffer("other", torch.tensor([3, 4]))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.drop(torch.tanh(self.up(x)))) * self.scale
        return self.head(x)


SCALED_PLAN = {"embed": "vocab", "up": "column", "down": "row", "head": "vocab"}


def test_another_model_by_its_own_plan_with_buffers_takes_the_steps_of_one_process():
    def make():
        torch.manual_seed(5)
        return Scaled()

    layouts = [Layout(2, 2), Layout(2, 2, zero=3), Layout(1, 2, 2), Layout(2, 1, 2, zero=1)]

    def work(world):
        results = []
        for layout in layouts:
            parallel = built(layout, world, make(), plan=SCALED_PLAN)
            results.append(trained(world, None, parallel))
            buffers = dict(parallel.named_buffers())
            assert all(b.dtype in (torch.float64, torch.int64) for b in buffers.values())
        return results

    want = plain_steps(make())
    for layout, *of_ranks in zip(layouts, *launch(work, ranks=4), strict=True):
        assert_same(layout, of_ranks, want, SCALED_PLAN)


class Nested(Scaled):
    """Its dropout is inside another module between the layers that are cut."""

    def __init__(self, drop):
        super().__init__()
        self.drop = nn.Sequential(nn.Identity(), nn.Dropout(drop))


class After(Scaled):
    """Its dropout is beside the layers that are cut, and called after them."""

    def __init__(self, drop):
        super().__init__()
        self.drop, self.down = nn.Identity(), nn.Sequential(self.down, nn.Dropout(drop))


def test_dropout_where_a_rank_has_numbers_of_its_own_is_refused_by_name():
    tp = Layout(1, 2)
    tries = [(Scaled, tp, 0.5), (Nested, tp, 0.5), (After, tp, 0.5), (Scaled, tp, 0.0)]

    def work(world):
        told = []
        for kind, layout, drop in [*tries, (Scaled, Layout(2), 0.5)]:
            plan = SCALED_PLAN
            if kind is After:
                plan = {name.replace("down", "down.0"): style for name, style in plan.items()}
            try:
                built(layout, world, kind(drop), plan=plan).step(*batch(0))
                told.append("trained")
            except ValueError as error:
                told.append(str(error))
        return told

    for beside, nested, *others in launch(work, ranks=2):
        assert beside.startswith("drop drops between layers that tensor parallelism cuts")
        assert nested.startswith("drop.1 drops between layers that tensor parallelism cuts")
        assert others == ["trained"] * 3


def test_a_model_with_weights_keeps_them_and_one_without_gets_those_of_the_seed():
    """Bit for bit what construction draws, whatever the layout."""
    layouts = [Layout(2, 2, zero=3), Layout(1, 2, 2, tied=True), Layout(4, zero=1, hybrid=2)]

    def work(world, real):
        torch.manual_seed(0 if real else 100 + world.rank)
        results = []
        for layout in layouts:
            torch.manual_seed(0)
            model = GPT(layout.config().gpt()) if real else None
            results.append(trained(world, None, built(layout, world, model), steps=0))
        return results

    for real in (False, True):
        for layout, *of_ranks in zip(layouts, *launch(work, real, ranks=4), strict=True):
            want = alone(layout.layers, layout.tied, 0)[2]
            assert_weights(layout, [weights for *_, weights in of_ranks], want, GPT_PLAN, 0)


def test_bfloat16_follows_float64_to_its_eight_bits():
    """Losses to 1 %, norms to 5 %; what the optimizer steps are float32."""
    narrow = {"precision": "bfloat16"}
    layouts = [Layout(2, 2, **narrow), Layout(2, 1, 2, 3, recompute=True, **narrow)]
    results = launch(trained_at, layouts, ranks=4)
    for layout, *of_ranks in zip(layouts, *results, strict=True):
        losses, norms, _ = alone(layout.layers)
        for got_losses, got_norms, weights in of_ranks:
            assert (got_losses, got_norms) == of_ranks[0][:2]
            assert got_losses == pytest.approx(losses, rel=0.01)
            assert got_norms == pytest.approx(norms, rel=0.05)
            assert {w.dtype for w in weights.values()} == {torch.float32}


def test_checkpointed_blocks_run_again_in_backward():
    def work(world):
        counts = []
        for recompute in (False, True):
            parallel = built(Layout(recompute=recompute), world)
            calls = []
            for name, module in parallel.named_modules():
                if name.endswith("attn.q"):
                    module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            parallel.step(*batch(0))
            counts.append(len(calls))
        return counts

    # 2 blocks, 2 micro-batches.
    assert launch(work, ranks=1) == [[4, 8]]


# What is sent, and who averages what


def planned(parallel) -> Counter:
    """How often each parameter is in a plan of reduction: a bucket of a DDP or a flat of a ZeRO."""
    count = Counter()
    for module in parallel.modules():
        if isinstance(module, DDP):
            count.update(id(p) for bucket in module.buckets for p in bucket.parameters)
        if isinstance(module, ZeRO):
            count.update(id(p) for flat in module.flats if flat.trainable for p in flat.parameters)
    return count


def predicted(layout, parameters):
    """Bytes of a step of all 8 ranks together, by axis, from what each strategy's docstring says.
    On each axis groups of W = 2, where (W-1) is 1 and what an all_reduce sends 2 times a tensor.

    `parameters`: bytes of what all ranks of one copy hold together.
    """
    numbers, copies = 8, 2
    micro, rows = layout.micro, ROWS // layout.dp // layout.micro
    tokens = rows * SHAPE["seq"]
    activation = tokens * SHAPE["hidden"] * numbers
    # Each block has two row layers, and two inputs that its column layers share; then there are
    # the embedding forward and the head's input backward.
    sums = 4 * layout.layers + 2
    entropy = 2 * 3 * tokens * numbers + 2 * 16
    # The loss is averaged on the last stage's two ranks of each replica, and told to the first.
    told = 2 * numbers
    travels = {0: 2, 1: 2, 2: 2, 3: 2 * micro + 1}[layout.zero]
    return {
        "tp": copies * micro * (sums * 2 * activation + entropy),
        "pp": 4 * (2 * micro * activation + 2 * 72 + numbers),
        "dp": travels * parameters + 2 * told,
    }


def test_a_step_sends_on_each_axis_what_its_strategy_says_and_averages_each_parameter_once():
    layouts = [Layout(2, 2, 2, zero=zero) for zero in range(4)]

    def work(world):
        results = []
        for layout in layouts:
            parallel = built(layout, world)
            optimizer = adamw(parallel)
            assert planned(parallel) == Counter(map(id, parallel.parameters()))
            held = sum(p.nbytes for p in parallel.parameters())
            # In the first step the pipeline also tells what its messages look like.
            parallel.step(*rows_of(parallel.dp, 0))
            optimizer.step()
            with bill() as sent:
                parallel.step(*rows_of(parallel.dp, 1))
            by_axis = {ranks: axis for axis, ranks in groups_of(parallel).items()}
            results.append(({by_axis[g]: n for g, n in sent.by("group").items()}, held))
        return results

    for layout, *of_ranks in zip(layouts, *launch(work, ranks=8, timeout=120), strict=True):
        total = sum((Counter(sent) for sent, _ in of_ranks), Counter())
        held = sum(held for _, held in of_ranks) // (1 if layout.zero else layout.dp)
        assert dict(total) == predicted(layout, held), str(layout)
