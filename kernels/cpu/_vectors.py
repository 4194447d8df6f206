"""Loops written in LLVM's language, because Numba would not keep their vectors in registers.

`tile_sum` is the micro-kernel of a matmul (Goto, van de Geijn: Anatomy of High-Performance Matrix
Multiplication, 2008) whose operands may lie anywhere in steps, so that a convolution needs no matrix of its
patches. `transpose_tile` turns a square of numbers. Starts and steps are in elements.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic


def compiled_for(feature: str) -> bool:
    """Whether Numba compiles for a processor with it: this one, or the one of NUMBA_CPU_FEATURES."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return binding.get_host_cpu_features().get(feature, False)


WIDE = compiled_for("avx512f")
FMA = compiled_for("fma")  # x86-64 alone has this name; without it LLVM calls a function for each number
# Whether tile_sum takes pairs of bfloat16, and the processor has nothing faster.
PAIRS = WIDE and compiled_for("avx512bf16") and not compiled_for("amx-bf16")
BYTES = 64 if WIDE else 32  # of a vector register
VECTORS = 2  # of an operand that tile_sum holds at once
ROWS = 14 if WIDE else 6  # of so many vectors each, whose sums fit the registers next to the operands
_WORD = ir.IntType(64)


def lanes(dtype: Any) -> int:
    """Numbers of this type in a vector."""
    return BYTES // np.dtype(dtype).itemsize


