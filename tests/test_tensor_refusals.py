"""What tensor parallelism cannot do it says before it changes anything, on every rank alike.

Its mistakes are silent otherwise: shapes that fit and numbers that do not. Each refusal at
construction leaves the module as it was, object by object, value by value and without a hook, and
it then trains as a fresh one does. Each in a forward or backward leaves a model that takes the
steps of one process afterwards. A check that comes after the first cut, a rank that refuses alone
while the others wait, a message without the numbers or the way out: each fails here.
"""

import copy
import dataclasses
import pickle
import traceback

import pytest
import torch
import torch.nn.functional as F
from test_tensor_uses import CLOSE, TOKENS, batch, cut, gpt, loss_of, mlp, net, whole_gradients
from torch import nn
from torch.nn.utils import prune

from s2s_lib import (
    DDP,
    GPT,
    GPT_PLAN,
    Column,
    ColumnParallelLinear,
    GPTConfig,
    Mesh,
    RowParallelLinear,
    Vocab,
    VocabParallelEmbedding,
    ZeRO,
    full_state_dict,
    launch,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)


def picture(module):
    """All that a refusal must leave alone."""
    parts = [
        (name, type(m), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in module.named_modules()
    ]
    tensors = [
        (name, id(p), p.shape, p.detach().clone(), len(p._backward_hooks or ()))
        for name, p in module.named_parameters()
    ]
    return parts, tensors


def gradients(module, x):
    module.eval()(x).square().sum().backward()
    return [p.grad.to_dense() for p in module.parameters() if p.requires_grad]


def refuse(world, make, plan, *words, error=ValueError, **settings):
    """The plan is refused with these words, and the module is what it was."""
    torch.manual_seed(0)
    module, x = make()
    torch.manual_seed(0)
    twin, _ = make()
    before = picture(module)
    with pytest.raises(error) as caught:
        tensor_parallel(module, world, plan, **settings)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    parts, tensors = picture(module)
    assert parts == before[0]
    for got, want in zip(tensors, before[1], strict=True):
        assert got[:3] == want[:3] and torch.equal(got[3], want[3]) and got[4] == want[4]
    for got, want in zip(gradients(module, x), gradients(twin, x), strict=True):
        assert torch.equal(got, want)


def complaints(cases):
    """Name -> what went wrong, for each case that did."""
    told = {}
    for name, case in cases.items():
        try:
            case()
        except BaseException:
            told[name] = traceback.format_exc(limit=-2)
    return told


def assert_refused(cases_of, ranks, timeout=20):
    """`cases_of(world)` gives functions by name, and on no rank one of them complains."""
    for told in launch(lambda world: complaints(cases_of(world)), ranks=ranks, timeout=timeout):
        assert not told, "\n".join(f"{name}: {text}" for name, text in told.items())


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)


def a_gpt(**changes):
    shape = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 17, "seq": TOKENS}
    return lambda: (GPT(GPTConfig(**shape | changes)).double(), batch()[0])


def a_chain(*layers):
    return lambda: (nn.Sequential(*[layer() for layer in layers]).double(), X)


def linear(inputs, outputs, **settings):
    return lambda: nn.Linear(inputs, outputs, **settings)


def a_mlp():
    return mlp(), X


