"""One plain GPT, the model of every lesson. It does not know that other processes exist.

    tokens -> embed -> layers blocks -> norm -> head -> logits
    block:  x + attention(norm(x)), then x + mlp(norm(x))

RMSNorm, rotary positions, attention in which several query heads may share a key-value head, a
gated MLP, a head that may be tied to the embedding, no biases. Three things make it easy to cut:

* It has no buffers. Rotary angles are computed from the positions in every forward, so the
  parameters are all there is to keep, and a model made on the meta device misses nothing.
* A block maps [B, T, D] to [B, T, D] and needs nothing else, so any run of blocks can stand alone.
* Attention counts its heads by the width of what `q`, `k` and `v` return, never by the
  configuration, so it still works when they return only some of the heads.

Shapes: B batch, T tokens in a row, D hidden, F inside the MLP, V vocabulary, H query heads,
K key-value heads, E numbers per head (D = H E).

Sources: RMSNorm arXiv:1910.07467, rotary positions 2104.09864, gated MLP 2002.05202, shared
key-value heads 2305.13245.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Sizes that do not fit together raise ValueError with the numbers.

    `kv_heads` None means as many as `heads`; `mlp_hidden` None means 8/3 of `hidden`, rounded up
    to a multiple of 32. `seq` is the longest row of tokens. `dropout` is applied to what each
    block adds to its input.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    vocab: int = 256
    seq: int = 64
    mlp_hidden: int | None = None
    tied: bool = True
    rope_theta: float = 10_000.0
    dropout: float = 0.0

    @classmethod
    def tiny(cls, **changes) -> "GPTConfig":
        """0.23 M parameters in 4 blocks: a lesson's training step takes milliseconds."""
        return cls(**{"layers": 4, "hidden": 64, "heads": 4} | changes)

    @classmethod
    def small(cls, **changes) -> "GPTConfig":
        """4.89 M parameters in 6 blocks: enough work to time."""
        return cls(**{"layers": 6, "hidden": 256, "heads": 8} | changes)

    def __post_init__(self):
        for key in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq", "mlp_hidden"):
            value = getattr(self, key)
            optional = value is None and key in ("kv_heads", "mlp_hidden")
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (optional or whole):
                raise ValueError(f"{key}={value!r}: give a whole number of at least 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden {self.hidden} does not cut into {self.heads} heads of even width, which "
                f"rotary positions need; use a multiple of {2 * self.heads}"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly; "
                f"kv_heads must divide {self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: give a share of at least 0 and below 1")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta={self.rope_theta!r}: give a number above 0, say 10000")


class Linear(nn.Linear):
    """x @ weight.T without a bias; weight [out, in] is drawn from a normal distribution."""

    def __init__(self, inputs, outputs, std=0.02):
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """tokens [B, T], T <= seq -> their rows of weight [V, D]: [B, T, D]."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.vocab, config.hidden)
        self.seq = config.seq

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens_BT):
        # Here and not in GPT: whoever runs a part of the model that begins with tokens is told too.
        if tokens_BT.dim() != 2 or tokens_BT.shape[1] > self.seq:
            raise ValueError(
                f"tokens of shape {tuple(tokens_BT.shape)}: give [batch, tokens] with at most "
                f"seq={self.seq} tokens in a row, or a config with a larger seq"
            )
        return super().forward(tokens_BT)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself if it is float32 or wider, else float32."""
    return torch.promote_types(dtype, torch.float32)


def rotate(x_BHTE: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn each pair (e, e + E/2) of a head by position * theta^(-2e/E), in float32 or wider.

    The product of a query and a key turned so depends on their distance, not on where they are.
    """
    T, E = x_BHTE.shape[-2:]
    dtype = at_least_float32(x_BHTE.dtype)
    steps = torch.arange(0, E, 2, device=x_BHTE.device, dtype=dtype) / E
    positions = torch.arange(T, device=x_BHTE.device, dtype=dtype)
    angles = positions[:, None] * theta**-steps
    cos, sin = angles.cos(), angles.sin()
    first, second = x_BHTE.to(dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x_BHTE.dtype)


class Attention(nn.Module):
    """Each token looks at itself and the ones before it: [B, T, D] -> [B, T, D].

    q, k, v, o are [D, D], [K E, D], [K E, D], [D, D]. Query head h reads key-value head h K // H.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.theta = config.rope_theta
        kv_width = (config.kv_heads or config.heads) * self.head_dim
        self.q = Linear(config.hidden, config.hidden)
        self.k = Linear(config.hidden, kv_width)
        self.v = Linear(config.hidden, kv_width)
        self.o = Linear(config.hidden, config.hidden, std=residual_std(config))

    def forward(self, x_BTD):
        q_BHTE = rotate(self.split_heads(self.q(x_BTD)), self.theta)
        k_BKTE = rotate(self.split_heads(self.k(x_BTD)), self.theta)
        v_BKTE = self.split_heads(self.v(x_BTD))
        y_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1]
        )
        return self.o(y_BHTE.transpose(1, 2).flatten(2))

    def split_heads(self, x_BTD):
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [B, T, D] -> [B, T, F] -> [B, T, D]."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.mlp_hidden or -(-8 * config.hidden // (3 * 32)) * 32
        self.gate = Linear(config.hidden, width)
        self.up = Linear(config.hidden, width)
        self.down = Linear(width, config.hidden, std=residual_std(config))

    def forward(self, x_BTD):
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x): [B, T, D] -> [B, T, D]."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp = MLP(config)
        self.attn_dropout, self.mlp_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attn_dropout(self.attn(self.attn_norm(x_BTD)))
        return x_BTD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT(nn.Module):
    """The plain model: tokens [B, T] (int64, T <= seq) in, logits [B, T, V] out.

    With `config.tied`, `head.weight is embed.weight`.

    On the meta device: `GPT(config)` there, `.to_empty(device=...)`, then `init_weights()`, which
    draws what construction with the same seed would have drawn.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = Linear(config.hidden, config.vocab)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))

    def num_parameters(self) -> int:
        """How many numbers are trained; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def init_weights(self):
        """Draw every weight anew, in the order of construction."""
        modules = [m for m in self.modules() if hasattr(m, "reset_parameters")]
        if self.head.weight is self.embed.weight:
            modules.remove(self.head)
        for module in modules:
            module.reset_parameters()

    def _apply(self, fn, recurse=True):
        # Moving off the meta device makes new parameters, one for each module that holds one.
        tied = self.head.weight is self.embed.weight
        super()._apply(fn, recurse)
        if tied:
            self.head.weight = self.embed.weight
        return self


def residual_std(config: GPTConfig) -> float:
    """Of the 2 * layers projections whose outputs add up in the residual stream (GPT-2)."""
    return 0.02 / (2 * config.layers) ** 0.5


def next_token_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over all B T targets, in float32 or wider; -100 is not counted."""
    logits_BTV = logits_BTV.to(at_least_float32(logits_BTV.dtype))
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
