"""Buffers in host memory for what a device holds: pinned, or mapped from a file where that is too much.

Pieces of a mapped buffer are written to its file, and their pages dropped from memory. For any other array
write_out and drop do nothing. docs/offload.md says why it is done so.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.device.protocol import Device


def buffer(device: Device, count: int, dtype: Any, directory: str | Path | None = None) -> np.ndarray:
    """Zeros in host memory: pinned for `device`, or a file of its own in `directory`.

    The file has no name once it is mapped, so it goes away with the process, however that ends. Raises
    OSError, naming the directory, where the disk has no room for it.
    """
    if directory is None or count == 0 or not device.writes_files:
        return device.pinned(count, dtype)
    Path(directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        _reserve(file.fileno(), count * np.dtype(dtype).itemsize, directory)
        mapped = np.memmap(file, dtype, "r+", shape=(count,))
    return np.asarray(mapped)  # what is called with NumPy's own kind of array need not look further


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


def _reserve(file: int, nbytes: int, directory: str | Path) -> None:
    """Take the room on the disk now: a mapped page for which there is none later ends the process."""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        text = f"directory {directory} has no room for {nbytes} bytes more: {error.strerror}"
        raise OSError(error.errno, text) from error


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