def test_sizes_that_do_not_divide_are_named_with_what_would():
    def cases(world):
        wide = a_chain(linear(8, 15), nn.Tanh, linear(15, 8))
        heads = "3 heads of 4 (12 outputs) do not cut into 4 equal parts; 1, 3 ranks"
        shared = "2 heads of 4 (8 outputs) do not cut into 4 equal parts; 1, 2 ranks"
        blocks = {"0": Column(blocks=2), "2": "row"}
        fused = a_chain(linear(8, 12), nn.Tanh, linear(12, 8))
        return {
            "heads": lambda: refuse(
                world, a_gpt(hidden=12, heads=3), GPT_PLAN, "blocks.0.attn.q: " + heads
            ),
            "shared heads": lambda: refuse(
                world, a_gpt(kv_heads=2), GPT_PLAN, "blocks.0.attn.k: " + shared
            ),
            "width of the MLP": lambda: refuse(
                world,
                a_gpt(mlp_hidden=30),
                GPT_PLAN,
                "blocks.0.mlp.gate: 30 outputs do not cut into 4 equal parts; 1, 2, 3, 5, 6, 10",
            ),
            "outputs": lambda: refuse(
                world, wide, {"0": "column", "2": "row"}, "0: 15 outputs", "1, 3, 5, 15 ranks"
            ),
            "inputs": lambda: refuse(world, wide, {"2": "row"}, "2: 15 inputs", "1, 3, 5, 15"),
            "a block": lambda: refuse(world, fused, blocks, "0: 6 outputs", "1, 2, 3, 6 ranks"),
            "vocabulary": lambda: refuse(
                world, tokens_of_three, {"0": "vocab"}, "0: ", "vocabulary of 3", "into 4 parts"
            ),
            "logits": lambda: refuse(
                world, a_chain(linear(8, 3)), {"0": "vocab"}, "vocabulary of 3", "into 4 parts"
            ),
        }

    def tokens_of_three():
        return nn.Sequential(nn.Embedding(3, 8)).double(), torch.tensor([[0, 2, 1]])

    assert_refused(cases, ranks=4)


def test_patterns_and_styles_that_say_nothing_are_named_with_the_nearest():
    def cases(world):
        def bad(plan, *words):
            return lambda: refuse(world, a_gpt(), plan, *words)

        return {
            "no layer": bad({"blocks.*.attn.qq": "row"}, "'blocks.*.attn.qq'", ".attn.q'?"),
            "a parameter": bad({"embed.weight": "vocab"}, "'embed.weight'", "'embed'?"),
            "too few parts": bad({"*.attn.q": "column"}, "matches no layer", ".attn.q'?"),
            "one that fits and one that does not": bad(GPT_PLAN | {"lm_head": "vocab"}, "lm_head"),
            "twice": bad(
                GPT_PLAN | {"blocks.1.*.q": "column"},
                "blocks.1.attn.q is matched twice",
                "'blocks.*.attn.[qkv]' and 'blocks.1.*.q'",
            ),
            "unknown": bad(
                {"embed": "vocabulary"}, "'embed'", "'vocabulary'", "column, row, vocab"
            ),
            "a class": bad({"embed": Vocab}, "Vocab(gather=)"),
            "None": bad({"embed": None}, "the style None"),
            "a list": bad([("embed", "vocab")], "a plan is a dictionary", "('embed', 'vocab')"),
            "nothing": bad({}, "a plan is a dictionary of names and styles"),
            "no plan": bad(None, "a plan is a dictionary of names and styles"),
            "regather alone": lambda: refuse(
                world, a_gpt(), GPT_PLAN, "sequence_parallel", regather=True
            ),
        }

    assert_refused(cases, ranks=2)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def patched():
    """A layer with a forward of its own, as adapters and offloaders put it there."""
    module = mlp()
    plain = module[0].forward
    module[0].forward = lambda x: 2 * plain(x)
    return module, X


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x)[0]


