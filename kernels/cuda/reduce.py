"""Sums: over ranks' buffers, over rows, of powers. Fixed order, so bitwise identical every time."""

from typing import Any

import numpy as np

from shardrt.kernels.cuda._launch import (
    THREADS,
    Array,
    accumulator,
    backend,
    blocks_for,
    empty,
    launch,
    type_name,
    vectors,
)
from shardrt.kernels.cuda.cast import type_of

ROWS = 64  # rows of a partial sum in column sums
_LANES = 32  # of a warp, each with columns of its own
_FAN = 8  # parts that one pass sums
_PIECE = 65536  # elements of a partial sum in norms
_CHUNK = 1 << 20  # elements of which groups of parts are summed at once


def sum_into(out: Array, parts: list[Array], scale: float, accumulate: bool) -> None:
    """Set out = (out if accumulate) + scale * sum of `parts`, in the CPU's tree, bitwise identical.

    16-bit parts are summed in float32 and rounded once.
    """
    _sum(out, parts, parts[0].dtype, scale, accumulate)


def sum_packed(out: Array, parts: list[Array], scale: float, accumulate: bool, kind: str) -> None:
    """As sum_into of parts that are uint16, the bits of `kind`; `out` is float32."""
    _sum(out, parts, type_of(kind), scale, accumulate)


def column_sum(x: Array, out: Array, accumulate: bool) -> None:
    """Compute out (columns,) = sum over the rows of x (rows, columns), or plus it; by blocks of ROWS rows.

    `out` may be of another type than x, which is summed in float32 (float64 in float64).
    """
    rows, columns = x.shape
    partials = empty((-(-rows // ROWS), columns), accumulator(x.dtype))
    if rows and columns:
        width = 16 // x.dtype.itemsize
        wide = vectors(x, partials) and columns % width == 0
        grid = len(partials), -(-columns // (_LANES * width if wide else _LANES))
        launch("reduce", "column_blocks", x.dtype, grid, (x, partials, rows, columns, wide))
    combine_blocks(partials, out, accumulate)


def column_grid(rows: int, columns: int, x: Array, *others: Array) -> tuple[bool, tuple[int, int], int]:
    """For a kernel in which a block has ROWS rows of some columns: 16 bytes at once?, the grid, threads."""
    width = 16 // x.dtype.itemsize
    wide = vectors(x, *others) and columns % width == 0
    pieces = columns // width if wide else columns
    threads = min(THREADS, -(-pieces // 32) * 32)
    return wide, (-(-rows // ROWS), -(-pieces // threads)), threads


def combine_blocks(partials: Array, out: Array, accumulate: bool) -> None:
    """Sum the rows of `partials` into out, or add them, in an order that depends on their number only."""
    combine_two([(partials, out)], accumulate)


def combine_two(sums: list[tuple[Array, Array]], accumulate: bool) -> None:
    """As combine_blocks of one or two (partials, out), in one launch where shapes and types are the same."""
    (partials, out), (other, other_out) = sums[0], sums[-1]
    if partials.shape != other.shape or out.dtype != other_out.dtype:
        for each in sums:
            combine_two([each], accumulate)
        return
    blocks, columns = partials.shape
    args = (partials, out, other, other_out, blocks, columns, bool(accumulate))
    grid, defines = (-(-columns // _LANES), len(sums)), {"GRADIENT": type_name(out.dtype)}
    launch("reduce", "combine", partials.dtype, grid, args, threads=_LANES * _LANES, **defines)


def power_rows(count: int) -> int:
    """Rows of power_sums of `count` elements."""
    return -(-count // _PIECE)


def power_sums(x: Array, p: float, out: Array | None = None) -> Array:
    """Float64 pairs (high, low), (n, 2), whose exact sum is that of |x| ** p, as on the CPU.

    For p other than 1, 2 and 3 the powers themselves may differ from the CPU's in the last bit.
    """
    out = empty((power_rows(x.size), 2), np.float64) if out is None else out
    launch("reduce", "power_sums", x.dtype, len(out), (x, np.float64(p), out, x.size, vectors(x)))
    return out


def add_pairs(pairs: Array, out: Array) -> None:
    """Compute out (2,) = the sum of `pairs` (n, 2) of power_sums as one, as on the CPU. It is not waited for.

    high + low of `out`, rounded once, is the exact sum with the exception that power_sums names.
    """
    launch("reduce", "add_pairs", np.float32, 1, (pairs, out, len(pairs)))


def clip_factor(pairs: Array, limit: float, leave_nonfinite: bool, out: Array) -> None:
    """Set out (2,): the norm, and the factor to reach `limit`, as on the CPU. The host does not wait."""
    launch(
        *("reduce", "clip_factor", np.float32, 1),
        (pairs, np.float64(limit), bool(leave_nonfinite), out, len(pairs)),
    )


def exact_power_sums(x: Array, p: int) -> Array:
    """The exact sum of |x| ** p, p 1 or 2, in integers: int64 (256, 2), the table that the CPU's gives."""
    blocks = max(1, min(-(-x.size // _PIECE), 4 * backend().multiprocessors))
    tables, table = empty((blocks, 256, 2), np.int64), empty((256, 2), np.int64)
    launch("reduce", "exact_tables", x.dtype, blocks, (x, tables, x.size, p == 2), threads=256)
    launch("reduce", "add_tables", x.dtype, 2, (tables, table, blocks), threads=256)
    return table


def abs_max(x: Array, out: Array | None = None) -> float | None:
    """The largest absolute value, as on the CPU. Without `out` it is a number, and waited for."""
    if not x.size:
        return 0.0 if out is None else out.fill(0)
    blocks = blocks_for(x.size, 16 // x.dtype.itemsize)
    partials, largest = (empty(count, accumulator(x.dtype)) for count in (blocks, 1))
    launch("reduce", "abs_max", x.dtype, blocks, (x, partials, x.size, vectors(x)))
    launch("reduce", "abs_max", partials.dtype, 1, (partials, largest, blocks, vectors(partials)))
    if out is None:
        return float(largest[0])
    out[...] = largest
    return None


def _sum(out: Array, parts: list[Array], source: Any, scale: float, accumulate: bool) -> None:
    """More than _FAN parts: sums of aligned groups, then the sum of those; it is the same tree."""
    real = accumulator(out.dtype)
    if len(parts) <= _FAN:
        given = (*parts, *[None] * (_FAN - len(parts)))
        defines = {"SOURCE": type_name(source), "PARTS": str(1 << (len(parts) - 1).bit_length())}
        how = (np.int32(len(parts)), real(scale), bool(accumulate), out.size, vectors(out, *parts))
        grid = blocks_for(out.size, 4)
        launch("sum_parts", "sum_parts", out.dtype, grid, (out, *given, *how), **defines)
        return
    groups = [parts[first : first + _FAN] for first in range(0, len(parts), _FAN)]
    for low in range(0, out.size, _CHUNK):
        piece = slice(low, min(low + _CHUNK, out.size))
        sums = [empty(piece.stop - low, real) for _ in groups]
        for group, total in zip(groups, sums, strict=True):
            _sum(total, [part[piece] for part in group], source, 1.0, False)
        _sum(out[piece], sums, sums[0].dtype, scale, accumulate)
