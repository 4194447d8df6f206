"""Attention in bfloat16 by our own products: what _attention_bits.py computes, without calls of a library.

For processors with AVX512-BF16 and no AMX. Their instruction multiplies pairs of neighbours along the summed
dimension, so operands are uint32: two numbers of a row as they lie, or of a column, packed once for a head.
ROWS queries at a time are multiplied, softened and multiplied again while they are in the first cache,
without the keys that none of them sees. What is rounded, and where, is as there.
"""

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
)
from shardrt.kernels.cpu._jit import exp, reordered, reordered_part
from shardrt.kernels.cpu._vectors import bits_of
from shardrt.kernels.cpu.cast import widened

TILE = 64  # queries of which backward adds up what goes to keys and values
_16 = np.uint32(16)


def suits(head_dim: int) -> bool:
    """Whether the processor has the instruction, and not the faster ones of AMX, and blocks fit."""
    return _vectors.PAIRS and head_dim % WIDTH == 0


def forward(start: int, stop: int, call: Call) -> None:
    """As attention._forward."""
    of_heads(_forward, _operands(call.keys, call.arrays[1].shape[3]), start, stop, call)


def backward(start: int, stop: int, call: Call) -> None:
    """As attention._backward."""
    sizes = call.keys, call.arrays[2].shape[3]
    of_heads_backward(_backward, (_operands(*sizes), *_operands_backward(*sizes)), start, stop, call)


