"""Lets tests that were written for the emulator run on the GPU: arrays stay NumPy's, and all the memory that
they lie in goes there and back at every launch, guards around them included.
"""

import ctypes

import cupy
import numpy as np

from tests.cuda.emulator import Emulator


class Mirror(Emulator):
    """A backend of kernels/cuda/_launch.py over the real one, for NumPy arrays. `launches`: what was run."""

    def __init__(self, real):
        super().__init__()
        self._real = real
        self.multiprocessors, self.shared = real.multiprocessors, real.shared

    def launch(self, file, defines, function, grid, threads, args, shared):
        self.launches.append(function)
        there = _There()
        self._real.launch(file, defines, function, grid, threads, tuple(map(there, args)), shared)
        there.bring_back()

    def gemm(self, a, b, out, *, accumulate, bias=None, varied=False):
        there = _There()
        arrays = there(a), there(b), there(out)
        beside = None if bias is None else there(bias)
        self._real.matmuls.gemm(*arrays, accumulate=accumulate, bias=beside, varied=varied)
        there.bring_back()

    def prepare(self, wanted):
        self._real.prepare(wanted)


def on_gpu(function):
    """A kernel of a GPU, libraries and all, for NumPy arrays."""

    def launched(*args, **how):
        there = _There()
        function(*map(there, args), **{name: there(value) for name, value in how.items()})
        there.bring_back()

    return launched


class _There:
    """NumPy arrays as arrays of the GPU: those that share memory here share it there, equally aligned."""

    def __init__(self):
        self._owners = {}  # address -> (bytes here, bytes there)

    def __call__(self, value):
        if not isinstance(value, np.ndarray):
            return value
        here, there = self._memory(value)
        offset = value.ctypes.data - here.ctypes.data if value.size else 0
        return cupy.ndarray(value.shape, value.dtype, there.data + offset, strides=value.strides)

    def bring_back(self):
        """Copy all of it, when the GPU is done."""
        cupy.cuda.Device().synchronize()
        for here, there in self._owners.values():
            if here.size:
                here[...] = there.get()

    def _memory(self, value):
        owner = value
        while getattr(owner, "base", None) is not None:
            owner = owner.base
        owner = owner if isinstance(owner, np.ndarray) else value
        low, high = np.lib.array_utils.byte_bounds(owner)
        if low not in self._owners:
            size = high - low if owner.size else 0
            here = np.frombuffer((ctypes.c_ubyte * size).from_address(low), np.uint8)
            there = cupy.empty(size + 512, np.uint8)
            start = (low - there.data.ptr) % 256
            there = there[start : start + size]
            there.set(here)
            cupy.cuda.Device().synchronize()  # what runs next may be in another stream
            self._owners[low] = here, there
        return self._owners[low]
