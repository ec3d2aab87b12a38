"""What tensor parallelism sends is what its docstrings say, to the byte.

With b rows of s tokens of h numbers, a layer and micro-batch cost 8 b s h (W-1)/W numbers a rank,
whole or with sequence parallel. Counted by collective: on two ranks for each of them, on four and
in odd groups as the sum over ranks, since an all_reduce of few bytes goes by a tree there. A sum
that is owed once and sent for each of q, k and v, a gather in backward that nobody needs, a
gradient sent for data: each shows as so many times b s h.
"""

import pytest
import torch
from tensor_training import OPTIONS, Case, gpt, in_groups, tokens

from s2s_lib import (
    GPT_PLAN,
    bill,
    clip_grad_norm_,
    full_state_dict,
    launch,
    tensor_parallel,
)

GROUPS = [[0, 1, 2, 3], [3, 1], [2, 0, 3], [1]]
LAYERS, B, S, H, FLOAT = 2, 2, 12, 24, 8


def predicted(how, ranks):
    """Bytes of all ranks together in forward and backward, by collective."""
    # A whole input W-1 times, for what enters attention, MLP and head.
    inputs = (2 * LAYERS + 1) * (ranks - 1) * B * S * H * FLOAT
    norms = (2 * LAYERS + 1) * (ranks - 1) * H * FLOAT
    sizes_of_parts, sums_of_tokens = 16 * ranks * (ranks - 1), 3 * (ranks - 1) * B * S * FLOAT
    if how == "whole":
        forward = {"all_reduce": 2 * inputs + 2 * sums_of_tokens, "all_gather": sizes_of_parts}
        backward = {"all_reduce": 2 * inputs}
    else:
        forward = {
            "all_gather": inputs + sizes_of_parts,
            "reduce_scatter": inputs,
            "all_reduce": 2 * sums_of_tokens,
        }
        backward = {
            "all_gather": 2 * inputs if how == "regather" else inputs,
            "reduce_scatter": inputs,
            "all_reduce": 2 * norms,
        }
    return [{name: n for name, n in sent.items() if n} for sent in (forward, backward)]


def of_a_step(model, case, group):
    """What this rank sends in forward with its loss, and in backward."""
    x, y = case.data(0)
    with bill() as forward:
        loss = case.loss(model(x), y, group)
    with bill() as backward:
        loss.backward()
    return [sent.by("collective") for sent in (forward, backward)]


def summed(parts):
    return {key: sum(part.get(key, 0) for part in parts) for key in set().union(*parts)}


def shares(sent, ranks):
    return {key: total // ranks for key, total in sent.items()}


@pytest.mark.parametrize("how", OPTIONS)
def test_a_step_sends_what_the_docstring_says(how):
    case = Case(lambda: gpt(tied=False, layers=LAYERS))

    def work(world):
        return {
            group.ranks: of_a_step(case.cut(group, **OPTIONS[how]), case, group)
            for group in in_groups(world, GROUPS)
        }

    results = launch(work, ranks=4)
    for ranks in map(tuple, GROUPS):
        want = predicted(how, len(ranks))
        found = [results[rank][ranks] for rank in ranks]
        for phase, expected in enumerate(want):
            assert summed([sent[phase] for sent in found]) == expected, (ranks, phase)
            if len(ranks) == 2:
                assert all(sent[phase] == shares(expected, 2) for sent in found), (ranks, phase)


def test_a_layer_costs_eight_times_its_input_whole_and_with_sequence_parallel():
    """The difference of two depths; the norms' gradients aside, 2 (W-1)/W of 2 h numbers."""

    def work(world):
        cost = {}
        for how, more in OPTIONS.items():
            for layers in (1, 3):
                case = Case(lambda layers=layers: gpt(kv_heads=4, layers=layers))
                sent = of_a_step(case.cut(world, **more), case, world)
                cost[layers] = sum(n for phase in sent for n in phase.values())
            cost[how] = (cost[3] - cost[1]) / 2
        return [cost[how] for how in OPTIONS]

    for ranks in (2, 4):
        costs = [sum(costs) / ranks for costs in zip(*launch(work, ranks=ranks), strict=True)]
        each = (ranks - 1) / ranks * FLOAT
        layer, norms = 8 * B * S * H * each, 2 * 2 * H * each
        # Gathering again: once for attention and once for the MLP.
        assert costs == [layer, layer + norms, layer + norms + 2 * B * S * H * each]


def test_sums_are_sent_once_for_all_layers_that_share_an_input():
    def work(world):
        case = Case(lambda: gpt(tied=False, layers=3))
        model = case.cut(world)
        x, y = tokens(0)
        with bill() as forward:
            output = model(x)
        loss = case.loss(output, y, world)
        with bill() as backward:
            loss.backward()
        return forward.messages, backward.messages

    # On two ranks an all_reduce is one message of each: two a block, one of embedding or head.
    assert launch(work, ranks=2) == [(7, 7)] * 2


def test_nothing_is_sent_back_to_what_is_not_trained():
    def work(world):
        costs = []
        for frozen in (("embed.*",), ("embed.*", "blocks.0.*"), ("*",)):
            case = Case(lambda: gpt(tied=False), frozen=frozen)
            model = case.cut(world)
            x, y = tokens(0)
            loss = case.loss(model(x), y, world)
            with bill() as backward:
                if loss.requires_grad:
                    loss.backward()
            costs.append(backward.messages)
        with torch.no_grad(), bill() as forward:
            model(x)
        return costs, forward.messages

    # Block 1's attention norm is the first that is trained in the second case.
    assert launch(work, ranks=2) == [([5, 3, 0], 5)] * 2


def test_a_column_layer_fed_data_sends_nothing_and_with_sequence_parallel_gathers_it():
    def work(world):
        counts = []
        for more in OPTIONS.values():
            model = tensor_parallel(
                torch.nn.Sequential(torch.nn.Linear(H, 4)), world, {"0": "column"}, **more
            )
            with bill() as sent:
                model(torch.ones(B, S, H)).sum().backward()
            counts.append(sent.bytes)
        return counts

    part = B * S * H * 4
    assert launch(work, ranks=2) == [[0, part, 2 * part]] * 2


def test_construction_sends_the_modules_bytes_to_each_other_rank():
    case = Case(lambda: gpt(tied=False))
    whole = sum(p.nbytes for p in case.build().parameters())

    def work(world):
        model = case.build(world.rank)
        with bill() as sent:
            tensor_parallel(model, world, GPT_PLAN)
        return sent.by("collective")

    for ranks in (1, 2, 4):
        total = summed(launch(work, ranks=ranks))
        assert total.get("broadcast", 0) == (ranks - 1) * whole
        # Do all ranks have the same module and the same plan?
        assert total.get("all_gather", 0) <= 2000 * ranks * (ranks - 1)


def test_the_full_state_dict_gathers_what_is_cut():
    case = Case(lambda: gpt(tied=False))
    whole = sum(p.nbytes for n, p in case.build().named_parameters() if "norm" not in n)

    def work(world):
        model = case.cut(world)
        with bill() as sent:
            full_state_dict(model)
        return sent.bytes

    assert sum(launch(work, ranks=2)) == whole


def test_the_norm_costs_a_number():
    def work(world):
        case = Case()
        model = case.cut(world)
        case.loss(model(tokens(0)[0]), tokens(0)[1], world).backward()
        with bill() as sent:
            clip_grad_norm_(model, 1.0)
        return sent.bytes

    for ranks in (2, 4):
        assert sum(launch(work, ranks=ranks)) == 2 * (ranks - 1) * 8
