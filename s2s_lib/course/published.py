"""Numbers that papers report, for lessons to set beside their own.

ZERO_TABLE_1 is Table 1 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (arXiv:1910.02054): GB of model states for each GPU (1 GB = 10^9 bytes), Adam in
mixed precision, by degree of data parallelism. Written as printed, since the digits say to what a
number was rounded.
"""

from typing import NamedTuple


class Cell(NamedTuple):
    """One number of ZERO_TABLE_1; `printed` is a text, GB for each of `ranks` GPUs."""

    parameters: float
    ranks: int
    stage: int
    printed: str


# Parameters: for each number of GPUs the cells of stages 1, 2, 3 (P_os, P_os+g, P_os+g+p).
_ZERO_TABLE_1 = {
    7.5e9: {
        1: "120 120 120",
        4: "52.5 41.3 30",
        16: "35.6 21.6 7.5",
        64: "31.4 16.6 1.88",
        256: "30.4 15.4 0.47",
        1024: "30.1 15.1 0.12",
    },
    128e9: {
        1: "2048 2048 2048",
        4: "896 704 512",
        16: "608 368 128",
        64: "536 284 32",
        256: "518 263 8",
        1024: "513 257 2",
    },
    1e12: {
        1: "16000 16000 16000",
        4: "7000 5500 4000",
        16: "4750 2875 1000",
        64: "4187 2218 250",
        256: "4046 2054 62.5",
        1024: "4011 2013 15.6",
    },
}

ZERO_TABLE_1 = [
    Cell(parameters, ranks, stage, printed)
    for parameters, rows in _ZERO_TABLE_1.items()
    for ranks, cells in rows.items()
    for stage, printed in enumerate(cells.split(), start=1)
]
