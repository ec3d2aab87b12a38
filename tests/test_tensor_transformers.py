"""A Llama and a Qwen3 as `transformers` builds them, untouched, train with their layers cut.

From small configurations, so nothing is downloaded. The key-value heads are grouped, the rotary
angles are buffers, outputs are dataclasses, the loss is computed inside from `labels` (the head
gathers) or by us from logits that stay cut. A Qwen3 has norms inside of a head besides, whose
gradients each rank knows for its own heads alone. Compared with one process: loss, norm and
gradients of every step and the weights after three, in float64 to 1e-10.
"""

import pytest
import torch
import torch.nn.functional as F
from tensor_training import assert_same

from s2s_lib import Vocab, clip_grad_norm_, launch, tensor_parallel, vocab_parallel_cross_entropy

transformers = pytest.importorskip("transformers")

VOCAB = 37
PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def tied():
    return llama(tie_word_embeddings=True, attention_bias=True)


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def build(make, seed=0):
    torch.manual_seed(seed)
    return make().double().train()


def batch(step):
    random = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (3, 9), generator=random)


def own_loss(model, tokens, group):
    """From logits, which are cut where there is a group: the same tokens that labels compare."""
    logits, targets = model(input_ids=tokens).logits[:, :-1], tokens[:, 1:]
    if group:
        return vocab_parallel_cross_entropy(logits, targets, group)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def labels_loss(model, tokens, group):
    return model(input_ids=tokens, labels=tokens).loss


def train(model, loss_of, group=None):
    """Of three steps loss, norm and gradients, by name, and the weights in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    told = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step), group)
        loss.backward()
        told |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        told |= {f"{step} loss": loss.detach(), f"{step} norm": clip_grad_norm_(model, 0.1)}
        optimizer.step()
    return told | {name: p.detach().clone() for name, p in model.named_parameters()}


WAYS = {
    "logits cut": (llama, "vocab", own_loss, {}),
    "labels": (llama, Vocab(gather=True), labels_loss, {}),
    "tied": (tied, "vocab", own_loss, {}),
    "norms of heads": (qwen3, Vocab(gather=True), labels_loss, {}),
}


def work(world):
    results = []
    for make, head, loss_of, options in WAYS.values():
        model = build(make, seed=world.rank)
        tensor_parallel(model, world, PLAN | {"lm_head": head}, **options)
        results.append(train(model, loss_of, world))
    return results


def test_models_of_transformers_equal_one_process():
    results = launch(work, ranks=2)
    for (name, (make, _, loss_of, _)), parts in zip(
        WAYS.items(), zip(*results, strict=True), strict=True
    ):
        assert_same(parts, train(build(make), loss_of), name)
