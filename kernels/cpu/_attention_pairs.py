"""Attention in bfloat16 by our own products: what _attention_bits.py computes, without calls of a library.

For processors with AVX512-BF16 and no AMX. Their instruction multiplies pairs of neighbours along the summed
dimension, so operands are uint32: two numbers of a row as they lie, or of a column, packed once for a head.
ROWS queries at a time are multiplied, softened and multiplied again while they are in the first cache,
without the keys that none of them sees. What is rounded, and where, is as there.
"""

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from shardrt.kernels.cpu import _vectors
from shardrt.kernels.cpu._attention_bits import heads_of
from shardrt.kernels.cpu._jit import exp, larger, reordered
from shardrt.kernels.cpu._vectors import tile_sum
from shardrt.kernels.cpu.cast import narrowed, widened

Array = Any

ROWS, WIDTH = 8, 32  # of a block of a product: its sums are 16 vectors
TILE = 64  # queries of which backward adds up what goes to keys and values
_BLOCK = ((0,) * ROWS, (0,) * 2, (), ())
_16 = np.uint32(16)


def suits(head_dim: int) -> bool:
    """Whether the processor has the instruction, and not the faster ones of AMX, and blocks fit."""
    return _vectors.PAIRS and head_dim % WIDTH == 0


def forward(
    start: int,
    stop: int,
    kv_heads: int,
    group: int,
    arrays: tuple,
    spans: list,
    chunks: bool,
    causal: bool,
    scale: Any,
) -> None:
    """As attention._forward."""
    q, k, v, y = map(heads_of, arrays[:4])
    lse, steps = arrays[4], (q.row, k.row, v.row, y.row)
    scratch = _operands(arrays[1].shape[2], q.width)
    for number in range(start * group, stop * group):
        sequence, head = divmod(number, kv_heads * group)
        for own, others, first in spans[sequence]:
            here, there = (sequence, head, own.start), (sequence, head // group, others.start)
            places = q.at(*here), k.at(*there), v.at(*there), y.at(*here)
            sizes = own.stop - own.start, others.stop - others.start, first
            _forward(places, steps, sizes, scale, lse[sequence, head, own], *scratch)


def backward(
    start: int,
    stop: int,
    kv_heads: int,
    group: int,
    arrays: tuple,
    spans: list,
    chunks: bool,
    causal: bool,
    scale: Any,
) -> None:
    """As attention._backward."""
    dy, q, k, v, y, lse, dq, dk, dv = arrays
    of_queries, of_keys = [heads_of(x) for x in (dy, q, y, dq)], [heads_of(x) for x in (k, v, dk, dv)]
    steps = tuple(x.row for x in (*of_queries, *of_keys))
    scratch = (_operands(k.shape[2], q.shape[3]), *_operands_backward(k.shape[2], q.shape[3]))
    for number in range(start * group, stop * group):
        sequence, head = divmod(number, kv_heads * group)
        if chunks and head % group == 0:  # keys may be seen by both chunks, or by none
            dk[sequence, head // group] = 0
            dv[sequence, head // group] = 0
        for own, others, first in spans[sequence]:
            here, there = (sequence, head, own.start), (sequence, head // group, others.start)
            places = (*(x.at(*here) for x in of_queries), *(x.at(*there) for x in of_keys))
            sizes = own.stop - own.start, others.stop - others.start, first
            add = chunks or head % group > 0
            _backward(places, steps, sizes, scale, lse[sequence, head, own], add, *scratch)


def _operands(keys: int, width: int) -> tuple[Array, ...]:
    """Of one head: pairs of rows' columns and of columns' rows; scores; their bits, twice the same memory."""
    keys = -(-keys // WIDTH) * WIDTH
    weights = np.zeros((ROWS, keys), np.uint16)
    return (
        np.empty((width // 2, keys), np.uint32),
        np.empty((keys // 2, width), np.uint32),
        np.empty((ROWS, keys), np.float32),
        weights,
        weights.view(np.uint32),
        np.empty((ROWS, width // 2), np.uint32),
        np.empty((ROWS, width), np.float32),
        np.zeros(1, np.int64),
    )


def _operands_backward(keys: int, width: int) -> tuple[Array, ...]:
    """What backward has beside: columns of values; dscores; dy; of a tile, by pairs of rows, queries and dy,
    gradients of scores and weights; the sums for keys and values."""
    keys = -(-keys // WIDTH) * WIDTH
    upper = np.empty((ROWS, width), np.uint16)
    return (
        np.empty((width // 2, keys), np.uint32),
        np.empty((ROWS, keys), np.float32),
        upper,
        upper.view(np.uint32),
        np.zeros((2, TILE // 2, width), np.uint32),
        np.empty((2, TILE // 2, keys), np.uint32),
        np.empty((2, keys, width), np.float32),
    )


@intrinsic
def _pointer(typing_context, address, like):
    """To numbers of the type of the array `like`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@reordered
def _row(address, count, like):
    return carray(_pointer(np.int64(address), like), (count,))


@reordered
def _columns(address, step, keys, like, out):
    """out[c, j]: numbers 2 c and 2 c + 1 of row j; zeros behind the last row."""
    for j in range(keys):
        line = _row(address + j * step, out.shape[0], like)
        for c in range(out.shape[0]):
            out[c, j] = line[c]
    for c in range(out.shape[0]):
        out[c, keys:] = 0


@reordered
def _two_rows(address, step, count, like, out):
    """out[j, c]: numbers c of rows 2 j and 2 j + 1; zeros behind the last row."""
    width = out.shape[1]
    for j in range((count + 1) // 2):
        upper, line = _row(address + 2 * j * step, width, like), out[j]
        if 2 * j + 1 < count:
            lower = _row(address + (2 * j + 1) * step, width, like)
            for c in range(width):
                line[c] = np.uint32(upper[c]) | np.uint32(np.uint32(lower[c]) << _16)
        else:
            for c in range(width):
                line[c] = np.uint32(upper[c])


@reordered
def _product(a, a_at, a_k, a_i, b, b_at, count, out, out_at, width, none, add):
    """`width` columns of ROWS rows: out = a b, or that added; sums over `count` pairs. a_k, a_i: steps."""
    for c in range(0, width, WIDTH):
        places, steps = (a_at, b_at + c, out_at + c), (a_k, a_i, b.shape[1], out.shape[1])
        tile_sum(_BLOCK, a, b, out, none, none, (1, count), places, steps, add)


@reordered
def _add_product(a, b, out, first, at, count, none):
    """out, rows from `at` on: plus the product of these columns of a and b, pairs of rows from `first` on."""
    many, width = a.shape[1], b.shape[1]
    _product(a, first * many + at, many, 1, b, first * width, count, out, at * width, width, none, True)


@reordered
def _forward(at, by, sizes, scale, lse, columns, twos, scores, weights, pairs, rows, out, none):
    """One head. at, by: addresses and bytes between rows of q, k, v, y. sizes: queries, keys, `first`."""
    time, keys, first = sizes
    half, width, many = rows.shape[1], out.shape[1], weights.shape[1]
    _columns(at[1], by[1], keys, rows, columns)
    _two_rows(at[2], by[2], keys, weights, twos)
    for low in range(0, time, ROWS):
        count = min(ROWS, time - low)
        seen = min(first + low + count, keys)
        for i in range(count):
            rows[i, :] = _row(at[0] + (low + i) * by[0], half, rows)
        _product(rows, 0, 1, half, columns, 0, half, scores, 0, seen, none, False)
        for i in range(count):
            near = min(first + low + i + 1, seen)
            lse[low + i] = _softmax(scores[i, :near], weights[i, :near], scale)
            weights[i, near : seen + 1] = 0  # a pair's second, too
        _product(pairs, 0, 1, many // 2, twos, 0, (seen + 1) // 2, out, 0, width, none, False)
        for i in range(count):
            _row(at[3] + (low + i) * by[3], width, out)[:] = out[i]


@reordered
def _softmax(near, kept, scale):
    """kept: the bits of the probabilities; scores are overwritten. Gives the logarithm of their sum."""
    highest = near[0] * scale
    for j in range(near.size):
        highest = larger(highest, near[j] * scale)
    total = near.dtype.type(0)
    for j in range(near.size):
        value = exp(near[j] * scale - highest)
        near[j] = value
        total += value
    factor = near.dtype.type(1) / total
    for j in range(near.size):
        kept[j] = narrowed(near[j] * factor)
    return highest + np.log(total)


@reordered
def _backward(at, by, sizes, scale, lse, add, scratch, columns_v, dscores, bits, rows_dy, tile, turned, sums):
    """One head. at, by: addresses and bytes between rows of dy, q, y, dq, k, v, dk, dv; else as _forward."""
    time, keys, first = sizes
    columns, twos, scores, weights, pairs, rows, out, none = scratch
    half, width, many = rows.shape[1], out.shape[1], weights.shape[1]
    _columns(at[4], by[4], keys, rows, columns)
    _columns(at[5], by[5], keys, rows, columns_v)
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
                rows[i, :] = _row(at[1] + (low + i) * by[1], half, rows)
            _product(rows, 0, 1, half, columns, 0, half, scores, 0, seen, none, False)
            _bits_and_dots(at, by, low, count, out, bits, dots)
            _two_of(bits, tile[1, place:])
            _product(rows_dy, 0, 1, half, columns_v, 0, half, dscores, 0, seen, none, False)
            for i in range(ROWS):
                near = min(first + low + i + 1, seen) if i < count else 0
                if near:
                    _softmax_backward(scores[i, :near], dscores[i, :near], lse[low + i], dots[i], scale)
                scores[i, near:end] = 0
                dscores[i, near:end] = 0
                _narrow(dscores[i, :end], weights[i])
            _two_of(weights[:, :end], turned[0, place:])
            _product(pairs, 0, 1, many // 2, twos, 0, (seen + 1) // 2, out, 0, width, none, False)
            for i in range(count):
                _row(at[3] + (low + i) * by[3], width, out)[:] = out[i]
            for i in range(ROWS):
                _narrow(scores[i, :end], weights[i])
            _two_of(weights[:, :end], turned[1, place:])
        pairs_here = (stop - start + ROWS - 1) // ROWS * (ROWS // 2)
        for j in range(0, all_seen, ROWS):
            before = max(0, j - first - start) // 2  # pairs of queries that see none of these keys
            for i in range(2):
                _add_product(turned[i], tile[i], sums[i], before, j, pairs_here - before, none)
    for j in range(keys):
        _put(sums[0, j], _row(at[6] + j * by[6], width, out), add)
        _put(sums[1, j], _row(at[7] + j * by[7], width, out), add)


@reordered
def _softmax_backward(near, dnear, shift, dot, scale):
    """Scores become probabilities, and their gradients those before scaling."""
    for j in range(near.size):
        probability = exp(near[j] * scale - shift)
        near[j] = probability
        dnear[j] = probability * (dnear[j] - dot) * scale


@reordered
def _bits_and_dots(at, by, low, count, like, upper, dots):
    """upper: the bits of rows of dy. dots: of what they say and y, so that gradients of scores sum to 0."""
    for i in range(count):
        bits = upper[i]
        given = _row(at[0] + (low + i) * by[0], bits.size, like)
        result = _row(at[2] + (low + i) * by[2], bits.size, like)
        _narrow(given, bits)
        dot = dots.dtype.type(0)
        for j in range(bits.size):
            dot += widened(bits[j]) * result[j]
        dots[i] = dot
    upper[count:] = 0


@reordered
def _narrow(numbers, bits):
    for c in range(0, numbers.size, WIDTH):
        line, kept = numbers[c : c + WIDTH], bits[c : c + WIDTH]
        for j in range(WIDTH):
            kept[j] = narrowed(line[j])


@reordered
def _two_of(bits, out):
    """As _two_rows, of ROWS rows."""
    for i in range(ROWS // 2):
        upper, lower, line = bits[2 * i], bits[2 * i + 1], out[i]
        for c in range(0, upper.size, WIDTH):
            first, second, both = upper[c : c + WIDTH], lower[c : c + WIDTH], line[c : c + WIDTH]
            for j in range(WIDTH):
                both[j] = np.uint32(first[j]) | np.uint32(np.uint32(second[j]) << _16)


@reordered
def _put(numbers, out, add):
    if add:
        for c in range(out.size):
            out[c] += numbers[c]
    else:
        for c in range(out.size):
            out[c] = numbers[c]
