"""Floating point operations, as torch counts them, with attention on the CPU counted too.

Torch's counter knows matrix products, convolutions and the attention kernels of accelerators, and
nothing else: an embedding's look-up, a norm, an LSTM count 0.
"""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode


def attention_flops(q_shape, k_shape, v_shape, *_, out_shape=None, **__) -> int:
    """Two products for each query head, over all pairs of places: masked ones are counted too."""
    *heads, T, E = q_shape
    return 2 * math.prod(heads) * T * k_shape[-2] * (E + v_shape[-1])


def attention_backward_flops(_, q_shape, k_shape, v_shape, *__, out_shape=None, **___) -> int:
    """Five products: the scores again, and the gradients of weights, values, queries and keys."""
    *heads, T, E = q_shape
    return 2 * math.prod(heads) * T * k_shape[-2] * (3 * E + 2 * v_shape[-1])


CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def counted() -> FlopCounterMode:
    """A context; afterwards `.get_total_flops()` says what was computed inside."""
    return FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
