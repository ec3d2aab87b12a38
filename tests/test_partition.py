"""A model cut into stages is the same model.

Composed in one process the stages must do the model's very operations, so outputs and gradients are
compared bit for bit. A value that is not carried to the stage that needs it fails in the U-net; one
that is carried too far fails in the names of the boundaries; a parameter that is copied instead of
shared fails where its gradient is looked up; a cut that is not the best fails against all cuts.
"""

import copy
import functools
import itertools
import pickle

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import memory
from s2s_lib.course.model import GPT, GPTConfig
from s2s_lib.course.reference import one_thread
from s2s_lib.strategies.pipeline.partition.costs import balance
from s2s_lib.strategies.pipeline.partition.materialize import materialize
from s2s_lib.strategies.pipeline.partition.split import split

TINY = {"hidden": 16, "heads": 2, "vocab": 11, "seq": 6, "mlp_hidden": 20}


@pytest.fixture(autouse=True, scope="module")
def alone():
    with one_thread():
        yield


def compose(stages, x):
    return functools.reduce(lambda value, stage: stage(value), stages, x)


def call(model, x):
    return model(*x) if isinstance(x, tuple) else model(x)


def outcome(model, run, x):
    """Every tensor that comes out, every gradient, every buffer, after a run from one seed."""
    model.zero_grad()
    torch.manual_seed(5)
    out = run(x)
    leaves = (
        list(out.values()) if isinstance(out, dict) else list(torch.utils._pytree.tree_leaves(out))
    )
    sum(leaf.sin().sum() for leaf in leaves).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return type(out), [leaf.detach() for leaf in leaves], gradients


def assert_same(model, stages, x):
    """Forward, structure and gradients of the stages are the model's, bit for bit."""
    state = copy.deepcopy(model.state_dict())
    kind, values, gradients = outcome(model, lambda x: call(model, copy.deepcopy(x)), x)
    buffers = copy.deepcopy(list(model.buffers()))
    model.load_state_dict(state)
    assert gradients
    other = outcome(model, lambda x: compose(stages, copy.deepcopy(x)), x)
    assert other[0] is kind
    assert len(other[1]) == len(values) and all(map(torch.equal, other[1], values))
    assert len(other[2]) == len(gradients) and all(map(torch.equal, other[2], gradients))
    assert all(map(torch.equal, model.buffers(), buffers))


