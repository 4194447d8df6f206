"""Reserved addresses without memory, for arrays without elements. An access ends the process.

Also gives the bytes of an array as ranges of addresses.
"""

import mmap
import sys
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from shardrt.device.program import Range
from shardrt.device.protocol import Array

__all__ = ["ALIGNMENT", "Addresses", "Block", "block_of", "joined", "ranges_of"]

ALIGNMENT = 512  # bytes; the same as CuPy's pool
ROWS = 1024  # most ranges of a view; more are joined, with the bytes between them
_CHUNK = 1 << 36
_PROT_NONE, _MAP_NORESERVE = 0, 0x4000  # of Linux; Python has no names for them


class Addresses:
    """A source of addresses, reserved in chunks. Freed addresses are reused first, for the same size.

    Each `owner` has its own pool. Addresses of owner None are never reused.
    """

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self._next = self._end = 0
        self._free: dict[tuple[str, int], list[int]] = {}

    def take(self, nbytes: int, owner: str | None = None) -> int:
        """The aligned address of `nbytes` bytes."""
        size = _aligned(nbytes)
        if owner is not None and self._free.get((owner, size)):
            return self._free[owner, size].pop()
        if self._next + size > self._end:
            self._reserve(size)
        start, self._next = self._next, self._next + size
        return start

    def give_back(self, start: int, nbytes: int, owner: str | None = None) -> None:
        """Return addresses to their pool, which may lend them again at once."""
        if owner is not None:
            self._free.setdefault((owner, _aligned(nbytes)), []).append(start)

    def _reserve(self, least: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        for size in (max(least, _CHUNK), least):
            try:
                memory = mmap.mmap(-1, size, flags=flags, prot=_PROT_NONE)
                break
            except (OSError, ValueError) as error:
                raised = error
        else:
            raise MemoryError(f"no addresses for {least} bytes more ({raised}); see `ulimit -v`")
        self._chunks.append(np.frombuffer(memory, np.uint8))
        self._next = self._chunks[-1].__array_interface__["data"][0]
        self._end = self._next + size


class Block:
    """Addresses of one array and its views. Calls `release(block)` when the last of them dies."""

    __slots__ = ("start", "nbytes", "release", "owner", "item", "__array_interface__", "__weakref__")

    def __init__(self, start: int, nbytes: int, release: Any, owner: str | None = None) -> None:
        self.start, self.nbytes, self.release, self.owner = start, nbytes, release, owner
        self.item = -1  # index of its Take in the items of a program
        interface = {"data": (start, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self.__array_interface__ = interface

    def array(self, kind: type[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """An array of class `kind` at its start."""
        return np.ndarray.__new__(kind, shape, dtype, np.asarray(self))

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.release(self)


def block_of(array: Array) -> Block | None:
    """The block of an array of reserved addresses, or of a view; None for other arrays."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, Block) else None


def ranges_of(array: Array) -> tuple[Range, ...]:
    """The bytes of the array's elements as ascending, disjoint ranges.

    Exact up to ROWS separate pieces, such as padded rows, columns of a matrix, or heads. For more pieces it
    joins the innermost, with the bytes between them.
    """
    if array.size == 0:
        return ()
    start = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return (Range(start, start + array.nbytes),)
    return _ranges(start, array.shape, array.strides, array.itemsize)


@lru_cache(1 << 14)
def _ranges(start: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[Range, ...]:
    axes = [(stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1 and stride]
    start += sum(stride * (n - 1) for stride, n in axes if stride < 0)
    run, outer = itemsize, sorted((abs(stride), n) for stride, n in axes)
    while outer and (outer[0][0] <= run or prod(n for _, n in outer) > ROWS):
        stride, n = outer.pop(0)
        run += stride * (n - 1)
    starts = np.array([start])
    for stride, n in reversed(outer):
        starts = np.add.outer(starts, np.arange(n) * stride).ravel()
    return joined((first, first + run) for first in starts.tolist())


def joined(pieces: Any) -> tuple[Range, ...]:
    """Ascending ranges of these (start, stop) pairs. Ranges that touch are joined."""
    result: list[Range] = []
    first = end = -1
    for start, stop in sorted(pieces):
        if start > end:
            if end >= 0:
                result.append(Range(first, end))
            first, end = start, stop
        elif stop > end:
            end = stop
    if end >= 0:
        result.append(Range(first, end))
    return tuple(result)


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
