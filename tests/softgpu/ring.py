"""What NCCL's ring gives: each slice goes once round the ranks, and every hop rounds to its type."""

import ctypes

import ml_dtypes
import numpy as np

# By NCCL's number.
TYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split()
TYPES = [np.dtype(name) for name in TYPES]
TYPES += [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]
SUM, PROD, MAX, MIN, AVG = range(5)
_COMBINE = {SUM: np.add, PROD: np.multiply, MAX: np.fmax, MIN: np.fmin}


def view(address: int, count: int, kind: int) -> np.ndarray:
    """The elements in memory, as NumPy's."""
    memory = (ctypes.c_ubyte * (count * TYPES[kind].itemsize)).from_address(address)
    return np.frombuffer(memory, TYPES[kind])


def reduced(parts: list[np.ndarray], op: int, last: int) -> np.ndarray:
    """The ranks' parts, combined from the rank behind `last` on.

    A mean multiplies floats by 1/n before it adds them, and divides the sum of integers (src/enqueue.cc,
    hostToDevRedOp: ncclDevPreMulSum and ncclDevSumPostDiv).
    """
    ranks, dtype = len(parts), parts[0].dtype
    if op == AVG and dtype.kind in "iu":
        return (reduced(parts, SUM, last) // ranks).astype(dtype)
    if op == AVG:
        return reduced([(part * dtype.type(1 / ranks)).astype(dtype) for part in parts], SUM, last)
    total = parts[(last + 1) % ranks].copy()
    for step in range(2, ranks + 1):
        total = _COMBINE[op](total, parts[(last + step) % ranks]).astype(dtype)
    return total