def _operands(keys: int, width: int) -> tuple[Array, ...]:
    """Of one head: pairs of rows' columns and of columns' rows; scores; their bits, twice the same memory."""
    keys = -(-keys // WIDTH) * WIDTH
    weights = np.zeros((ROWS, keys), np.uint16)
    return (
        np.empty((keys // WIDTH, width // 2, WIDTH), np.uint32),
        np.empty((keys // 2, width), np.uint32),
        np.empty((ROWS, keys + WIDTH), np.float32),  # a window's last block may begin at any key
        weights,
        weights.view(np.uint32),
        np.empty((ROWS, width // 2), np.uint32),
        np.empty((ROWS, width), np.float32),
        np.zeros(1, np.int64),
    )


def _operands_backward(keys: int, width: int) -> tuple[Array, ...]:
    """Operands of backward alone.

    Columns of values; dscores; dy, and its bits; of a tile, by pairs of rows, queries and dy, gradients of
    scores and weights; the sums for keys and values.
    """
    keys = -(-keys // WIDTH) * WIDTH
    upper = np.empty((ROWS, width), np.uint16)
    return (
        np.empty((keys // WIDTH, width // 2, WIDTH), np.uint32),
        np.empty((ROWS, keys), np.float32),
        np.empty((ROWS, width), np.float32),
        upper,
        upper.view(np.uint32),
        np.zeros((2, TILE // 2, width), np.uint32),
        np.empty((2, TILE // 2, keys), np.uint32),
        np.empty((2, keys, width), np.float32),
    )


@reordered_part
def _two_rows(address, step, count, like, out):
    """out[j, c]: numbers c of rows 2 j and 2 j + 1; zeros behind the last row."""
    width = out.shape[1]
    for j in range((count + 1) // 2):
        upper, line = row_at(address + 2 * j * step, width, like), out[j]
        if 2 * j + 1 < count:
            lower = row_at(address + (2 * j + 1) * step, width, like)
            for c in range(width):
                line[c] = np.uint32(upper[c]) | np.uint32(np.uint32(lower[c]) << _16)
        else:
            for c in range(width):
                line[c] = np.uint32(upper[c])


@reordered
def _forward(at, by, sizes, scale, lse, columns, twos, scores, weights, pairs, rows, out, none):
    """One head.

    at, by: addresses and bytes between rows of q, k, v, y. sizes: queries, keys, `first`, the window.
    """
    time, keys, first, window = sizes
    half, width, many = rows.shape[1], out.shape[1], weights.shape[1]
    columns_of(at[1], by[1], keys, rows, columns)
    _two_rows(at[2], by[2], keys, weights, twos)
    for low in range(0, time, ROWS):
        count = min(ROWS, time - low)
        seen = min(first + low + count, keys)
        for i in range(count):
            copy(row_at(at[0] + (low + i) * by[0], half, rows), rows[i])
        product_of_columns(rows, 0, half, columns, scores, 0, seen, none)
        end = (seen + WIDTH - 1) // WIDTH * WIDTH
        for i in range(count):
            near, oldest = min(first + low + i + 1, seen), max(0, first + low + i + 1 - window)
            lse[low + i] = _softmax(scores[i], weights[i, :end], oldest, near, scale)
        product(pairs, 0, 1, many // 2, twos, 0, width, WIDTH, (seen + 1) // 2, out, 0, width, none, False)
        for i in range(count):
            copy(out[i], row_at(at[3] + (low + i) * by[3], width, out))


@reordered_part
def _softmax(line, kept, oldest, near, scale):
    """Overwrite the scores, and give the logarithm of the sum of their exponentials. Lines are whole blocks.

    kept: the bits of the probabilities, 0 before `oldest` and from `near` on.
    """
    total, lse = exponentials(line[oldest:], near - oldest, scale)
    line = line[: kept.size]
    line[:oldest] = 0
    line[near:] = 0
    factor = np.float32(1) / total
    for j in range(line.size):
        kept[j] = bits_of(line[j] * factor)
    return lse


@reordered
def _backward(
    at, by, sizes, scale, lse, add, scratch, columns_v, dscores, dy, bits, rows_dy, tile, turned, sums
):
    """One head. at, by: addresses and bytes between rows of dy, q, y, dq, k, v, dk, dv; else as _forward."""
    time, keys, first, window = sizes
    columns, twos, scores, weights, pairs, rows, out, none = scratch
    half, width, many = rows.shape[1], out.shape[1], weights.shape[1]
    columns_of(at[4], by[4], keys, rows, columns)
    columns_of(at[5], by[5], keys, rows, columns_v)
    _two_rows(at[4], by[4], keys, weights, twos)
    sums[:] = 0
    dots = np.empty(ROWS, lse.dtype)
    for start in range(0, time, TILE):
        stop = min(start + TILE, time)
        all_seen = min(first + stop, keys)
        end = (all_seen + WIDTH - 1) // WIDTH * WIDTH
        _two_rows(at[1] + start * by[1], by[1], stop - start, weights, tile[0])
        for low in range(start, stop, ROWS):
            count, place = min(ROWS, stop - low), (low - start) // 2
            seen = min(first + low + count, keys)
            for i in range(count):
                copy(row_at(at[1] + (low + i) * by[1], half, rows), rows[i])
            product_of_columns(rows, 0, half, columns, scores, 0, seen, none)
            _bits_and_dots(at, by, low, count, dy, bits, dots)
            for i in range(ROWS // 2):
                _two_of(dy[2 * i], dy[2 * i + 1], tile[1, place + i])
            product_of_columns(rows_dy, 0, half, columns_v, dscores, 0, seen, none)
            whole = (seen + WIDTH - 1) // WIDTH * WIDTH
            for i in range(ROWS):
                near, shift = (min(first + low + i + 1, seen), lse[low + i]) if i < count else (0, lse[low])
                _slopes(scores[i, :whole], dscores[i, :whole], near, shift, dots[i], scale)
                oldest = max(0, min(first + low + i + 1 - window, whole))
                scores[i, :oldest] = 0
                dscores[i, :oldest] = 0
                _narrow(dscores[i, :whole], weights[i])
            for i in range(ROWS // 2):
                _two_of(dscores[2 * i, :whole], dscores[2 * i + 1, :whole], turned[0, place + i, :end])
                _two_of(scores[2 * i, :whole], scores[2 * i + 1, :whole], turned[1, place + i, :end])
            half_seen = (seen + 1) // 2
            product(pairs, 0, 1, many // 2, twos, 0, width, WIDTH, half_seen, out, 0, width, none, False)
            for i in range(count):
                copy(out[i], row_at(at[3] + (low + i) * by[3], width, out))
        pairs_here = (stop - start + ROWS - 1) // ROWS * (ROWS // 2)
        for j in range(0, all_seen, ROWS):
            before = max(0, j - first - start) // 2  # pairs of queries that see none of these keys
            for i in range(2):
                add_product(turned[i], tile[i], sums[i], before, j, pairs_here - before, none)
    for j in range(keys):
        put(sums[0, j], row_at(at[6] + j * by[6], width, out), add)
        put(sums[1, j], row_at(at[7] + j * by[7], width, out), add)


@reordered_part
def _bits_and_dots(at, by, low, count, given, upper, dots):
    """Write rows of dy, their bits and their dots.

    given, upper: rows of dy and their bits; then zeros. dots: of what these say and y, so that gradients of
    scores sum to 0.
    """
    for i in range(count):
        line, bits = given[i], upper[i]
        copy(row_at(at[0] + (low + i) * by[0], line.size, given), line)
        result = row_at(at[2] + (low + i) * by[2], line.size, given)
        _narrow(line, bits)
        dot = dots.dtype.type(0)
        for j in range(bits.size):
            dot += widened(bits[j]) * result[j]
        dots[i] = dot
    upper[count:] = 0
    given[count:] = 0
    dots[count:] = 0


@reordered_part
def _slopes(line, dline, near, shift, dot, scale):
    """Scores become probabilities, and their gradients those before scaling; 0 from `near` on."""
    whole, zero = near // WIDTH * WIDTH, np.float32(0)
    for j in range(whole):
        probability = exp(line[j] * scale - shift)
        line[j] = probability
        dline[j] = probability * (dline[j] - dot) * scale
    for j in range(whole, line.size):
        probability = exp(line[j] * scale - shift)
        slope = probability * (dline[j] - dot) * scale
        line[j] = probability if j < near else zero
        dline[j] = slope if j < near else zero


@reordered_part
def _narrow(numbers, bits):
    for j in range(numbers.size):
        bits[j] = bits_of(numbers[j])


@reordered_part
def _two_of(first, second, out):
    """The bits of two rows' numbers side by side, and zeros behind them."""
    for j in range(first.size):
        out[j] = np.uint32(bits_of(first[j])) | np.uint32(np.uint32(bits_of(second[j])) << _16)
    out[first.size :] = 0
