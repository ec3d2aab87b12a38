"""What "reduce" means: the operation, the dtype it is done in, and which dtypes allow it."""

import functools

import torch

OPS = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def widened(function):
    def combine(received, mine, out):
        function(received.to(out.dtype), mine, out=out)

    return combine


@functools.lru_cache
def works(op, dtype) -> bool:
    number = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        OPS[op](number, number, out=number)
        return op != "avg" or number.div_(1) is number
    except RuntimeError:
        return False


class Reduction:
    """`combine` takes two tensors into a third; `finish` divides for avg, in place.

    Floats narrower than 32 bits are added and multiplied in float32 (`dtype`), and rounded once
    at the end. TypeError where a result could not be represented: avg of integers, sum or avg of
    bools, max or min of complex numbers. The prod of bools is "all".
    """

    def __init__(self, op: str, dtype: torch.dtype, size: int):
        self.op = op
        self.size = size
        self.check(op, dtype)
        narrow = dtype.is_floating_point and dtype.itemsize < 4
        # torch neither compares 8-bit floats nor mixes them with float32.
        tiny = narrow and dtype.itemsize == 1
        self.dtype = torch.float32 if narrow and (tiny or op not in ("max", "min")) else dtype
        self.widens = self.dtype != dtype
        if not works(op, self.dtype):
            raise TypeError(
                f"torch cannot take the {op} of {dtype}: convert to another dtype first"
            )
        self.function = widened(OPS[op]) if tiny else OPS[op]

    @staticmethod
    def check(op, dtype):
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if op == "avg" and whole:
            raise TypeError(f"the average of {dtype} would be rounded: convert to float, or sum")
        if op == "sum" and dtype == torch.bool:
            raise TypeError("the sum of bools is not a bool: use max for 'any', or convert to int")
        if op in ("max", "min") and dtype.is_complex:
            raise TypeError(f"complex numbers have no order, so no {op}; reduce abs() instead")

    def combine(self, received, mine, out):
        self.function(received, mine, out=out)

    def finish(self, chunk):
        if self.op == "avg":
            chunk.div_(self.size)


_made = functools.lru_cache(Reduction)


def reduction_of(op: str, dtype: torch.dtype, size: int) -> Reduction:
    """The Reduction `op` of tensors of `dtype` over `size` ranks, made once."""
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"no reduction {op!r}: choose one of {', '.join(OPS)}")
    return _made(op, dtype, size)
