"""Rows of a table by index, and the gradient of the table."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.cast import widened


@cost("indices weight -> y", more=lambda indices, weight: -_left(indices, weight))
def forward(indices: Array, weight: Array, y: Array, first: int = 0, vocab: int | None = None) -> None:
    """y[i] = weight[indices[i]]. indices int64 (rows,), weight (vocab, width), y (rows, width).

    weight may be uint16, the bits of bfloat16, where y is float32.

    first, vocab: where weight is a part of a table of `vocab` rows, those from `first` on. Rows of the other
    parts are 0.
    """
    kernel = _forward_bits if weight.dtype == np.uint16 else _forward
    run_rows(kernel, indices.size, y.size, indices, weight, y, int(first))


@cost(
    "indices dy dweight -> dweight",
    flops=lambda dy: dy.size,
    more=lambda indices, dweight: -2 * _left(indices, dweight),
)
def backward(indices: Array, dy: Array, dweight: Array, first: int = 0) -> None:
    """dweight[indices[i] - first] += dy[i], one row after the other: the same bits every time.

    Indices of rows that dweight does not have add nothing.
    """
    _backward(indices, dy, dweight, int(first))


@exact
def _forward(start, stop, indices, weight, y, first):
    for row in range(start, stop):
        index, out = indices[row] - first, y[row]
        if not 0 <= index < len(weight):
            out[:] = 0
            continue
        source = weight[index]
        for j in range(out.size):
            out[j] = source[j]


@exact
def _forward_bits(start, stop, indices, weight, y, first):
    for row in range(start, stop):
        index, out = indices[row] - first, y[row]
        if not 0 <= index < len(weight):
            out[:] = 0
            continue
        source = weight[index]
        for j in range(out.size):
            out[j] = widened(source[j])


@exact
def _backward(indices, dy, dweight, first):
    for row in range(indices.size):
        index = indices[row] - first
        if not 0 <= index < len(dweight):
            continue
        line, out = dy[row], dweight[index]
        for j in range(out.size):
            out[j] += line[j]


def _left(indices: Array, table: Array) -> int:
    """Bytes of a table that do not move: as many rows move as there are indices, at most all."""
    return max(0, len(table) - indices.size) * table.shape[1] * table.dtype.itemsize
