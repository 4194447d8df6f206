"""Steps of block-wise 8-bit numbers on 16 at a time, in LLVM's language, as _vectors.py.

Numba would make no vectors of loops this short. LLVM makes several of each where the processor has shorter
ones; no bit depends on it. x, codes and others are 1-D arrays whose elements [at, at + 16) are meant.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardrt.kernels.cpu._vectors import _pointers, _spread

BLOCK = 16  # elements
_SHORT, _WORD, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INFINITY = float("inf")


@intrinsic
def extremes(typing_context, x, at):
    """Of x, float32, the number whose bits are the largest int32, and the one with the largest uint32."""

    def generate(context, builder, signature, arguments):
        (base,) = _pointers(context, builder, signature, arguments, 0, 1)
        bits = builder.bitcast(_load(builder, base, arguments[1]), _many(_WORD))
        found = [builder.bitcast(_reduced(builder, bits, kind), _FLOAT) for kind in ("smax", "umax")]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, 2)(x, at), generate


@intrinsic
def order(typing_context, x, at, numbers, high, low):
    """Divide x by the first of `numbers` and write the two halves of `ordered` of it: uint16, high and low.

    numbers: float32 (divisor, upper end, lower end, least, floor). What equals an end becomes an infinity.
    What is above 0 becomes at least `least`, the rest at least `floor`, and nan one of the two.
    """

    def generate(context, builder, signature, arguments):
        (base,) = _pointers(context, builder, signature, arguments, 0, 1)
        x, at = _load(builder, base, arguments[1]), arguments[1]
        divisor, upper, lower, least, floor = (
            _spread(builder, _many(_FLOAT), each) for each in cgutils.unpack_tuple(builder, arguments[2], 5)
        )
        y = builder.fdiv(x, divisor)
        for end, infinity in ((upper, _INFINITY), (lower, -_INFINITY)):
            y = builder.select(builder.fcmp_ordered("==", x, end), _all(_FLOAT, infinity), y)
        above = builder.fcmp_ordered(">", x, _all(_FLOAT, 0.0))
        least = builder.select(above, least, floor)
        y = builder.select(builder.fcmp_ordered(">=", y, least), y, least)
        keys = _ordered(builder, y)
        halves = builder.lshr(keys, _all(_WORD, 16)), keys
        for half, to in zip(halves, _pointers(context, builder, signature, arguments, 3, 5), strict=True):
            _store(builder, builder.trunc(half, _many(_SHORT)), to, at)
        return context.get_dummy_value()

    return types.void(x, at, numbers, high, low), generate


@intrinsic
def take(typing_context, table, places, at, out):
    """Write table[place] of 16 places, uint8 or uint16, to `out`."""

    def generate(context, builder, signature, arguments):
        table, places = _pointers(context, builder, signature, arguments, 0, 2)
        (to,) = _pointers(context, builder, signature, arguments, 3, 4)
        _store(builder, _taken(builder, table, places, arguments[2]), to, arguments[2])
        return context.get_dummy_value()

    return types.void(table, places, at, out), generate


@intrinsic
def decode(typing_context, values, codes, at, scale, out):
    """Compute out = values[codes] * scale, never -0."""

    def generate(context, builder, signature, arguments):
        values, codes = _pointers(context, builder, signature, arguments, 0, 2)
        (to,) = _pointers(context, builder, signature, arguments, 4, 5)
        found = _taken(builder, values, codes, arguments[2])
        found = builder.fmul(found, _spread(builder, found.type, arguments[3]))
        _store(builder, builder.fadd(found, _all(_FLOAT, 0.0)), to, arguments[2])
        return context.get_dummy_value()

    return types.void(values, codes, at, scale, out), generate


def _many(kind: ir.Type) -> ir.VectorType:
    return ir.VectorType(kind, BLOCK)


def _all(kind: ir.Type, number: float) -> ir.Constant:
    return ir.Constant(_many(kind), [number] * BLOCK)


def _load(builder: Any, base: Any, at: Any) -> Any:
    place = builder.bitcast(builder.gep(base, [at]), _many(base.type.pointee).as_pointer())
    return builder.load(place, align=1)


def _store(builder: Any, vector: Any, base: Any, at: Any) -> None:
    place = builder.bitcast(builder.gep(base, [at]), vector.type.as_pointer())
    builder.store(vector, place, align=1)


def _reduced(builder: Any, vector: Any, kind: str) -> Any:
    function = ir.FunctionType(_WORD, [vector.type])
    name = f"llvm.vector.reduce.{kind}.v{BLOCK}i32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [vector])


def _ordered(builder: Any, y: Any) -> Any:
    """As _blockwise.ordered: all bits but the sign's are turned where that is set."""
    bits = builder.bitcast(y, _many(_WORD))
    sign = builder.ashr(bits, _all(_WORD, 31))
    return builder.xor(bits, builder.lshr(sign, _all(_WORD, 1)))


def _taken(builder: Any, table: Any, places: Any, at: Any) -> Any:
    """The numbers of a table at 16 places, of which several are loaded as one word."""
    bits, kind = places.type.pointee.width, table.type.pointee
    each, mask = 64 // bits, _LONG(2**bits - 1)
    words = builder.bitcast(builder.gep(places, [at]), _LONG.as_pointer())
    found: Any = ir.Constant(_many(kind), ir.Undefined)
    for lane in range(BLOCK):
        word = builder.load(builder.gep(words, [_LONG(lane // each)]), align=1)
        place = builder.and_(builder.lshr(word, _LONG(lane % each * bits)), mask)
        found = builder.insert_element(found, builder.load(builder.gep(table, [place])), _WORD(lane))
    return found
