"""Tensor parallelism computes what one process computes: outputs, losses, gradients, steps.

In float64 to 1e-10, on 1, 2, 3 and 4 ranks and in groups out of order; every rank builds another
model, and the result is that of the group's first. What would show where:

* a sum forward that is missing or doubled, a wrong part of a weight: in the output;
* a bias added by every rank: in the output of the MLP, whose layers have biases;
* a sum backward that is missing: nowhere in the output or loss, but in the gradient of what enters
  (`grad of what enters`, and all weights before it);
* a gradient of a norm or of a row layer's bias that is not summed with sequence parallel: in that
  gradient, and that it differs between ranks (`joined` asks for equal tensors);
* a part counted once a rank in the norm, or a whole one W times: in `norm 0`, and from there on in
  every weight after the first step.
"""

import pytest
import torch
import torch.nn.functional as F
from tensor_training import (
    GROUPS,
    HIDDEN,
    MLP_PLAN,
    OPTIONS,
    Case,
    alone,
    assert_same,
    by_group,
    gpt,
    gradients,
    in_groups,
    joined,
    mlp,
    numbers,
    square,
    train,
    whole_entropy,
)
from torch import nn

from s2s_lib import (
    GPT_PLAN,
    Column,
    Vocab,
    full_state_dict,
    gather_from_group,
    launch,
)


def compare(cases, options=OPTIONS, groups=GROUPS, steps=5, blocks=None):
    """Train every case with every option in every group, and alone."""

    def work(world):
        return {
            (name, how, group.ranks): train(case, case.cut(group, **more), group, steps)
            for name, case in cases.items()
            for group in in_groups(world, groups)
            for how, more in options.items()
        }

    found = by_group(launch(work, ranks=4))
    assert len(found) == len(cases) * len(options) * len(groups)
    for name, case in cases.items():
        want = alone(case, steps)
        for (of, how, ranks), parts in found.items():
            if of == name:
                assert_same(parts, want, f"{name}, {how}, ranks {ranks}", blocks=blocks)


@pytest.mark.parametrize("how", OPTIONS)
def test_a_gpt_equals_one_process_after_five_steps_of_adamw(how):
    compare({"tied": Case(), "own head": Case(lambda: gpt(tied=False))}, {how: OPTIONS[how]})


def test_grouped_key_value_heads_equal_one_process():
    cases = {
        # One key-value head a rank, and two.
        "3 heads share one": Case(lambda: gpt(kv_heads=4)),
        "8 of 16 heads": Case(lambda: gpt(hidden=32, heads=16, kv_heads=8, tied=False)),
    }
    compare(cases, groups=[[0, 1, 2, 3], [3, 1]], steps=2)


def test_layers_with_biases_equal_one_process():
    """Fed numbers that require a gradient; with sequence parallel cut by hand."""
    compare({"mlp": Case(mlp, MLP_PLAN, numbers, square)})


CUT = ("embed.*", "head.*", *(f"*.{n}.weight" for n in ("[qkvo]", "gate", "up", "down")))
FROZEN = {
    "embedding and first block": ("embed.*", "blocks.0.*"),
    "all but the norms": CUT,
    "column layers": ("*.attn.q.*", "*.mlp.up.*", "blocks.1.attn.*"),
    "row layers": ("*.o.weight", "*.down.weight"),
    "norms and embedding": ("*norm*", "embed.*"),
}


def test_frozen_parts_equal_one_process():
    cases = {n: Case(lambda: gpt(tied=False), frozen=frozen) for n, frozen in FROZEN.items()}
    compare(cases, groups=[[3, 1]], steps=2)


class Fused(nn.Module):
    """A block whose q, k and v come from one layer, with fewer key-value heads, and gate and up
    from another; all layers have biases."""

    def __init__(self, heads=12, kv_heads=4, head_dim=2, width=24):
        super().__init__()
        self.head_dim, self.queries = head_dim, heads // kv_heads
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (heads + 2 * kv_heads) * head_dim)
        self.o = nn.Linear(heads * head_dim, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * width)
        self.down = nn.Linear(width, HIDDEN)

    def forward(self, x):
        qkv = self.qkv(self.norm(x))
        one = qkv.shape[-1] // (self.queries + 2)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in qkv.split([self.queries * one, one, one], -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


FUSED_PLAN = {
    "qkv": Column(blocks=(24, 8, 8)),
    "o": "row",
    "gate_up": Column(blocks=2),
    "down": "row",
}


def test_fused_layers_are_cut_block_by_block():
    cases = {"fused": Case(Fused, FUSED_PLAN, numbers, square)}
    blocks = {
        name: sizes
        for layer in ("weight", "bias")
        for name, sizes in ((f"qkv.{layer}", (24, 8, 8)), (f"gate_up.{layer}", (24, 24)))
    }
    compare(cases, groups=[[0, 1, 2, 3], [3, 1]], steps=2, blocks=blocks)


def test_a_fused_layer_cut_straight_through_is_noticed():
    """Else the test above might pass whatever the blocks are."""
    plan = FUSED_PLAN | {"qkv": Column(blocks=1, head_dim=1)}
    with pytest.raises(AssertionError, match="output"):
        compare({"cut through": Case(Fused, plan, numbers, square)}, {"whole": {}}, [[3, 1]])


def only(*starts, **more):
    return {name: style for name, style in GPT_PLAN.items() if name.startswith(starts)} | more


