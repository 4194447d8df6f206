"""A pool of host memory for the arrays that ops make and drop in every step.

The first write to a new large array costs a page fault per page. The C library gives large blocks back to the
system at once, so this would recur in every step. Training steps need the same sizes each time, so the pool
keeps a free list per size. After the first step it lends memory that is already mapped. If sizes change, such
as lengths of sequences, the pool unmaps free blocks of the sizes that were used least recently. Blocks come
from mmap with huge pages; the pool lends the pages of free blocks (pages.py). NumPy allocates small arrays.
"""

import mmap
import threading
from collections import OrderedDict
from math import prod
from typing import Any

import numpy as np

from shardrt.device import pages
from shardrt.device.cpu import HostMemory
from shardrt.device.pages import SEGMENT, Mapping, Part, Segment

LENDS = True  # whether gradients lend their memory from one zero_grad to the next backward
SMALL = 1 << 15  # bytes; below this malloc is faster than the pool
# Least number of bytes between the starts of two arrays. If a compiled loop writes within a few vectors
# behind what it reads, it runs element by element, and its sums have other last bits.
APART = 512
# Most mapped bytes per byte of the largest total lent so far. Training our models needs 1.2 to 1.3.
_MOST = 2


class _Block:
    """Memory lent to one array and its views. It returns to the pool when the last of them dies."""

    __slots__ = ("pool", "region", "__array_interface__", "__weakref__")

    def __init__(self, pool: "Pool", region: Mapping | Part, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.pool = pool
        self.region = region
        data = (region.address, False)
        self.__array_interface__ = {"data": data, "shape": shape, "typestr": dtype.str, "version": 3}

    def __del__(self) -> None:
        self.pool._give_back(self.region)


class Pool(HostMemory):
    """Arrays from reused memory. `held_bytes` are lent now; `peak_bytes` is the most since reset_peak."""

    def __init__(self) -> None:
        self._free: OrderedDict[int, list[Mapping | Part]] = (
            OrderedDict()
        )  # by size, the last used at the end
        self._mapped = self._most = 0  # bytes: lent and free now; most ever lent at once
        self._segment: Segment | None = None  # for the next short block
        self._lock = threading.RLock()  # __del__ may run inside empty(), in the same thread
        self.held_bytes = 0
        self.peak_bytes = 0

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised C-contiguous array."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < APART:
            return np.empty(APART, np.uint8)[:nbytes].view(dtype).reshape(shape)
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        size = rounded(nbytes)
        with self._lock:
            region = self._reused(size) or self._newly_mapped(size)
            region.take()
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            self._most = max(self._most, self.held_bytes)
        return np.asarray(_Block(self, region, shape, dtype)).view(dtype)  # bfloat16 has no type string

    def buffer(self, count: int, dtype: Any) -> np.ndarray:
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes < pages.HUGE:
            return np.zeros(count, dtype)
        return np.asarray(pages.Buffer(nbytes)).view(dtype)

    def lend(self, array: np.ndarray) -> None:
        buffer = _buffer_of(array)
        if LENDS and buffer is not None:
            pages.lend(buffer.mapping, array.ctypes.data, array.nbytes, first=True)

    def take(self, array: np.ndarray) -> None:
        if LENDS and _buffer_of(array) is not None:
            pages.take(array.ctypes.data, array.nbytes)

    @staticmethod
    def pooled(nbytes: int) -> int:
        return 0 if nbytes < SMALL else rounded(nbytes)

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.held_bytes

    def _reused(self, size: int) -> Mapping | Part | None:
        free = self._free.get(size)
        if not free:
            return None
        self._free.move_to_end(size)
        return free.pop()

    def _newly_mapped(self, size: int) -> Mapping | Part:
        while self._free and self._mapped + size > _MOST * max(self._most, self.held_bytes + size):
            self._unmap()
        try:
            region = self._region(size)
        except MemoryError:
            while self._free:
                self._unmap()
            region = self._region(size)
        self._mapped += size
        return region

    def _region(self, size: int) -> Mapping | Part:
        """Memory for a block. Short blocks are adjacent in a segment, so that they share huge pages."""
        if size > SEGMENT // 4:
            return Mapping(size)
        part = None if self._segment is None else self._segment.part(size)
        if part is None:
            try:
                self._segment = Segment()
            except MemoryError:  # a limit allows less than a segment
                return Mapping(size)
            part = self._segment.part(size)
        return part

    def _unmap(self) -> None:
        """Give a free region of the least recently used size back to the system."""
        size, free = next(iter(self._free.items()))
        if free:
            free.pop()
            self._mapped -= size
        else:
            del self._free[size]

    def _give_back(self, region: Mapping | Part) -> None:
        with self._lock:
            self.held_bytes -= region.size
            self._free.setdefault(region.size, []).append(region)
            region.lend()
            self._free.move_to_end(region.size)


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up in steps of an eighth of its magnitude, so that similar sizes share a free list.

    The result is whole pages (up to 64 KiB on arm64), so that no two arrays share a page.
    """
    step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _buffer_of(array: np.ndarray) -> pages.Buffer | None:
    """The buffer from `Pool.buffer` under an array; None for other memory."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, pages.Buffer) else None
