"""What papers on DiLoCo report: quality, bytes, time, and the bandwidth that islands need.

As printed; texts where the digits say to what a number was rounded. Each table names its paper
above it:

DiLoCo               Douillard et al. 2023, arXiv:2311.08105
OpenDiLoCo           Jaghouar et al. 2024, arXiv:2407.07852
INTELLECT-1          Jaghouar et al. 2024, arXiv:2412.01152
Streaming DiLoCo     Douillard et al. 2025, arXiv:2501.18512
scaling laws         Charles et al. 2025, arXiv:2503.09799
"""

from typing import NamedTuple


class Tradeoff(NamedTuple):
    """One way to train; `communication` in exchanges of a model, for N steps in rounds of H."""

    model: str
    communication: str
    time: str
    compute_and_data: str
    perplexity: float


# DiLoCo, table 2: 150M parameters on C4, 8 workers, H = 500, 64,000 steps after 24,000 alone.
DILOCO_TABLE_2 = [
    Tradeoff("baseline", "0", "1x", "1x", 16.23),
    Tradeoff("baseline, 8x batch, data parallel", "8N", "1x", "8x", 15.30),
    Tradeoff("baseline, 8x batch, microbatching", "0", "8x", "8x", 15.30),
    Tradeoff("baseline, 8x updates", "0", "8x", "8x", 14.72),
    Tradeoff("DiLoCo", "8N/H", "1x", "8x", 15.02),
]

# DiLoCo: perplexity by number of replicas, each with data of its own kind or drawn alike (iid).
DILOCO_REPLICAS = {
    1: {"iid": 16.23, "non_iid": 16.23},
    4: {"iid": 15.23, "non_iid": 15.18},
    8: {"iid": 15.08, "non_iid": 15.02},
    16: {"iid": 15.02, "non_iid": 14.91},
    64: {"iid": 14.95, "non_iid": 14.96},
}

# OpenDiLoCo: the same experiment by others, 150M parameters.
OPEN_DILOCO_150M = [
    Tradeoff("baseline, no replica", "0", "1x", "1x", 16.17),
    Tradeoff("baseline, 8x batch, data parallel", "8N", "1x", "8x", 13.68),
    Tradeoff("DiLoCo, 8 replicas", "8N/H", "1x", "8x", 13.73),
]


class Run(NamedTuple):
    """A row of INTELLECT_1_TABLE_2: `all_reduce_seconds` is the median, None without one."""

    scenario: str
    mfu_percent: float
    inner_minutes: float
    all_reduce_seconds: float | None
    utilisation_percent: float


# INTELLECT-1, table 2: 10B parameters, H = 100, pseudo-gradients as int8.
INTELLECT_1_TABLE_2 = [
    Run("no communication", 43.3, 38, None, 100),
    Run("USA", 41.4, 38, 103, 95.7),
    Run("USA + Europe", 37.1, 38, 382, 85.6),
    Run("Global", 36.0, 38, 469, 83.0),
]


class Dolma(NamedTuple):
    """A row of STREAMING_TABLE_1: hours with an infinite and a 1 Gbit/s link."""

    method: str
    tokens: float
    hours: float
    hours_1_gbit_s: float
    terabytes: float
    loss: float
    hellaswag: float


# Streaming DiLoCo, table 1: 1B parameters on Dolma, 2 replicas; DiLoCo with H = 100, fragments of
# 3 of the 24 layers, a delay of one step, and 4 bits on the wire.
STREAMING_TABLE_1 = [
    Dolma("Data-Parallel", 25e9, 0.67, 109, 441, 2.67, 42.09),
    Dolma("Data-Parallel", 100e9, 2.7, 438, 1767, 2.52, 49.78),
    Dolma("Data-Parallel", 250e9, 6.75, 1097, 4418, 2.45, 53.86),
    Dolma("Streaming DiLoCo overlapped FP4", 25e9, 0.67, 0.88, 1.10, 2.66, 42.08),
    Dolma("Streaming DiLoCo overlapped FP4", 100e9, 2.7, 3.5, 4.42, 2.51, 49.98),
    Dolma("Streaming DiLoCo overlapped FP4", 250e9, 6.75, 8.75, 11.05, 2.45, 54.24),
]

# Streaming DiLoCo, table 5: evaluation loss on C4, 2 replicas. In the order of STREAMING_METHODS.
STREAMING_METHODS = ("Data-Parallel", "DiLoCo H=30", "FP4 H=30", "FP4 H=100")
STREAMING_TABLE_5 = {
    "35M": (3.51, 3.54, 3.53, 3.56),
    "100M": (3.19, 3.21, 3.21, 3.22),
    "200M": (2.97, 2.98, 2.98, 3.00),
    "300M": (2.80, 2.81, 2.81, 2.83),
    "500M": (2.67, 2.68, 2.67, 2.69),
    "1B": (2.49, 2.49, 2.48, 2.50),
    "4B": (2.25, None, None, 2.26),
}

