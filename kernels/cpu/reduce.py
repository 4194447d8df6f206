"""Sums: over ranks' buffers, over rows, of powers. Fixed order, so bitwise identical every time."""

from math import fsum, isfinite
from typing import Any

import numpy as np

from shardrt.kernels.cost import Answer, Array, New, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.cast import check_kind, unpack_bfloat16, unpack_float16

ROWS = 64  # rows of a partial sum in column sums
_FAN = 4  # parts that one pass sums
_SOME = 4096  # elements that are added before the way to the general kernel is gone
_TABLE = 1 << 20  # elements of a table of exact sums
_LANES = 256  # sums that run side by side in a norm
_PIECE = 65536  # elements of a partial sum in norms
_BLOCK = 1024  # elements that stay in the first cache between two loops
_CHUNK = 131072  # elements that stay in the second cache while groups of parts are summed


@cost("parts out?accumulate -> out", flops=lambda out, parts: len(parts) * out.size)
def sum_into(out: Array, parts: list[Array], scale: float, accumulate: bool) -> None:
    """Set out = (out if accumulate) + scale * sum of `parts`, as a tree of neighbours: (0+1) + (2+3), ...

    Bottom up; a last part without a neighbour goes up as it is: of three it is (0+1) + 2. So aligned groups
    of 2, 4, 8, ... parts may be summed first, elsewhere, and their sums here.

    1-D arrays of one length and float dtype; `out` may be one of the parts. Each element depends on its own
    elements only: an array may be split into any pieces.
    """
    if out.size <= _SOME and len(parts) == 2 and scale == 1 and not accumulate:
        _add_two(out, *parts)
        return
    scale, elements = out.dtype.type(scale), out.size * len(parts) // 2
    if len(parts) <= 2:  # at once: for few numbers, ways to the kernel take longer than it does
        run_rows(_sum_two, out.size, elements, out, parts[0], parts[-1], len(parts), scale, accumulate)
    else:
        run_rows(_sum_range, out.size, elements, out, parts, scale, accumulate, None)


