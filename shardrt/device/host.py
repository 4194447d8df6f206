"""Host buffers for arrays that a device offloads: pinned memory, or a mapped file for more than fits.

write_out writes a piece of a mapped buffer to its file and drops the piece's pages from memory. For other
arrays write_out and drop do nothing. docs/howto/fit_in_memory.md gives the reasons.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.device.protocol import Device

__all__ = ["buffer", "drop", "write_out"]


def buffer(device: Device, count: int, dtype: Any, directory: str | Path | None = None) -> np.ndarray:
    """Zeros in host memory: pinned for `device`, or a file of its own in `directory`.

    The file has no name once it is mapped, so it disappears with the process.

    Raises:
        OSError: naming the directory, if the disk has no room for it.
    """
    if directory is None or count == 0 or not device.writes_files:
        return device.pinned(count, dtype)
    Path(directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        _reserve(file.fileno(), count * np.dtype(dtype).itemsize, directory)
        mapped = np.memmap(file, dtype, "r+", shape=(count,))
    return np.asarray(mapped)  # a plain array: NumPy functions are faster on it than on a memmap


def write_out(array: np.ndarray) -> None:
    """Write the pages of `array` to the file, wait until they are written, and drop them from memory."""
    place = _place(array)
    if place is not None:
        mapping, start, size = place
        mapping.flush(start, size)
        mapping.madvise(mmap.MADV_DONTNEED, start, size)


def drop(array: np.ndarray) -> None:
    """Drop the pages of `array` from this process. The kernel keeps written values for the file."""
    place = _place(array)
    if place is not None:
        mapping, start, size = place
        mapping.madvise(mmap.MADV_DONTNEED, start, size)


def _reserve(file: int, nbytes: int, directory: str | Path) -> None:
    """Reserve disk space now: writing to a mapped page without disk space would end the process."""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        text = f"directory {directory} has no room for {nbytes} bytes more: {error.strerror}"
        raise OSError(error.errno, text) from error


def _place(array: np.ndarray) -> tuple[mmap.mmap, int, int] | None:
    """(mapping, first byte, size) of the whole pages of `array`; None if it is not in a mapped file."""
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
