"""Latency and bandwidth of a collective from its times at several sizes: t = latency + bytes / bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 3  # sizes; two would always fit


@dataclass(frozen=True)
class Fit:
    """latency: seconds. bandwidth: bytes per second, None where time does not grow with size.

    worst: the largest of |fitted / measured - 1|; what is far from a line says so.
    """

    latency: float
    bandwidth: float | None
    worst: float


def fit(nbytes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """The line with the least relative squared error and no negative part; None for fewer than 3 sizes."""
    x, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    if len(set(nbytes)) < FEWEST:
        return None
    columns = np.stack([np.ones_like(x), x]) / t
    candidates = []
    for kept in ([0, 1], [0], [1]):
        found = np.zeros(2)
        found[kept] = np.linalg.lstsq(_scaled(columns[kept]), np.ones_like(t))[0] / _norms(columns[kept])
        if (found >= 0).all():
            candidates.append((float(np.square(found @ columns - 1).sum()), tuple(found)))
    _, (latency, slope) = min(candidates)
    worst = float(np.abs((latency + slope * x) / t - 1).max())
    return Fit(float(latency), 1 / float(slope) if slope else None, worst)


def _norms(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows, axis=1)


def _scaled(rows: np.ndarray) -> np.ndarray:
    """Equations with unknowns of like size: bytes and ones are nine orders of magnitude apart."""
    return (rows / _norms(rows)[:, None]).T
