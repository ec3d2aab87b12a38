"""Stages that are hard on a pipeline: each ends where one process ends.

A case builds its stages twice on every rank; one copy goes through the pipeline, the other through
plain autograd on the whole batch. Compared are the loss, every gradient (None where one process
has None) and the weights after steps of AdamW, in float64 to 1e-10. A gradient that went to the
wrong one of several tensors, that was dropped or added twice shows in every weight behind it.
"""

import torch
from pipeline_training import (
    CLOSE,
    WIDTH,
    Flow,
    Layers,
    adamw,
    assert_gradients,
    assert_parity,
    assert_weights,
    batch,
    entropy,
    linear,
    mean_square,
    parameters_of,
    run,
    stages,
    tokens,
)
from torch import nn

from s2s_lib import GPT, GPTConfig, Pipeline, bill, clip_grad_norm_, launch, schedule, split

# What passes between stages


def skip_stages():
    """The last uses what the first two gave: the tensor of the first is carried past the second."""
    return [
        Flow(0, lambda m, x: (m.a(x).tanh(), x), a=linear()),
        Flow(1, lambda m, v: (m.a(v[0]).tanh(), v[0], v[1]), a=linear()),
        Flow(2, lambda m, v: m.a(v[0]) * v[1] + v[2], a=linear()),
    ]


def test_a_skip_connection_is_carried_along():
    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2"):
            assert_parity(skip_stages, world, schedule.BUILDERS[name](3, 4))

    launch(work, ranks=3)


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))

    def forward(self, x):
        first = self.layers[0](x).tanh()
        second = self.layers[1](first).tanh()
        third = self.layers[2](second) * first
        return self.layers[3](third) + second + x


def test_a_model_with_skip_connections_split_by_itself():
    def build():
        torch.manual_seed(0)
        return split(Skipping().double(), 4)

    def work(world):
        for plan in (schedule.one_f_one_b(4, 3), schedule.zb_h1(4, 3)):
            assert_parity(build, world, plan)
        if pair := world.subgroup([3, 1]):
            for plan in (schedule.interleaved(2, 4), schedule.zbv(2, 4)):
                assert_parity(build, pair, plan)

    launch(work, ranks=4)


def many_stages():
    """A dict with lists, None, numbers that have no gradient, a flag, and one tensor twice."""

    def begin(m, x):
        h = m.a(x).tanh()
        index = torch.arange(len(x)).flip(0)
        return {"h": h, "more": [None, (x > 0, index)], "again": (h, h.sum(1), x.half())}

    def middle(m, value):
        mask, index = value["more"][1]
        assert value["more"][0] is None and mask.dtype == torch.bool
        assert index.dtype == torch.int64 and value["again"][2].dtype == torch.float16
        h = m.a(value["h"] * mask)[index] + value["again"][0] + value["again"][1][:, None]
        return h, None, mask

    def end(m, value):
        h, nothing, mask = value
        assert nothing is None
        return m.a(h) * mask

    return [Flow(i, f, a=linear()) for i, f in enumerate((begin, middle, end))]


def test_tensors_travel_in_tuples_lists_and_dicts_with_none_between():
    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1"):
            plan = schedule.BUILDERS[name](3, 1)
            assert_parity(many_stages, world, plan)

    launch(work, ranks=3)


def three_stages():
    def begin(m, x):
        return m.a(x), m.b(x), m.c(x)

    def end(m, value):
        return m.a(value[0]) * value[1] + value[2]

    return [
        Flow(0, begin, a=linear(), b=linear(), c=linear()),
        Flow(1, end, a=linear()),
    ]


def test_three_tensors_in_a_message_all_arrive():
    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1"):
            pipeline = assert_parity(three_stages, world, schedule.BUILDERS[name](2, 4))
            with bill() as sent:
                pipeline.step(*batch())
            kind = "activations" if world.rank == 0 else "activation gradients"
            assert sent.by("collective")[kind] == 3 * 8 * WIDTH * 8

    launch(work, ranks=2)


def unused_stages():
    """The second of two outputs is looked at by nobody; a third has no way to a weight."""
    return [
        Flow(0, lambda m, x: (m.a(x), m.b(x), x.detach()), a=linear(), b=linear()),
        Flow(1, lambda m, v: (m.a(v[0]), v[1]), a=linear(), unused=linear()),
        Flow(2, lambda m, v: m.a(v[0]), a=linear()),
    ]


