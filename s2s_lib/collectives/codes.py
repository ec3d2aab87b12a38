"""Numbers as codes: whole numbers of 8 or 4 bits, and one scale for each block of them.

    scale = max |x| of the block / levels     float32; levels is 127 (8 bits) or 7 (4 bits)
    code  = x / scale, to the nearest         from -levels to levels; two codes of 4 bits a byte

So the largest of a block comes out as it was, any other is off by at most half a scale, zero
stays zero, and -x has the codes of x with the other sign. In memory the scales of all blocks come
first, then the codes; the last block may be short.

At the ends of float32's range: a scale is at least 2^-126, float32's smallest normal number, so a
block of smaller values is rounded to multiples of that, most often to zeros. A block that holds
inf or nan, or (from float64) values whose scale is beyond float32, has the scale nan and comes out
as nan: every number of it, for beside an inf no other number of its block has a code.
"""

import torch
from torch.nn.functional import pad

LEVELS = {8: 127, 4: 7}
# One more bit a number halves the error, so other blocks have to pay for themselves. Blocks of 64
# cost 0.375 bits a number more, worth 23 % of the error: of normal numbers, and of a small GPT's
# outer gradients, they save 15 %. Blocks of 1024 save 0.094 bits, worth 6 %, and add 13 % (and far
# more where a few numbers are large: each costs its whole block precision). The scales of blocks
# of 256 add 1.6 % to the bytes at 8 bits, 3.1 % at 4.
BLOCK = 256
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Codes:
    """Encodes and decodes flat tensors of `dtype`, float32 or float64, at `bits` a number."""

    def __init__(self, bits: int, dtype: torch.dtype):
        self.bits = bits
        self.dtype = dtype

    def nbytes(self, numel: int) -> int:
        """The bytes of so many numbers: their codes, and four for each block."""
        return 4 * block_count(numel) + (numel * self.bits + 7) // 8

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The scales and codes of a flat tensor, as bytes."""
        blocks = in_blocks(x)
        scales = blocks.abs().amax(dim=1).div_(LEVELS[self.bits]).clamp_(min=SMALLEST_SCALE)
        scales = scales.to(torch.float32)
        scales.masked_fill_(scales.isinf(), torch.nan)
        # What code a nan becomes does not matter: its scale is nan.
        codes = (blocks / scales[:, None]).round_().to(torch.int8).view(-1)
        if self.bits == 4:
            codes = (codes[0::2] & 15) | (codes[1::2] << 4)
        data = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device="cpu")
        scales_of, codes_of = self.parts(data, x.numel())
        scales_of.copy_(scales)
        codes_of.copy_(codes[: codes_of.numel()])
        return data

    def decode(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        """The `numel` numbers that these bytes stand for."""
        scales, codes = self.parts(data, numel)
        if self.bits == 4:
            # Shifted up and down again, a number of 4 bits keeps its sign.
            codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=1).view(-1)[:numel]
        blocks = in_blocks(codes).to(self.dtype) * scales[:, None]
        return blocks.view(-1)[:numel]

    def parts(self, data, numel):
        """The scales and the codes that lie in these bytes, as views."""
        start = 4 * block_count(numel)
        return data[:start].view(torch.float32), data[start:].view(torch.int8)


def block_count(numel):
    return -(-numel // BLOCK)


def in_blocks(row):
    """A row as (blocks, BLOCK), the last one filled up with zeros."""
    missing = -row.numel() % BLOCK
    return (pad(row, (0, missing)) if missing else row).view(-1, BLOCK)
