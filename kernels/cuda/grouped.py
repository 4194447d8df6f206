"""One matmul per group of rows, each with a separate weight: the layers of experts.

In 16 bits one call of cuBLAS computes all groups, on tensor cores (_cublas_grouped.py). Where that can't be
(other types, a result of another type than the factors, rows that don't begin at multiples of 16 bytes,
deterministic algorithms), groups of few rows have one launch together (grouped.cu): a call of cublasLt for
each would take the host longer than the GPU. Larger ones have cublasLt. How many rows a group has changes
from call to call, so no algorithm is measured there: the first that cublasLt proposes computes it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from shardrt.kernels import determinism
from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda._launch import Array, Group

__all__ = ["FEW", "backward_input", "backward_weight", "forward"]

# Operations of a group's product up to which it is computed by our launch, and not by a call of cublasLt. Not
# measured: such a call takes about 10 us of the host, in which ordinary cores do about so much. A group's own
# rows decide, so that its bits do not depend on the others'.
FEW = 1 << 28
_WHOLE = 8  # elements of 16 bits in 16 bytes
_ROWS, _COLUMNS, _THREADS = 32, 64, 128  # as in grouped.cu


def forward(x: Array, weight: Array, counts: Sequence[int], y: Array) -> None:
    """Compute y (rows, outputs) from x (rows, inputs), weight (groups, outputs, inputs)."""
    groups = list(_groups(counts))
    if _in_one_call(x, weight.transpose(0, 2, 1), y, groups):
        groups = []
    small, large = _split(groups, weight)
    for group, start, stop in large:
        _product(x[start:stop], weight[group].T, y[start:stop], False)
    _in_tiles("forward", small, x, weight, y)
    _clear(y[sum(counts) :])


def backward_input(dy: Array, weight: Array, counts: Sequence[int], dx: Array) -> None:
    """Compute dx (rows, inputs) from dy (rows, outputs), weight (groups, outputs, inputs)."""
    groups = list(_groups(counts))
    if _in_one_call(dy, weight, dx, groups):
        groups = []
    small, large = _split(groups, weight)
    for group, start, stop in large:
        _product(dy[start:stop], weight[group], dx[start:stop], False)
    _in_tiles("backward_input", small, dy, weight, dx)
    _clear(dx[sum(counts) :])


def backward_weight(x: Array, dy: Array, counts: Sequence[int], dweight: Array, accumulate: bool) -> None:
    """Write or add dweight (groups, outputs, inputs) from x (rows, inputs) and dy (rows, outputs).

    dweight may be of another type than x: sums are float32 (float64 in float64), rounded once.
    """
    groups = list(_groups(counts))
    if _in_one_call(dy.T, x, dweight, groups, accumulate):
        groups = [each for each in groups if each[1] == each[2]]  # which get zeros below
    small, large = _split(groups, dweight)
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


def _in_one_call(a: Array, b: Array, out: Array, groups: list[Group], accumulate: bool = False) -> bool:
    """Whether one call of a library has computed the groups that have rows (Backend.gemm_grouped).

    Not with deterministic algorithms: which kernel the library takes may depend on all groups together, and a
    group's bits then on the other groups.
    """
    full = [each for each in groups if each[1] < each[2]]
    fits = a.dtype.itemsize == 2 and a.dtype == b.dtype == out.dtype and _launch.vectors(a, b, out)
    widths = (b if b.ndim == 3 else out).shape[1:]
    if not full or not fits or not all(widths) or any(width % _WHOLE for width in widths):
        return False
    if determinism.are_deterministic_algorithms_enabled():
        return False
    return _launch.backend().gemm_grouped(a, b, out, full, accumulate=accumulate)


def _product(a: Array, b: Array, out: Array, accumulate: bool) -> None:
    _launch.backend().matmuls.gemm(a, b, out, accumulate=accumulate, varied=True)


def _in_tiles(function: str, groups: list[Group], rows: Array, weight: Array, out: Array) -> None:
    """Compute forward or backward_input of these groups, in one launch."""
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


def _split(groups: list[Group], weight: Array) -> tuple[list[Group], list[Group]]:
    """The groups that our launch computes, those without rows among them, and the others."""
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