def assert_parts(model, stages):
    """The stages hold the model's own parameters under its names, and together all of them."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    names = set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter is whole[name]
            names.add(name)
        assert stage.state_dict().keys() <= model.state_dict().keys()
    assert {whole[name] for name in names} == set(model.parameters())


def gpt(layers=4, seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(layers=layers, **TINY | changes))


def tokens():
    return torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(1))


def chain(*widths, between=nn.ReLU):
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), between())))


class UNet(nn.Module):
    """What goes down at level i is needed again at level i on the way up; so is the input."""

    def __init__(self, levels=3):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4 + i, 5 + i) for i in range(levels))
        self.up = nn.ModuleDict({str(i): nn.Linear(10 + 2 * i, 4 + i) for i in range(levels)})
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        skips, value = [], x
        for layer in self.down:
            value = torch.tanh(layer(value))
            skips.append(value)
        for i in reversed(range(len(self.down))):
            value = self.up[str(i)](torch.cat([value, skips[i]], dim=-1))
        return self.last(torch.cat([value, x], dim=-1))


class BasicBlock(nn.Module):
    """As in a ResNet: a branch that exists or not, in-place activations, a container inside."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=True)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.norm(self.conv(x))
        if self.downsample is not None:
            x = self.downsample(x)
        return self.act(y + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 6), BasicBlock(6, 6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        x = self.layer2(self.layer1(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Shared(nn.Module):
    """One Linear used at both ends, a parameter and a buffer of its own, functional residuals."""

    def __init__(self):
        super().__init__()
        self.ends, self.middle = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("mask", torch.randn(5, 4), persistent=False)
        self.offset = torch.randn(4)

    def forward(self, x):
        x = self.ends(x) * self.scale
        for layer in self.middle:
            x = x + F.gelu(layer(x)) * self.mask[: x.shape[0]]
        return self.ends(x) + self.scale + self.offset


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y, bias=None):
        x = self.b(self.a(x))
        if bias is not None:
            x = x + bias
        return {"sum": self.c(x) + y, "first": x}


class Wrapper(nn.Module):
    """The whole model one level down, and work before and after it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(11, 3)

    def forward(self, x):
        return self.out(self.inner(x % 11)).mean(dim=1)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(self.a(x), 0.5, self.training)
        return self.b(x + torch.rand(8) + torch.arange(8))


class InPlace(nn.Module):
    """What the calls return is not used; what they do is."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        x.add_(1)
        self.act(x)
        return self.b(x)


class Sized(nn.Module):
    """Sizes of the input are needed at the very end."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        B, T = x.shape
        half = T // 2
        return self.b(self.a(x)).view(B, 2, half) / (B * T)


def batch(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


MODELS = {
    "tied GPT": (lambda: gpt(), tokens(), 6),
    "untied GPT": (lambda: gpt(tied=False), tokens(), 6),
    "GPT with dropout": (lambda: gpt(dropout=0.3), tokens(), 4),
    "inside a block": (lambda: gpt(layers=2), tokens(), 12),
    "U-net": (UNet, batch(3, 4), 7),
    "ResNet": (ResNet, batch(2, 3, 8, 8), 6),
    "shared module": (Shared, batch(3, 4), 5),
    "two inputs": (TwoInputs, (batch(3, 4), batch(3, 4)), 3),
    "three inputs": (TwoInputs, (batch(3, 4), batch(3, 4), batch(4)), 3),
    "GPT inside": (lambda: Wrapper(gpt()), tokens() + 11, 6),
    "in-place chain": (
        lambda: chain(4, 5, 6, 3, between=lambda: nn.ELU(inplace=True)),
        batch(3, 4),
        6,
    ),
    "results not used": (InPlace, batch(3, 4), 3),
    "functional dropout": (FunctionalDropout, batch(3, 8), 2),
    "sizes": (Sized, batch(3, 6), 2),
    "torch's encoder": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 3)),
        batch(2, 3, 4),
        2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_stages_composed_are_the_model_bit_for_bit(name):
    build, x, most = MODELS[name]
    torch.manual_seed(0)
    model = build()
    for stages in range(1, most + 1):
        parts = split(model, stages, example=x if name == "three inputs" else None)
        assert len(parts) == stages and len(parts.boundaries) == stages - 1
        assert_parts(model, parts)
        assert_same(model, parts, x)


@pytest.mark.parametrize("name", ["tied GPT", "U-net", "shared module", "functional dropout"])
def test_stages_that_were_copied_or_sent_to_another_process_are_still_the_model(name):
    build, x, most = MODELS[name]
    model = build()
    parts = split(model, most)
    torch.manual_seed(5)
    expected = model(x)
    sent = [module.loads(module.dumps(parts)) for module in (pickle, cloudpickle)]
    for other in (copy.deepcopy(parts), *sent):
        torch.manual_seed(5)
        assert torch.equal(compose(other, x), expected)
        assert str(other) == str(parts)


def test_layers_are_the_blocks_wherever_they_are_and_blocks_stay_whole():
    def layers(model, stages):
        return [name for row in split(model, stages).rows for name in row.layers]

    blocks = [f"inner.blocks.{i}" for i in range(4)]
    names = ["inner.embed", *blocks, "inner.norm", "inner.head", "out"]
    assert layers(Wrapper(gpt()), 2) == names
    names = ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert layers(ResNet(), 2) == names
    assert len(layers(ResNet(), 7)) > 7


def test_what_crosses_is_named_and_nothing_is_carried_too_far():
    parts = split(UNet(levels=2), 5)
    assert [row.layers for row in parts.rows] == [
        ("down.0",), ("down.1",), ("up.1",), ("up.0",), ("last",)
    ]  # fmt: skip
    # An operation belongs to the layer before it, so it is its result that crosses.
    assert parts.boundaries == [
        ("x", "tanh"), ("x", "tanh", "cat"), ("x", "cat_1"), ("cat_2",)
    ]  # fmt: skip


def test_where_a_size_is_needed_its_tensor_is_carried_and_no_number():
    for example in (None, batch(3, 6)):
        assert split(Sized(), 2, example=example).boundaries == [("x", "a")]


def test_a_stage_is_given_only_blocks_and_passes_one_bare_tensor():
    parts = split(gpt(), 3)
    assert parts.boundaries == [("blocks_0",), ("blocks_2",)]
    assert parts[0](tokens()).shape == (3, 6, 16)
    assert {name.split(".")[1] for name, _ in parts[1].named_parameters()} == {"1", "2"}


def test_the_first_stage_refuses_tokens_as_the_model_does():
    stage = split(gpt(), 2)[0]
    with pytest.raises(ValueError, match=r"shape \(1, 7\).*seq=6"):
        stage(torch.zeros(1, 7, dtype=torch.int64))


def test_what_several_stages_use_is_listed_and_held_by_each():
    model = gpt()
    assert split(model, 1).tied == []
    parts = split(model, 4)
    assert parts.tied == [{0: "embed.weight", 3: "head.weight"}]
    assert parts[0].embed.weight is parts[3].head.weight
    assert split(gpt(tied=False), 4).tied == []
    names = ("ends.weight", "ends.bias", "scale")
    tied = split(Shared(), 5).tied
    assert len(tied) == 3 and all({0: name, 4: name} in tied for name in names)


def all_cuts(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *cuts, layers))]


def test_no_other_cut_has_a_cheaper_dearest_stage_or_then_a_smaller_sum_of_squares():
    generator = torch.Generator().manual_seed(0)

    def score(costs, cut):
        unions = [functools.reduce(dict.__or__, (costs[i] for i in part)) for part in cut]
        totals = [sum(union.values()) for union in unions]
        return max(totals), sum(total * total for total in totals)

    for trial in range(60):
        numbers = torch.randint(0, 9, (8,), generator=generator).tolist()
        # Some layers use what others use too.
        keys = torch.randint(0, 6 if trial % 2 else 100, (8, 2), generator=generator).tolist()
        price = {key: numbers[key % 8] for pair in keys for key in pair}
        costs = [{key: price[key] for key in pair} for pair in keys]
        for stages in range(1, 9):
            cut = balance(costs, stages)
            assert [i for part in cut for i in part] == list(range(8)) and all(map(len, cut))
            assert score(costs, cut) == min(score(costs, c) for c in all_cuts(8, stages))


def test_flops_put_the_cut_elsewhere_than_parameters_where_the_embedding_is_large():
    model = gpt(vocab=500, tied=False)
    by_params = split(model, 3)
    by_flops = split(model, 3, by="flops", example=tokens())
    assert [row.layers for row in by_params.rows] == [
        ("embed",), ("blocks.0", "blocks.1", "blocks.2", "blocks.3"), ("norm", "head")
    ]  # fmt: skip
    # Looking rows up is free, and the head is a product.
    assert by_flops.rows[0].layers == ("embed", "blocks.0", "blocks.1")
    assert "Mflop" in str(by_flops) and by_flops.by == "flops"


def test_flops_are_two_for_each_product_attention_included():
    parts = split(gpt(layers=1), 3, by="flops", example=tokens())
    rows, D, F_, T = 3 * 6, 16, 20, 6
    block = 2 * rows * (4 * D * D + 3 * D * F_) + 2 * 2 * rows * T * D
    assert [row.cost for row in parts.rows if "blocks.0" in row.layers] == [block]
    with torch.device("meta"):
        model = gpt(layers=1)
    on_meta = split(model, 3, by="flops", example=tokens().to("meta"))
    assert [row.cost for row in on_meta.rows] == [row.cost for row in parts.rows]


class Sleepy(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        import time

        time.sleep(self.seconds)
        return x


def test_time_balances_what_costs_time_and_has_no_parameters():
    model = nn.Sequential(*(Sleepy(s) for s in (0.02, 0.001, 0.001, 0.02)))
    parts = split(model, 2, by="time", example=torch.ones(1))
    assert 0.35 < parts.rows[0].share < 0.65
    assert parts.rows[0].cost > 0.02


def test_splitting_leaves_the_model_as_it_was():
    model = ResNet().train()
    model.layer1[1].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    x = batch(2, 3, 8, 8)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for by in ("params", "flops", "time"):
        kept = x.clone()
        split(model, 3, by=by, example=x)
        assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, kept)
        assert [module.training for module in model.modules()] == flags
        assert [dict(vars(module)) for module in model.modules()] == attributes
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert all(p.grad is None for p in model.parameters())


def test_stages_follow_train_and_eval():
    for model, x in ((FunctionalDropout(), batch(3, 8)), (gpt(dropout=0.5), tokens())):
        parts = split(model, 2)
        for stage in parts:
            stage.eval()
        model.eval()
        assert_same(model, parts, x)
        state = torch.get_rng_state()
        if isinstance(model, GPT):
            compose(parts, x)
            assert torch.equal(torch.get_rng_state(), state)
        for stage in parts:
            stage.train()
        model.train()
        assert_same(model, parts, x)


def test_an_example_that_the_model_changes_in_place_is_left_as_it_was():
    x = batch(3, 4)
    kept = x.clone()
    for by in ("params", "flops", "time"):
        split(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), 2, by=by, example=x)
        assert torch.equal(x, kept)


def test_measuring_keeps_nothing_for_a_backward():
    recorded, x = [], batch(3, 4)
    model = chain(4, 4, 4)
    model[0].register_forward_hook(lambda module, args, out: recorded.append(out.requires_grad))
    for by in ("params", "flops", "time"):
        split(model, 2, by=by, example=x)
    assert recorded and not any(recorded)


def test_random_numbers_are_left_as_they_were_by_a_model_that_draws_some():
    model, x = FunctionalDropout(), batch(3, 8)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for by in ("params", "flops", "time"):
        split(model, 2, by=by, example=x)
        assert torch.equal(torch.get_rng_state(), state)


def test_hooks_on_layers_run_in_the_stages_and_a_module_with_hooks_stays_whole():
    model, seen = gpt(), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(module))
    parts = split(model, 7)
    assert seen == []
    compose(parts, tokens())
    assert seen == list(model.blocks)
    with pytest.raises(ValueError, match="use at most 7(?s:.*)blocks.0 .Block. has hooks"):
        split(model, 8)


def test_a_report_prints_and_draws_itself():
    parts = split(gpt(), 3)
    assert str(parts).splitlines() == [
        "stage  layers                parameters  share  sends",
        "0      embed .. blocks.0          2,192  26.0%  blocks_0",
        "1      blocks.1 .. blocks.2       4,032  47.8%  blocks_2",
        "2      blocks.3 .. head           2,208  26.2%  result",
        "tied: embed.weight (stage 0) = head.weight (stage 2)",
    ]
    assert parts._repr_markdown_().splitlines()[-3:] == [
        "| 2 | blocks.3 .. head | 2,208 | 26.2% | result |",
        "",
        "tied: embed.weight (stage 0) = head.weight (stage 2)",
    ]
    assert "blocks_2" in repr(parts[1]) and "(1): Block(" in repr(parts[1])


# What is refused.


class Branching(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            x = -x
        return self.b(x)


class NoGrad(Branching):
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)


class Counting(Branching):
    def forward(self, x):
        count = int_of(x)
        return self.b(self.a(x)) * count


@torch.fx.wrap
def int_of(x):
    return int(x.numel())


def test_more_stages_than_layers_are_refused_with_both_numbers_and_the_names():
    with pytest.raises(ValueError, match=r"4 layers .*\(0, 1, 2, 3\) into 5 stages: use at most 4"):
        split(chain(2, 3, 4), 5)
    with pytest.raises(
        ValueError, match=r"the \d\d layers of the GPT .*\.\.\., .*head.* 99 stages"
    ):
        split(gpt(), 99)


def test_a_model_that_cannot_be_traced_is_refused_with_its_line():
    with pytest.raises(ValueError) as caught:
        split(Branching(), 2)
    message = str(caught.value)
    assert "the Branching cannot be traced" in message and "by hand" in message
    assert "test_partition.py: `if x.sum() > 0:`" in message and "control flow" in message
    with pytest.raises(ValueError, match="`x = self.a.x.`.*gradients or autocast are switched"):
        split(NoGrad(), 2)


def test_a_part_that_cannot_be_traced_is_one_layer():
    model = nn.Sequential(nn.Linear(4, 4), Branching(), NoGrad(), nn.Linear(4, 3))
    assert_same(model, split(model, 4), batch(3, 4))
    with pytest.raises(
        ValueError, match=r"4 layers .* 5 stages(?s:.*)inside: 1 \(Branching\), line"
    ):
        split(model, 5)


def test_a_number_that_would_cross_is_refused_by_name():
    example = batch(3, 4)
    assert_same(model := Counting(), split(model, 1, example=example), example)
    with pytest.raises(ValueError) as caught:
        split(Counting(), 2, example=example)
    message = str(caught.value)
    assert "int_of holds int, no tensor: made in stage 0 by `count = int_of(x)`" in message
    assert "used in stage 1" in message and "by hand" in message


@pytest.mark.parametrize(
    "refused, message",
    [
        (lambda: split(gpt(), 0), "stages=0"),
        (lambda: split(gpt(), 2.0), "stages=2.0"),
        (lambda: split(gpt(), True), "stages=True"),
        (lambda: split(gpt(), 2, by="size"), "by='size': .* 'params', 'flops', 'time'"),
        (lambda: split(gpt(), 2, by="flops"), "by='flops' runs the model, so give example="),
        (lambda: split(gpt(), 2, by="time", example=torch.ones(1, device="meta")), "meta"),
        (
            lambda: split(TwoInputs(), 2, example=batch(3, 4)),
            "1 values, but TwoInputs.* x, y, bias",
        ),
        (lambda: split(TwoInputs(), 2, example=(1, 2, 3, 4)), "4 values"),
    ],
)
def test_wrong_arguments_are_refused_with_the_way_out(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()


def test_a_model_with_hooks_of_its_own_is_refused():
    model = gpt()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the GPT has hooks of its own"):
        split(model, 2)


# Weights for one stage only.


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv1d(2, 3, 1),
                nn.BatchNorm1d(3),
                nn.Conv1d(3, 3, 1),
                nn.LSTM(5, 4),
                nn.Linear(4, 2),
            ]
        )

    def forward(self, x):
        for layer in self.layers[:-2]:
            x = layer(x)
        return self.layers[-1](self.layers[-2](x)[0])


BUILT = {
    "tied GPT": (lambda: GPT(GPTConfig(layers=3, **TINY)), tokens()),
    "untied GPT": (lambda: GPT(GPTConfig(layers=3, tied=False, **TINY)), tokens()),
    "norms and an LSTM": (Batched, batch(3, 2, 5)),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_stage_materialized_alone_has_the_weights_of_a_seeded_construction(name):
    build, x = BUILT[name]
    torch.manual_seed(7)
    model = build()
    state, after = model.state_dict(), torch.get_rng_state()
    with torch.device("meta"):
        parts = split(build(), 4)
    tied = parts.tied
    for s in (2, 0, 3, 1):
        stage = materialize(parts, s, seed=7)
        assert stage is parts[s] and torch.equal(torch.get_rng_state(), after)
        assert stage.state_dict() and all(
            torch.equal(value, state[key]) for key, value in stage.state_dict().items()
        )
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in stage.parameters())
    assert torch.equal(compose(parts, x), model(x)) and parts.tied == tied


def test_a_tie_inside_one_stage_is_kept():
    with torch.device("meta"):
        parts = split(BUILT["tied GPT"][0](), 1)
    stage = materialize(parts, 0, seed=0)
    assert stage.embed.weight is stage.head.weight and not stage.head.weight.is_meta


def test_without_a_seed_the_present_random_numbers_go_on():
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = GPT(GPTConfig(layers=3, **TINY)).state_dict()
        with torch.device("meta"):
            parts = split(GPT(GPTConfig(layers=3, **TINY)), 2)
        torch.manual_seed(seed)
        stage = materialize(parts, 1)
        assert all(torch.equal(v, expected[k]) for k, v in stage.state_dict().items())


def test_materializing_needs_the_stage_and_one_module_more():
    with torch.device("meta"):
        model = GPT(GPTConfig.tiny(tied=False))
        parts = split(model, 4)
    stage_bytes = [sum(p.numel() * 4 for p in stage.parameters()) for stage in parts]
    largest = max(p.numel() * 4 for p in model.parameters())
    assert sum(p.numel() * 4 for p in model.parameters()) > 3 * max(stage_bytes)
    with memory() as m:
        materialize(parts, 3, seed=0)
    assert stage_bytes[3] <= m.peak_total <= stage_bytes[3] + largest + 1024
    assert all(p.is_meta for s in (0, 1, 2) for p in parts[s].parameters())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def forward(self, x):
        return x @ self.mask


def test_weights_that_cannot_be_drawn_are_refused_by_name():
    def parts_of(model, stages):
        with torch.device("meta"):
            return split(model(), stages)

    with pytest.raises(ValueError, match=r"the model \(Shared\) has no reset_parameters"):
        materialize(parts_of(Shared, 2), 0)
    encoder = parts_of(lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2), nn.Linear(4, 4)), 2)
    with pytest.raises(ValueError, match=r"0.self_attn \(MultiheadAttention\) has no reset"):
        materialize(encoder, 1)
    masked = parts_of(lambda: nn.Sequential(nn.Linear(4, 4), Masked()), 2)
    materialize(masked, 0)
    with pytest.raises(ValueError, match="no reset_parameters fills Masked.mask of stage 1"):
        materialize(masked, 1)
    with pytest.raises(ValueError, match="no stage 2: 2 stages"):
        materialize(masked, 2)
