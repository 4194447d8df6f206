"""What attention's own products share: the way over its heads, and blocks of a product.

For processors with AVX-512. An operand of a product has ROWS rows and lies anywhere in steps; sums are of
float32. Rows of tensors are read at their addresses: of arrays with gaps Numba would not make vectors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from shardrt.kernels.cpu._attention_bits import heads_of
from shardrt.kernels.cpu._jit import reordered_part
from shardrt.kernels.cpu._vectors import lanes, tile_sum, transpose_tile

Array = Any

ROWS, WIDTH = 8, 32  # of a block of a product: its sums are 16 vectors
LANES = lanes(np.float32)
_BLOCK = ((0,) * ROWS, (0,) * 2, (), ())


def of_heads(
    kernel: Callable,
    scratch: tuple,
    numbers: range,
    group: int,
    arrays: tuple,
    spans: list,
    chunks: bool,
    causal: bool,
    scale: Any,
) -> None:
    """Call `kernel` for each of these heads of queries and its spans, as attention._forward does."""
    q, k, v, y = map(heads_of, arrays[:4])
    lse, steps, heads = arrays[4], (q.row, k.row, v.row, y.row), arrays[0].shape[1]
    for number in numbers:
        sequence, head = divmod(number, heads)
        for own, others, first in spans[sequence]:
            here, there = (sequence, head, own.start), (sequence, head // group, others.start)
            places = q.at(*here), k.at(*there), v.at(*there), y.at(*here)
            sizes = own.stop - own.start, others.stop - others.start, first
            kernel(places, steps, sizes, scale, lse[sequence, head, own], *scratch)


def of_heads_backward(
    kernel: Callable,
    scratch: tuple,
    numbers: range,
    group: int,
    arrays: tuple,
    spans: list,
    chunks: bool,
    causal: bool,
    scale: Any,
) -> None:
    """As of_heads, for attention._backward."""
    dy, q, k, v, y, lse, dq, dk, dv = arrays
    of_queries, of_keys = [heads_of(x) for x in (dy, q, y, dq)], [heads_of(x) for x in (k, v, dk, dv)]
    steps = tuple(x.row for x in (*of_queries, *of_keys))
    for number in numbers:
        sequence, head = divmod(number, q.shape[1])
        if chunks and head % group == 0:  # keys may be seen by both chunks, or by none
            dk[sequence, head // group] = 0
            dv[sequence, head // group] = 0
        for own, others, first in spans[sequence]:
            here, there = (sequence, head, own.start), (sequence, head // group, others.start)
            places = (*(x.at(*here) for x in of_queries), *(x.at(*there) for x in of_keys))
            sizes = own.stop - own.start, others.stop - others.start, first
            add = chunks or head % group > 0
            kernel(places, steps, sizes, scale, lse[sequence, head, own], add, *scratch)


@intrinsic
def _pointer(typing_context, address, like):
    """To numbers of the type of the array `like`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@reordered_part
def row_at(address, count, like):
    return carray(_pointer(np.int64(address), like), (count,))


@reordered_part
def copy(source, target):
    """Of one size. Numba's own target[:] = source looks whether they overlap, and is slower."""
    for j in range(source.size):
        target[j] = source[j]


@reordered_part
def columns_of(address, step, keys, like, out):
    """out[c, j]: element c, of the type of `like`, of row j; zeros behind the last row."""
    width, many = out.shape
    rows = np.empty((LANES, width), out.dtype)
    starts, places = np.arange(LANES) * width, np.arange(LANES) * many
    for j in range(0, many, LANES):
        for i in range(LANES):
            if j + i < keys:
                copy(row_at(address + (j + i) * step, width, like), rows[i])
            else:
                rows[i] = 0
        for c in range(0, width, LANES):
            transpose_tile(rows, c, starts, out, c * many + j, places)


@reordered_part
def product(a, a_at, a_k, a_i, b, b_at, count, out, out_at, width, none, add):
    """`width` columns of ROWS rows: out = a b, or that added; sums over `count` k. a_k, a_i: steps."""
    for c in range(0, width, WIDTH):
        places, steps = (a_at, b_at + c, out_at + c), (a_k, a_i, b.shape[1], out.shape[1])
        tile_sum(_BLOCK, a, b, out, none, none, (1, count), places, steps, add, None)


@reordered_part
def add_product(a, b, out, first, at, count, none):
    """out, rows from `at` on: plus the product of these columns of a and b, their rows from `first` on."""
    many, width = a.shape[1], b.shape[1]
    product(a, first * many + at, many, 1, b, first * width, count, out, at * width, width, none, True)


@reordered_part
def put(numbers, out, add):
    if add:
        for c in range(out.size):
            out[c] += numbers[c]
    else:
        for c in range(out.size):
            out[c] = numbers[c]