def test_what_is_not_used_has_no_gradient():
    """An optimizer with weight decay moves a weight with zeros for gradient, not one with None."""

    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1"):
            pipeline = assert_parity(unused_stages, world, schedule.BUILDERS[name](3, 4))
            if world.rank == 0:
                assert pipeline.stages[0].b.weight.grad is None
            if world.rank == 1:
                assert pipeline.stages[0].unused.weight.grad is None

    launch(work, ranks=3)


def test_a_gradient_of_zeros_is_not_none():
    """0.0 and -0.0 both."""

    def work(world):
        for sign in (1, -1):
            pipeline = assert_parity(
                stages(2),
                world,
                schedule.gpipe(2, 2),
                loss_fn=lambda out, target, sign=sign: sign * (out * 0 * target).mean(),
                steps=1,
            )
            assert all(p.grad is not None for p in pipeline.parameters())

    launch(work, ranks=2)


BARE = {
    "the first has no parameters": lambda: [nn.Tanh(), Layers(1), Layers(2)],
    "the middle has none": lambda: [Layers(0), nn.Tanh(), Layers(2)],
    "the last has none": lambda: [Layers(0), Layers(1), nn.Identity()],
    "only the last has some": lambda: [nn.Tanh(), nn.Identity(), Layers(2)],
    "only the first has some": lambda: [Layers(0), nn.Identity(), nn.Tanh()],
    "the first is frozen": lambda: [Layers(0).requires_grad_(False), Layers(1), Layers(2)],
    "the middle is frozen": lambda: [Layers(0), Layers(1).requires_grad_(False), Layers(2)],
    "the first two are frozen": lambda: [
        *(Layers(i).requires_grad_(False) for i in range(2)),
        Layers(2),
    ],
    "in place at the start": lambda: [
        Layers(0),
        nn.Sequential(nn.ReLU(inplace=True), Layers(1)),
        nn.Sequential(nn.ELU(inplace=True), Layers(2)),
    ],
    "in place at the end": lambda: [
        nn.Sequential(Layers(i), nn.ReLU(inplace=True)) for i in range(3)
    ],
    "not contiguous": lambda: [
        Flow(i, lambda m, x: m.a(x).T.contiguous().T, a=linear()) for i in range(3)
    ],
}  # fmt: skip


def test_stages_without_parameters_frozen_ones_and_operations_in_place():
    def work(world):
        for build in BARE.values():
            for name in ("gpipe", "one_f_one_b", "zb_h1"):
                assert_parity(build, world, schedule.BUILDERS[name](3, 4), steps=2)

    launch(work, ranks=3)


def test_operations_in_place_where_two_stages_are_on_one_rank():
    """The turn of the V, and a group of one."""

    def build():
        return [Layers(0)] + [nn.Sequential(nn.ELU(inplace=True), Layers(i)) for i in (1, 2, 3)]

    def work(world):
        for plan in (schedule.zbv(2, 4), schedule.dualpipev(2, 4)):
            assert_parity(build, world, plan)
        if alone := world.subgroup([1]):
            plan = schedule.interleaved(1, 4, chunks=4)
            assert_parity(build, alone, plan)

    launch(work, ranks=2)


def test_bfloat16_travels_as_it_is():
    def work(world):
        built = [Layers(i).bfloat16() for i in range(2)]
        pipeline = Pipeline(built, world, schedule.one_f_one_b(2, 4), mean_square)
        x, y = (part.bfloat16() for part in batch())
        pipeline.step(x, y)
        with bill() as sent:
            loss = pipeline.step(x, y)
        assert (
            sum(v for k, v in sent.by("collective").items() if k != "all_gather") == 8 * WIDTH * 2
        )
        reference = [Layers(i).bfloat16() for i in range(2)]
        for part_x, part_y in 2 * list(zip(x.chunk(4), y.chunk(4), strict=True)):
            part = mean_square(run(reference, part_x), part_y) * 0.25
            part.backward()
        for number, stage in pipeline.module_of.items():
            for p, q in zip(stage.parameters(), reference[number].parameters(), strict=True):
                assert p.grad.dtype == torch.bfloat16
                torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.01)
        # A sum of many parts would lose its last ones in 16 bits.
        assert loss is None or loss.dtype == torch.float32

    launch(work, ranks=2)


