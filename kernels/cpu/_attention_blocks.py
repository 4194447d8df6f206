"""What attention's own products share: the way over its heads, and blocks of a product.

For processors with AVX2 or AVX-512: the width of their vectors sets the size of a block. An operand of a
product has ROWS rows and lies anywhere in steps; sums are of float32. Rows of tensors are read at their
addresses: of arrays with gaps Numba would not make vectors.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from shardrt.kernels.cpu._attention_bits import Call, heads_of
from shardrt.kernels.cpu._jit import exp, larger, reordered_part
from shardrt.kernels.cpu._vectors import VECTORS, WIDE, lanes, tile_sum, transpose_tile

LANES = lanes(np.float32)
ROWS, WIDTH = 8 if WIDE else 6, VECTORS * LANES  # of a block of a product: its sums are 16 vectors, or 12
_BLOCK = ((0,) * ROWS, (0,) * VECTORS, (), ())


def whole_blocks(keys: int) -> int:
    """At least so many keys, for blocks of ROWS and of WIDTH that begin among them."""
    return -(-(-(-keys // ROWS) * ROWS) // WIDTH) * WIDTH


def of_heads(kernel: Callable, scratch: tuple, start: int, stop: int, call: Call) -> None:
    """Call `kernel` for each head of queries of these heads of keys, and each span, as attention._forward."""
    q, k, v, y = map(heads_of, call.arrays[:4])
    lse, steps = call.arrays[4], (q.row, k.row, v.row, y.row)
    for number in range(start * call.group, stop * call.group):
        sequence, head = divmod(number, call.heads)
        for own, others, first in call.spans[sequence]:
            here, there = (sequence, head, own.start), (sequence, head // call.group, others.start)
            places = q.at(*here), k.at(*there), v.at(*there), y.at(*here)
            sizes = own.stop - own.start, others.stop - others.start, first, call.window
            kernel(places, steps, sizes, call.scale, lse[sequence, head, own], *scratch)


def of_heads_backward(kernel: Callable, scratch: tuple, start: int, stop: int, call: Call) -> None:
    """As of_heads, for attention._backward."""
    dy, q, k, v, y, lse, dq, dk, dv = call.arrays
    of_queries, of_keys = [heads_of(x) for x in (dy, q, y, dq)], [heads_of(x) for x in (k, v, dk, dv)]
    steps = tuple(x.row for x in (*of_queries, *of_keys))
    for number in range(start * call.group, stop * call.group):
        sequence, head = divmod(number, call.heads)
        if call.chunks and head % call.group == 0:
            dk[sequence, head // call.group] = 0
            dv[sequence, head // call.group] = 0
        for own, others, first in call.spans[sequence]:
            here, there = (sequence, head, own.start), (sequence, head // call.group, others.start)
            places = (*(x.at(*here) for x in of_queries), *(x.at(*there) for x in of_keys))
            sizes = own.stop - own.start, others.stop - others.start, first, call.window
            add = call.chunks or head % call.group > 0
            kernel(places, steps, sizes, call.scale, lse[sequence, head, own], add, *scratch)


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
    """out[j // WIDTH, c, j % WIDTH]: element c, of the type of `like`, of row j; zeros behind the last row.

    So what a block of a product reads of them lies in one piece.
    """
    panels, width, _ = out.shape
    rows = np.empty((LANES, width), out.dtype)
    starts, places = np.arange(LANES) * width, np.arange(LANES) * WIDTH
    for j in range(0, panels * WIDTH, LANES):
        for i in range(LANES):
            if j + i < keys:
                copy(row_at(address + (j + i) * step, width, like), rows[i])
            else:
                rows[i] = 0
        for c in range(0, width, LANES):
            at = (j // WIDTH * width + c) * WIDTH + j % WIDTH
            transpose_tile(rows, c, starts, out, at, places)


@reordered_part
def product(a, a_at, a_k, a_i, b, b_at, b_k, b_c, count, out, out_at, width, none, add):
    """Set `width` columns of ROWS rows: out = a b, or that added; sums over `count` k.

    a_k, a_i, b_k: steps; b_c: from WIDTH columns of b to the next.
    """
    for c in range(0, width, WIDTH):
        places, steps = (a_at, b_at + c // WIDTH * b_c, out_at + c), (a_k, a_i, b_k, out.shape[1])
        tile_sum(_BLOCK, a, b, out, none, none, (1, count), places, steps, add, None)


@reordered_part
def product_of_columns(a, a_at, a_i, columns, out, out_at, width, none):
    """Compute out = a, rows that are `a_i` apart, times what columns_of gives."""
    count = columns.shape[1]
    product(a, a_at, 1, a_i, columns, 0, WIDTH, count * WIDTH, count, out, out_at, width, none, False)


@reordered_part
def add_product(a, b, out, first, at, count, none):
    """out, rows from `at` on: plus the product of these columns of a and b, their rows from `first` on."""
    many, width = a.shape[1], b.shape[1]
    from_a, from_b, to = first * many + at, first * width, at * width
    product(a, from_a, many, 1, b, from_b, width, WIDTH, count, out, to, width, none, True)


@reordered_part
def put(numbers, out, add):
    if add:
        for c in range(out.size):
            out[c] += numbers[c]
    else:
        for c in range(out.size):
            out[c] = numbers[c]


@reordered_part
def exponentials(line, near, scale):
    """The first `near` scores become exponentials, the largest of them 1; the rest of their WIDTH becomes 0.

    Returns their sum, and the logarithm of the sum of the exponentials before the division.
    """
    whole = near // WIDTH * WIDTH
    end = (near + WIDTH - 1) // WIDTH * WIDTH  # by `near` alone: sums of other lengths have other bits
    line, last, left, highest = line[:end], line[whole:end], near - whole, line[0] * scale
    for j in range(whole):
        value = line[j] * scale
        line[j] = value
        highest = larger(highest, value)
    for j in range(last.size):
        value = last[j] * scale
        value = value if j < left else np.float32(-np.inf)
        last[j] = value
        highest = larger(highest, value)
    total = np.float32(0)
    for j in range(line.size):
        value = exp(line[j] - highest)
        line[j] = value
        total += value
    return total, highest + np.log(total)
