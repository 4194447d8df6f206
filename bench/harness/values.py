"""What the arrays of a check hold, and how many elements of a result are wrong.

An element is a function of rank, index and round: a small integer, so that sums and products are exact in
every type, and scattered, so that a piece that went to another place, or is left from another round, does not
pass.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardrt.device import Device

Array = Any
PIECE = 1 << 20  # elements that are made or compared at a time
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)


def values(rank: int | np.ndarray, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    """Integers 0 to 7 as `dtype`; of bfloat16 the bits, as uint16. indices: uint64."""
    seed = (np.asarray(rank).astype(np.uint64) << np.uint64(40)) + np.uint64(round_ << 52)
    mixed = (indices + seed) * _ODD
    small = ((mixed ^ (mixed >> np.uint64(32))) * _ODD) >> np.uint64(61)
    if dtype == "bfloat16":  # the upper half of a float32
        return (small.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return small.astype(dtype)


def factors(rank: int, ranks: int, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    """Integers 1 to 8, ones but for one rank at each index: their product over many ranks fits a byte."""
    own = (indices + np.uint64(round_)) % np.uint64(ranks) == rank
    return np.where(own, values(0, indices, round_, dtype) + np.ones(1, dtype), np.ones(1, dtype))


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
    device: Device, array: Array, expected: Callable[[int, int], np.ndarray], tolerance: float = 0.0
) -> int:
    """Elements of `array` that are not `expected(start, stop)` to the bit; nan never is.

    tolerance: relative, for a result that is no small integer.
    """
    wrong = 0
    for start in range(0, array.size, PIECE):
        stop = min(start + PIECE, array.size)
        found, right = device.to_numpy(array[start:stop]), expected(start, stop)
        if tolerance:
            good = np.abs(found - right) <= tolerance * np.abs(right)
        else:
            good = found == right.view(found.dtype)
        wrong += int(np.count_nonzero(~good))
    return wrong
