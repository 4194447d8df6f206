"""Memory-mapped arrays: write pieces of them to their files, and drop the pages from memory.

For optimizer state, shards and gradients that are larger than host memory. An array here is a np.memmap or a
view of one; for any other array these functions do nothing. docs/offload.md says why it is done so.
"""

import mmap

import numpy as np


def write_out(array: np.ndarray) -> None:
    """Write the pages of `array` to the file, return when they are there, and drop them from memory."""
    place = _place(array)
    if place is not None:
        mapping, start, size = place
        mapping.flush(start, size)
        mapping.madvise(mmap.MADV_DONTNEED, start, size)


def drop(array: np.ndarray) -> None:
    """Drop the pages of `array` from this process. Nothing is lost: the kernel keeps what was written."""
    place = _place(array)
    if place is not None:
        mapping, start, size = place
        mapping.madvise(mmap.MADV_DONTNEED, start, size)


def _place(array: np.ndarray) -> tuple[mmap.mmap, int, int] | None:
    """(mapping, first byte, size), in whole pages, of the file that `array` is a view of."""
    base = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap) and base.mode not in ("r+", "w+"):
            return None  # a private copy: dropped pages would lose what was written
        base = base.base
    if not isinstance(base, mmap.mmap) or array.size == 0:
        return None
    first = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    return base, start, min(first + array.nbytes, len(base)) - start
