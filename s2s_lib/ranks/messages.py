"""One tensor from one rank to another: send and recv, and their starts, isend and irecv."""

import reprlib
import time

import torch

from s2s_lib.ranks import connection, wire
from s2s_lib.ranks.group import Group, check_group


def send(tensor: torch.Tensor, to: int, group: Group):
    """Send a tensor to the rank at place `to`; returns when the receiver has taken it."""
    transfer = isend(tensor, to, group, shown="send")
    transfer.wait()


def recv(out: torch.Tensor, source: int, group: Group) -> torch.Tensor:
    """Receive into `out`, and return it, what the rank at place `source` sends.

    The sender's tensor must have the shape and dtype of `out`.
    """
    transfer = irecv(out, source, group, shown="recv")
    transfer.wait()
    return out


def isend(
    tensor: torch.Tensor, to: int, group: Group, shown="isend", label="", step=0
) -> wire.Transfer:
    """Start sending; the tensor must not change before `.wait()` on what this returns.

    A send that is never waited for is waited for when the rank's function returns. Messages with a
    `label` and `step` meet only receives with the same (steps count to 255 and begin again);
    `shown` is their name in bills and tables.
    """
    called = time.monotonic()
    check_message(tensor, to, "destination", group)
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _message("send", tensor, to, group, shown, label, step, called)


def irecv(
    out: torch.Tensor, source: int, group: Group, shown="irecv", label="", step=0
) -> wire.Transfer:
    """Start receiving into `out`; `.wait()` on what this returns gives it, filled."""
    called = time.monotonic()
    check_message(out, source, "source", group)
    if out.is_conj() or out.is_neg():
        raise ValueError(
            "cannot receive into a tensor that conjugates or negates what its memory holds; "
            "receive into torch.empty(...) and copy"
        )
    if not out.is_contiguous():
        raise ValueError(
            f"cannot receive into a tensor of shape {tuple(out.shape)} and strides {out.stride()}:"
            " its memory has gaps; receive into torch.empty(...) and copy"
        )
    return _message("receive", out.detach(), source, group, shown, label, step, called)


def check_message(tensor, place, role, group):
    """Errors for what cannot be sent or received into."""
    check_group(group)
    group.check_member(place, role)
    check_tensor(tensor)


def check_tensor(tensor):
    """Errors for what is no dense tensor on the device of the ranks."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"expected a tensor, got {reprlib.repr(tensor)}; wrap it: torch.tensor(...)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"cannot send a {tensor.layout} tensor; make it dense: .to_dense()")
    if not tensor.is_cpu:
        raise ValueError(
            f"this tensor is on {tensor.device}, the ranks exchange tensors on the CPU: .cpu()"
        )


def _message(direction, tensor, place, group, shown, label, step, called):
    if place == group.rank:
        raise ValueError(f"rank {place} cannot {shown} to or from itself; copy the tensor instead")
    detail = (label,) if label else ()
    with wire.Operation(
        "message", group, tensor.shape, tensor.dtype, detail, shown=shown, since=called
    ) as operation:
        transfer = getattr(operation, direction)(tensor, place, step)
        operation.sends.clear()
    operation.wire.pending.add(transfer)
    return transfer


def finish():
    """Wait for what `isend` and `irecv` started and nobody waited for; raise what went wrong in a
    background task that nobody waited for."""
    here = connection.current()
    while here.pending:
        here.pending.pop().wait()
    if here.unheard:
        raise here.unheard[0]
