"""How near the formulas of `islands.py` come to what papers print: every number, none left out.

No constant is fitted. A formula gets what its table states (parameters, step time, H, bits, layers,
fragments, delay) and answers. Two formulas stand beside the bandwidths: `plain`, a replica that
computes and then exchanges (CU = H t / (H t + C), for all methods), and `layered`, whose exchange
starts during the last backward pass, as in the authors' simulation.

The bandwidths are steps of a grid, 1.207 apart, and a simulation prints the first that will do. So
an exact formula would lie at 0.83 to 1 of the printed number, and `steps` counts how many steps of
the grid lie between the printed number and the formula's, rounded up to the grid. The two tables
share one case, 10B parameters, 0.8 s and H = 100, and differ in it by 1 to 2 steps themselves.
"""

import math
from statistics import median
from typing import NamedTuple

from s2s_lib.cluster import Link
from s2s_lib.course.published_diloco import (
    BANDWIDTHS,
    INTELLECT_1_TABLE_2,
    STREAMING_TABLE_1,
    Bandwidth,
    Dolma,
    Run,
)
from s2s_lib.plan.islands import Rounds, utilisation

# The bandwidths that the authors tried, in Gbit/s; the printed ones are these, rounded.
GRID = [10 ** (-1 + 4 * k / 49) for k in range(50)]


def grid_step(gbit_s: float) -> int:
    """The number of the first bandwidth of the grid that is enough; 50 if none is."""
    return sum(tried < gbit_s * (1 - 1e-12) for tried in GRID)


def setting(method: str, layers: int) -> dict:
    """What a method's name says of an exchange: bits, fragments of 3 layers, a delay of a step."""
    return {
        "bits": 4 if "FP4" in method else 16,
        "fragments": layers // 3 if "Streaming" in method else 1,
        "delay": 1 if "overlapped" in method else 0,
    }


class BandwidthRow(NamedTuple):
    """One published bandwidth and what the formulas say, all in Gbit/s."""

    cell: Bandwidth
    printed: float
    plain: float
    layered: float

    @property
    def ratio(self) -> float:
        """Layered formula / printed."""
        return self.layered / self.printed

    @property
    def steps(self) -> int:
        """Steps of the grid from the printed number up to the formula's; 0: the same."""
        # Half a step lower, since the printed number is rounded to 0.1.
        beyond = self.cell.printed.endswith("+")
        printed = len(GRID) if beyond else grid_step(self.printed / math.sqrt(GRID[1] / GRID[0]))
        return grid_step(self.layered) - printed


def bandwidth_rows() -> list[BandwidthRow]:
    """All 165 numbers of the two bandwidth tables."""
    rows = []
    for cell in BANDWIDTHS:
        base = (cell.parameters, cell.step_seconds, cell.sync_every)
        how = setting(cell.method, cell.layers)
        plain = Rounds(*base, bits=how["bits"]).gbit_s(cell.percent / 100)
        layered = Rounds(*base, layers=cell.layers, **how).gbit_s(cell.percent / 100)
        rows.append(BandwidthRow(cell, float(cell.printed.rstrip("+")), plain, layered))
    return rows


class Agreement(NamedTuple):
    """How a formula does over `cells` numbers: formula / printed, and steps of the grid."""

    paper: str
    method: str
    cells: int
    lowest: float
    median: float
    highest: float
    within_a_step: int
    farthest: int
    plain_median: float
    plain_highest: float


def bandwidth_agreement() -> list[Agreement]:
    """The rows of `bandwidth_rows` by paper and method, in the tables' order."""
    groups: dict = {}
    for row in bandwidth_rows():
        groups.setdefault((row.cell.paper, row.cell.method), []).append(row)
    return [_agreement(*names, rows) for names, rows in groups.items()]


def _agreement(paper, method, rows):
    ratios = [row.ratio for row in rows]
    plain = [row.plain / row.printed for row in rows]
    steps = [abs(row.steps) for row in rows]
    near = sum(step <= 1 for step in steps)
    spread = (min(ratios), median(ratios), max(ratios), near, max(steps))
    return Agreement(paper, method, len(rows), *spread, median(plain), max(plain))


class DolmaRow(NamedTuple):
    """A row of Streaming DiLoCo's table 1 and, by formula, its hours at 1 Gbit/s and its bytes.

    `tebibytes` (2^40 bytes) is what one replica sends. All six printed numbers are ten times that,
    and contradict the printed hours: 441 TB at 1 Gbit/s, 0.45 TB an hour, take 980 hours, not 109.
    """

    printed: Dolma
    hours: float
    tebibytes: float


def dolma_rows() -> list[DolmaRow]:
    """Streaming DiLoCo's table 1 from its own hours without a network and steps of 0.1 s.

    The table gives no number of steps: hours / 0.1 s, about one for each 2^20 tokens. Both 0.1 s
    and the 1B parameters are rounded.
    """
    rows = []
    for row in STREAMING_TABLE_1:
        every = 1 if row.method == "Data-Parallel" else 100
        how = Rounds(1e9, 0.1, every, layers=24, **setting(row.method, 24))
        hours = row.hours / how.utilisation(Link(gbit_s=1))
        rounds = row.hours * 3600 / how.compute_seconds
        rows.append(DolmaRow(row, hours, rounds * how.bytes_per_round / 2**40))
    return rows


class RunRow(NamedTuple):
    """A row of INTELLECT-1's table 2 and its utilisation and MFU by formula, in percent."""

    printed: Run
    utilisation_percent: float
    mfu_percent: float


def intellect_rows() -> list[RunRow]:
    """INTELLECT-1's table 2 from its minutes of inner steps and its seconds of all-reduce."""
    alone = INTELLECT_1_TABLE_2[0].mfu_percent
    rows = []
    for row in INTELLECT_1_TABLE_2:
        share = utilisation(row.inner_minutes * 60, row.all_reduce_seconds or 0.0)
        rows.append(RunRow(row, 100 * share, alone * share))
    return rows
