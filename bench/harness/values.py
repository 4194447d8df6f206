"""What the arrays of a check hold, and how many elements of a result are wrong.

An element is a function of rank, index and round: a small integer, so that sums and products are exact in
every type, and scattered, so that a piece that went to another place, or is left from another round, does not
pass.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardrt.device import Device
from shardrt.dtypes import LOW

Array = Any
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
NARROW = (*LOW, *FLOAT8)  # floats that travel as bits: NumPy has no arithmetic of bfloat16 and of 8 bits
PIECE = 1 << 20  # elements that are made or compared at a time
_ROUNDS = 1 << 12  # that have values of their own: seeds are 64 bits
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)


def storage(dtype: str) -> np.dtype:
    """The NumPy dtype that holds elements of a type, or their bits."""
    return np.dtype(np.uint8 if dtype in FLOAT8 else np.uint16 if dtype in LOW else dtype)


def encoded(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as elements of a type, rounded to nearest even; of NARROW types the bits."""
    return numbers.astype(_as_numpy(dtype)).view(storage(dtype))


def decoded(elements: np.ndarray, dtype: str) -> np.ndarray:
    """The opposite: NARROW types as float32."""
    return elements.view(_as_numpy(dtype)).astype(np.float32) if dtype in NARROW else elements


def _as_numpy(dtype: str) -> np.dtype:
    """The type with its arithmetic, by ml_dtypes where NumPy lacks it."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def values(rank: int | np.ndarray, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    """Integers 0 to 7 as elements of `dtype`. indices: uint64."""
    return encoded(_small(rank, indices, round_), dtype)


def sparse(rank: int, ranks: int, indices: np.ndarray, round_: int) -> np.ndarray:
    """Integers 0 to 2, at each index of two neighbouring ranks only, float32.

    So sums over many ranks, in any order, are exact in 8 bits.
    """
    turn = (indices + np.uint64(round_ + rank)) % np.uint64(ranks)
    return np.where(turn < 2, _small(rank, indices, round_) % np.uint64(3), 0).astype(np.float32)


def _small(rank: int | np.ndarray, indices: np.ndarray, round_: int) -> np.ndarray:
    seed = (np.asarray(rank).astype(np.uint64) << np.uint64(40)) + np.uint64(round_ % _ROUNDS << 52)
    mixed = (indices + seed) * _ODD
    return ((mixed ^ (mixed >> np.uint64(32))) * _ODD) >> np.uint64(61)


def factors(rank: int, ranks: int, indices: np.ndarray, round_: int) -> np.ndarray:
    """Integers 1 to 8, ones but for one rank at each index: their product over many ranks fits a byte."""
    own = (indices + np.uint64(round_)) % np.uint64(ranks) == rank
    return np.where(own, _small(0, indices, round_) + np.uint64(1), np.uint64(1))


def fill(device: Device, array: Array, given: Callable[[np.ndarray], np.ndarray]) -> None:
    """Give a source its values: `given` of the indices, or their bits where the array is of another type."""
    for start in range(0, array.size, PIECE):
        stop = min(start + PIECE, array.size)
        made = given(np.arange(start, stop, dtype=np.uint64))
        device.copy(array[start:stop], made.view(array.dtype))
    device.wait_here()


def poison(array: Array) -> None:
    """Put what no result holds into a target: nan, or -1 (all bits of it, where they are bits)."""
    array.fill(np.nan if array.dtype.kind == "f" else np.array(-1).astype(array.dtype))


def count_wrong(
    device: Device,
    array: Array,
    expected: Callable[[int, int], np.ndarray],
    tolerance: float = 0.0,
    dtype: str = "",
) -> int:
    """Elements of `array` that are not `expected(start, stop)` to the bit; nan never is.

    tolerance: relative, for a result that is no small integer; `expected` then gives numbers, not elements of
    `dtype`.
    """
    wrong = 0
    for start in range(0, array.size, PIECE):
        stop = min(start + PIECE, array.size)
        found, right = device.to_numpy(array[start:stop]), expected(start, stop)
        if tolerance:
            good = np.abs(decoded(found, dtype) - right) <= tolerance * np.abs(right)
        else:
            good = found == right.view(found.dtype)
        wrong += int(np.count_nonzero(~good))
    return wrong