class Scaled(nn.Module):
    """A parameter beside layers: on what it is used, no name tells."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.scale * self.up(x))


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.b.weight = self.a.weight
        self.o = nn.Linear(16, 8)

    def forward(self, x):
        return self.o(self.a(x) * torch.cat(self.b(x.flip(0)).chunk(2, -1)[::-1], -1))


def normalised(kind):
    """Weights that are computed before each forward from others, which a cut would not meet."""

    def make():
        module = mlp()
        for layer in (module[0], module[2]):
            kind(layer)
        return module, X

    return make


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


def an_embedding(**settings):
    return lambda: (nn.Sequential(nn.Embedding(6, 8, **settings)).double(), torch.tensor([[1, 5]]))


PLAN = {"0": "column", "2": "row"}


def test_layers_that_cannot_be_cut_so_are_named_with_the_reason():
    def cases(world):
        def bad(make, plan, *words):
            return lambda: refuse(world, make, plan, *words)

        convolution = a_chain(lambda: nn.Conv1d(3, 4, 1))
        own = "forward of its own"
        tied = a_gpt(tied=True)
        without_head = {name: style for name, style in GPT_PLAN.items() if name != "head"}
        kinds = [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm, pruned]
        return {
            "its own forward": bad(a_chain(lambda: Doubled(8, 8)), {"0": "column"}, "0: ", own),
            "its own forward, patched": bad(patched, PLAN, "0: ", own),
            "an attention of torch": bad(
                lambda: (Attends().double(), X[None]), {"attn.out_proj": "row"}, "never calls them"
            ),
            "a convolution": bad(convolution, {"0": "column"}, "0: ", "nn.Linear", "Conv1d"),
            "an embedding by columns": bad(
                an_embedding(), {"0": "column"}, "0: ", "nn.Linear", "Embedding"
            ),
            "a block": bad(a_gpt(), {"blocks.0": "column"}, "blocks.0: ", "not a Block"),
            "a norm": bad(a_gpt(), {"norm": "vocab"}, "nn.Linear or nn.Embedding", "RMSNorm"),
            "one of two that share": bad(
                tied, without_head, "embed and head share a weight", "the same style"
            ),
            "two styles for what is shared": bad(
                lambda: (Tied().double(), X),
                {"a": "column", "b": "row", "o": "row"},
                "a and b share a weight",
            ),
            "two cuts of what is shared": bad(
                lambda: (Tied().double(), X),
                {"a": "column", "b": Column(blocks=2), "o": "row"},
                "a and b share a weight",
            ),
            "a parameter between": bad(
                lambda: (Scaled().double(), X),
                {"up": "column", "down": "row"},
                "scale beside the column-parallel up",
                "a module of its own",
            ),
            "rows kept short": bad(an_embedding(max_norm=1.0), {"0": "vocab"}, "0: ", "max_norm"),
            "counted tokens": bad(
                an_embedding(scale_grad_by_freq=True), {"0": "vocab"}, "scale_grad_by_freq"
            ),
            "sparse gradients": bad(an_embedding(sparse=True), {"0": "vocab"}, "sparse"),
            **{
                f"weights computed from others, {kind.__name__}": bad(
                    normalised(kind), PLAN, "0: ", "weight"
                )
                for kind in kinds
            },
            **{
                f"blocks={blocks!r}": bad(a_mlp, {"0": Column(blocks=blocks)}, "0: ", words)
                for blocks, words in [
                    (5, "12 outputs do not make 5 equal blocks"),
                    ((4, 4), "[4, 4] add up to 8 outputs of 12"),
                    ((12, 0), "give their number, or a tuple of their sizes"),
                    (0, "give their number, or a tuple of their sizes"),
                    (True, "give their number, or a tuple of their sizes"),
                    ("2", "give their number, or a tuple of their sizes"),
                    (1.5, "give their number, or a tuple of their sizes"),
                ]
            },
        }

    assert_refused(cases, ranks=2)


def test_ranks_that_ask_for_different_things_are_told_so_on_all_of_them():
    def cases(world):
        mine = {True: "column", False: Column(gather=True)}
        last = world.rank == world.size - 1
        more = GPT_PLAN | ({"blocks.*.attn.[qkv]": Column(blocks=2)} if last else {})
        fewer = {name: s for name, s in GPT_PLAN.items() if "mlp" not in name or not last}

        def bad(make, plan, *words, **settings):
            return lambda: refuse(world, make, plan, *words, **settings)

        different = "the ranks give tensor_parallel different options"
        return {
            "styles": bad(a_mlp, {"0": mine[last]}, different, "gather=True"),
            "blocks": bad(a_gpt(kv_heads=4), more, different, "blocks=2"),
            "fewer layers": bad(a_gpt(), fewer, different),
            "sequence_parallel": bad(
                a_gpt(), GPT_PLAN, different, "sequence_parallel=", sequence_parallel=last
            ),
            "regather": bad(a_gpt(), GPT_PLAN, different, sequence_parallel=True, regather=last),
            "modules": bad(a_gpt(layers=1 + last), GPT_PLAN, "built different modules"),
            "frozen": bad(frozen_where(last), PLAN, "built different modules", "trainable"),
            # Only some ranks would send a number before each forward.
            "dropout": bad(a_gpt(dropout=0.5 * last), GPT_PLAN, "different", "drop"),
        }

    def frozen_where(here):
        def make():
            module = mlp()
            module[0].weight.requires_grad_(not here)
            return module, X

        return make

    assert_refused(cases, ranks=2)


def test_a_module_is_cut_once():
    """A second plan would copy the first rank's parts over everybody's."""

    def work(world):
        for sequence in (False, True):
            first = {name: s for name, s in GPT_PLAN.items() if "mlp" in name}
            for plan in (first, {n: s for n, s in GPT_PLAN.items() if n not in first}):
                model = tensor_parallel(gpt(), world, first, sequence_parallel=sequence)
                before = picture(model)
                with pytest.raises(ValueError, match="already"):
                    tensor_parallel(model, world, plan, sequence_parallel=sequence)
                with pytest.raises(ValueError, match="already"):
                    tensor_parallel(model.blocks[0], world, {"attn.[qkv]": "column"})
                parts, tensors = picture(model)
                assert parts == before[0]
                for got, want in zip(tensors, before[1], strict=True):
                    assert torch.equal(got[3], want[3])

    launch(work, ranks=2, timeout=20)


def test_replicas_and_parts_of_one_group_exclude_each_other():
    def cases(world):
        mesh = Mesh(world, dp=2, tp=2)

        def inside(wrap):
            model = wrap(mlp())
            for target, plan in ((model.module, PLAN), (model, {"module.0": "column"})):
                with pytest.raises(ValueError, match="0.weight is .* already"):
                    tensor_parallel(target, mesh["tp"], plan)
            loss = model(X).square().sum()
            loss.backward()

        def outside(wrap, group):
            model = tensor_parallel(mlp(), mesh["tp"], PLAN)
            before = full_state_dict(model)
            with pytest.raises(ValueError) as caught:
                wrap(model, group)
            assert "0.weight is cut over ranks" in str(caught.value)
            assert '"dp" axis' in str(caught.value)
            after = full_state_dict(model)
            assert all(torch.equal(after[name], value) for name, value in before.items())

        wraps = {"DDP": DDP} | {f"ZeRO-{s}": lambda m, g, s=s: ZeRO(m, g, s) for s in (0, 2, 3)}
        return {
            **{
                f"a part of a {name}": lambda w=wrap: inside(lambda m: w(m, mesh["dp"]))
                for name, wrap in wraps.items()
            },
            **{
                f"{name} over {what}": lambda w=wrap, g=group: outside(w, g)
                for name, wrap in wraps.items()
                for what, group in (("the parts", mesh["tp"]), ("all", world))
            },
        }

    assert_refused(cases, ranks=4)


def test_copies_are_made_before_cutting():
    """torch copies neither the hooks of parameters, which sum gradients, nor what is known of them:
    a copy would train, and each rank another model."""

    def work(world):
        plain = gpt()
        model = cut(copy.deepcopy(plain), world, sequence_parallel=True)
        alone = ColumnParallelLinear(8, 8, world)
        for part in (model, model.blocks[1], alone, nn.Sequential(alone)):
            for keep in (copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError) as caught:
                    keep(part)
                assert "full_state_dict(module), or copy the module before" in str(caught.value)
        assert_trains_on(model, world, plain)

    launch(work, ranks=2)


def test_a_rank_outside_of_the_group_and_what_is_no_module_are_told():
    def work(world):
        group = world.subgroup([2, 1])
        module = mlp()
        if group is None:
            with pytest.raises(TypeError, match="got None: this rank is not in the subgroup"):
                tensor_parallel(module, group, PLAN)
            with pytest.raises(TypeError, match="expected a Group"):
                ColumnParallelLinear(8, 8, group)
            return
        assert tensor_parallel(module, group, PLAN)[0].weight.shape == (6, 8)
        with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got <class"):
            tensor_parallel(nn.Linear, group, PLAN)

    launch(work, ranks=3, timeout=20)


def test_layers_alone_say_what_does_not_divide():
    def work(world):
        for make, words in [
            (lambda: ColumnParallelLinear(8, 15, world), "15 outputs"),
            (lambda: ColumnParallelLinear(8, 12, world, blocks=(6, 3, 3)), "3 outputs"),
            (lambda: ColumnParallelLinear(8, 12, world, blocks=5), "5 equal blocks"),
            (lambda: RowParallelLinear(15, 8, world), "15 inputs"),
            (lambda: VocabParallelEmbedding(1, 8, world), "vocabulary of 1"),
        ]:
            with pytest.raises(ValueError, match=words):
                make()

    launch(work, ranks=2)


# In a forward or backward


def assert_trains_on(model, world, plain, x=None, y=None):
    """After a refusal the gradients are those of one process."""
    if x is None:
        x, y = batch()
    for module in (model, plain):
        module.zero_grad()
    loss_of(model(x), y, world).backward()
    loss_of(plain(x), y).backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    got = {name: whole for name, whole in whole_gradients(model).items() if name in want}
    torch.testing.assert_close(got, want, **CLOSE)


def test_a_row_layer_fed_whole_and_a_column_layer_fed_a_part_say_which_function_helps():
    def work(world):
        row = RowParallelLinear(8, 4, world)
        with pytest.raises(ValueError) as caught:
            row(torch.ones(3, 8))
        assert f"on rank {world.rank} of 2 takes its 4 of 8 inputs" in str(caught.value)
        assert "scatter_to_group(x, group)" in str(caught.value)
        column = ColumnParallelLinear(8, 4, world)
        with pytest.raises(ValueError) as caught:
            column(torch.ones(3, 4))
        assert "takes all 8 inputs and got 4" in str(caught.value)
        assert "gather_from_group(x, group)" in str(caught.value)
        # In a plan: a row layer alone, a column layer after another.
        for plan, words in [({"2": "row"}, "scatter"), ({"0": "column", "2": "column"}, "gather")]:
            model = tensor_parallel(mlp(), world, plan)
            for _ in range(2):
                with pytest.raises(ValueError, match=words):
                    model(X)

    launch(work, ranks=2, timeout=20)


def test_a_sequence_that_does_not_divide_is_told_before_anything_is_sent():
    def work(world):
        uncut = {name: style for name, style in GPT_PLAN.items() if name not in ("embed", "head")}
        for make, plan in [(gpt, GPT_PLAN), (lambda: gpt(tied=False), uncut | {"head": "vocab"})]:
            model, plain = make(), make()
            tensor_parallel(model, world, plan, sequence_parallel=True)
            x, y = batch()
            for length in (7, 1, 3):
                for mode in (model.train, model.eval):
                    mode()
                    with pytest.raises(ValueError) as caught:
                        model(x[:, :length])
                    assert f"a sequence of {length} does not cut into 2" in str(caught.value)
                    assert "a multiple of 2" in str(caught.value)
            assert_trains_on(model.train(), world, plain, x[:, :6], y[:, :6])

    launch(work, ranks=2, timeout=20)


def test_tokens_and_targets_outside_of_the_vocabulary_are_told_on_all_ranks():
    def work(world):
        model = cut(gpt(), world)
        x, y = batch()
        for token in (17, -1, 2**40):
            bad = x.clone()
            bad[1, 2] = token
            with pytest.raises(IndexError) as caught:
                model(bad)
            assert str(token) in str(caught.value) and "0..16" in str(caught.value)
            with pytest.raises(IndexError, match="vocabulary has 0..16"):
                vocab_parallel_cross_entropy(model(x), torch.where(bad == x, y, token), world)
        with pytest.raises(ValueError, match=f"seq={TOKENS}"):
            model(torch.zeros(1, TOKENS + 1, dtype=torch.long))
        assert_trains_on(model, world, gpt())

    launch(work, ranks=2, timeout=20)


def test_a_part_is_not_drawn_anew():
    def work(world):
        model = cut(gpt(), world)
        before = full_state_dict(model)
        for draw in (
            model.init_weights,
            model.embed.reset_parameters,
            model.head.reset_parameters,
            model.blocks[0].attn.q.reset_parameters,
            model.blocks[0].attn.o.reset_parameters,
            RowParallelLinear(8, 8, world).reset_parameters,
        ):
            with pytest.raises(RuntimeError, match="first, then cut"):
                draw()
        after = full_state_dict(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())

    launch(work, ranks=2)


class TwoPlaces(nn.Module):
    """One activation with a weight, before the column layer and after it."""

    def __init__(self, places):
        super().__init__()
        self.act = nn.PReLU()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.places = places

    def forward(self, x):
        before, after = self.places
        x = self.act(x) if before else x
        h = self.up(x)
        return self.down(self.act(h) if after else h)


def test_a_module_used_on_whole_and_on_cut_tensors_is_named():
    def make(places):
        torch.manual_seed(0)
        return TwoPlaces(places).double()

    def work(world):
        plan = {"up": "column", "down": "row"}
        for places in ((True, False), (False, True)):
            model, plain = tensor_parallel(make(places), world, plan), make(places)
            for module in (model, plain):
                module(X).square().sum().backward()
            torch.testing.assert_close(model.act.weight.grad, plain.act.weight.grad, **CLOSE)
        model = tensor_parallel(make((True, True)), world, plan)
        with pytest.raises(RuntimeError, match="act is used both where tensors are cut and"):
            model(X)
        # With sequence parallel a sum is owed in both places.
        model, plain = make((True, True)), make((True, True))
        tensor_parallel(model, world, plan, sequence_parallel=True)
        model(X[:2].chunk(2)[world.rank]).square().sum().backward()
        plain(X[:2]).square().sum().backward()
        torch.testing.assert_close(model.act.weight.grad, plain.act.weight.grad, **CLOSE)

    launch(work, ranks=2, timeout=20)


class Literal(nn.Module):
    """Drops by a number that is written into its forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return F.dropout(self.down(self.up(x)), 0.1, self.training)


