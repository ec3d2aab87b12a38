"""Parameters that are not cut, used beside those that are: their gradients are the whole ones.

A norm of each rank's heads owes a sum, a norm of a whole tensor owes none, wherever they are called
and however; where it cannot be told, the user is. One bug here shows in no shape and in no loss:
only in the gradient of a few small weights, which is what these tests compare.
"""

import pytest
import torch
from torch import nn

from s2s_lib import Column, RankError, launch, scatter_to_group, tensor_parallel

CLOSE = {"rtol": 0, "atol": 1e-10}
PLAN = {"up": "column", "down": "row"}


class Pair(nn.Module):
    """A column and a row layer, and `flow(self, x)` to say what happens between."""

    def __init__(self, flow):
        super().__init__()
        self.up, self.down, self.first = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.flow = flow

    def forward(self, x):
        return self.flow(self, x)


def built(flow):
    torch.manual_seed(3)
    return Pair(flow).double()


def x_of():
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def of_norm(model):
    model(x_of()).square().sum().backward()
    return model.norm.weight.grad, model.norm.bias.grad


def heads(x):
    return x.unflatten(-1, (-1, 4))


def by_keyword(m, x):
    return m.down(m.norm(input=heads(m.up(x))).flatten(-2))


def norm_read(m, x):
    y = nn.functional.layer_norm(heads(m.up(x)), (4,), m.norm.weight, m.norm.bias)
    return m.down(y.flatten(-2))


def test_a_norm_of_heads_called_by_keyword_is_summed():
    want = of_norm(built(by_keyword))
    for got in launch(lambda w: of_norm(tensor_parallel(built(by_keyword), w, PLAN)), ranks=2):
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_norm_of_what_scatter_to_group_has_cut_is_summed():
    def work(world):
        def scattered(m, x):
            cut = scatter_to_group(m.first(x), world)
            return m.down(m.norm(heads(cut)).flatten(-2))

        return of_norm(tensor_parallel(built(scattered), world, PLAN))

    def whole(m, x):
        return m.down(m.norm(heads(m.first(x))).flatten(-2))

    want = of_norm(built(whole))
    for got in launch(work, ranks=2):
        torch.testing.assert_close(got, want, **CLOSE)


def test_a_norm_that_is_read_beside_column_layers_and_never_called_is_refused():
    def work(world):
        block = nn.ModuleDict({"pair": built(norm_read)})
        tensor_parallel(block, world, {f"pair.{name}": style for name, style in PLAN.items()})
        of_norm(block["pair"])

    with pytest.raises(RankError, match="pair.norm was not called"):
        launch(work, ranks=2)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_unfrozen_or_added_later_is_refused(sequence):
    def work(world):
        complaints = []
        for change in (
            lambda model: model.norm.requires_grad_(True),
            lambda model: setattr(model, "adapter", nn.Linear(8, 8).double()),
        ):
            model = built(by_keyword)
            model.norm.requires_grad_(False)
            tensor_parallel(model, world, PLAN, sequence_parallel=sequence)
            change(model)
            try:
                model(x_of()[: 4 // world.size])
            except RuntimeError as error:
                complaints.append("when tensor_parallel was called" in str(error))
        return complaints

    assert launch(work, ranks=2) == [[True, True]] * 2


class Held(nn.Module):
    """Its layers are in a dictionary; `more` are attributes of the module that calls them."""

    def __init__(self, **more):
        super().__init__()
        self.layers = nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.layers["down"](self.layers["up"](x))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scale": nn.Parameter(torch.ones(8))}, "has scale beside the column-parallel layers.up"),
        ({"head_dim": 8}, "1 heads of 8"),
        ({"num_heads": 2}, "has num_heads=2 and no head_dim"),
    ],
    ids=["parameter", "head_dim", "num_heads"],
)
def test_what_counts_is_the_module_that_calls_the_layers_not_their_container(more, words):
    def work(world):
        plan = {"layers.up": "column", "layers.down": "row"}
        tensor_parallel(Held(**more), world, plan)

    with pytest.raises(RankError, match=words):
        launch(work, ranks=2)


def test_heads_that_the_user_vouches_for_are_cut():
    def work(world):
        model = Held(num_heads=2).double()
        tensor_parallel(model, world, {"layers.up": Column(head_dim=4), "layers.down": "row"})
        return model(x_of())

    a, b = launch(work, ranks=2)
    assert torch.equal(a, b)


def test_a_layer_that_looks_fused_must_say_its_blocks():
    def work(world):
        def fused():
            model = nn.Module()
            model.qkv, model.o = nn.Linear(8, 24), nn.Linear(8, 8)
            return model

        with pytest.raises(ValueError, match="gives 24 numbers, and the row-parallel .* takes 8"):
            tensor_parallel(fused(), world, {"qkv": "column", "o": "row"})
        for blocks in (1, 3):
            tensor_parallel(fused(), world, {"qkv": Column(blocks=blocks), "o": "row"})

    launch(work, ranks=2)
