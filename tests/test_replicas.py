"""Replicas are the same on every rank, or nothing is sent.

A check that looks at shapes only passes the swapped names; one that raises on the odd rank alone
leaves the others waiting; a broadcast that reads memory instead of values mixes up the transposed
parameter; one that writes through autograd breaks the graph that was recorded before it.
"""

import pytest
import torch
from torch import nn

from s2s_lib import DDP, bill, launch
from s2s_lib.strategies.replicas import check_same, copy_from, copy_state


def two(first="left", second="right", **change):
    layers = {first: nn.Linear(4, 4), second: nn.Linear(4, 4)}
    return nn.ModuleDict({name: change.get(name, layer) for name, layer in layers.items()})


def transposed():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).t())
    return layer


def frozen():
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    return layer


def tied():
    model = two()
    model["right"].weight = model["left"].weight
    return model


# What another rank builds, and what the message says of the first rank's and of the other's.
DIFFERENT = {
    "one more parameter": (
        lambda: nn.ModuleDict({**two(), "extra": nn.Linear(4, 4, bias=False)}),
        ["entry 4", "'nothing'", "'extra.weight (4, 4) float32 trainable'", "(4 and 5 entries)"],
    ),
    "one less": (
        lambda: two(right=nn.Linear(4, 4, bias=False)),
        ["entry 3", "'right.bias (4,) float32 trainable'", "'nothing'", "(4 and 3 entries)"],
    ),
    "nothing at all": (
        nn.Identity,
        ["entry 0", "'left.weight (4, 4) float32 trainable'", "'nothing'", "(4 and 0 entries)"],
    ),
    "another order": (
        lambda: two("right", "left"),
        ["entry 0", "'left.weight", "'right.weight"],
    ),
    "another shape": (lambda: two(left=nn.Linear(3, 4)), ["(4, 4)", "'left.weight (4, 3)"]),
    "another dtype": (lambda: two(right=nn.Linear(4, 4).double()), ["entry 2", "float64"]),
    "other strides": (lambda: two(right=transposed()), ["right.weight", "strides (1, 4)"]),
    "frozen": (lambda: two(right=frozen()), ["trainable'", "'right.bias (4,) float32'"]),
    "tied": (tied, ["entry 2", "'right.weight", "'right.bias"]),
    "a buffer": (
        lambda: two(right=nn.BatchNorm1d(4, affine=False)),
        ["entry 2", "'right.weight", "'right.running_mean (4,) float32'"],
    ),
}


def test_every_rank_names_the_first_difference_and_no_weight_moves():
    def work(world):
        said = {}
        for name, (other, _) in DIFFERENT.items():
            module = two() if world.rank < 2 else other()
            before = [p.clone() for p in module.parameters()]
            with pytest.raises(ValueError) as caught:
                DDP(module, world)
            assert all(map(torch.equal, before, module.parameters())), name
            said[name] = str(caught.value)
        return said

    first, *others = launch(work, ranks=3)
    assert all(said == first for said in others)
    for name, (_, words) in DIFFERENT.items():
        for word in ["on rank 0", "on rank 2", *words]:
            assert word in first[name], f"{name}: no {word!r} in: {first[name]}"


def test_equal_modules_cost_eight_bytes_a_rank_to_compare():
    def work(world):
        with bill() as sent:
            check_same(two(), world)
            check_same(nn.Identity(), world)
        return sent.by("collective")

    # Two ranks: each sends the other its 8 bytes, twice.
    assert launch(work, ranks=2) == [{"all_gather": 16}] * 2


class Everything(nn.Module):
    """Parameters and buffers of several dtypes and strides, one shared, one empty, a number."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Parameter(torch.randn(3, 2))
        self.shared = self.plain
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.sixteen = nn.Parameter(torch.randn(5).bfloat16())
        self.complex = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.number = nn.Parameter(torch.randn(()).double())
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("mask", torch.randn(6) > 0)
        self.register_buffer("kept_out", torch.randn(3, 3)[:, 1], persistent=False)


def values(module):
    return [t.detach().clone() for t in [*module.parameters(), *module.buffers()]]


def test_all_ranks_start_with_the_weights_and_buffers_of_the_groups_first():
    def work(world):
        torch.manual_seed(world.rank)
        module, result = Everything(), {"built": None}
        result["built"] = values(module)
        group = world.subgroup([2, 1])
        if group:
            DDP(module, group)
        result["wrapped"] = values(module)
        if group:
            copy_from([module.number, module.sixteen], group, root=1)
        result["copied"] = values(module)
        return result

    zero, one, two = launch(work, ranks=3)
    assert all(map(torch.equal, zero["built"], zero["wrapped"]))
    assert all(map(torch.equal, two["built"], two["wrapped"]))
    assert all(map(torch.equal, two["built"], one["wrapped"]))
    assert not torch.equal(one["built"][0], two["built"][0])
    # After the first copy both have the same, so the second changes nothing.
    assert all(map(torch.equal, one["copied"], two["copied"]))


def test_copying_leaves_a_graph_recorded_before_as_it_was_and_costs_a_message_for_each_dtype():
    def work(world):
        x = torch.full((2,), 1.0 + world.rank, requires_grad=True)
        count = torch.tensor([world.rank])
        y = (x * x).sum()
        with bill() as sent:
            copy_from([x, count], world, root=1)
        y.backward()
        return x.tolist(), count.item(), x.grad.tolist(), sent.messages, sent.bytes

    zero, one = launch(work, ranks=2)
    assert zero == ([2.0, 2.0], 1, [4.0, 4.0], 0, 0)
    assert one == ([2.0, 2.0], 1, [4.0, 4.0], 2, 16)


class Counter:
    """As much of an optimizer as `copy_state` asks for."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_state_of_optimizers_and_schedulers_comes_from_one_rank():
    def work(world):
        things = [Counter({}), Counter({"step": world.rank, "moments": torch.full((3,), 0.5)})]
        if world.rank == 1:
            things[0].state = {"lr": 0.1}
        copy_state(things, world, root=1)
        return [thing.state for thing in things]

    for lr, moments in launch(work, ranks=3):
        assert lr == {"lr": 0.1}
        assert moments["step"] == 1 and moments["moments"].tolist() == [0.5] * 3