@cost("parts out?accumulate -> out", flops=lambda out, parts: len(parts) * out.size)
def sum_packed(out: Array, parts: list[Array], scale: float, accumulate: bool, kind: str) -> None:
    """As sum_into of parts that are uint16, the bits of `kind` ("bfloat16" or "float16"); `out` is float32.

    The same bits as unpacking the parts (cast.unpack) and summing them with sum_into.
    """
    check_kind(kind)
    work = (out, parts, np.float32(scale), accumulate, kind)
    run_rows(_sum_range, out.size, out.size * len(parts) // 2, *work)


def _sum_range(start, stop, out, parts, scale, accumulate, kind):
    """More than _FAN parts: sums of aligned groups, in cache, then the sum of those; it is the same tree."""
    if len(parts) <= _FAN:
        _sum_few(start, stop, out, parts, scale, accumulate, kind)
        return
    groups = [parts[first : first + _FAN] for first in range(0, len(parts), _FAN)]
    chunk = min(max(_BLOCK, _CHUNK // len(groups)), max(1, stop - start))
    sums = list(np.empty((len(groups), chunk), out.dtype))
    for low in range(start, stop, chunk):
        high = min(low + chunk, stop)
        for group, total in zip(groups, sums, strict=True):
            pieces = [part[low:high] for part in group]
            _sum_few(0, high - low, total, pieces, out.dtype.type(1), False, kind)
        _sum_range(0, high - low, out[low:high], sums, scale, accumulate, None)


def _sum_few(start, stop, out, parts, scale, accumulate, kind):
    if kind is None and len(parts) <= 2:
        _sum_two(start, stop, out, parts[0], parts[-1], len(parts), scale, accumulate)
        return
    four = (*parts, *parts[:1] * (_FAN - len(parts)))
    if kind is None:
        _sum_blocks(start, stop, out, *four, len(parts), scale, accumulate)
    else:
        _sum_packed_blocks(start, stop, out, *four, len(parts), scale, accumulate, kind == "bfloat16")


@exact
def _sum_two(start, stop, out, first, second, count, scale, accumulate):
    out, first, second = out[start:stop], first[start:stop], second[start:stop]
    if count == 2 and accumulate:
        for i in range(out.size):
            out[i] = out[i] + scale * (first[i] + second[i])
    elif count == 2 and out.ctypes.data == first.ctypes.data:
        _add_to(out, second, scale)
    elif count == 2 and out.ctypes.data == second.ctypes.data:
        _add_to(out, first, scale)
    elif count == 2:
        for i in range(out.size):
            out[i] = scale * (first[i] + second[i])
    elif accumulate:
        for i in range(out.size):
            out[i] = out[i] + scale * first[i]
    else:
        for i in range(out.size):
            out[i] = scale * first[i]


@exact
def _add_two(out, first, second):
    for i in range(out.size):
        out[i] = first[i] + second[i]


@exact
def _add_to(out, other, scale):
    """A loop that reads `out` under another name would not be vectorised."""
    for i in range(out.size):
        out[i] = scale * (out[i] + other[i])


@exact
def _sum_blocks(start, stop, out, a, b, c, d, count, scale, accumulate):
    total = np.empty(_BLOCK, out.dtype)  # `out` may be a part: loops that write it would not be vectorised
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        _tree(total, a[low:high], b[low:high], c[low:high], d[low:high], count)
        _finish(out[low:high], total, scale, accumulate)


@exact
def _sum_packed_blocks(start, stop, out, a, b, c, d, count, scale, accumulate, bfloat16):
    numbers = np.empty((5, _BLOCK), np.float32)
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        size = high - low
        for i, part in enumerate((a, b, c, d)):
            if i < count and bfloat16:
                unpack_bfloat16(0, size, part[low:high], numbers[i, :size])
            elif i < count:
                unpack_float16(0, size, part[low:high], numbers[i, :size])
        total = numbers[4]
        _tree(total, numbers[0, :size], numbers[1, :size], numbers[2, :size], numbers[3, :size], count)
        _finish(out[low:high], total, scale, accumulate)


@exact
def _tree(total, a, b, c, d, count):
    if count == 1:
        for i in range(a.size):
            total[i] = a[i]
    elif count == 2:
        for i in range(a.size):
            total[i] = a[i] + b[i]
    elif count == 3:
        for i in range(a.size):
            total[i] = (a[i] + b[i]) + c[i]
    else:
        for i in range(a.size):
            total[i] = (a[i] + b[i]) + (c[i] + d[i])


@exact
def _finish(out, total, scale, accumulate):
    if accumulate:
        for i in range(out.size):
            out[i] = out[i] + scale * total[i]
    else:
        for i in range(out.size):
            out[i] = scale * total[i]


@cost("x out?accumulate -> out", flops=1)
def column_sum(x: Array, out: Array, accumulate: bool) -> None:
    """Compute out (columns,) = sum over the rows of x (rows, columns), or plus it; by blocks of ROWS rows."""
    blocks = -(-x.shape[0] // ROWS)
    partials = np.empty((blocks, x.shape[1]), x.dtype)
    run_rows(_column_blocks, blocks, x.size, x, partials)
    combine_blocks(partials, out, accumulate)


@exact
def _column_blocks(start, stop, x, partials):
    for block in range(start, stop):
        total = partials[block]
        total[:] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, x.shape[0])):
            line = x[row]
            for j in range(total.size):
                total[j] += line[j]


@exact
def combine_blocks(partials, out, accumulate):
    """Compute out = sum of the rows of `partials`, in order; or plus it."""
    if not accumulate:
        out[:] = 0
    for block in range(partials.shape[0]):
        line = partials[block]
        for j in range(out.size):
            out[j] += line[j]


def power_rows(count: int) -> int:
    """Rows of power_sums of `count` elements."""
    return -(-count // _PIECE)


@cost("x -> out", flops=8, value=lambda x, out: _pairs_of(x) if out is None else out, scratch=False)
def power_sums(x: Array, p: float, out: Array | None = None) -> Array:
    """Float64 pairs (high, low), (n, 2), whose exact sum is that of |x| ** p to about 100 bits; 1-D, p > 0.

    So math.fsum of the pairs of all pieces of an array gives the same bits however it was cut. (The exception
    needs an exact sum within 2**-40 or so of the middle between two floats: once in 10**12 sums.) Where
    there is infinity or nan, it is in `high`, and `low` is 0.

    out: where they go, of power_rows(x.size) rows; a new array if there is none.
    """
    out = np.empty((power_rows(x.size), 2), np.float64) if out is None else out
    run_rows(_power_pieces, len(out), x.size, x, float(p), out)
    return out


@cost("pairs -> out", flops=4)
def add_pairs(pairs: Array, out: Array) -> None:
    """Compute out (2,) = the sum of `pairs` (n, 2) of power_sums as one, to about 100 bits."""
    highs, lows = (column.tolist() for column in pairs.T)
    try:
        high = fsum(highs)
    except OverflowError:
        high = sum(highs)  # infinite, or nan
    out[:] = high, fsum([*highs, *lows, -high]) if isfinite(high) else 0.0


@cost("pairs -> out", flops=4)
def clip_factor(pairs: Array, limit: float, leave_nonfinite: bool, out: Array) -> None:
    """Set out (2,): the norm, the root of the sum of `pairs` (n, 2), and the factor to reach `limit`.

    The factor is limit / (norm + 1e-6), at most 1, and nan where the norm is; leave_nonfinite: 1 where the
    norm is nan or infinite.
    """
    add_pairs(pairs, out)
    with np.errstate(invalid="ignore"):
        norm = np.sqrt(out[0] + out[1])
        left = leave_nonfinite and not np.isfinite(norm)
        out[:] = norm, 1.0 if left else np.minimum(limit / (norm + 1e-6), 1.0)


@exact
def _power_pieces(start, stop, x, p, partials):
    high, low, terms = np.empty(_LANES), np.empty(_LANES), np.empty(_LANES)
    for piece in range(start, stop):
        high[:] = 0
        low[:] = 0
        end = min((piece + 1) * _PIECE, x.size)
        for row in range(piece * _PIECE, end, _LANES):
            line = x[row : min(row + _LANES, end)]
            _powers(line, p, terms)
            _add_exactly(high, low, terms[: line.size])
        width = _LANES
        while width > 1:  # fold the upper half of the lanes into the lower
            width //= 2
            _add_exactly(high, low, high[width : 2 * width])
            for j in range(width):
                low[j] += low[width + j]
        partials[piece, 0] = high[0]
        partials[piece, 1] = low[0] if np.isfinite(high[0]) else 0.0


@exact
def _powers(x, p, terms):
    """In float64, where the square of a float32 is exact."""
    if p == 2:
        for j in range(x.size):
            value = np.float64(x[j])
            terms[j] = value * value
    elif p == 1:
        for j in range(x.size):
            terms[j] = abs(np.float64(x[j]))
    elif p == 3:
        for j in range(x.size):
            value = abs(np.float64(x[j]))
            terms[j] = value * value * value
    else:
        for j in range(x.size):
            terms[j] = abs(np.float64(x[j])) ** p


@exact
def _add_exactly(high, low, terms):
    """Add terms to high + low, lane by lane: the rounding error goes to `low` (Knuth's TwoSum)."""
    for j in range(terms.size):
        before, term = high[j], terms[j]
        total = before + term
        added = total - before
        low[j] += (before - (total - added)) + (term - added)
        high[j] = total


@cost("x ->", flops=8, value=New((256, 2), np.int64), scratch=False)
def exact_power_sums(x: Array, p: int) -> Array:
    """The exact sum of |x| ** p, p 1 or 2, in integers: int64 (256, 2). x: float32, 1-D, below 2**39 long.

    A float32 with exponent bits e is a whole number below 2**24 times 2 ** (max(e, 1) - 150). Row e has the
    sum of the p-th powers of those numbers, as low + 2**24 * high. Tables of several arrays may be added, in
    any order. Row 255 has the number of nan and that of infinities instead. Costs about three power_sums.
    """
    tables = np.zeros((-(-x.size // _TABLE), 256, 2), np.int64)
    run_rows(_exact_tables, len(tables), x.size, x.view(np.uint32), p == 2, tables)
    return tables.sum(axis=0)


@exact
def _exact_tables(start, stop, bits, squared, tables):
    sums = np.empty((4, 256), np.uint64)  # neighbours go to different ones: no addition waits for the last
    for row in range(start, stop):
        for low in range(row * _TABLE, min((row + 1) * _TABLE, bits.size), _PIECE):
            line = bits[low : min(low + _PIECE, bits.size)]  # 2**16 squares below 2**48 fit in 64 bits
            sums[:] = 0
            if squared:
                for i in range(line.size):
                    number = _whole(line[i])
                    sums[i & 3, (line[i] >> np.uint32(23)) & np.uint32(255)] += number * number
            else:
                for i in range(line.size):
                    sums[i & 3, (line[i] >> np.uint32(23)) & np.uint32(255)] += _whole(line[i])
            _add_table(line, sums, tables[row])


@exact
def _whole(bits):
    fraction = np.uint64(bits & np.uint32(0x7FFFFF))
    return fraction | (np.uint64(bits & np.uint32(0x7F800000) != 0) << np.uint64(23))


@exact
def _add_table(line, sums, table):
    for e in range(255):
        for total in sums[:, e]:
            table[e, 0] += np.int64(total & np.uint64(0xFFFFFF))
            table[e, 1] += np.int64(total >> np.uint64(24))
    if sums[0, 255] + sums[1, 255] + sums[2, 255] + sums[3, 255]:
        for bits in line:
            size = bits & np.uint32(0x7FFFFFFF)
            table[255, 0] += size > np.uint32(0x7F800000)
            table[255, 1] += size == np.uint32(0x7F800000)


@cost("x -> out", flops=2, value=lambda x, out: _largest(x, out), scratch=False)
def abs_max(x: Array, out: Array | None = None) -> float | None:
    """The largest absolute value of a 1-D array, 0 for an empty one; nan if one is nan.

    out: where it goes, a float array of one element. Without it, it is given as a number.
    """
    largest = float(max(x.max(), -x.min())) if x.size else 0.0
    if out is None:
        return largest
    out[0] = largest
    return None


def _largest(x: Array, out: Array | None) -> Any:
    """What abs_max gives."""
    if out is not None:
        return None
    return Answer("largest", 1.0) if x.size else 0.0


def _pairs_of(x: Array) -> New:
    """What power_sums makes."""
    return New((power_rows(x.size), 2), np.float64)
