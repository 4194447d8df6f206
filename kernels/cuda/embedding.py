"""Rows of a table by index, and the gradient of the table, bitwise identical every time."""

from typing import Any

import numpy as np

from shardrt.kernels.cuda._launch import THREADS, accumulator, backend, empty, launch, type_name, vectors

Array = Any

_TILE = 1024  # ids that a block sorts
_ROWS = 32  # sorted rows that a block sums


def forward(indices: Array, weight: Array, y: Array, first: int = 0, vocab: int | None = None) -> None:
    """y[i] = weight[indices[i]], as on the CPU; nan for an index outside."""
    rows, (count, width) = indices.size, weight.shape
    wide = vectors(weight, y) and width % (16 // weight.dtype.itemsize) == 0
    grid = min(-(-rows // (THREADS // 32)), 8 * backend().multiprocessors)
    sizes = (rows, count, width, int(first), count if vocab is None else int(vocab))
    launch("embedding", "gather", weight.dtype, grid, (indices, weight, y, *sizes, wide))


def backward(indices: Array, dy: Array, dweight: Array, first: int = 0) -> None:
    """dweight[indices[i] - first] += dy[i]: the rows of one index are summed first, in an order of their own.

    That order depends on `indices` only. It is found by sorting them: two launches for each eight bits of the
    vocabulary's size, which cost little next to the sums (dy read once, and the rows that are named read and
    written). dweight may be of another type than dy, which is summed in float32 (float64 in float64).
    """
    count, (vocab, width) = indices.size, dweight.shape
    if not count or not dweight.size:
        return
    gradient = {"GRADIENT": type_name(dweight.dtype)}
    ids, rows = in_order(indices, int(first), vocab, dy.dtype, gradient)
    blocks = -(-count // _ROWS)
    partials = empty((blocks, 2, width), accumulator(dy.dtype))
    columns = 16 // min(dy.dtype.itemsize, dweight.dtype.itemsize)
    wide = vectors(dy, dweight, partials) and width % columns == 0
    pieces = -(-width // columns) if wide else width
    threads = min(THREADS, -(-pieces // 32) * 32)
    grid, how = (blocks, -(-pieces // threads)), {"threads": threads, **gradient}
    sizes = (count, vocab, width, wide)
    launch("embedding", "sum_runs", dy.dtype, grid, (ids, rows, dy, partials, dweight, *sizes), **how)
    launch("embedding", "join_runs", dy.dtype, grid, (ids, partials, dweight, *sizes), **how)


def in_order(
    indices: Array, first: int, vocab: int, element: Any = np.float32, defines: dict[str, str] | None = None
) -> tuple[Array, Array]:
    """(indices - first in ascending order, which of them each is), both uint32; equal ones stay in order.

    Those outside of [first, first + vocab) are `vocab`, behind all. element, defines: of the module that
    sums, so that no other is compiled.
    """
    count, defines = indices.size, defines or {}
    tiles = -(-count // _TILE)
    counts = empty((tiles, 256), np.int32)
    source, ids, rows = indices, None, None
    for shift in range(0, max(1, vocab.bit_length()), 8):
        places = empty(count, np.uint32), empty(count, np.uint32)
        digit = (count, first, vocab, np.int32(shift))
        launch("embedding", "count_digits", element, tiles, (source, ids, counts, *digit), **defines)
        launch("embedding", "place", element, tiles, (source, ids, rows, counts, *places, *digit), **defines)
        source, (ids, rows) = None, places
    return ids, rows
