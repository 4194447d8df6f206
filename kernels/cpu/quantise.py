"""Numbers quantised in blocks to 8 or 4 bits (packed.py).

8 bits are symmetric: a block's scale is its largest absolute value over 127, and a number is off by at most
half a scale. A block whose numbers are all below 1e-30 becomes 0.

4 bits divide the span from a block's least number, rounded down to bfloat16, to its greatest into 15 steps of
bfloat16: numbers around 1, as a norm's weights, differ. A number is off by half a step, and by 1/256 of the
span, at most. Numbers above 3.38e38 may become infinite.

A block with an infinity or nan becomes nan, so that a loss scaler finds it. (Dettmers et al., 8-bit
Optimizers via Block-wise Quantization, 2021; Wang et al., ZeRO++, 2023.)
"""

from collections.abc import Callable

import numpy as np

from shardrt.kernels import packed as form
from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.cast import _bits, _float, _rounded_bfloat16, widened

_u, _f = np.uint32, np.float32
_index = np.uint64  # an index that can't be negative, so that Numba need not ask
_TILE = 512  # numbers that short blocks are worked on together
_SIGN, _MAGNITUDE, _INFINITY, _SMALLEST = _u(0x80000000), _u(0x7FFFFFFF), _u(0x7F800000), _f(1e-30)
_ROUND = _f(12582912)  # 1.5 * 2**23: added to a number, its lowest bits are the rounded number


@cost("x -> out", flops=3)
def pack(x: Array, out: Array, bits: int, block: int) -> None:
    """Quantise x (count,), float32, into out (packed_bytes(count, bits, block),), uint8.

    bits: 8 or 4. block: numbers that share a scale, a multiple of 32. Raises ValueError.
    """
    form.check(bits, block)
    scales, codes = _parts(out.reshape(1, -1), x.size, bits, block)
    run_rows(_of(bits, _pack_8, _pack_4), scales.shape[1], x.size, x, scales[0], codes[0], block)


@cost("packed -> out", flops=lambda out: out.size)
def unpack(packed: Array, out: Array, bits: int, block: int) -> None:
    """Write the numbers of packed (rows, bytes) to out (rows * count,), float32: one row after the other."""
    form.check(bits, block)
    for row, target in zip(packed, out.reshape(len(packed), -1), strict=True):
        _sum(row[None], target, bits, block, 1.0, False)


@cost("packed out?accumulate -> out", flops=lambda packed, out: 2 * len(packed) * out.size)
def sum_rows(packed: Array, out: Array, bits: int, block: int, scale: float, accumulate: bool) -> None:
    """Set out (count,) = (out if `accumulate`) + scale * the sum of packed's rows, in order, in float32."""
    form.check(bits, block)
    _sum(packed, out, bits, block, scale, accumulate)


@cost("packed x -> x", flops=2)
def subtract(packed: Array, x: Array, bits: int, block: int) -> None:
    """Subtract the numbers of packed (bytes,) from x (count,): the error is left. A nan block leaves 0."""
    form.check(bits, block)
    scales, codes = _parts(packed.reshape(1, -1), x.size, bits, block)
    run_rows(_of(bits, _subtract_8, _subtract_4), scales.shape[1], x.size, scales[0], codes[0], x, block)


def _of(bits: int, eight: Callable, four: Callable) -> Callable:
    return eight if bits == 8 else four


def _parts(packed: Array, count: int, bits: int, block: int) -> tuple[Array, Array]:
    """(scales (rows, blocks), codes (rows, bytes)) of packed (rows, bytes)."""
    ends = 4 * form.blocks_of(count, block)
    return packed[:, :ends].view(form.SCALES[bits]), packed[:, ends:]


def _sum(packed: Array, out: Array, bits: int, block: int, scale: float, accumulate: bool) -> None:
    scales, codes = _parts(packed, out.size, bits, block)
    args = scales, codes, out, block, _f(scale), accumulate
    run_rows(_of(bits, _sum_8, _sum_4), scales.shape[1], len(packed) * out.size, *args)


