"""16-bit floats as bits and as rounded float32: bfloat16 and float16, rounding to nearest, ties to even.

NumPy has no bfloat16 and is slow at float16, so numbers are computed in float32 and rounded here. What is too
large becomes infinity, what is too small a subnormal or zero of the type; nan stays nan.
"""

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows


@cost("x -> out", flops=1)
def round_to(x: Array, out: Array, kind: str) -> None:
    """Round x to the values of `kind` ("bfloat16" or "float16") into out; float32, 1-D. `out` may be x."""
    run_rows(_of(kind, _round_bfloat16, _round_float16), x.size, x.size, x, out)


@cost("x -> out", flops=1)
def pack(x: Array, out: Array, kind: str) -> None:
    """Compute out (uint16) = the bits of x (float32) rounded to `kind` ("bfloat16" or "float16"); 1-D."""
    run_rows(_of(kind, _pack_bfloat16, _pack_float16), x.size, x.size, x, out)


@cost("x -> out", flops=1)
def unpack(x: Array, out: Array, kind: str) -> None:
    """Compute out (float32) = the numbers whose bits in `kind` are x (uint16), exactly; 1-D."""
    run_rows(_of(kind, unpack_bfloat16, unpack_float16), x.size, x.size, x, out)


def narrow(x: Array, out: Array, kind: str) -> None:
    """As pack if `out` is uint16, else as round_to."""
    (pack if out.dtype == np.uint16 else round_to)(x, out, kind)


def check_kind(kind: str) -> None:
    """Raise ValueError for a type that is not one of the two."""
    if kind not in ("bfloat16", "float16"):
        raise ValueError(f"cast: kind must be 'bfloat16' or 'float16', got {kind!r}")


def _of(kind: str, bfloat16: Callable, float16: Callable) -> Callable:
    check_kind(kind)
    return bfloat16 if kind == "bfloat16" else float16


@intrinsic
def _bits(typing_context, x):
    """The 32 bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _float(typing_context, bits):
    """The float32 with these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


# Every step is brought back to 32 bits: Numba would widen to 64, and vectors would be half as wide.
_u, _f = np.uint32, np.float32
_SIGN, _MAGNITUDE, _INFINITY, _QUIET = _u(0x80000000), _u(0x7FFFFFFF), _u(0x7F800000), _u(0x00400000)
_ONE, _13, _16 = _u(1), _u(13), _u(16)


@exact
def _bfloat16(x):
    """Bits of float32 whose upper half is x in bfloat16: half a step added, less one bit if that is a tie."""
    u = _bits(x)
    if _u(u & _MAGNITUDE) > _INFINITY:
        return _u(u | _QUIET)  # nan: adding could turn it into infinity
    return _u(u + _u(_u(0x7FFF) + _u(_u(u >> _16) & _ONE)))


@exact
def narrowed(x):
    """The bits in bfloat16 of a float32."""
    return np.uint16(_bfloat16(x) >> _16)


@exact
def widened(bits):
    """The float32 of these bits in bfloat16."""
    return _float(_u(_u(bits) << _16))


@exact
def _rounded_bfloat16(x):
    return _float(_u(_bfloat16(x) & _u(0xFFFF0000)))


@exact
def _round_bfloat16(start, stop, x, out):
    x, out = x[start:stop], out[start:stop]
    if x.ctypes.data == out.ctypes.data:  # one pointer, or the compiler would fear overlap and not vectorise
        for i in range(x.size):
            x[i] = _rounded_bfloat16(x[i])
    else:
        for i in range(x.size):
            out[i] = _rounded_bfloat16(x[i])


@exact
def _pack_bfloat16(start, stop, x, out):
    x, out = x[start:stop], out[start:stop]
    for i in range(x.size):
        out[i] = np.uint16(_bfloat16(x[i]) >> _16)


@exact
def unpack_bfloat16(start, stop, x, out):
    """As `unpack`, on [start, stop)."""
    x, out = x[start:stop], out[start:stop]
    for i in range(x.size):
        out[i] = _float(_u(_u(x[i]) << _16))


_SMALLEST = _f(2**-14)  # below it float16 has the step 2**-24, which float32 has between 0.5 and 1
_TOO_LARGE = _u(0x47800000)  # 2**16
_REBIAS = _u(0x38000000)  # what the exponents of float32 and float16 differ by


@exact
def _normal_float16(u):
    """The magnitude in float32 bits, rounded to 10 bits of fraction: right from 2**-14 up."""
    magnitude = _u(u & _MAGNITUDE)
    rounded = _u(_u(magnitude + _u(_u(0x0FFF) + _u(_u(u >> _13) & _ONE))) & _u(0xFFFFE000))
    if rounded >= _TOO_LARGE:
        rounded = _INFINITY
    if magnitude > _INFINITY:
        rounded = _u(_u(magnitude | _QUIET) & _u(0xFFFFE000))
    return rounded


@exact
def _rounded_float16(x):
    magnitude, u = abs(x), _bits(x)
    rounded = _normal_float16(u)
    small = _bits(_f(_f(magnitude + _f(0.5)) - _f(0.5)))
    if magnitude < _SMALLEST:
        rounded = small
    return _float(_u(rounded | _u(u & _SIGN)))


@exact
def _round_float16(start, stop, x, out):
    x, out = x[start:stop], out[start:stop]
    if x.ctypes.data == out.ctypes.data:  # as in _round_bfloat16
        for i in range(x.size):
            x[i] = _rounded_float16(x[i])
    else:
        for i in range(x.size):
            out[i] = _rounded_float16(x[i])


@exact
def _pack_float16(start, stop, x, out):
    x, out = x[start:stop], out[start:stop]
    for i in range(x.size):
        magnitude, u = abs(x[i]), _bits(x[i])
        rounded = _normal_float16(u)
        packed = _u(_u(rounded - _REBIAS) >> _13)
        if rounded >= _INFINITY:
            packed = _u(_u(0x7C00) | _u(_u(rounded >> _13) & _u(0x3FF)))
        small = _u(_bits(_f(magnitude + _f(0.5))) - _bits(_f(0.5)))
        if magnitude < _SMALLEST:
            packed = small
        out[i] = np.uint16(_u(packed | _u(_u(u & _SIGN) >> _16)))


@exact
def unpack_float16(start, stop, x, out):
    """As `unpack`, on [start, stop)."""
    x, out = x[start:stop], out[start:stop]
    for i in range(x.size):
        u = _u(x[i])
        magnitude = _u(u & _u(0x7FFF))
        bits = _u(_u(magnitude << _13) + _REBIAS)
        if magnitude >= _u(0x7C00):
            bits = _u(bits | _INFINITY)
        small = _bits(_f(_f(np.int32(magnitude)) * _f(2**-24)))
        if magnitude < _u(0x0400):
            bits = small
        out[i] = _float(_u(bits | _u(_u(u & _u(0x8000)) << _16)))
