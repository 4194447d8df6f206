"""One matrix product per group of rows, each with a weight of its own: the layers of experts.

Groups of few rows have one launch together (grouped.cu): a call of cublasLt for each would take the host
longer than the GPU. Larger ones have cublasLt, whose products use tensor cores. How many rows a group has
changes from call to call, so no algorithm is measured there: the first that cublasLt proposes computes it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardrt.kernels.cuda import _launch

Array = Any
Group = tuple[int, int, int]  # its number, its first row, and the one behind its last

# Operations of a group's product up to which it is computed by our launch. Not measured: a call of cublasLt
# takes about 10 us of the host, in which ordinary cores do about so much. A group's own rows decide, so that
# its bits do not depend on the others'.
FEW = 1 << 28
_ROWS, _COLUMNS, _THREADS = 32, 64, 128  # as in grouped.cu


def forward(x: Array, weight: Array, counts: Sequence[int], y: Array) -> None:
    """x (rows, inputs), weight (groups, outputs, inputs) -> y (rows, outputs)."""
    small, large = _split(counts, weight)
    for group, start, stop in large:
        _product(x[start:stop], weight[group].T, y[start:stop], False)
    _in_tiles("forward", small, x, weight, y)
    _clear(y[sum(counts) :])


def backward_input(dy: Array, weight: Array, counts: Sequence[int], dx: Array) -> None:
    """dy (rows, outputs), weight (groups, outputs, inputs) -> dx (rows, inputs)."""
    small, large = _split(counts, weight)
    for group, start, stop in large:
        _product(dy[start:stop], weight[group], dx[start:stop], False)
    _in_tiles("backward_input", small, dy, weight, dx)
    _clear(dx[sum(counts) :])


def backward_weight(x: Array, dy: Array, counts: Sequence[int], dweight: Array, accumulate: bool) -> None:
    """x (rows, inputs), dy (rows, outputs) -> dweight (groups, outputs, inputs), written or added to.

    dweight may be of another type than x: sums are float32 (float64 in float64), rounded once.
    """
    small, large = _split(counts, dweight)
    for group, start, stop in large:
        _product(dy[start:stop].T, x[start:stop], dweight[group], accumulate)
    if accumulate:
        small = [each for each in small if each[1] < each[2]]
    if small and dweight.size:
        groups, outputs, inputs = dweight.shape
        grid = len(small), -(-outputs // _ROWS), -(-inputs // _COLUMNS)
        args = (x, dy, _table(small), dweight, inputs, outputs, accumulate, _vectors(x, dy, inputs, outputs))
        kinds = {"GRADIENT": _launch.type_name(dweight.dtype)}
        _launch.launch("grouped", "backward_weight", x.dtype, grid, args, threads=_THREADS, **kinds)


def _product(a: Array, b: Array, out: Array, accumulate: bool) -> None:
    _launch.backend().gemm(a, b, out, accumulate=accumulate, varied=True)


def _in_tiles(function: str, groups: list[Group], rows: Array, weight: Array, out: Array) -> None:
    """forward or backward_input of these groups, in one launch."""
    _, outputs, inputs = weight.shape
    tiles = [
        (group, first, min(first + _ROWS, stop))
        for group, start, stop in groups
        for first in range(start, stop, _ROWS)
    ]
    if tiles and out.size:
        grid = len(tiles), -(-out.shape[1] // _COLUMNS)
        args = (rows, weight, _table(tiles), out, inputs, outputs, _vectors(rows, weight, inputs, outputs))
        kinds = {"GRADIENT": _launch.type_name(out.dtype)}
        _launch.launch("grouped", function, rows.dtype, grid, args, threads=_THREADS, **kinds)


def _table(rows: list[Group]) -> Array:
    return _launch.backend().upload(np.array(rows, np.int64))


def _vectors(one: Array, other: Array, inputs: int, outputs: int) -> bool:
    """Whether both factors can be read 16 bytes at a time."""
    width = 16 // one.dtype.itemsize
    return _launch.vectors(one, other) and inputs % width == outputs % width == 0


def _split(counts: Sequence[int], weight: Array) -> tuple[list[Group], list[Group]]:
    """The groups that our launch computes, those without rows among them, and the others."""
    groups = list(_groups(counts))
    limit = FEW // max(1, 2 * weight.shape[1] * weight.shape[2])
    small = [each for each in groups if each[2] - each[1] <= limit]
    return small, [each for each in groups if each[2] - each[1] > limit]


def _groups(counts: Sequence[int]) -> Iterator[Group]:
    start = 0
    for group, count in enumerate(counts):
        yield group, start, start + count
        start += count


def _clear(rest: Array) -> None:
    """The rows behind the last group."""
    if rest.size:
        rest.fill(0)
