"""Random numbers as a function of (seed, stream, element): Philox4x32-10.

(Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.) The key is the seed. The counter's two low
words count blocks of four numbers, its two high words are the stream. Element i is number i % 4 of block
i // 4, so any piece of a sequence can be made without the rest, with the same bits.
"""

from typing import Any

import numpy as np

from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows

Array = Any


def uniform(out: Array, seed: int, stream: int, offset: int) -> None:
    """Fill a flat array with elements [offset, offset + size) of the stream, uniform in [0, 1)."""
    words = np.uint64(seed), np.uint64(stream), np.uint64(offset)
    run_rows(_uniform, out.size, out.size, out, *words)


def normal(out: Array, seed: int, stream: int, offset: int, mean: float, std: float) -> None:
    """As `uniform`, normally distributed (Box and Muller, 1958)."""
    words = np.uint64(seed), np.uint64(stream), np.uint64(offset)
    run_rows(_normal, out.size, out.size, out, *words, float(mean), float(std))


_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF_WORD, _TWO, _FOUR = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(2), np.uint64(4)


@exact
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


@exact
def _uniform(start, stop, out, seed, stream, offset):
    scale = 2.0**-24
    first, last = offset + np.uint64(start), offset + np.uint64(stop)
    for block in range(first // _FOUR, (last + np.uint64(3)) // _FOUR):
        four = words(seed, stream, np.uint64(block))
        for lane in range(4):
            element = np.uint64(block) * _FOUR + np.uint64(lane)
            if first <= element < last:
                out[np.int64(element - offset)] = np.float64(four[lane] >> np.uint64(8)) * scale


@exact
def _normal(start, stop, out, seed, stream, offset, mean, std):
    scale = 2.0**-32
    first, last = offset + np.uint64(start), offset + np.uint64(stop)
    for block in range(first // _FOUR, (last + np.uint64(3)) // _FOUR):
        a, b, c, d = words(seed, stream, np.uint64(block))
        for pair in range(2):
            length, turn = (a, b) if pair == 0 else (c, d)
            radius = np.sqrt(-2.0 * np.log((np.float64(length) + 0.5) * scale)) * std
            angle = 2.0 * np.pi * (np.float64(turn) * scale)
            element = np.uint64(block) * _FOUR + _TWO * np.uint64(pair)
            if first <= element < last:
                out[np.int64(element - offset)] = mean + radius * np.cos(angle)
            if first <= element + np.uint64(1) < last:
                out[np.int64(element + np.uint64(1) - offset)] = mean + radius * np.sin(angle)
