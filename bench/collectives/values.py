"""What the arrays of a check hold, and how many elements of a result are wrong.

An element is a function of rank, index and round: a small integer, so that sums are exact in every type, and
scattered, so that a piece that went to another place, or is left from another round, does not pass.
"""

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


def fill(device: Device, array: Array, rank: int, round_: int, dtype: str) -> None:
    """Give a source its values."""
    for start in range(0, array.size, PIECE):
        stop = min(start + PIECE, array.size)
        indices = np.arange(start, stop, dtype=np.uint64)
        device.copy(array[start:stop], values(rank, indices, round_, dtype))
    device.wait_here()


def poison(array: Array) -> None:
    """Put what no result holds into a target: nan, or -1 (all bits of it, where they are bits)."""
    array.fill(np.nan if array.dtype.kind == "f" else np.array(-1).astype(array.dtype))


def count_wrong(device: Device, array: Array, expected: Any) -> int:
    """Elements of `array` that are not `expected(start, stop)`; nan never is."""
    wrong = 0
    for start in range(0, array.size, PIECE):
        stop = min(start + PIECE, array.size)
        found = device.to_numpy(array[start:stop])
        wrong += int(np.count_nonzero(found != expected(start, stop)))
    return wrong
