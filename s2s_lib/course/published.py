"""Numbers that papers report, for lessons to set beside their own.

ZERO_TABLE_1 is Table 1 of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (arXiv:1910.02054): GB of model states for each GPU (1 GB = 10^9 bytes), Adam in
mixed precision, by degree of data parallelism. Written as printed, since the digits say to what a
number was rounded.

ZERO_BUBBLE_TABLE_5 and ZERO_BUBBLE_TABLE_6 are those of Qi et al., "Zero Bubble Pipeline
Parallelism" (arXiv:2401.10241): bubble rates of schedules, computed by the authors (section 5.3)
from the durations that they measured on A100s.
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


class BubbleRate(NamedTuple):
    """One number of ZERO_BUBBLE_TABLE_5: the share that a schedule idles, to four decimals."""

    model: str
    stages: int
    microbatches: int
    schedule: str
    rate: float


class StageTimes(NamedTuple):
    """One row of ZERO_BUBBLE_TABLE_6: milliseconds for one micro-batch on one stage.

    `backward` is the gradient of the input alone, `transfer` one message. `layers` is how many
    transformer layers a stage has, each a chunk of its own in the interleaved schedule.
    """

    model: str
    stages: int
    microbatches: int
    layers: int
    forward: float
    backward: float
    weight: float
    transfer: float


# (Model, stages): for each number of micro-batches the rates in this order.
_SCHEDULES = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
_ZERO_BUBBLE_TABLE_5 = {
    ("1.5B", 8): {
        24: "0.2431 0.1055 0.1585 0.1083 0.1585 0.0433",
        32: "0.1985 0.0818 0.1242 0.0837 0.1242 0.0039",
        64: "0.1240 0.0443 0.0674 0.0444 0.0674 0.0026",
    },
    ("6.2B", 8): {
        24: "0.2347 0.0808 0.1323 0.0698 0.1323 0.0029",
        32: "0.1898 0.0628 0.1045 0.0559 0.1045 0.0022",
        64: "0.1091 0.0320 0.0554 0.0294 0.0554 0.0010",
    },
    ("14.6B", 16): {
        48: "0.2552 0.1104 0.1397 0.0672 0.1397 0.0066",
        64: "0.2082 0.0852 0.1088 0.0516 0.1088 0.0054",
        128: "0.1251 0.0445 0.0576 0.0266 0.0576 0.0028",
    },
    ("28.3B", 32): {
        96: "0.2646 0.1493 0.1421 0.0641 0.1421 0.0038",
        128: "0.2168 0.1164 0.1106 0.0490 0.1106 0.0029",
        256: "0.1352 0.0624 0.0594 0.0257 0.0594 0.0018",
    },
}

ZERO_BUBBLE_TABLE_5 = [
    BubbleRate(model, stages, microbatches, schedule, float(rate))
    for (model, stages), rows in _ZERO_BUBBLE_TABLE_5.items()
    for microbatches, rates in rows.items()
    for schedule, rate in zip(_SCHEDULES, rates.split(), strict=True)
]

ZERO_BUBBLE_TABLE_6 = [
    StageTimes("1.5B", 8, 24, 3, 18.522, 18.086, 9.337, 0.601),
    StageTimes("1.5B", 8, 32, 3, 18.513, 18.086, 9.331, 0.626),
    StageTimes("1.5B", 8, 64, 3, 18.546, 18.097, 9.321, 0.762),
    StageTimes("6.2B", 8, 24, 4, 29.718, 29.444, 19.927, 0.527),
    StageTimes("6.2B", 8, 32, 4, 29.802, 29.428, 19.530, 0.577),
    StageTimes("6.2B", 8, 64, 4, 29.935, 29.621, 19.388, 0.535),
    StageTimes("14.6B", 16, 48, 3, 11.347, 11.248, 8.132, 0.377),
    StageTimes("14.6B", 16, 64, 3, 11.307, 11.254, 8.101, 0.379),
    StageTimes("14.6B", 16, 128, 3, 11.325, 11.308, 8.109, 0.378),
    StageTimes("28.3B", 32, 96, 2, 10.419, 10.207, 7.715, 0.408),
    StageTimes("28.3B", 32, 128, 2, 10.408, 10.204, 7.703, 0.408),
    StageTimes("28.3B", 32, 256, 2, 10.402, 10.248, 7.698, 0.460),
]
