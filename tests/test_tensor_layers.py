"""The three layers by themselves, without a plan: values drawn whole, outputs, gradients, biases.

Against torch's layer with the same seed: weights bit for bit, outputs and gradients in float64 to
1e-10. A bias added by every rank is W times too large in a row layer's output; one drawn for a part
alone, whose width it would be scaled by, differs in every number; gathered blocks that are not put
back in order show in the output alone, since all gradients follow them.
"""

import torch
import torch.nn.functional as F
from tensor_training import (
    CLOSE,
    OPTIONS,
    assert_same,
    by_group,
    in_groups,
    numbers,
)
from torch import nn

from s2s_lib import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    launch,
    scatter_to_group,
)

GROUPS = [[0, 1, 2, 3], [3, 1], [2, 0, 3], [1]]


def parameters(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def gradients(module, **more):
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return more | {f"grad {name}": grad for name, grad in grads.items()}


def check(work, want, groups=GROUPS, blocks=None):
    """`work(group)` is what a rank has of `want`."""

    def everywhere(world):
        return {(group.ranks,): work(group) for group in in_groups(world, groups)}

    for ranks, parts in by_group(launch(everywhere, ranks=4)).items():
        assert_same(parts, want, str(ranks), CLOSE, blocks)


def test_a_row_layers_bias_is_added_once():
    def work(world):
        results = []
        for group in in_groups(world, GROUPS):
            for more in ({}, {"sequence_parallel": True}):
                column = ColumnParallelLinear(5, 12, group)
                row = RowParallelLinear(12, 3, group, **more)
                nn.init.zeros_(row.weight)
                nn.init.constant_(row.bias, 100.0)
                results.append(row(column(torch.randn(2, 12, 5))))
        return results

    for results in launch(work, ranks=4):
        for y in results:
            assert torch.equal(y, torch.full_like(y, 100.0))


def test_a_layer_is_drawn_whole_and_as_torchs_own_bit_for_bit():
    """From one seed, for any number of ranks; and the random numbers after it are the same too."""
    makers = {
        "column": (ColumnParallelLinear, nn.Linear, (64, 48), {}),
        "no bias": (ColumnParallelLinear, nn.Linear, (7, 12), {"bias": False}),
        "row": (RowParallelLinear, nn.Linear, (48, 64), {}),
        "embedding": (VocabParallelEmbedding, nn.Embedding, (17, 6), {}),
        "padding": (VocabParallelEmbedding, nn.Embedding, (17, 6), {"padding_idx": 9}),
        "float64": (ColumnParallelLinear, nn.Linear, (8, 12), {"dtype": torch.float64}),
    }

    def built(kind, sizes, more, *group):
        torch.manual_seed(7)
        layer = kind(*sizes, *group, **more)
        return parameters(layer) | {"next number": torch.rand(3)}

    def work(world):
        return {
            (name, group.ranks): built(kind, sizes, more, group)
            for name, (kind, _, sizes, more) in makers.items()
            for group in in_groups(world, GROUPS)
        }

    for (name, ranks), parts in by_group(launch(work, ranks=4)).items():
        _, kind, sizes, more = makers[name]
        want = built(kind, sizes, more)
        assert_same(parts, want, f"{name}, {ranks}", {"rtol": 0, "atol": 0})


def run(layer, x, y, gather=None):
    x = x.detach().requires_grad_()
    out = layer(x)
    ((out if gather is None else gather(out)) * y).sum().backward()
    return gradients(layer, output=out.detach(), x=x.grad)


def test_a_gathering_column_layer_gives_the_whole_output_in_order():
    x, _ = numbers(0)
    y = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for blocks in (1, 2, (12, 12), (24,)):
        sizes = {"weight": (12, 12), "bias": (12, 12)} if blocks in (2, (12, 12)) else None

        def built(blocks, group=None):
            torch.manual_seed(1)
            if group is None:
                return nn.Linear(24, 24).double()
            return ColumnParallelLinear(24, 24, group, blocks=blocks, gather=True).double()

        want = run(built(blocks), x, y)
        check(lambda group, b=blocks: run(built(b, group), x, y), want, blocks=sizes)


def test_a_gathering_column_layer_with_uneven_blocks():
    x, _ = numbers(0)
    y = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def built(group=None):
        torch.manual_seed(1)
        more = {"blocks": (12, 4, 8), "gather": True}
        layer = ColumnParallelLinear(24, 24, group, **more) if group else nn.Linear(24, 24)
        return layer.double()

    blocks = {"weight": (12, 4, 8), "bias": (12, 4, 8)}
    groups = [[0, 1, 2, 3], [3, 1]]
    check(lambda group: run(built(group), x, y), run(built(), x, y), groups, blocks)


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_a_column_and_a_row_layer_make_a_pair_whole_and_on_sequences():
    x, y = numbers(0)

    def built(group=None, regather=False, sequence_parallel=False):
        torch.manual_seed(2)
        if group is None:
            return Pair(nn.Linear(24, 36), nn.Linear(36, 24)).double()
        first = ColumnParallelLinear(
            24, 36, group, sequence_parallel=sequence_parallel, regather=regather
        )
        second = RowParallelLinear(36, 24, group, sequence_parallel=sequence_parallel)
        return Pair(first, second).double()

    want = run(built(), x, y)
    for more in OPTIONS.values():

        def work(group, more=more):
            pair = built(group, **more)
            if not more:
                return run(pair, x, y)
            return run(pair, scatter_to_group(x, group, 1), scatter_to_group(y, group, 1))

        check(work, want)


def test_a_row_layer_cuts_its_gradient_and_sums_its_output():
    x, y = numbers(0)

    def built(group=None):
        torch.manual_seed(2)
        return (RowParallelLinear(24, 24, group) if group else nn.Linear(24, 24)).double()

    want = run(built(), x, y)
    check(lambda group: run(built(group), scatter_to_group(x, group), y), want)


def test_an_embedding_gives_whole_rows_and_gradients_to_the_rows_used():
    """Some tokens twice, some never; 17 rows do not cut evenly, and row 9 is for padding."""
    tokens = torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(5))
    tokens[0, :4] = torch.tensor([0, 16, 9, 9])
    y = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

    def trained(embedding, weigh):
        out = embedding(tokens)
        (out * weigh).sum().backward()
        return gradients(embedding, output=out.detach())

    for padding in (None, 9, -1):

        def built(padding, group=None, **more):
            torch.manual_seed(2)
            if group is None:
                return nn.Embedding(17, 6, padding).double()
            return VocabParallelEmbedding(17, 6, group, padding, **more).double()

        want = trained(built(padding), y)
        check(lambda group, p=padding: trained(built(p, group), y), want)
        check(
            lambda group, p=padding: trained(
                built(p, group, sequence_parallel=True), scatter_to_group(y, group, 1)
            ),
            want,
        )


def test_a_vocabulary_may_be_as_small_as_the_group():
    def work(group):
        torch.manual_seed(2)
        embedding = VocabParallelEmbedding(4, 3, group).double()
        out = embedding(torch.arange(4))
        F.mse_loss(out, torch.zeros_like(out)).backward()
        return gradients(embedding, output=out.detach())

    torch.manual_seed(2)
    whole = nn.Embedding(4, 3).double()
    out = whole(torch.arange(4))
    F.mse_loss(out, torch.zeros_like(out)).backward()
    check(work, gradients(whole, output=out.detach()))
