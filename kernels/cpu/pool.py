"""Pooling of planes (planes, height, width): the largest or the mean of each window.

window, stride, padding: (vertical, horizontal); padding is less than the window, so each window sees a pixel.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact, fused, fused_part
from shardrt.kernels.cpu._threads import run_rows

Pair = tuple[int, int]


@cost("x -> y index", flops=lambda y, window: y.size * window[0] * window[1])
def max_forward(x: Array, y: Array, index: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """Compute y (planes, rows, columns): the largest of each window, nan if one is.

    index: int32, where in its plane the first such pixel is.
    """
    run_rows(_max_forward, len(x), y.size * window[0] * window[1], x, y, index, window, stride, padding)


@cost("dy index -> dx", flops=lambda dy, window: dy.size * window[0] * window[1])
def max_backward(dy: Array, index: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """Compute dx from dy and the forward's indices."""
    run_rows(_max_backward, len(dx), dy.size, dy, index, dx)


@cost("x -> y", flops=lambda y, window: y.size * window[0] * window[1])
def mean_forward(x: Array, y: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """y: the mean of each window, in which pixels of the padding count as zeros."""
    run_rows(_mean_forward, len(x), y.size * window[0] * window[1], x, y, window, stride, padding)


@cost("dy -> dx", flops=lambda dy, window: dy.size * window[0] * window[1])
def mean_backward(dy: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """Compute dx from dy."""
    run_rows(_mean_backward, len(dx), dy.size * window[0] * window[1], dy, dx, window, stride, padding)


@exact
def _span(at, size, window, stride, padding):
    """The pixels that output `at` sees."""
    first = at * stride - padding
    return max(0, first), min(size, first + window)


@exact
def _max_forward(start, stop, x, y, index, window, stride, padding):
    """Down each column first, which is vectors, then along the row of what was found."""
    height, width = x.shape[1:]
    best, where = np.empty(width, x.dtype), np.empty(width, np.int32)
    for p in range(start, stop):
        for i in range(y.shape[1]):
            top, bottom = _span(i, height, window[0], stride[0], padding[0])
            _down(x[p, top:bottom], top, best, where)
            out, at = y[p, i], index[p, i]
            for j in range(out.size):
                left, right = _span(j, width, window[1], stride[1], padding[1])
                value, place = best[left], where[left] * width + left
                for column in range(left + 1, right):
                    other, there = best[column], where[column] * width + column
                    unordered = other != other and (value == value or there < place)
                    if other > value or unordered or (other == value and there < place):
                        value, place = other, there
                out[j], at[j] = value, place


@exact
def _down(rows, top, best, where):
    """The largest of each column, nan if one is, and its first row; `top` is the number of rows[0]."""
    for j in range(best.size):
        best[j], where[j] = rows[0, j], np.int32(top)
    for i in range(1, rows.shape[0]):
        line, row = rows[i], np.int32(top + i)
        for j in range(best.size):
            value, before = line[j], best[j]
            larger = value > before or (value != value and before == before)
            best[j] = value if larger else before
            where[j] = row if larger else where[j]


@exact
def _max_backward(start, stop, dy, index, dx):
    for p in range(start, stop):
        out, upper, where = dx[p].reshape(-1), dy[p].reshape(-1), index[p].reshape(-1)
        out[:] = 0
        for j in range(upper.size):
            out[where[j]] += upper[j]


@fused
def _mean_forward(start, stop, x, y, window, stride, padding):
    """Down each column first, which is vectors, then along the row of sums."""
    share = x.dtype.type(1) / x.dtype.type(window[0] * window[1])
    sums = np.empty(x.shape[2], x.dtype)
    for p in range(start, stop):
        plane = x[p]
        for i in range(y.shape[1]):
            top, bottom = _span(i, x.shape[1], window[0], stride[0], padding[0])
            sums[:] = plane[top]
            for row in range(top + 1, bottom):
                _add(sums, plane[row])
            out = y[p, i]
            for j in range(out.size):
                left, right = _span(j, x.shape[2], window[1], stride[1], padding[1])
                total = sums[left]
                for column in range(left + 1, right):
                    total += sums[column]
                out[j] = total * share


@fused_part
def _add(sums, line):
    for j in range(sums.size):
        sums[j] += line[j]


@fused
def _mean_backward(start, stop, dy, dx, window, stride, padding):
    share = dx.dtype.type(1) / dx.dtype.type(window[0] * window[1])
    parts = np.empty(dx.shape[2], dx.dtype)
    for p in range(start, stop):
        out = dx[p]
        out[:] = 0
        for i in range(dy.shape[1]):
            top, bottom = _span(i, dx.shape[1], window[0], stride[0], padding[0])
            parts[:] = 0
            upper = dy[p, i]
            for j in range(upper.size):
                left, right = _span(j, dx.shape[2], window[1], stride[1], padding[1])
                for column in range(left, right):
                    parts[column] += upper[j] * share
            for row in range(top, bottom):
                _add(out[row], parts)
