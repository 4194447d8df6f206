"""Pooling of planes (planes, height, width): the largest or the mean of each window.

window, stride, padding: (vertical, horizontal); padding is less than the window, so each window sees a pixel.
"""

from typing import Any

from shardrt.kernels.cpu._jit import exact, fused
from shardrt.kernels.cpu._threads import run_rows

Array = Any
Pair = tuple[int, int]


def max_forward(x: Array, y: Array, index: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """y (planes, rows, columns): the largest of each window, nan if one is.

    index: int32, where in its plane the first such pixel is.
    """
    run_rows(_max_forward, len(x), y.size * window[0] * window[1], x, y, index, window, stride, padding)


def max_backward(dy: Array, index: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """dx from dy and what forward found."""
    run_rows(_max_backward, len(dx), dy.size, dy, index, dx)


def mean_forward(x: Array, y: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """y: the mean of each window, in which pixels of the padding count as zeros."""
    run_rows(_mean_forward, len(x), y.size * window[0] * window[1], x, y, window, stride, padding)


def mean_backward(dy: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """dx from dy."""
    run_rows(_mean_backward, len(dx), dy.size * window[0] * window[1], dy, dx, window, stride, padding)


@exact
def _span(at, size, window, stride, padding):
    """The pixels that output `at` sees."""
    first = at * stride - padding
    return max(0, first), min(size, first + window)


@exact
def _max_forward(start, stop, x, y, index, window, stride, padding):
    height, width = x.shape[1:]
    for p in range(start, stop):
        plane = x[p]
        for i in range(y.shape[1]):
            top, bottom = _span(i, height, window[0], stride[0], padding[0])
            for j in range(y.shape[2]):
                left, right = _span(j, width, window[1], stride[1], padding[1])
                best, where = plane[top, left], top * width + left
                for row in range(top, bottom):
                    for column in range(left, right):
                        value = plane[row, column]
                        if value > best or (value != value and best == best):
                            best, where = value, row * width + column
                y[p, i, j], index[p, i, j] = best, where


@exact
def _max_backward(start, stop, dy, index, dx):
    for p in range(start, stop):
        out, upper, where = dx[p].reshape(-1), dy[p].reshape(-1), index[p].reshape(-1)
        out[:] = 0
        for j in range(upper.size):
            out[where[j]] += upper[j]


@fused
def _mean_forward(start, stop, x, y, window, stride, padding):
    share = x.dtype.type(1) / x.dtype.type(window[0] * window[1])
    for p in range(start, stop):
        plane = x[p]
        for i in range(y.shape[1]):
            top, bottom = _span(i, x.shape[1], window[0], stride[0], padding[0])
            for j in range(y.shape[2]):
                left, right = _span(j, x.shape[2], window[1], stride[1], padding[1])
                total = x.dtype.type(0)
                for row in range(top, bottom):
                    for column in range(left, right):
                        total += plane[row, column]
                y[p, i, j] = total * share


@fused
def _mean_backward(start, stop, dy, dx, window, stride, padding):
    share = dx.dtype.type(1) / dx.dtype.type(window[0] * window[1])
    for p in range(start, stop):
        out = dx[p]
        out[:] = 0
        for i in range(dy.shape[1]):
            top, bottom = _span(i, dx.shape[1], window[0], stride[0], padding[0])
            for j in range(dy.shape[2]):
                left, right = _span(j, dx.shape[2], window[1], stride[1], padding[1])
                part = dy[p, i, j] * share
                for row in range(top, bottom):
                    for column in range(left, right):
                        out[row, column] += part