def test_random_numbers_of_which_no_attribute_tells_are_noticed():
    def work(world):
        model = tensor_parallel(Literal().double(), world, {"up": "column", "down": "row"})
        with pytest.raises(RuntimeError, match="an attribute with drop in its name"):
            model(X)
        torch.testing.assert_close(model.eval()(X), model(X))
        # A rate that was raised after construction.
        late = cut(net(), world)
        late.embed_drop.p = 0.5
        with pytest.raises(RuntimeError, match="an attribute with drop in its name"):
            late(batch()[0])

    launch(work, ranks=2, timeout=20)


def test_a_gradient_of_a_gradient_is_refused():
    """The graph of the second order would end at the first sum over ranks, without a word."""

    def work(world):
        for sequence in (False, True):
            model, (x, y) = cut(gpt(), world, sequence_parallel=sequence), batch()
            for parameters in ([model.norm.weight], list(model.parameters())):
                with pytest.raises(RuntimeError, match="create_graph"):
                    torch.autograd.grad(loss_of(model(x), y, world), parameters, create_graph=True)
            with pytest.raises(RuntimeError, match="create_graph"):
                loss_of(model(x), y, world).backward(create_graph=True)
            assert_trains_on(model, world, gpt())

    launch(work, ranks=2, timeout=20)


def test_other_tensors_on_another_rank_are_told_before_they_are_added():
    """Under `check`, where ranks say what they are about to do."""

    def work(world):
        model = cut(gpt(), world)
        x, _ = batch(rows=3 + world.rank)
        with pytest.raises(ValueError, match="disagree"):
            model(x)

    launch(work, ranks=2, timeout=20, check=True)


def test_settings_are_plain_values_that_do_not_change():
    for style, name in ((Column(), "blocks"), (Vocab(), "gather")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(style, name, 2)
