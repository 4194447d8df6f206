"""Rows of a table by index, and the gradient of the table."""

from typing import Any

from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows

Array = Any


def forward(indices: Array, weight: Array, y: Array) -> None:
    """y[i] = weight[indices[i]]. indices int64 (rows,), weight (vocab, width), y (rows, width)."""
    run_rows(_forward, indices.size, y.size, indices, weight, y)


def backward(indices: Array, dy: Array, dweight: Array) -> None:
    """dweight[indices[i]] += dy[i], one row after the other: the same bits every time."""
    _backward(indices, dy, dweight)


def bytes_moved(rows: int, width: int, itemsize: int = 4) -> int:
    """Bytes of forward; backward moves half as much again."""
    return 2 * rows * width * itemsize


def flops(rows: int, width: int) -> int:
    """Additions of backward."""
    return rows * width


@exact
def _forward(start, stop, indices, weight, y):
    for row in range(start, stop):
        source, out = weight[indices[row]], y[row]
        for j in range(out.size):
            out[j] = source[j]


@exact
def _backward(indices, dy, dweight):
    for row in range(indices.size):
        line, out = dy[row], dweight[indices[row]]
        for j in range(out.size):
            out[j] += line[j]