@intrinsic
def tile_sum(typing_context, tile, a, b, out, a_starts, b_starts, sizes, firsts, steps, add, masks):
    """Compute out = the sum over r and k of a[r, k] times b[r, k], in one of three ways, or plus it if `add`.

    tile: (rows, vectors, turns, kept), tuples of which only the lengths count; they are known when this is
    compiled. Vector v of i, in `rows` and `vectors`:

    - without turns, the product of a matrix: out[i, v] = a[i] b[v], a[i] one number;
    - with turns, lane by lane: out[i, v] = sum over t of turned(a[i, v], t) b[t, v], where turned(x, t) moves
      each run of len(turns) lanes round by t: every lane meets all lanes of its run;
    - with turns that are kept apart: out[i, t, v] = a[i, v] turned(b[v], t).

    a, b, out: arrays of one float type. a[r, k, i] is at firsts[0] + a_starts[r] + k * steps[0] + i *
    steps[1], b[r, k] begins at firsts[1] + b_starts[r] + k * steps[2], out[i] at firsts[2] + i * steps[3]; t
    and v count vectors side by side. sizes: how many r, how many k.

    With PAIRS a and b may be uint32, where out is float32: two neighbours of k in bfloat16, the first in the
    lower bits. Then k counts pairs, and subnormal numbers count as 0.

    masks: None; or without turns an array of uint16, a bit for each lane: at firsts[3] + r * steps[4] + v of
    b[r, k, v], the other lanes are 0 and not read; and of out[i, v], whose r is one more than the last.
    """
    masked = masks != types.none

    def generate(context, builder, signature, arguments):
        count, columns, turns, kept = (part.count for part in signature.args[0])
        given, vector = _vector(signature.args[1]), _vector(signature.args[3])
        from_a, from_b, to, starts_a, starts_b = _pointers(context, builder, signature, arguments, 1, 6)
        parts, length = cgutils.unpack_tuple(builder, arguments[6], 2)
        first_a, first_b, first_out, *first_mask = cgutils.unpack_tuple(
            builder, arguments[7], signature.args[7].count
        )
        a_k, a_i, b_k, out_i, *mask_r = cgutils.unpack_tuple(builder, arguments[8], signature.args[8].count)
        fma = _multiply_add(builder, given, vector)
        a_i, itemsize = builder.mul(a_i, _WORD(BYTES // vector.count)), _WORD(BYTES // vector.count)
        three, five = (_hidden(builder, builder.mul(a_i, _WORD(rows))) for rows in (3, 5))
        near = _WORD(0), a_i, builder.mul(a_i, _WORD(2)), three, builder.mul(a_i, _WORD(4))

        def lanes_of(r):
            if not masked:
                return [None] * columns
            (bits,) = _pointers(context, builder, signature, arguments, 10, 11)
            at = builder.add(first_mask[0], builder.mul(r, mask_r[0]))
            return [_mask(builder, vector.count, bits, builder.add(at, _WORD(v))) for v in range(columns)]

        def part(r, sums):
            at_a = builder.add(first_a, builder.load(builder.gep(starts_a, [r])))
            at_b = builder.add(first_b, builder.load(builder.gep(starts_b, [r])))
            read = lanes_of(r)
            return _loop(builder, length, sums, lambda k, now: product(at_a, at_b, k, now, read))

        def product(at_a, at_b, k, sums, read):
            at_a = builder.add(at_a, builder.mul(k, a_k))
            at_b = builder.add(at_b, builder.mul(k, b_k))
            base = _hidden(builder, builder.ptrtoint(builder.gep(from_a, [at_a]), _WORD))
            places = []
            for i in range(count):
                if i and i % 5 == 0:
                    base = _hidden(builder, builder.add(base, five))
                places.append(builder.add(base, near[i % 5]))
            sums = list(sums)

            def load_a(i, kind, v):
                place = builder.add(places[i], builder.mul(_WORD(v * vector.count), itemsize))
                return builder.load(builder.inttoptr(place, kind.as_pointer()), align=BYTES // vector.count)

            def add_to(place, left, right):
                sums[place] = fma(left, right, sums[place])

            def load_b(place, mask=None):
                return _load(builder, given, from_b, at_b, place * vector.count, mask)

            if not turns:
                right = [load_b(v, read[v]) for v in range(columns)]
                for i in range(count):
                    left = _spread(builder, given, load_a(i, given.element, 0))
                    for v in range(columns):
                        add_to(i * columns + v, left, right[v])
                return sums
            for v in range(columns):
                left = [load_a(i, given, v) for i in range(count)]
                right = load_b(v) if kept else None
                for t in range(turns):
                    b_now = _turned(builder, right, turns, t) if kept else load_b(t * columns + v)
                    for i in range(count):
                        if kept:
                            add_to((i * turns + t) * columns + v, left[i], b_now)
                        else:
                            add_to(i * columns + v, _turned(builder, left[i], turns, t), b_now)
            return sums

        each = columns * (turns if kept else 1)
        zero = ir.Constant(vector, [0.0] * vector.count)
        sums = _loop(builder, parts, [zero] * (count * each), part)
        written = lanes_of(parts)
        for adding in (True, False):
            with builder.if_then(arguments[9] if adding else builder.not_(arguments[9])):
                for position, total in enumerate(sums):
                    i, v = divmod(position, each)
                    at = builder.add(first_out, builder.mul(out_i, _WORD(i)))
                    if adding:
                        before = _load(builder, vector, to, at, v * vector.count, written[v % columns])
                        total = builder.fadd(total, before)
                    _store(builder, total, to, at, v * vector.count, written[v % columns])
        return context.get_dummy_value()

    given = (tile, a, b, out, a_starts, b_starts, sizes, firsts, steps, add, masks)
    return types.void(*given), generate


@intrinsic
def tap_sums(typing_context, tile, x, dy, out, shifts, masks, sizes, firsts, steps, add):
    """Sum over images r, vectors k and their lanes: x[r, k] moved by shifts[t], times dy[r, i, k].

    The sum is written to out[i, t], or added if `add`.
    tile: (rows i, taps t), as in tile_sum. sizes: how many r, how many k. firsts: of x, dy, out, shifts,
    the masks of t and of dy. steps: of r in x and dy, of i in dy and out, of t in masks, which are as there.
    """

    def generate(context, builder, signature, arguments):
        rows, taps = (part.count for part in signature.args[0])
        vector = _vector(signature.args[1])
        from_x, from_dy, to, moved, masks = _pointers(context, builder, signature, arguments, 1, 6)
        images, length = cgutils.unpack_tuple(builder, arguments[6], 2)
        first_x, first_dy, first_out, first, mask, inside = cgutils.unpack_tuple(builder, arguments[7], 6)
        x_r, dy_r, dy_i, out_i, mask_t = cgutils.unpack_tuple(builder, arguments[8], 5)
        by = [builder.load(builder.gep(moved, [builder.add(first, _WORD(t))])) for t in range(taps)]

        def image(r, sums):
            at_x = builder.add(first_x, builder.mul(r, x_r))
            at_dy = builder.add(first_dy, builder.mul(r, dy_r))
            return _loop(builder, length, sums, lambda k, now: product(at_x, at_dy, k, now))

        def product(at_x, at_dy, k, sums):
            along, sums = builder.mul(k, _WORD(vector.count)), list(sums)
            seen = _mask(builder, vector.count, masks, builder.add(inside, k))
            places = [
                builder.add(at_dy, builder.add(along, builder.mul(_WORD(i), dy_i))) for i in range(rows)
            ]
            upper = [_load(builder, vector, from_dy, place, 0, seen) for place in places]
            for t in range(taps):
                at = builder.add(mask, builder.add(k, builder.mul(_WORD(t), mask_t)))
                place = builder.add(builder.add(at_x, by[t]), along)
                met = _load(builder, vector, from_x, place, 0, _mask(builder, vector.count, masks, at))
                for i in range(rows):
                    sums[i * taps + t] = fma(upper[i], met, sums[i * taps + t])
            return sums

        fma = _multiply_add(builder, vector, vector)
        zero = ir.Constant(vector, [0.0] * vector.count)
        for position, total in enumerate(_loop(builder, images, [zero] * (rows * taps), image)):
            i, t = divmod(position, taps)
            total = _lane_sum(builder, total)
            at = builder.add(builder.add(first_out, builder.mul(out_i, _WORD(i))), _WORD(t))
            place = builder.gep(to, [at])
            before = builder.select(arguments[9], builder.load(place), ir.Constant(total.type, 0.0))
            builder.store(builder.fadd(total, before), place)
        return context.get_dummy_value()

    given = (tile, x, dy, out, shifts, masks, sizes, firsts, steps, add)
    return types.void(*given), generate


@intrinsic
def bits_of(typing_context, x):
    """The bits in bfloat16 of a float32, rounded by the processor. Subnormal numbers become 0. With PAIRS."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], _BFloat()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def transpose_tile(typing_context, source, source_first, source_starts, target, target_first, target_starts):
    """Turn a square of vectors: its column j becomes the row at target_first + target_starts[j].

    Its rows are vectors that begin at source_first + source_starts[i].
    """

    def generate(context, builder, signature, arguments):
        vector = _vector(signature.args[0])
        size = vector.count
        (origin,) = _pointers(context, builder, signature, arguments, 0, 1)
        origins, to, places = (
            _pointers(context, builder, signature, arguments, i, i + 1)[0] for i in (2, 3, 5)
        )

        def start(first, starts, i):
            return builder.add(first, builder.load(builder.gep(starts, [_WORD(i)])))

        rows = [_load(builder, vector, origin, start(arguments[1], origins, i), 0) for i in range(size)]
        distance = 1
        while distance < size:  # swap blocks next to the diagonal, of 1, 2, 4, ... numbers
            low = [j if not j & distance else size + j - distance for j in range(size)]
            high = [j + distance if not j & distance else size + j for j in range(size)]
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), size), mask) for mask in (low, high)]
            for i in range(size):
                if not i & distance:
                    pair = rows[i], rows[i + distance]
                    rows[i], rows[i + distance] = (builder.shuffle_vector(*pair, mask) for mask in masks)
            distance *= 2
        for j, row in enumerate(rows):
            _store(builder, row, to, start(arguments[4], places, j), 0)
        return context.get_dummy_value()

    given = (source, source_first, source_starts, target, target_first, target_starts)
    return types.void(*given), generate


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def __str__(self) -> str:
        return "bfloat"


def _multiply_add(builder: Any, given: ir.VectorType, vector: ir.VectorType) -> Callable:
    """(left, right, sum) -> sum + left * right, lane by lane."""
    if given == vector:
        kind, operand = ir.FunctionType(vector, [vector] * 3), vector
        name = f"llvm.fma.v{vector.count}{vector.element.intrinsic_name}"
    else:
        operand = ir.VectorType(_BFloat(), 2 * vector.count)
        kind = ir.FunctionType(vector, [vector, operand, operand])
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    if given == vector:
        return lambda left, right, total: builder.call(function, [left, right, total])
    pairs = partial(builder.bitcast, typ=operand)
    return lambda left, right, total: builder.call(function, [total, pairs(left), pairs(right)])


def _vector(array: types.Array) -> ir.VectorType:
    if array.dtype == types.uint32:
        return ir.VectorType(ir.IntType(32), BYTES // 4)
    single = array.dtype == types.float32
    return ir.VectorType(ir.FloatType() if single else ir.DoubleType(), BYTES // (4 if single else 8))


def _pointers(context: Any, builder: Any, signature: Any, arguments: Any, first: int, stop: int) -> list:
    """Where the arrays among the arguments begin."""
    return [
        context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in range(first, stop)
    ]


def _place(builder: Any, vector: ir.VectorType, base: Any, index: Any, offset: int) -> Any:
    return builder.bitcast(builder.gep(base, [builder.add(index, _WORD(offset))]), vector.as_pointer())


def _load(builder: Any, vector: ir.VectorType, base: Any, index: Any, offset: int, mask: Any = None) -> Any:
    """mask: of the lanes that are read, the others are 0; None: of all."""
    place, align = _place(builder, vector, base, index, offset), BYTES // vector.count
    if mask is None:
        return builder.load(place, align=align)
    kind = ir.FunctionType(vector, [place.type, ir.IntType(32), mask.type, vector])
    function = cgutils.get_or_insert_function(
        builder.module, kind, f"llvm.masked.load.{_reported(vector)}.p0"
    )
    nothing = ir.Constant(vector, [0.0] * vector.count)
    return builder.call(function, [place, ir.IntType(32)(align), mask, nothing])


def _store(builder: Any, value: Any, base: Any, index: Any, offset: int, mask: Any = None) -> None:
    """mask: of the lanes that are written; None: of all."""
    place, align = _place(builder, value.type, base, index, offset), BYTES // value.type.count
    if mask is None:
        builder.store(value, place, align=align)
        return
    kind = ir.FunctionType(ir.VoidType(), [value.type, place.type, ir.IntType(32), mask.type])
    name = f"llvm.masked.store.{_reported(value.type)}.p0"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(function, [value, place, ir.IntType(32)(align), mask])


def _reported(vector: ir.VectorType) -> str:
    return f"v{vector.count}{vector.element.intrinsic_name}"


def _mask(builder: Any, count: int, masks: Any, at: Any) -> Any:
    bits = builder.load(builder.gep(masks, [at]))
    bits = bits if count == 16 else builder.trunc(bits, ir.IntType(count))
    return builder.bitcast(bits, ir.VectorType(ir.IntType(1), count))


def _hidden(builder: Any, value: Any) -> Any:
    """The same number, of which LLVM does not know where it comes from.

    Else it would make the address of each row from the one before, a chain that takes longer than the
    products, or keep all of them and run out of registers. An x86 address adds 1, 2 or 4 times a register to
    another: with 3 steps in a register as well, one reaches five rows.
    """
    return builder.asm(ir.FunctionType(_WORD, [_WORD]), "", "=r,0", [value], False)


def _turned(builder: Any, value: Any, run: int, by: int) -> Any:
    """Each `run` lanes of a vector moved round by `by`: lane l gets what lane l + by of its run had."""
    if not by:
        return value
    lanes = [lane // run * run + (lane + by) % run for lane in range(value.type.count)]
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _lane_sum(builder: Any, vector: Any) -> Any:
    """Half of the lanes plus the other half, until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        mask = [*range(count, 2 * count)] + [0] * (vector.type.count - count)
        index = ir.Constant(ir.VectorType(ir.IntType(32), vector.type.count), mask)
        other = builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), index)
        vector = builder.fadd(vector, other)
    return builder.extract_element(vector, ir.IntType(32)(0))


def _spread(builder: Any, vector: ir.VectorType, number: Any) -> Any:
    """A vector of one number."""
    nothing, index = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    one = builder.insert_element(nothing, number, index(0))
    return builder.shuffle_vector(
        one, nothing, ir.Constant(ir.VectorType(index, vector.count), [0] * vector.count)
    )


def _loop(builder: Any, count: Any, state: list, body: Callable) -> list:
    """Compute state = body(index, state), `count` times; the state stays in registers."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_WORD)
    index.add_incoming(_WORD(0), before)
    values = [builder.phi(value.type) for value in state]
    for value, first in zip(values, state, strict=True):
        value.add_incoming(first, before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    for value, following in zip(values, body(index, values), strict=True):
        value.add_incoming(following, builder.block)
    index.add_incoming(builder.add(index, _WORD(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values
