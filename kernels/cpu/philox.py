"""Random numbers as a function of (seed, stream, element): Philox4x32-10.

(Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.) The key is the seed. The counter's two low
words count blocks of four numbers, its two high words are the stream. Element i is number i % 4 of block
i // 4, so any piece of a sequence can be made without the rest, with the same bits.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact, exact_part
from shardrt.kernels.cpu._threads import run_rows

__all__ = ["uniform"]


@cost("-> out", flops=25)
def uniform(out: Array, seed: int, stream: int, offset: int) -> None:
    """Fill a flat array with elements [offset, offset + size) of the stream, uniform in [0, 1)."""
    words = np.uint64(seed), np.uint64(stream), np.uint64(offset)
    run_rows(_uniform, out.size, out.size, out, *words)


@cost("-> out", flops=25)
def normal(out: Array, seed: int, stream: int, offset: int, mean: float, std: float) -> None:
    """As `uniform`, normally distributed (Box and Muller, 1958)."""
    words = np.uint64(seed), np.uint64(stream), np.uint64(offset)
    run_rows(_normal, out.size, out.size, out, *words, float(mean), float(std))


_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF_WORD, _FOUR = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(4)


@exact_part
def words(seed, stream, block):
    """The four 32-bit numbers of a block, as uint64."""
    a, b = block & _LOW, block >> _HALF_WORD
    c, d = stream & _LOW, stream >> _HALF_WORD
    k0, k1 = seed & _LOW, seed >> _HALF_WORD
    for _ in range(10):
        first, second = _M0 * a, _M1 * c
        a, b, c, d = (
            (second >> _HALF_WORD) ^ b ^ k0,
            second & _LOW,
            (first >> _HALF_WORD) ^ d ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return a, b, c, d


MANY = 64  # blocks whose numbers are made side by side, in vectors


@exact
def make_blocks(seed, stream, block, made):
    """made, uint64 (4, MANY): the numbers of so many blocks from `block` on, one row for each of the four."""
    first, second, third, fourth = made[0], made[1], made[2], made[3]
    for j in range(MANY):
        first[j], second[j], third[j], fourth[j] = words(seed, stream, block + np.uint64(j))


@exact
def _put(numbers, scale, shift, out, start, stop, begin):
    """Elements of out in [start, stop): shift + scale * number; the first of `numbers` is element `begin`."""
    if start <= begin and begin + 4 * MANY <= stop:
        part = out[begin : begin + 4 * MANY]
        for j in range(MANY):
            for lane in range(4):
                part[4 * j + lane] = shift + scale * np.float64(numbers[lane, j])
        return
    for i in range(max(start, begin), min(stop, begin + 4 * MANY)):
        out[i] = shift + scale * np.float64(numbers[(i - begin) % 4, (i - begin) // 4])


@exact
def _uniform(start, stop, out, seed, stream, offset):
    first, last = offset + np.uint64(start), offset + np.uint64(stop)
    made = np.empty((4, MANY), np.uint64)
    for block in range(first // _FOUR, (last + np.uint64(3)) // _FOUR, np.uint64(MANY)):
        make_blocks(seed, stream, np.uint64(block), made)
        for lane in range(4):
            for j in range(MANY):
                made[lane, j] >>= np.uint64(8)
        _put(made, 2.0**-24, 0.0, out, start, stop, np.int64(np.uint64(block) * _FOUR - offset))


@exact
def _normal(start, stop, out, seed, stream, offset, mean, std):
    first, last = offset + np.uint64(start), offset + np.uint64(stop)
    made = np.empty((4, MANY), np.uint64)
    numbers, logs = np.empty((4, MANY), np.float64), np.empty(MANY, np.float64)
    for block in range(first // _FOUR, (last + np.uint64(3)) // _FOUR, np.uint64(MANY)):
        make_blocks(seed, stream, np.uint64(block), made)
        for pair in range(0, 4, 2):
            _logarithms(made[pair], logs)
            _turn(made[pair + 1], logs, numbers[pair], numbers[pair + 1], std)
        _put(numbers, 1.0, mean, out, start, stop, np.int64(np.uint64(block) * _FOUR - offset))


# Polynomials of fdlibm (Sun Microsystems, 1993), e_log.c, k_sin.c, k_cos.c: the library's functions would be
# called for one number at a time. Errors are some 1e-16: float32 has the same bits but where that is a tie.
_LN2_HIGH, _LN2_LOW, _ROOT2 = 6.93147180369123816490e-01, 1.90821492927058770002e-10, 1.4142135623730951
_L1, _L2, _L3, _L4 = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
)
_L5, _L6, _L7 = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01
_S1, _S2, _S3 = -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04
_S4, _S5, _S6 = 2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10
_C1, _C2, _C3 = 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05
_C4, _C5, _C6 = -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11
_FRACTION, _ONE_BITS, _52, _1023 = (
    np.int64(0x000FFFFFFFFFFFFF),
    np.int64(0x3FF0000000000000),
    np.int64(52),
    np.int64(1023),
)


@exact
def _logarithms(words, out):
    """Compute out = log((words + 1/2) / 2**32)."""
    bits = out.view(np.int64)
    for j in range(words.size):
        out[j] = (np.float64(words[j]) + 0.5) * 2.0**-32
    exponents = np.empty(MANY, np.float64)
    for j in range(words.size):
        exponents[j] = np.float64((bits[j] >> _52) - _1023)
        bits[j] = (bits[j] & _FRACTION) | _ONE_BITS
    for j in range(words.size):
        large = out[j] > _ROOT2
        k = exponents[j] + 1.0 if large else exponents[j]
        f = (0.5 * out[j] if large else out[j]) - 1.0
        s = f / (2.0 + f)
        z = s * s
        r = z * (_L1 + z * (_L2 + z * (_L3 + z * (_L4 + z * (_L5 + z * (_L6 + z * _L7))))))
        half = 0.5 * f * f
        out[j] = k * _LN2_HIGH - ((half - (s * (half + r) + k * _LN2_LOW)) - f)


@exact
def _turn(turns, logs, x, y, std):
    """x, y: a vector of length std * sqrt(-2 logs), turned by turns / 2**32 of a circle."""
    for j in range(turns.size):
        turn = np.float64(turns[j]) * 2.0**-32
        quarter = np.floor(4.0 * turn + 0.5)
        angle = 2.0 * np.pi * (turn - 0.25 * quarter)  # at most an eighth
        z = angle * angle
        sine = angle + angle * z * (_S1 + z * (_S2 + z * (_S3 + z * (_S4 + z * (_S5 + z * _S6)))))
        r = z * (_C1 + z * (_C2 + z * (_C3 + z * (_C4 + z * (_C5 + z * _C6)))))
        cosine = 1.0 - (0.5 * z - z * r)
        odd = quarter == 1.0 or quarter == 3.0
        radius = np.sqrt(-2.0 * logs[j]) * std
        first, second = (sine, cosine) if odd else (cosine, sine)
        x[j] = radius * (-first if quarter == 1.0 or quarter == 2.0 else first)
        y[j] = radius * (-second if quarter == 2.0 or quarter == 3.0 else second)
