"""Plans for tensor parallelism: which layers of a model are cut, and how."""

# The plain GPT (model.py). Its logits stay cut: the loss is vocab_parallel_cross_entropy.
GPT_PLAN = {
    "embed": "vocab",
    "blocks.*.attn.[qkv]": "column",
    "blocks.*.attn.o": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "vocab",
}
