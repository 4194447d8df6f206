"""CuPy's sort and argsort, which call Thrust inside CuPy, for the GPU emulator: in a stream, as NumPy.

The functions have the names of cupy.cuda.thrust and take their places.
"""

import ctypes

import numpy as np

from tests.softgpu.cuda import CUDA, Work


def put(cuda: CUDA) -> None:
    """In the place of CuPy's functions. They sort along the last axis of contiguous arrays."""
    import cupy

    def array(address: int, shape: tuple, dtype) -> np.ndarray:
        count = int(np.prod(shape))
        memory = (ctypes.c_ubyte * (count * np.dtype(dtype).itemsize)).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def issue(work) -> None:
        cuda.issue("sort", cupy.cuda.get_current_stream().ptr, Work(work))

    def sort(dtype, data, keys, shape) -> None:
        issue(lambda: array(data, shape, dtype).sort(axis=-1, kind="stable"))

    def argsort(dtype, places, data, keys, shape) -> None:
        def work():
            values, found = array(data, shape, dtype), array(places, shape, np.int64)
            found[...] = np.argsort(values, axis=-1, kind="stable")

        issue(work)

    cupy.cuda.thrust.sort, cupy.cuda.thrust.argsort = sort, argsort
