"""Attention in float32 by our own products: what attention.py computes, without calls of a library.

For processors with AVX2 or AVX-512. ROWS queries at a time are multiplied, softened and multiplied again
while they are in the first cache, without the keys that none of them sees.
"""

from typing import Any

import numpy as np

from shardrt.kernels.cost import Array
from shardrt.kernels.cpu import _vectors
from shardrt.kernels.cpu._attention_bits import Call
from shardrt.kernels.cpu._attention_blocks import (
    ROWS,
    WIDTH,
    add_product,
    columns_of,
    copy,
    exponentials,
    of_heads,
    of_heads_backward,
    product,
    product_of_columns,
    put,
    row_at,
    whole_blocks,
)
from shardrt.kernels.cpu._jit import exp, reordered, reordered_part

TILE = 4 * ROWS  # queries of which backward adds up what goes to keys and values


def suits(head_dim: int, dtype: Any) -> bool:
    """Whether the processor multiplies and adds at once, and blocks fit."""
    return _vectors.FMA and dtype == np.float32 and head_dim % WIDTH == 0


def forward(start: int, stop: int, call: Call) -> None:
    """As attention._forward."""
    of_heads(_forward, _scratch(call.keys, call.arrays[1].shape[3]), start, stop, call)


def backward(start: int, stop: int, call: Call) -> None:
    """As attention._backward."""
    sizes = call.keys, call.arrays[2].shape[3]
    of_heads_backward(_backward, (_scratch(*sizes), *_scratch_backward(*sizes)), start, stop, call)


def _scratch(keys: int, width: int) -> tuple[Array, ...]:
    """Of one head: columns of keys, rows of values or keys; of some queries, rows, scores and results."""
    keys = whole_blocks(keys)
    line = keys + WIDTH  # a window's last block of exponentials may begin at any key
    shapes = ((keys // WIDTH, width, WIDTH), (keys, width), (ROWS, width), (ROWS, line), (ROWS, width))
    return *(np.zeros(shape, np.float32) for shape in shapes), np.zeros(1, np.int64)


def _scratch_backward(keys: int, width: int) -> tuple[Array, ...]:
    """Scratch memory of backward alone.

    Columns of values; of a tile queries and dy, gradients of scores and weights; the sums for keys and
    values.
    """
    keys = whole_blocks(keys)
    shapes = ((keys // WIDTH, width, WIDTH), (2, TILE, width), (2, TILE, keys), (2, keys, width))
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


@reordered_part
def _copy_rows(address, step, count, out):
    for j in range(count):
        copy(row_at(address + j * step, out.shape[1], out), out[j])


@reordered
def _forward(at, by, sizes, scale, lse, columns, dense, rows, scores, out, none):
    """One head.

    at, by: addresses and bytes between rows of q, k, v, y. sizes: queries, keys, `first`, the window.
    """
    time, keys, first, window = sizes
    width, many = out.shape[1], scores.shape[1]
    totals = np.empty(ROWS, lse.dtype)
    columns_of(at[1], by[1], keys, rows, columns)
    _copy_rows(at[2], by[2], keys, dense)
    for low in range(0, time, ROWS):
        count = min(ROWS, time - low)
        seen = min(first + low + count, keys)
        _copy_rows(at[0] + low * by[0], by[0], count, rows)
        product_of_columns(rows, 0, width, columns, scores, 0, seen, none)
        for i in range(count):
            near, oldest = min(first + low + i + 1, seen), max(0, first + low + i + 1 - window)
            totals[i], lse[low + i] = exponentials(scores[i, oldest:], near - oldest, scale)
            scores[i, :oldest] = 0
            scores[i, near:seen] = 0
        product(scores, 0, 1, many, dense, 0, width, WIDTH, seen, out, 0, width, none, False)
        for i in range(count):
            row, factor = row_at(at[3] + (low + i) * by[3], width, out), np.float32(1) / totals[i]
            for c in range(width):
                row[c] = out[i, c] * factor


@reordered_part
def _softmax_backward(near, dnear, shift, dot, scale):
    """Scores become probabilities, and their gradients those before scaling."""
    for j in range(near.size):
        probability = exp(near[j] * scale - shift)
        near[j] = probability
        dnear[j] = probability * (dnear[j] - dot) * scale


@reordered
def _backward(at, by, sizes, scale, lse, add, scratch, columns_v, tile, weights, sums):
    """One head. at, by: addresses and bytes between rows of dy, q, y, dq, k, v, dk, dv; else as _forward."""
    time, keys, first, window = sizes
    columns, dense, rows, _, out, none = scratch
    width, many = out.shape[1], weights.shape[2]
    columns_of(at[4], by[4], keys, rows, columns)
    columns_of(at[5], by[5], keys, rows, columns_v)
    _copy_rows(at[4], by[4], keys, dense)
    sums[:] = 0
    for start in range(0, time, TILE):
        stop = min(start + TILE, time)
        all_seen = min(first + stop, keys)
        end = (all_seen + ROWS - 1) // ROWS * ROWS
        _copy_rows(at[1] + start * by[1], by[1], stop - start, tile[0])
        _copy_rows(at[0] + start * by[0], by[0], stop - start, tile[1])
        for low in range(start, stop, ROWS):
            row, count = low - start, min(ROWS, stop - low)
            seen = min(first + low + count, keys)
            product_of_columns(tile[0], row * width, width, columns, weights[1], row * many, seen, none)
            product_of_columns(tile[1], row * width, width, columns_v, weights[0], row * many, seen, none)
            for i in range(row, row + count):
                near, oldest = min(first + start + i + 1, seen), max(0, first + start + i + 1 - window)
                dot = _dot(tile[1, i], row_at(at[2] + (start + i) * by[2], width, out))
                seen_by_it = weights[1, i, oldest:near], weights[0, i, oldest:near]
                _softmax_backward(*seen_by_it, lse[start + i], dot, scale)
                weights[:, i, :oldest] = 0
                weights[:, i, near:end] = 0
            product(weights[0], row * many, 1, many, dense, 0, width, WIDTH, seen, out, 0, width, none, False)
            for i in range(count):
                copy(out[i], row_at(at[3] + (low + i) * by[3], width, out))
        for j in range(0, all_seen, ROWS):
            before = max(0, j - first - start)  # queries that see none of these keys
            for i in range(2):
                add_product(weights[i], tile[i], sums[i], before, j, stop - start - before, none)
    for j in range(keys):
        put(sums[0, j], row_at(at[6] + j * by[6], width, out), add)
        put(sums[1, j], row_at(at[7] + j * by[7], width, out), add)


@reordered_part
def _dot(x, y):
    total = x.dtype.type(0)
    for j in range(x.size):
        total += x[j] * y[j]
    return total
