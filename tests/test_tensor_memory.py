"""What is kept for backward is what the formula of course/activations.py says, to the byte.

Counted by the memory meter between forward and backward; the difference of two depths is a block.
A gathered input that is kept besides the part of which it was gathered, norms that see all tokens,
an output kept that backward does not need: each is one term more. Then what the ranks hold of
weights, gradients and moments, and that nowhere whole logits appear.
"""

import dataclasses

import pytest
import torch
from tensor_training import OPTIONS

from s2s_lib import (
    GPT,
    GPT_PLAN,
    GPTConfig,
    launch,
    memory,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from s2s_lib.course.activations import (
    activation_bytes,
    published_alone,
    published_selective,
    published_sequence,
    published_tensor,
)

BATCH, TOKENS = 2, 12


def shape(**changes):
    sizes = {"layers": 1, "hidden": 32, "heads": 8, "kv_heads": 4, "mlp_hidden": 48, "vocab": 64}
    return GPTConfig(**sizes | {"seq": TOKENS, "tied": False} | changes)


CONFIGS = {
    "plain": (shape(), torch.float32),
    "all heads their own keys": (shape(kv_heads=None, mlp_hidden=None), torch.float64),
    "a head a rank": (shape(heads=4, kv_heads=4), torch.float32),
    "dropout": (shape(dropout=0.1), torch.float32),
    "sixteen bits": (shape(), torch.bfloat16),
}


def tokens_of(config, batch=BATCH, tokens=TOKENS):
    random = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab, (batch, tokens), generator=random)


def kept(config, dtype, group=None, **options):
    """Bytes alive as activations after a forward."""
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    if group:
        tensor_parallel(model, group, GPT_PLAN, **options)
    with memory(model) as found:
        logits = model(tokens_of(config))
        live = found.live["activations"]
        del logits
    return live


def of_a_block(config, *args, **options):
    two = dataclasses.replace(config, layers=2)
    return kept(two, *args, **options) - kept(config, *args, **options)


@pytest.mark.parametrize(
    "ranks, names",
    [(1, ["plain"]), (2, list(CONFIGS)), (4, ["plain", "a head a rank"])],
    ids=["1", "2", "4"],
)
def test_a_block_keeps_what_the_formula_says(ranks, names):
    def work(world):
        return {
            (name, how): of_a_block(*CONFIGS[name], world, **options)
            for name in names
            for how, options in OPTIONS.items()
        }

    for found in launch(work, ranks=ranks):
        for (name, how), counted in found.items():
            config, dtype = CONFIGS[name]
            terms = activation_bytes(
                config, BATCH, TOKENS, ranks, **OPTIONS[how], itemsize=dtype.itemsize
            )
            assert counted == sum(terms.values()), f"{name}, {how}: {terms}"
            assert all(type(number) is int for number in terms.values())


def test_on_one_process_the_plain_model_keeps_as_much():
    for config, dtype in CONFIGS.values():
        terms = activation_bytes(config, BATCH, TOKENS, 1, itemsize=dtype.itemsize)
        assert of_a_block(config, dtype) == sum(terms.values())


def test_sequence_parallel_cuts_norms_and_residuals_and_regather_the_inputs():
    config, whole = shape(dropout=0.1), BATCH * TOKENS * 32 * 4
    tensor, sequence, regather = (
        activation_bytes(config, BATCH, TOKENS, 4, **options) for options in OPTIONS.values()
    )
    saved = {name: tensor[name] - sequence[name] for name in tensor}
    assert sum(saved.values()) == 3 / 4 * (6 * whole + 2 * whole // 32)
    again = {name: sequence[name] - regather[name] for name in tensor}
    assert {name: n for name, n in again.items() if n} == {
        "inputs of q, k, v and of gate, up": 3 / 4 * 2 * whole
    }
    # All is over ranks then, but for the cosines and sines.
    alone = activation_bytes(config, BATCH, TOKENS, 1)
    assert {n for n in alone if alone[n] != 4 * regather[n]} == {"cosines and sines"}


def test_sizes_that_do_not_cut_are_refused_with_the_numbers():
    for changes, more, words in (
        ({"heads": 8, "kv_heads": 2}, {}, "2 key-value heads do not cut into 4"),
        ({"mlp_hidden": 50}, {}, "50 MLP width"),
        ({}, {"tokens": 10, "sequence_parallel": True}, "10 tokens do not cut into 4 equal parts"),
    ):
        with pytest.raises(ValueError, match=words):
            activation_bytes(shape(**changes), **{"batch": 1, "tokens": 12, "ranks": 4} | more)


def test_the_published_formulas_are_those_of_the_paper():
    """Its section 5: attention's s x s matrices are 70 % of GPT-3's bytes, 65 % of MT-NLG's."""
    for s, h, a, share in ((2048, 12288, 96, 0.70), (2048, 20480, 128, 0.65)):
        whole = published_alone(s, 1, h, a)
        assert published_tensor(s, 1, h, a, 1) == whole == published_sequence(s, 1, h, a, 1)
        assert published_sequence(s, 1, h, a, 8) == whole / 8
        # Equation 2 leaves 10 s b h whole, which equation 4 cuts.
        left = published_tensor(s, 1, h, a, 8) - published_sequence(s, 1, h, a, 8)
        assert left == pytest.approx(10 * s * h * 7 / 8)
        selective = published_selective(s, 1, h, 8)
        assert 1 - selective / published_sequence(s, 1, h, a, 8) == pytest.approx(share, abs=0.005)
        assert published_selective(s, 3, h, 1) == 3 * 34 * s * h


def test_after_backward_nothing_is_kept_and_a_rank_holds_its_part_of_all_else():
    config = shape()

    def work(world):
        found = {}
        for how, options in OPTIONS.items():
            model = tensor_parallel(GPT(config), world, GPT_PLAN, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            with memory(model, optimizer) as m:
                x = tokens_of(config)
                loss = vocab_parallel_cross_entropy(model(x), x, world)
                loss.backward()
                del loss
                optimizer.step()
                found[how] = m.live, x.nbytes, sum(1 for _ in model.parameters())
        return found

    sizes = {name: p.nbytes for name, p in GPT(config).named_parameters()}
    whole = sum(size for name, size in sizes.items() if "norm" in name)
    for ranks in (1, 2, 4):
        own = (sum(sizes.values()) - whole) // ranks + whole
        for found in launch(work, ranks=ranks):
            for live, batch, parameters in found.values():
                assert live["weights"] == live["gradients"] == own
                assert live["optimizer"] == 2 * own + 4 * parameters
                assert live["activations"] <= batch


def test_whole_logits_are_never_there():
    """A vocabulary that is far more than all else: the most at any time is below one rank's whole
    logits, in forward and in backward."""
    config = shape(vocab=4096, layers=1)

    def work(world):
        model = tensor_parallel(GPT(config), world, GPT_PLAN)
        x = tokens_of(config)
        with memory(model) as m:
            vocab_parallel_cross_entropy(model(x), x, world).backward()
        return m.highest["activations"] + m.highest["temporary"]

    logits = BATCH * TOKENS * config.vocab * 4
    for most in launch(work, ranks=4):
        assert logits / 4 < most < logits
