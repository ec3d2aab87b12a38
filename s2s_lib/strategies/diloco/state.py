"""The outer step's own state, lent to the inner optimizer while that is saved or loaded.

So whoever saves an optimizer saves it too, cut as the parameters are, and needs to know nothing.
"""

import contextlib
import functools

import torch

OUTER, MOMENTUM, RESIDUAL = KEYS = ("outer", "outer_momentum", "outer_residual")


@contextlib.contextmanager
def kept_in(optimizer, rows):
    """See `DiLoCo.in_state`."""
    for row in rows:
        for key, value in zip(KEYS, (row.outer, row.momentum, row.residual), strict=True):
            if value is not None:
                for parameter, part in zip(row.parameters, row.parts(value), strict=True):
                    if key in optimizer.state[parameter]:
                        raise RuntimeError(f"another DiLoCo has {key!r} in this state: one by one")
                    optimizer.state[parameter][key] = part
    try:
        yield
    finally:
        for row in rows:
            take_back(optimizer, row)


def take_back(optimizer, row):
    row.outer = whole(optimizer, row, OUTER, row.outer, otherwise=row.live)
    zeros = functools.partial(torch.zeros_like, row.outer)
    row.momentum = whole(optimizer, row, MOMENTUM, row.momentum, zeros)
    residual = whole(optimizer, row, RESIDUAL, row.residual, zeros)
    row.residual = None if row.residual is None else residual


def whole(optimizer, row, key, lent, otherwise) -> torch.Tensor:
    """The row of what the state has under this key, which is taken out of it."""
    parts = [optimizer.state.get(p, {}).pop(key, None) for p in row.parameters]
    if any(part is None for part in parts):
        return otherwise()
    if all(part._base is lent for part in parts):
        return lent
    return torch.cat([part.reshape(-1).to(row.dtype) for part in parts])