@exact
def _scale(x):
    """(scale, what a number is multiplied by to be a code) of a block."""
    magnitude = _u(0)
    for i in range(x.size):
        magnitude = max(magnitude, _u(_bits(x[i]) & _MAGNITUDE))  # the bits of a nan are the largest
    if magnitude >= _INFINITY:
        return _f(np.nan), _f(0)
    top = _float(magnitude)
    if top < _SMALLEST:
        return _f(0), _f(0)
    return _f(top / _f(127)), _f(_f(127) / top)


@exact
def _code(x, factor):
    """The bits of a number rounded to the nearest integer, ties to even, of which the lowest are valid."""
    return _bits(_f(_f(x * factor) + _ROUND))


@exact
def _pack_8(start, stop, x, scales, codes, block):
    for b in range(start, stop):
        part, target = x[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b], factor = _scale(part)
        for i in range(part.size):
            target[i] = np.uint8(_code(part[i], factor)) if factor > 0 else np.uint8(0)


@exact
def _ordered(x):
    """Bits that have the order of the floats: those of nan are below or above all others."""
    bits = _bits(x)
    return _u(bits ^ _SIGN) if bits < _SIGN else _u(~bits)


@exact
def _number(ordered):
    """The float of `_ordered` bits."""
    return _float(_u(ordered ^ _SIGN)) if ordered >= _SIGN else _float(_u(~ordered))


@exact
def _span(low, high):
    """(step, least number, what a distance from it is multiplied by to be a code) of a block in 4 bits.

    low, high: `_ordered` bits of its least and its greatest number.
    """
    if low <= _ordered(_f(-np.inf)) or high >= _ordered(_f(np.inf)):
        return _f(np.nan), _f(0), _f(0)
    least = _below(_number(low))
    step = _rounded_bfloat16(_f(_f(_number(high) / _f(15)) - _f(least / _f(15))))
    return (step, least, _f(_f(1) / step)) if step >= _SMALLEST else (_f(0), least, _f(0))


@exact
def _below(x):
    """The greatest finite bfloat16 that is not above x, or the least."""
    bits = _bits(x)
    if bits < _SIGN:
        return _float(_u(bits & _u(0xFFFF0000)))
    return _float(min(_u(_u(bits + _u(0xFFFF)) & _u(0xFFFF0000)), _u(0xFF7F0000)))


@exact
def _code_4(x, least, factor):
    """The bits of a code from 0 to 15, of which the lowest 4 are valid."""
    place = _f(_f(x - least) * factor)
    return _bits(_f(min(max(place, _f(0)), _f(15)) + _ROUND))


@exact
def _pack_4(start, stop, x, scales, codes, block):
    """Long loops go over many blocks; what a block has is written out for each pair of numbers first."""
    half, many = block // 2, max(1, _TILE // block)
    keys = np.empty(many * block, np.uint32)
    leasts, factors = np.empty(many * half, np.float32), np.empty(many * half, np.float32)
    for begin in range(start, stop, many):
        end = min(begin + many, stop)
        part, target = x[begin * block : end * block], codes[begin * half : end * half]
        for i in range(part.size):
            keys[i] = _ordered(part[i])
        for b in range(_index(end - begin)):
            low, high, first = _u(0xFFFFFFFF), _u(0), b * _index(block)
            for i in range(first, min(first + _index(block), _index(part.size))):
                low, high = min(low, keys[i]), max(high, keys[i])
            step, least, factor = _span(low, high)
            scales[_index(begin) + b] = _u(_bits(least) | _u(_bits(step) >> _u(16)))
            for i in range(_index(half)):
                leasts[b * _index(half) + i] = least
                factors[b * _index(half) + i] = factor
        pairs = part.size // 2
        for i in range(pairs):
            low = _code_4(part[2 * i], leasts[i], factors[i])
            high = _code_4(part[2 * i + 1], leasts[i], factors[i])
            target[i] = np.uint8(_u(low & _u(15)) | _u(_u(high & _u(15)) << _u(4)))
        if part.size % 2:
            target[pairs] = np.uint8(_code_4(part[2 * pairs], leasts[pairs], factors[pairs]) & _u(15))


