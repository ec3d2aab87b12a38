"""A Llama and a GPT-2 as `transformers` builds them, untouched, train under stage 3.

From small configurations, so nothing is downloaded. Their outputs are dataclasses, their rotary
angles are buffers that no state dict holds, the GPT-2's head is tied and its weights transposed.
"""

import pytest
import torch
from zero_training import CLOSE, assert_same

from s2s_lib import ZeRO, clip_grad_norm_, launch

transformers = pytest.importorskip("transformers")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=37,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def build(make, seed):
    torch.manual_seed(seed)
    return make().double()


def train(model, rank=0, size=1, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        tokens = torch.randint(37, (4, 9), generator=random).chunk(size)[rank]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        norm = clip_grad_norm_(model, 0.1)
        optimizer.step()
        norms.append(norm.item())
    return norms


def work(world):
    results = {}
    for make in (llama, gpt2):
        plain = build(make, seed=world.rank)
        model = ZeRO(plain, world, 3)
        units = [unit.name for unit in model.units]
        norms = train(model, world.rank, world.size)
        assert not any(f.full.untyped_storage().nbytes() for u in model.units for f in u.flats)
        results[make.__name__] = units, norms, model.full_state_dict()
    return results


def test_a_llama_and_a_gpt_2_equal_one_process():
    results, _ = launch(work, ranks=2)
    layers = {llama: "model.layers", gpt2: "transformer.h"}
    for make, blocks in layers.items():
        units, norms, weights = results[make.__name__]
        assert units == [f"{blocks}.0", f"{blocks}.1", "the root"]
        plain = build(make, seed=0)
        assert norms == pytest.approx(train(plain), abs=1e-10)
        assert_same(weights, plain.state_dict(), make.__name__, CLOSE)
