"""Sums: over ranks' buffers, over rows, of squares. Fixed order, so the same bits every time."""

from typing import Any

import numpy as np

from shardrt.kernels.cpu._jit import exact, reordered
from shardrt.kernels.cpu._threads import run_rows

Array = Any

ROWS = 64  # rows of a partial sum in column sums
_BLOCK = 4096  # elements of a partial sum in norms
_CHUNK = 16384  # elements that stay in cache while more than two buffers are summed


def sum_into(out: Array, parts: list[Array], scale: float, accumulate: bool) -> None:
    """out = (out if accumulate) + scale * (parts[0] + parts[1] + ...), added in that order.

    1-D arrays of one length and float dtype; `out` may be one of the parts. Each element depends on its own
    elements only: an array may be cut into any pieces.
    """
    factor = out.dtype.type(scale)
    first, second = parts[0], parts[1] if len(parts) == 2 else parts[0]
    if len(parts) <= 2:
        run_rows(_sum_two, out.size, out.size, out, first, second, len(parts), factor, accumulate)
        return
    total = np.empty(min(_CHUNK, out.size), out.dtype)
    for start in range(0, out.size, _CHUNK):
        piece = slice(start, min(start + _CHUNK, out.size))
        sums = total[: piece.stop - start]
        np.add(parts[0][piece], parts[1][piece], out=sums)
        for part in parts[2:]:
            np.add(sums, part[piece], out=sums)
        _sum_two(0, sums.size, out[piece], sums, sums, 1, factor, accumulate)


@exact
def _sum_two(start, stop, out, first, second, count, scale, accumulate):
    out, first, second = out[start:stop], first[start:stop], second[start:stop]
    if count == 2 and accumulate:
        for i in range(out.size):
            out[i] = out[i] + scale * (first[i] + second[i])
    elif count == 2:
        for i in range(out.size):
            out[i] = scale * (first[i] + second[i])
    elif accumulate:
        for i in range(out.size):
            out[i] = out[i] + scale * first[i]
    else:
        for i in range(out.size):
            out[i] = scale * first[i]


def column_sum(x: Array, out: Array, accumulate: bool) -> None:
    """out (columns,) = sum over the rows of x (rows, columns), or plus it; by blocks of ROWS rows."""
    blocks = -(-x.shape[0] // ROWS)
    partials = np.empty((blocks, x.shape[1]), x.dtype)
    run_rows(_column_blocks, blocks, x.size, x, partials)
    combine_blocks(partials, out, accumulate)


@exact
def _column_blocks(start, stop, x, partials):
    for block in range(start, stop):
        total = partials[block]
        total[:] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, x.shape[0])):
            line = x[row]
            for j in range(total.size):
                total[j] += line[j]


@exact
def combine_blocks(partials, out, accumulate):
    """out = sum of the rows of `partials`, in order; or plus it."""
    if not accumulate:
        out[:] = 0
    for block in range(partials.shape[0]):
        line = partials[block]
        for j in range(out.size):
            out[j] += line[j]


def square_sum(x: Array) -> float:
    """Sum of the squares of a 1-D array, in float64 and in fixed blocks."""
    partials = np.zeros(-(-x.size // _BLOCK), np.float64)
    run_rows(_square_blocks, partials.size, x.size, x, partials)
    return float(partials.sum())


@reordered
def _square_blocks(start, stop, x, partials):
    for block in range(start, stop):
        piece = x[block * _BLOCK : min((block + 1) * _BLOCK, x.size)]
        total = 0.0
        for i in range(piece.size):
            value = np.float64(piece[i])
            total += value * value
        partials[block] = total


def abs_max(x: Array) -> float:
    """The largest absolute value of a 1-D array, 0 for an empty one; nan if one is nan."""
    return float(max(x.max(), -x.min())) if x.size else 0.0


def bytes_moved(parts: int, count: int, itemsize: int = 4) -> int:
    """Bytes of sum_into: the parts read, the sum written."""
    return (parts + 1) * count * itemsize


def flops(parts: int, count: int) -> int:
    """Operations of sum_into."""
    return parts * count