def test_plans_for_a_part_of_the_model_equal_one_process():
    cases = {
        "blocks": (only("blocks"), whole_entropy),
        "attention": (only("blocks.*.attn"), whole_entropy),
        "embedding": (only("embed"), whole_entropy),
        "head": (only("head"), None),
        "head, gathered": (only("blocks", head=Vocab(gather=True)), whole_entropy),
        "column, gathered": ({"blocks.*.mlp.up": Column(gather=True)}, whole_entropy),
    }
    cases = {
        name: Case(lambda: gpt(tied=False), plan, **({"loss": loss} if loss else {}))
        for name, (plan, loss) in cases.items()
    }
    compare(cases, {"whole": {}}, [[3, 1]], steps=2)


def test_with_sequence_parallel_what_is_not_cut_computes_on_this_ranks_tokens():
    """So does the loss, unless the head is cut too."""

    def of_own_tokens(logits, targets, group):
        logits = gather_from_group(logits, group, 1) if group else logits
        return whole_entropy(logits, targets, group)

    def plan(*starts, **more):
        return {"blocks.*.attn.[qkv]": "column", "blocks.*.attn.o": "row"} | only(*starts, **more)

    cases = {
        "attention": Case(lambda: gpt(tied=False), plan(), loss=of_own_tokens),
        "blocks": Case(lambda: gpt(tied=False), plan("blocks"), loss=of_own_tokens),
        "with a head": Case(
            lambda: gpt(tied=False), plan(head=Vocab(gather=True)), loss=whole_entropy
        ),
        "with an embedding": Case(lambda: gpt(tied=False), plan("embed"), loss=of_own_tokens),
    }
    more = {how: OPTIONS[how] for how in ("sequence", "regather")}
    compare(cases, more, [[3, 1]], steps=2)


def two_backwards(case, model, group=None):
    """Of two batches in turn; then the same gradients again, of a graph that was retained."""
    losses = [case.loss(model(x), y, group) for x, y in map(case.data, (0, 1))]
    for loss in losses:
        loss.backward(retain_graph=True)
    summed = gradients(model, "both ")
    model.zero_grad()
    for loss in reversed(losses):
        loss.backward()
    return summed | gradients(model, "again ")


def test_gradients_add_up_over_backwards_and_a_retained_graph_gives_them_again():
    cases = {"gpt": Case(), "mlp": Case(mlp, MLP_PLAN, numbers, square)}

    def work(world):
        return {
            (name, how, group.ranks): two_backwards(case, case.cut(group, **more), group)
            for name, case in cases.items()
            for group in in_groups(world, [[0, 1, 2, 3], [3, 1]])
            for how, more in OPTIONS.items()
        }

    for (name, *how), parts in by_group(launch(work, ranks=4)).items():
        assert_same(parts, two_backwards(cases[name], cases[name].build()), f"{name}, {how}")


# The relative error of each tensor against float64; one process's own are 6e-7 and 2e-2.
PRECISION = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


def test_narrow_dtypes_err_no_more_than_they_do_on_one_process():
    case = Case()

    def work(world):
        return {
            (dtype, how, group.ranks): train(case, case.cut(group, dtype, **more), group, 1)
            for dtype in PRECISION
            for group in in_groups(world, [[0, 1, 2, 3], [3, 1]])
            for how, more in OPTIONS.items()
        }

    want = train(case, case.build(), steps=1)
    for (dtype, *how), parts in by_group(launch(work, ranks=4)).items():
        for name in (n for n in want if n.startswith(("output", "loss", "grad", "norm"))):
            got = joined([part[name] for part in parts], want[name], what=f"{how}, {name}")
            assert got.dtype is dtype or name.startswith(("loss", "norm"))
            error = (got.double() - want[name]).norm() / want[name].norm()
            assert error < PRECISION[dtype], f"{dtype}, {how}, {name}: {error:.1e}"


def test_the_whole_model_is_the_same_for_any_number_of_ranks_bit_for_bit():
    """Each rank has drawn another; that of the group's first counts."""

    def xavier():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        for layer in model:
            nn.init.xavier_uniform_(layer.weight)
        return model

    cases = {
        "gpt": Case(lambda: gpt(tied=False)),
        "fused": Case(Fused, FUSED_PLAN),
        "xavier": Case(xavier, {"0": "column", "1": "row"}),
    }

    def work(world):
        models = {
            (name, group.ranks): case.cut(group)
            for name, case in cases.items()
            for group in in_groups(world, [[1], [3, 1], [2, 0, 3, 1]])
        }
        return {
            key: {"full": full_state_dict(model)} | dict(model.named_parameters())
            for key, model in models.items()
        }

    for (name, ranks), models in by_group(launch(work, ranks=4)).items():
        want = cases[name].build().state_dict()
        fulls = [model.pop("full") for model in models]
        for key, tensor in want.items():
            assert all(torch.equal(full[key], tensor) for full in fulls), (name, ranks, key)
        held = {n: [model[n].numel() for model in models] for n in models[0]}
        cut = {n: sizes for n, sizes in held.items() if sizes[0] != want[n].numel()}
        assert all(sum(sizes) == want[n].numel() for n, sizes in cut.items())
        whole = {name for name in held.keys() - cut.keys() if "norm" not in name}
        assert len(ranks) == 1 or whole <= {"o.bias", "down.bias", "1.bias"}
