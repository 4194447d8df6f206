"""What sums cost. Partial results of norms and of abs_max, a few bytes for 65,536 elements, are left out."""

import numpy as np

from shardrt.kernels.shape._cost import Answer, Array, Cost, New, cost, real, upto
from shardrt.kernels.shape.cast import check_kind

ROWS = 64  # rows of a partial sum in column sums
_FAN = 8  # parts that one pass sums
_PIECE = 65536  # elements of a partial sum in norms
_CHUNK = 1 << 20  # elements of which groups of parts are summed at once


def sum_into(out: Array, parts: list[Array], scale: float, accumulate: bool) -> Cost:
    launches, kept = _passes(len(parts))
    chunks = upto(out.size, _CHUNK) if kept else min(out.size, 1)
    reads = (*parts, out) if accumulate else parts
    how = {"launches": chunks * launches, "sizes": (len(parts), out.size)}
    return cost(reads, (out,), len(parts) * out.size, scratch=kept * out.size * real(out), **how)


def sum_packed(out: Array, parts: list[Array], scale: float, accumulate: bool, kind: str) -> Cost:
    check_kind(kind)
    return sum_into(out, parts, scale, accumulate)


def column_sum(x: Array, out: Array, accumulate: bool) -> Cost:
    rows, columns = x.shape
    scratch = upto(rows, ROWS) * columns * real(x)
    launches = int(x.size > 0) + int(columns > 0)
    reads = (x, out) if accumulate else (x,)
    return cost(reads, (out,), x.size, launches=launches, sizes=x.shape, scratch=scratch)


def power_rows(count: int) -> int:
    """As in the twins; it is no kernel."""
    return upto(count, _PIECE)


def power_sums(x: Array, p: float, out: Array | None = None) -> Cost:
    value = New((power_rows(x.size), 2), np.float64) if out is None else out
    how = {"launches": min(value.shape[0], 1), "sizes": (x.size,), "value": value}
    return cost((x,), (out,), 8 * x.size, **how)


def add_pairs(pairs: Array, out: Array) -> Cost:
    return cost((pairs,), (out,), 8 * len(pairs), sizes=(len(pairs),))


def clip_factor(pairs: Array, limit: float, leave_nonfinite: bool, out: Array) -> Cost:
    return cost((pairs,), (out,), 8 * len(pairs), sizes=(len(pairs),))


def exact_power_sums(x: Array, p: int) -> Cost:
    value = New((256, 2), np.int64)
    return cost((x,), (), 8 * x.size, launches=2, sizes=(x.size,), value=value)


def abs_max(x: Array, out: Array | None = None) -> Cost:
    value = None if out is not None else Answer("largest", 1.0) if x.size else 0.0
    launches = (2 if x.size else 0) + (out is not None)
    return cost((x,), (out,), 2 * x.size, launches=launches, sizes=(x.size,), value=value)


def _passes(parts: int) -> tuple[int, int]:
    """(launches for a chunk of elements, partial sums of an element) of so many parts."""
    if parts <= _FAN:
        return 1, 0
    groups = upto(parts, _FAN)
    launches, kept = _passes(groups)
    return groups + launches, groups + kept
