"""The plain GPT: what a language model must be, and what every strategy relies on.

A mask that leaks fails the causality test; heads grouped in the wrong order (h % K for h K // H)
fail the comparison with repeated key-value weights; a rotary angle that depends on place fails
the shift; a tie that is lost on the way from the meta device fails there.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib.course.data import Batches, hold_out, text
from s2s_lib.course.model import GPT, Attention, GPTConfig, next_token_loss, rotate
from s2s_lib.course.reference import one_thread

ODD = GPTConfig(layers=2, hidden=24, heads=6, kv_heads=2, vocab=11, seq=9, mlp_hidden=20)


@pytest.fixture(autouse=True, scope="module")
def alone():
    with one_thread():
        yield


def build(config, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return GPT(config).to(dtype)


def some_tokens(config, batch=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab, (batch, config.seq), generator=generator)


def test_later_tokens_do_not_change_earlier_logits():
    model, tokens = build(ODD), some_tokens(ODD)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % ODD.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    # And every later place does see it.
    assert ((before - after).abs().amax(dim=(0, 2))[5:] > 1e-6).all()


def test_rows_of_a_batch_do_not_see_each_other():
    model, tokens = build(ODD), some_tokens(ODD)
    alone = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=0, atol=1e-12)


def test_shared_key_value_heads_equal_repeated_ones():
    torch.manual_seed(0)
    grouped = Attention(ODD).double()
    full = Attention(GPTConfig(layers=2, hidden=24, heads=6)).double()
    repeated = {"q": 1, "k": 3, "v": 3, "o": 1}
    for name, times in repeated.items():
        heads = getattr(grouped, name).weight.detach().unflatten(0, (-1, 4))
        getattr(full, name).weight.data = heads.repeat_interleave(times, dim=0).flatten(0, 1)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x), rtol=0, atol=1e-12)


def test_attention_is_softmax_of_scaled_products_over_the_past():
    torch.manual_seed(0)
    attention = Attention(GPTConfig(layers=1, hidden=8, heads=2)).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = (attention.split_heads(p(x)) for p in (attention.q, attention.k, attention.v))
    scores = rotate(q, 1e4) @ rotate(k, 1e4).transpose(-1, -2) / 4**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    expected = attention.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, 5, 8))
    torch.testing.assert_close(attention(x), expected, rtol=0, atol=1e-12)


def test_attention_works_with_a_part_of_the_heads():
    """A rank's part: q, k, v by rows and o by columns; the parts' outputs add up to the whole."""
    torch.manual_seed(0)
    whole = Attention(ODD).double()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    total = 0
    for part in range(2):
        attention = copy.deepcopy(whole)
        for name, dim in {"q": 0, "k": 0, "v": 0, "o": 1}.items():
            linear = getattr(attention, name)
            linear.weight = nn.Parameter(linear.weight.detach().chunk(2, dim)[part])
        total = total + attention(x)
    torch.testing.assert_close(total, whole(x), rtol=0, atol=1e-12)


def test_a_rotated_product_depends_only_on_the_distance():
    torch.manual_seed(0)
    q, k = (torch.randn(16, dtype=torch.float64).expand(1, 1, 12, 16) for _ in range(2))
    scores = (rotate(q, 1e4) @ rotate(k, 1e4).transpose(-1, -2))[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert len(scores[0].unique()) == 12


def test_rotation_keeps_lengths_and_leaves_the_first_token_alone():
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, 1e4).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotate(x, 1e4)[:, :, 0], x[:, :, 0])


def test_rotation_of_16_bit_numbers_is_computed_in_float32():
    x = torch.randn(1, 1, 512, 8).bfloat16()
    assert torch.equal(rotate(x, 1e4), rotate(x.float(), 1e4).bfloat16())


@pytest.mark.parametrize(
    "config", [ODD, GPTConfig.tiny(), GPTConfig.tiny(tied=False)], ids=["odd", "tiny", "untied"]
)
def test_the_number_of_parameters_follows_the_formula(config):
    D, V = config.hidden, config.vocab
    kv_width = D // config.heads * (config.kv_heads or config.heads)
    F_ = config.mlp_hidden or 192
    block = 2 * D * D + 2 * D * kv_width + 3 * D * F_ + 2 * D
    expected = config.layers * block + D + V * D * (1 if config.tied else 2)
    assert GPT(config).num_parameters() == expected


def test_the_two_stock_sizes_are_a_quarter_and_five_million():
    assert GPT(GPTConfig.tiny()).num_parameters() == 229_952
    assert GPT(GPTConfig.small()).num_parameters() == 4_885_760
    assert GPTConfig.tiny(layers=1, kv_heads=2).kv_heads == 2


def test_a_tied_head_is_the_embedding_after_everything_that_moves_a_model():
    model = GPT(ODD)
    for moved in (model, model.double(), copy.deepcopy(model), model.to("meta")):
        assert moved.head.weight is moved.embed.weight
    untied = GPT(GPTConfig.tiny(tied=False))
    assert untied.head.weight is not untied.embed.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_made_on_meta_gets_the_weights_of_a_plain_one(tied):
    config = GPTConfig.tiny(tied=tied)
    with torch.device("meta"):
        model = GPT(config)
        assert model(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 64, 256)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    assert (model.head.weight is model.embed.weight) == tied
    plain = build(config, torch.float32, seed=7)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_a_model_has_no_buffers():
    assert list(GPT(ODD).buffers()) == []


def test_weights_are_small_and_residual_projections_smaller_with_depth():
    model = build(GPTConfig.small(layers=8), torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = name.endswith(("o.weight", "down.weight"))
        expected = 0.02 / 4 if residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_runs_forward_and_backward_close_to_float64(dtype):
    reference, model = build(ODD), build(ODD, dtype)
    tokens = some_tokens(ODD)
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    assert model(tokens).dtype == dtype
    assert loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
    assert loss.item() == pytest.approx(next_token_loss(reference(tokens), tokens).item(), abs=0.02)


def test_the_loss_is_the_mean_over_counted_targets():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, 2, -100], [0, -100, 4]])
    logs = logits.log_softmax(-1)
    picked = [logs[b, t, targets[b, t]] for b in range(2) for t in range(3) if targets[b, t] >= 0]
    expected = -sum(picked) / 4
    torch.testing.assert_close(next_token_loss(logits, targets), expected, rtol=0, atol=1e-12)


def test_dropout_acts_in_training_only_and_repeats_with_the_seed():
    model, tokens = build(GPTConfig.tiny(dropout=0.5)), some_tokens(GPTConfig.tiny())

    def run(seed):
        torch.manual_seed(seed)
        return model(tokens)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    model.eval()
    assert torch.equal(run(0), run(1))
    assert torch.equal(model(tokens), build(GPTConfig.tiny())(tokens))


def test_a_model_without_dropout_draws_no_random_numbers():
    model, tokens = build(ODD), some_tokens(ODD)
    state = torch.get_rng_state()
    model(tokens).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_are_those_of_the_loss():
    """One number of each weight, moved both ways in float64."""
    model, tokens = build(ODD), some_tokens(ODD)

    def loss():
        return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    loss().backward()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            place = parameter.view(-1)[3:4]
            place += 1e-5
            above = loss()
            place -= 2e-5
            below = loss()
            place += 1e-5
        slope = ((above - below) / 2e-5).item()
        assert parameter.grad.view(-1)[3].item() == pytest.approx(slope, abs=1e-8), name


def test_training_on_real_text_lowers_the_loss():
    config = GPTConfig.tiny()
    model = build(config, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train, _ = hold_out(text())
    losses = []
    for (x, y), _ in zip(Batches(train, config.seq, 8).epoch(0), range(60), strict=False):
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5
    assert sum(losses[-10:]) / 10 < 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": 0}, "layers=0"),
        ({"hidden": 64.0}, "hidden=64.0"),
        ({"heads": True}, "heads=True"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"vocab": None}, "vocab=None"),
        ({"mlp_hidden": -1}, "mlp_hidden=-1"),
        ({"hidden": 60}, "hidden 60 does not cut into 4 heads .* multiple of 8"),
        ({"kv_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"rope_theta": 0}, "rope_theta=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig.tiny(**changes)


def test_tokens_of_the_wrong_shape_are_refused_with_the_numbers():
    model = GPT(ODD)
    with pytest.raises(ValueError, match=r"shape \(1, 10\).*seq=9"):
        model(torch.zeros(1, 10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(9,\)"):
        model(torch.zeros(9, dtype=torch.int64))


def test_logits_are_the_head_of_what_the_blocks_make_of_the_embedding():
    """A pipeline stage is a run of blocks: nothing else may happen between them."""
    model, tokens = build(ODD), some_tokens(ODD)
    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x)
    assert torch.equal(F.linear(model.norm(x), model.embed.weight), model(tokens))
