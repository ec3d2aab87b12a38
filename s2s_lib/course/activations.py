"""What one block of the GPT (model.py) keeps for backward, term by term, and what papers report.

`activation_bytes` is what `memory()` counts as activations between forward and backward, exactly:
the difference between models of two depths. Of b rows of s tokens, h hidden, f inside the MLP, E
numbers a head, k key-value heads for a heads, over t ranks, in numbers:

    for each of two norms     b s h       what it gets
                              b s h       that divided by its root mean square
                              b s         1 / root mean square
    for q, k, v; gate, up     2 b s h     their inputs, whole; with `regather` this rank's tokens
    attention                 b s h / t   queries, turned
                              2 b s k E / t   keys, turned, and values
                              2 s E       cosines and sines, for queries and for keys
                              b s a / t   log of each softmax's sum
                              b s h / t   its output, and once more with the heads side by side
    MLP                       4 b s f / t     gate, silu(gate), up, and what down gets
    dropout                   2 b s h     its masks, if there is any

With sequence parallel norms and masks are over t too, so that of what is not cut only the inputs
are left, which are gathered.

Korthikanti et al. (arXiv:2205.05198) count a GPT of 2022 in bytes: 16-bit numbers and 1-byte masks.
What differs, and why their 34 s b h is not ours:

* RMSNorm as torch computes it on a CPU keeps two tensors, in 32 bits at least; their LayerNorm its
  input alone. A number a token they leave out, as being small.
* Keys and values: whole there, k E = h; here several heads may share them.
* The MLP is gated and keeps 4 f, f about 8/3 h; theirs 4 h twice.
* Attention keeps no matrix of s x s here. Theirs are 5 a s^2 b bytes, of the softmax, its dropout
  and what comes out. So it is their selective recomputation that compares: `published_selective`.
* No dropout in the lessons. Theirs has it thrice, and a mask is a byte a number; torch's on a CPU
  has the dtype of what is dropped.
* Rotary positions keep cosines and sines, which do not grow with b and are not cut.
* With sequence parallel they gather inputs again in backward, which is `regather` here. Without,
  the two inputs stay whole.
"""

import torch

from s2s_lib.course.model import MLP, GPTConfig


def activation_bytes(
    config: GPTConfig,
    batch: int,
    tokens: int,
    ranks: int,
    sequence_parallel: bool = False,
    regather: bool = False,
    itemsize: int = 4,
) -> dict[str, int]:
    """Bytes that one block keeps for backward on each of `ranks` ranks, by what they are.

    `itemsize` is that of the weights' dtype: 2, 4 or 8. Whole numbers where `tensor_parallel` takes
    the sizes; ValueError where heads, MLP or (with `sequence_parallel`) tokens do not cut evenly.
    """
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    head_dim, width = config.hidden // config.heads, mlp_width(config)
    uneven = {"heads": heads, "key-value heads": kv_heads, "MLP width": width}
    uneven |= {"tokens": tokens} if sequence_parallel else {}
    for what, number in uneven.items():
        if number % ranks:
            raise ValueError(f"{number} {what} do not cut into {ranks} equal parts")
    rows = batch * tokens
    # Tokens that norms, residuals and masks see, and that stay of a column layer's input.
    seen = rows // ranks if sequence_parallel else rows
    kept = rows // ranks if sequence_parallel and regather else rows
    queries = rows * config.hidden // ranks
    # torch norms, turns and sums in 32 bits or more.
    wide = max(itemsize, 4)
    # Heads lie side by side already where there is one, or one token.
    moved = heads > ranks and tokens > 1
    return {
        "what the norms get": 2 * seen * config.hidden * wide,
        "the same, divided by its size": 2 * seen * config.hidden * wide,
        "1 / its size": 2 * seen * wide,
        "inputs of q, k, v and of gate, up": 2 * kept * config.hidden * itemsize,
        "queries": queries * itemsize,
        "keys and values": 2 * rows * kv_heads * head_dim // ranks * itemsize,
        "cosines and sines": 2 * tokens * head_dim * wide,
        "logs of softmax sums": rows * heads // ranks * wide,
        "what attention gives": queries * itemsize,
        "the same, heads side by side": queries * itemsize * moved,
        "gate, silu(gate), up, product": 4 * rows * width // ranks * itemsize,
        "dropout masks": 2 * seen * config.hidden * itemsize * (config.dropout > 0),
    }


def mlp_width(config: GPTConfig) -> int:
    with torch.device("meta"):
        return MLP(config).gate.out_features


# Korthikanti et al., bytes a layer: s tokens, b rows, h hidden, a heads, t ranks. 16-bit numbers,
# 1-byte masks, attention's s x s matrices kept.


def published_alone(s: int, b: int, h: int, a: int) -> float:
    """Without parallelism (equation 1)."""
    return s * b * h * (34 + 5 * a * s / h)


def published_tensor(s: int, b: int, h: int, a: int, t: int) -> float:
    """Tensor parallelism (equation 2): norms, residuals and inputs whole on each rank."""
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def published_sequence(s: int, b: int, h: int, a: int, t: int) -> float:
    """And sequence parallel (equation 4): everything cut."""
    return s * b * h / t * (34 + 5 * a * s / h)


def published_selective(s: int, b: int, h: int, t: int) -> float:
    """And what is s x s computed again (equation 6, for one layer)."""
    return 34 * s * b * h / t