# Scaling laws, table 4: evaluation loss of 4B and 10B parameters, H = 30, M replicas.
SCALING_TABLE_4 = {
    "Data-Parallel": (2.224, 2.090),
    "DiLoCo M=1": (2.219, 2.086),
    "DiLoCo M=2": (2.220, 2.086),
    "DiLoCo M=4": (2.230, 2.096),
}


class Bandwidth(NamedTuple):
    """One number of BANDWIDTHS: the Gbit/s with which `percent` of the time is computing.

    Simulated by the authors for 2 replicas that exchange 16 bits a parameter (FP4: 4), every
    `sync_every` steps of `step_seconds`, in fragments of 3 `layers` when streaming. They tried
    50 bandwidths from 0.1 to 1000, each 1.207 times the one before, and print the first that will
    do: "1000.0+" if none did. Layers of Llama and DeepSeek are from their own reports.
    """

    paper: str
    model: str
    parameters: float
    layers: int
    step_seconds: float
    method: str
    sync_every: int
    percent: int
    printed: str


PERCENTS = (50, 80, 90, 95, 99)

# For each method or H what is printed in the columns of PERCENTS.
_STREAMING_TABLE_4 = {
    ("1B", 1e9, 24, 0.1): {
        "Data-Parallel": "86.8 152.6 184.2 222.3 569.0",
        "DiLoCo": "1.4 6.2 13.3 23.3 86.8",
        "Streaming": "1.4 5.2 9.1 16.0 28.1",
        "Streaming overlapped": "1.4 4.3 6.2 9.1 11.0",
        "Streaming overlapped FP4": "0.4 0.9 1.7 2.0 3.0",
    },
    ("10B", 10e9, 48, 0.8): {
        "Data-Parallel": "104.8 222.3 222.3 268.3 471.5",
        "DiLoCo": "1.7 7.5 16.0 33.9 104.8",
        "Streaming": "1.7 5.2 9.1 13.3 19.3",
        "Streaming overlapped": "1.7 3.6 5.2 6.2 7.5",
        "Streaming overlapped FP4": "0.4 0.9 1.4 1.4 1.7",
    },
    ("100B", 100e9, 108, 4.9): {
        "Data-Parallel": "184.2 323.8 390.7 390.7 471.5",
        "DiLoCo": "3.0 11.0 23.3 49.4 184.2",
        "Streaming": "2.4 6.2 9.1 11.0 19.3",
        "Streaming overlapped": "1.7 3.6 4.3 5.2 5.2",
        "Streaming overlapped FP4": "0.5 0.9 1.1 1.1 1.4",
    },
}
# H = 1 stands for two rows of equal numbers, Data-Parallel and DiLoCo with H = 1.
_SCALING_TABLE_7 = {
    ("Chinchilla 10B", 10e9, 48, 0.8): {
        1: "104.8 184.2 222.3 222.3 390.7",
        10: "16.0 49.4 86.8 152.6 222.3",
        50: "3.0 11.0 23.3 41.0 126.5",
        100: "1.4 6.2 13.3 23.3 86.8",
        300: "0.5 2.0 4.3 9.1 41.0",
    },
    ("Llama3 405B", 405e9, 126, 26): {
        1: "126.5 222.3 268.3 323.8 323.8",
        10: "19.3 72.0 126.5 184.2 268.3",
        50: "3.6 13.3 28.1 59.6 184.2",
        100: "2.0 7.5 16.0 33.9 126.5",
        300: "0.7 3.0 6.2 13.3 59.6",
    },
    ("DeepSeek-V3 671B", 671e9, 61, 20): {
        1: "323.8 569.0 686.6 686.6 1000.0+",
        10: "49.4 152.6 268.3 390.7 686.6",
        50: "7.5 33.9 72.0 126.5 390.7",
        100: "4.3 16.0 41.0 72.0 268.3",
        300: "1.7 6.2 13.3 28.1 126.5",
    },
}

# Streaming DiLoCo, table 4, and scaling laws, table 7 (table 6 of its first version).
BANDWIDTHS = [
    Bandwidth("Streaming, table 4", *model, method, every, percent, printed)
    for model, rows in _STREAMING_TABLE_4.items()
    for method, line in rows.items()
    for every in [1 if method == "Data-Parallel" else 100]
    for percent, printed in zip(PERCENTS, line.split(), strict=True)
] + [
    Bandwidth("scaling laws, table 7", *model, method, every, percent, printed)
    for model, rows in _SCALING_TABLE_7.items()
    for every, line in rows.items()
    for method in (["Data-Parallel", "DiLoCo"] if every == 1 else ["DiLoCo"])
    for percent, printed in zip(PERCENTS, line.split(), strict=True)
]