def test_outputs_without_any_gradient_leave_none():
    def work(world):
        for name in ("one_f_one_b", "zb_h1"):
            plan = schedule.BUILDERS[name](3, 4)
            built = stages(3)()
            built[1] = Flow(1, lambda m, x: m.a(x).detach(), a=linear())
            pipeline = Pipeline(built, world, plan, mean_square)
            for _ in range(2):
                pipeline.step(*batch())
            assert all((p.grad is None) == (world.rank < 2) for p in pipeline.parameters())

    launch(work, ranks=3)


# Tied weights


def tied_stages(count):
    """An embedding that is also the head, each stage with its own copy; only the first is right."""

    def build(shared=False):
        def embed(m, tokens):
            return m.embed(tokens)

        def head(m, x):
            return m.head(x)

        first = Flow(0, embed, embed=nn.Embedding(WIDTH, WIDTH))
        last = Flow(9, head, head=linear(bias=False))
        if shared:
            last.head.weight = first.embed.weight
        return [first, *(Layers(number) for number in range(1, count - 1)), last]

    return build


def test_tied_weights_stay_equal_and_get_the_sum_and_count_once():
    def work(world):
        for name in ("gpipe", "one_f_one_b", "zb_h1", "interleaved", "zbv", "dualpipev"):
            plan = schedule.BUILDERS[name](2, 4)
            build, last = tied_stages(plan.stages), plan.stages - 1
            tied = [{0: "embed.weight", last: "head.weight"}]
            pipeline = Pipeline(build(), world, plan, entropy, tied=tied)
            reference = build(shared=True)
            optimizers = [adamw(pipeline.parameters()), adamw(parameters_of(reference))]
            for step in range(5):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                # Several batches a step add up.
                for seed in (step, step + 10):
                    x, y = tokens(seed)
                    entropy(run(reference, x), y).backward()
                    pipeline.step(x, y)
                assert_gradients(pipeline, reference, f"{name}, step {step}")
                norm = nn.utils.clip_grad_norm_(parameters_of(reference), 0.5)
                torch.testing.assert_close(clip_grad_norm_(pipeline, 0.5), norm, **CLOSE)
                # And once more after clipping.
                if step == 3:
                    entropy(run(reference, x), y).backward()
                    pipeline.step(x, y)
                    assert_gradients(pipeline, reference, f"{name} after clipping")
                for optimizer in optimizers:
                    optimizer.step()
            assert_weights(pipeline, reference, name)

    launch(work, ranks=2)


def test_the_tied_gpt_split_by_itself():
    def build(count=3):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=2, hidden=12, heads=3, kv_heads=1, vocab=WIDTH, seq=3))
        assert model.head.weight is model.embed.weight
        return split(model.double(), count)

    def work(world):
        for name in ("one_f_one_b", "zb_h1"):
            assert_parity(build, world, schedule.BUILDERS[name](3, 4), tokens, entropy, steps=5)
        # First and last stage on one rank: they share one weight.
        if pair := world.subgroup([2, 1]):
            assert_parity(lambda: build(4), pair, schedule.zbv(2, 4), tokens, entropy, steps=5)

    launch(work, ranks=3)


def test_a_weight_in_three_stages_and_two_groups_of_tied_weights():
    def build(shared=False):
        built = [Layers(number) for number in range(4)]
        if shared:
            built[1].first.weight = built[2].first.weight = built[0].first.weight
            built[3].second.bias = built[1].second.bias
        return built

    tied = [
        {0: "first.weight", 1: "first.weight", 2: "first.weight"},
        {1: "second.bias", 3: "second.bias"},
    ]

    def work(world):
        for group, plan in (
            (world, schedule.one_f_one_b(4, 3)),
            (world.subgroup([2, 0]), schedule.zbv(2, 3)),
            (world.subgroup([3, 1]), schedule.interleaved(2, 4)),
            (world.subgroup([3]), schedule.interleaved(1, 3, chunks=4)),
        ):
            if group is None:
                continue
            pipeline = Pipeline(build(), group, plan, mean_square, tied=tied)
            reference = build(shared=True)
            optimizers = [adamw(pipeline.parameters()), adamw(parameters_of(reference))]
            for step in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                pipeline.step(*batch(seed=step))
                mean_square(run(reference, batch(seed=step)[0]), batch(seed=step)[1]).backward()
                assert_gradients(pipeline, reference, repr(plan))
                norm = nn.utils.clip_grad_norm_(parameters_of(reference), 0.1)
                torch.testing.assert_close(clip_grad_norm_(pipeline, 0.1), norm, **CLOSE)
                for optimizer in optimizers:
                    optimizer.step()
            assert_weights(pipeline, reference, repr(plan))

    launch(work, ranks=4)
