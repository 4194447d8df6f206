"""Percentiles, spikes and stragglers of times by rank and iteration.

Definitions are those of nccl-tests (src/util.cu, tools/analyze_perf_json.py): an iteration took as long as
its slowest rank, percentiles are nearest-rank, and an iteration spikes on the ranks that took more than 1.5
times the average.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPIKE = 1.5  # times the average


@dataclass(frozen=True)
class Stats:
    """Figures of one series, in its unit. stdev: of the whole series, as nccl-tests has it (over n)."""

    min: float
    max: float
    avg: float
    p50: float
    p90: float
    p95: float
    p99: float
    stdev: float

    @property
    def cv_pct(self) -> float:
        """Coefficient of variation: the standard deviation in percent of the average."""
        return 100 * self.stdev / self.avg if self.avg > 0 else 0.0


@dataclass(frozen=True)
class Straggler:
    """The rank with the largest average, and by how much of the smallest average it is slower."""

    rank: int
    spread: float


def stats(series: Sequence[float] | np.ndarray) -> Stats:
    """Of at least one number."""
    ordered = np.sort(np.asarray(series, float))
    p90, p95, p99 = (ordered[nearest(ordered.size, percent)] for percent in (90, 95, 99))
    found = ordered[0], ordered[-1], ordered.mean(), ordered[ordered.size // 2], p90, p95, p99, ordered.std()
    return Stats(*map(float, found))


def nearest(count: int, percent: int) -> int:
    """The place of a percentile among `count` ordered numbers, by the nearest-rank method."""
    return min(count - 1, -(-count * percent // 100) - 1)


def slowest(each: np.ndarray) -> np.ndarray:
    """Of times (ranks, iterations), the slowest rank's in each iteration."""
    return each.max(axis=0)


def spikes(each: np.ndarray, threshold: float = SPIKE) -> dict[int, list[int]]:
    """Of times (ranks, iterations): the iterations above `threshold` averages, and the ranks that were."""
    limit = threshold * slowest(each).mean()
    return {
        int(i): np.flatnonzero(each[:, i] > limit).tolist() for i in np.flatnonzero(slowest(each) > limit)
    }


def straggler(each: np.ndarray) -> Straggler:
    """Of times (ranks, iterations)."""
    averages = each.mean(axis=1)
    return Straggler(int(averages.argmax()), float(averages.max() / averages.min() - 1))
