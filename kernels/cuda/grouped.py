"""One matrix product per group of rows, each with a weight of its own: the layers of experts.

How many rows a group has changes from call to call, so no algorithm is measured for a product: the first that
cublasLt proposes computes it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from shardrt.kernels.cuda import _launch

Array = Any


def forward(x: Array, weight: Array, counts: Sequence[int], y: Array) -> None:
    """x (rows, inputs), weight (groups, outputs, inputs) -> y (rows, outputs)."""
    for group, rows in _groups(counts, y):
        _product(x[rows], weight[group].T, y[rows], False)


def backward_input(dy: Array, weight: Array, counts: Sequence[int], dx: Array) -> None:
    """dy (rows, outputs), weight (groups, outputs, inputs) -> dx (rows, inputs)."""
    for group, rows in _groups(counts, dx):
        _product(dy[rows], weight[group], dx[rows], False)


def backward_weight(x: Array, dy: Array, counts: Sequence[int], dweight: Array, accumulate: bool) -> None:
    """x (rows, inputs), dy (rows, outputs) -> dweight (groups, outputs, inputs), written or added to."""
    start = 0
    for group, count in enumerate(counts):
        rows = slice(start, start + count)
        if count:
            _product(dy[rows].T, x[rows], dweight[group], accumulate)
        elif not accumulate:
            dweight[group].fill(0)
        start += count


def _product(a: Array, b: Array, out: Array, accumulate: bool) -> None:
    _launch.backend().gemm(a, b, out, accumulate=accumulate, varied=True)


def _groups(counts: Sequence[int], result: Array) -> Iterator[tuple[int, slice]]:
    """(group, its rows) of those that have rows; what is behind them becomes 0."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count
    if start < len(result):
        result[start:].fill(0)
