"""Gradients through collectives: each linear one, with its transpose for the way back.

The gradients are those of the sum of every rank's loss. Seen that way a collective is a matrix
that mixes the tensors of all ranks, and backward multiplies by its transpose: what was broadcast
is reduced, what was gathered is reduce-scattered, and an all_reduce is its own transpose. The
backward is a collective too, so every rank of the group must run it: on each the input must
require a gradient, in a broadcast on those that only receive too.
"""

import functools

import torch


def first_order(backward):
    """A backward that cannot be differentiated again: RuntimeError where that is asked for.

    torch's once_differentiable says so only where the incoming gradient has one of its own, which
    that of a loss has not; the second derivative would be silently too small.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, and communication is not "
                "recorded in backward: leave it out, or compute that term in one process"
            )
        return backward(ctx, *grads)

    return checked


class _Linear(torch.autograd.Function):
    """forward: run    backward: transpose"""

    @staticmethod
    def forward(ctx, tensor, run, transpose, gives):
        ctx.transpose, ctx.gives = transpose, gives
        return run(tensor.detach())

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return ctx.transpose(grad), None, None, None


def linear(tensor: torch.Tensor, run, transpose, gives: str = "whole") -> torch.Tensor:
    """`run(tensor)`, through which gradients flow back by `transpose`. `gives` notes in the graph
    what comes out: "whole" (or summed), "cut", or "as it was"."""
    return _Linear.apply(tensor, run, transpose, gives)


def given_by(node) -> str:
    """What a node of autograd's graph gives, if it is one of ours; of others "as it was"."""
    return node.gives if isinstance(node, _Linear._backward_cls) else "as it was"


def wants_gradient(tensor, out, op: str = "sum") -> bool:
    """Whether this call must be recorded; ValueError where that is asked for but impossible."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return False
    if out is not None:
        raise ValueError("out= reuses memory that autograd must keep: leave it out, or detach()")
    if op not in ("sum", "avg"):
        raise ValueError(f"no gradient is defined through {op}: detach() the tensor first")
    return True