@exact
def _least(scale):
    return _float(_u(scale & _u(0xFFFF0000)))


@exact
def _low(byte, step, least):
    """The number in the lower half of a byte."""
    return _f(_f(_f(np.uint8(byte & np.uint8(15))) * step) + least)


@exact
def _high(byte, step, least):
    """The number in the upper half of a byte."""
    return _f(_f(_f(np.uint8(byte >> np.uint8(4))) * step) + least)


@exact
def _sum_8(start, stop, scales, codes, out, block, scale, accumulate):
    total = np.empty(block, np.float32)
    for b in range(start, stop):
        part = out[b * block : (b + 1) * block]
        total[:] = _f(0)
        for row in range(len(scales)):
            numbers, factor = codes[row, b * block : (b + 1) * block], scales[row, b]
            for i in range(part.size):
                total[i] += _f(_f(np.int8(numbers[i])) * factor)
        for i in range(part.size):
            part[i] = _f(_f(total[i] * scale) + part[i]) if accumulate else _f(total[i] * scale)


@exact
def _sum_4(start, stop, scales, codes, out, block, scale, accumulate):
    """Long loops as in _pack_4. Halves of bytes are summed apart, so that only the last loop has strides."""
    half, many = block // 2, max(1, _TILE // block)
    lows, highs = np.empty(many * half, np.float32), np.empty(many * half, np.float32)
    steps, leasts = np.empty_like(lows), np.empty_like(lows)
    for begin in range(start, stop, many):
        end = min(begin + many, stop)
        part = out[begin * block : end * block]
        lows[:] = _f(0)
        highs[:] = _f(0)
        for row in range(len(scales)):
            numbers = codes[row, begin * half : begin * half + (part.size + 1) // 2]
            own = scales[row, begin:end]
            for b in range(_index(own.size)):
                step, least = widened(own[b]), _least(own[b])
                for i in range(_index(half)):
                    steps[b * _index(half) + i] = step
                    leasts[b * _index(half) + i] = least
            for i in range(numbers.size):
                lows[i] += _low(numbers[i], steps[i], leasts[i])
            for i in range(numbers.size):
                highs[i] += _high(numbers[i], steps[i], leasts[i])
        pairs = part.size // 2
        if accumulate:
            for i in range(pairs):
                part[2 * i] = _f(_f(lows[i] * scale) + part[2 * i])
                part[2 * i + 1] = _f(_f(highs[i] * scale) + part[2 * i + 1])
        else:
            for i in range(pairs):
                part[2 * i] = _f(lows[i] * scale)
                part[2 * i + 1] = _f(highs[i] * scale)
        if part.size % 2:
            last = _f(lows[pairs] * scale)
            part[2 * pairs] = _f(last + part[2 * pairs]) if accumulate else last


@exact
def _subtract_8(start, stop, scales, codes, x, block):
    for b in range(start, stop):
        part, numbers = x[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        for i in range(part.size):
            error = _f(part[i] - _f(_f(np.int8(numbers[i])) * scales[b]))
            part[i] = error if error == error else _f(0)


@exact
def _subtract_4(start, stop, scales, codes, x, block):
    half = block // 2
    for b in range(start, stop):
        part, numbers = x[b * block : (b + 1) * block], codes[b * half : (b + 1) * half]
        step, least = widened(scales[b]), _least(scales[b])
        pairs = part.size // 2
        if step != step:
            part[:] = _f(0)
            continue
        for i in range(pairs):
            part[2 * i] -= _low(numbers[i], step, least)
            part[2 * i + 1] -= _high(numbers[i], step, least)
        if part.size % 2:
            part[2 * pairs] -= _low(numbers[pairs], step, least)
