"""AdamW and Lion with moments in bfloat16, rounded up or down at random, so that small changes add up.

A number is rounded up with a probability that is its distance from the lower neighbour, as a part of the step
between the two neighbours. The 32 random bits of an element are Philox's of (seed, stream, element): 16 for
the first moment, 16 for the second. A table's row ends with SEED: the low and the high word of the seed,
those of the stream, and the number of the range's first element in the stream, a multiple of 4.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import cast
from shardrt.kernels.cpu._jit import exact_part, fused
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.adamw import _updated
from shardrt.kernels.cpu.philox import MANY, make_blocks

_LOW, _16 = np.uint32(0xFFFF), np.uint32(16)


@cost("param grad m v ranges -> param m v rounded", flops=40)
def adamw(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """As adamw.step on float32; m and v are uint16, bits of bfloat16. ranges: (count, 13), with SEED."""
    for start, stop, keep, rate, correction, beta1, beta2, eps, *random in ranges.tolist():
        piece, size = slice(int(start), int(stop)), int(stop - start)
        numbers = tuple(map(np.float32, (keep, rate, correction, beta1, 1 - beta1, beta2, 1 - beta2, eps)))
        arrays = param[piece], grad[piece], m[piece], v[piece]
        run_rows(_adamw, -(-size // 4), size, *arrays, numbers, _sequence(random))
        if rounded is not None:
            cast.narrow(param[piece], rounded[piece], kind)


@cost("param grad m ranges -> param m", flops=34)
def lion(param: Array, grad: Array, m: Array, ranges: Array) -> None:
    """As lion.step on float32; m is uint16, bits of bfloat16. ranges: (count, 11), with SEED."""
    for start, stop, keep, rate, beta1, beta2, *random in ranges.tolist():
        piece, size = slice(int(start), int(stop)), int(stop - start)
        numbers = tuple(map(np.float32, (keep, rate, beta1, 1 - beta1, beta2, 1 - beta2, 0, 1)))
        arrays = param[piece], grad[piece], m[piece]
        run_rows(_lion, -(-size // 4), size, *arrays, numbers, _sequence(random))


def _sequence(random: list[float]) -> tuple[np.uint64, np.uint64, np.uint64]:
    """(seed, stream, first block of four numbers) of a range."""
    low, high, stream_low, stream_high, first = map(int, random)
    return np.uint64(high << 32 | low), np.uint64(stream_high << 32 | stream_low), np.uint64(first // 4)


@exact_part
def _noise(sequence, first, made, noise):
    """Write the random bits of a tile whose first quad is `first`, element by element."""
    seed, stream, offset = sequence
    make_blocks(seed, stream, offset + np.uint64(first), made)
    for j in range(MANY):
        for lane in range(4):
            noise[4 * j + lane] = np.uint32(made[lane, j])


@exact_part
def _dithered(x, noise):
    """The bits in bfloat16 of a float32, after `noise` of 16 bits is added below them."""
    bits = cast._bits(x)
    finite = np.uint32(bits & cast._MAGNITUDE) < cast._INFINITY
    return np.uint16(np.uint32(bits + noise) >> _16) if finite else cast.narrowed(x)


@fused
def _adamw(start, stop, param, grad, m, v, numbers, sequence):
    made, noise = np.empty((4, MANY), np.uint64), np.empty(4 * MANY, np.uint32)
    for first in range(start, stop, MANY):
        begin, end = 4 * first, min(4 * min(first + MANY, stop), param.size)
        p, g, one, two = param[begin:end], grad[begin:end], m[begin:end], v[begin:end]
        _noise(sequence, first, made, noise)
        for i in range(p.size):
            p[i], mean, square = _updated(p[i], g[i], cast.widened(one[i]), cast.widened(two[i]), numbers)
            one[i] = _dithered(mean, np.uint32(noise[i] & _LOW))
            two[i] = _dithered(square, np.uint32(noise[i] >> _16))


@fused
def _lion(start, stop, param, grad, m, numbers, sequence):
    keep, rate, beta1, rest1, beta2, rest2, zero, one = numbers
    made, noise = np.empty((4, MANY), np.uint64), np.empty(4 * MANY, np.uint32)
    for first in range(start, stop, MANY):
        begin, end = 4 * first, min(4 * min(first + MANY, stop), param.size)
        p, g, moments = param[begin:end], grad[begin:end], m[begin:end]
        _noise(sequence, first, made, noise)
        for i in range(p.size):
            before = cast.widened(moments[i])
            mixed = beta1 * before + rest1 * g[i]
            sign = one if mixed > zero else -one if mixed < zero else mixed
            moments[i] = _dithered(beta2 * before + rest2 * g[i], np.uint32(noise[i] & _LOW))
            p[i] = p[i] * keep - rate * sign
