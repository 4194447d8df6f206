"""What NCCL's ring gives: each slice goes once round the ranks, and every hop rounds to its type."""

import ctypes

import ml_dtypes
import numpy as np

# By NCCL's number.
TYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split()
TYPES = [np.dtype(name) for name in TYPES] + [np.dtype(ml_dtypes.bfloat16)]
SUM, PROD, MAX, MIN = range(4)
_COMBINE = {SUM: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}


def view(address: int, count: int, kind: int) -> np.ndarray:
    """The elements in memory, as NumPy's."""
    memory = (ctypes.c_ubyte * (count * TYPES[kind].itemsize)).from_address(address)
    return np.frombuffer(memory, TYPES[kind])


def reduced(parts: list[np.ndarray], op: int, last: int) -> np.ndarray:
    """The ranks' parts, combined from the rank behind `last` on."""
    ranks, dtype = len(parts), parts[0].dtype
    total = parts[(last + 1) % ranks].copy()
    for step in range(2, ranks + 1):
        total = _COMBINE[op](total, parts[(last + step) % ranks]).astype(dtype)
    return total
