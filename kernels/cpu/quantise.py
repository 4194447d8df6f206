"""Numbers quantised in blocks to 8 or 4 bits, symmetric, with one float32 scale per block (packed.py).

A block's scale is its largest absolute value over 127, or over 7. A number is off by at most half a scale. A
block with an infinity or nan becomes nan, so that a loss scaler finds it. A block whose numbers are all below
1e-30 becomes 0. (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021; Wang et al., ZeRO++,
2023.)
"""

from collections.abc import Callable

import numpy as np

from shardrt.kernels import packed as form
from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.cast import _bits, _float

_u, _f = np.uint32, np.float32
_MAGNITUDE, _INFINITY, _SMALLEST = _u(0x7FFFFFFF), _u(0x7F800000), _f(1e-30)
_ROUND = _f(12582912)  # 1.5 * 2**23: added to a number, its lowest bits are the rounded number


@cost("x -> out", flops=3)
def pack(x: Array, out: Array, bits: int, block: int) -> None:
    """Quantise x (count,), float32, into out (packed_bytes(count, bits, block),), uint8.

    bits: 8 or 4. block: numbers that share a scale, a multiple of 32. Raises ValueError.
    """
    form.check(bits, block)
    scales, codes = _parts(out.reshape(1, -1), x.size, block)
    kernel = _pack_8 if bits == 8 else _pack_4
    run_rows(kernel, scales.shape[1], x.size, x, scales[0], codes[0], block, _f(form.LARGEST[bits]))


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
    scales, codes = _parts(packed.reshape(1, -1), x.size, block)
    run_rows(_of(bits, _subtract_8, _subtract_4), scales.shape[1], x.size, scales[0], codes[0], x, block)


def _of(bits: int, eight: Callable, four: Callable) -> Callable:
    return eight if bits == 8 else four


def _parts(packed: Array, count: int, block: int) -> tuple[Array, Array]:
    """(scales (rows, blocks), codes (rows, bytes)) of packed (rows, bytes)."""
    ends = 4 * form.blocks_of(count, block)
    return packed[:, :ends].view(np.float32), packed[:, ends:]


def _sum(packed: Array, out: Array, bits: int, block: int, scale: float, accumulate: bool) -> None:
    scales, codes = _parts(packed, out.size, block)
    args = scales, codes, out, block, _f(scale), accumulate
    run_rows(_of(bits, _sum_8, _sum_4), scales.shape[1], len(packed) * out.size, *args)


@exact
def _scale(x, largest):
    """(scale, what a number is multiplied by to be a code) of a block."""
    magnitude = _u(0)
    for i in range(x.size):
        magnitude = max(magnitude, _u(_bits(x[i]) & _MAGNITUDE))  # the bits of a nan are the largest
    if magnitude >= _INFINITY:
        return _f(np.nan), _f(0)
    top = _float(magnitude)
    if top < _SMALLEST:
        return _f(0), _f(0)
    return _f(top / largest), _f(largest / top)


@exact
def _code(x, factor):
    """The bits of a number rounded to the nearest integer, ties to even, of which the lowest are valid."""
    return _bits(_f(_f(x * factor) + _ROUND))


@exact
def _pack_8(start, stop, x, scales, codes, block, largest):
    for b in range(start, stop):
        part, target = x[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        scales[b], factor = _scale(part, largest)
        for i in range(part.size):
            target[i] = np.uint8(_code(part[i], factor)) if factor > 0 else np.uint8(0)


@exact
def _pack_4(start, stop, x, scales, codes, block, largest):
    half = block // 2
    for b in range(start, stop):
        part, target = x[b * block : (b + 1) * block], codes[b * half : (b + 1) * half]
        scales[b], factor = _scale(part, largest)
        pairs = part.size // 2
        if not factor > 0:
            target[:] = 0
            continue
        for i in range(pairs):
            low, high = _code(part[2 * i], factor), _code(part[2 * i + 1], factor)
            target[i] = np.uint8(_u(low & _u(15)) | _u(_u(high & _u(15)) << _u(4)))
        if part.size % 2:
            target[pairs] = np.uint8(_code(part[2 * pairs], factor) & _u(15))


@exact
def _low(byte):
    """The number in the lower half of a byte, -8 to 7."""
    return _f(np.int32(np.int32(np.int32(byte & np.uint8(15)) ^ np.int32(8)) - np.int32(8)))


@exact
def _high(byte):
    """The number in the upper half of a byte."""
    return _f(np.int32(np.int32(np.int32(byte >> np.uint8(4)) ^ np.int32(8)) - np.int32(8)))


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
    """The halves of bytes are summed apart, so that no loop but the last has strides."""
    half = block // 2
    lows, highs = np.empty(half, np.float32), np.empty(half, np.float32)
    for b in range(start, stop):
        part = out[b * block : (b + 1) * block]
        count = (part.size + 1) // 2
        lows[:] = _f(0)
        highs[:] = _f(0)
        for row in range(len(scales)):
            numbers, factor = codes[row, b * half : b * half + count], scales[row, b]
            for i in range(count):
                lows[i] += _f(_low(numbers[i]) * factor)
            for i in range(count):
                highs[i] += _f(_high(numbers[i]) * factor)
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
        part, numbers, scale = x[b * block : (b + 1) * block], codes[b * half : (b + 1) * half], scales[b]
        pairs = part.size // 2
        if scale != scale:
            part[:] = _f(0)
            continue
        for i in range(pairs):
            part[2 * i] -= _f(_low(numbers[i]) * scale)
            part[2 * i + 1] -= _f(_high(numbers[i]) * scale)
        if part.size % 2:
            part[2 * pairs] -= _f(_low(numbers[pairs]) * scale)
