"""Tensors that lie in files as plain numbers, read in ranges."""

import errno
import os
from math import prod
from pathlib import Path

import numpy as np

from shardrt.exchange.checkpoint import BadCheckpoint

Identity = tuple[int, int, int, int]


class SourceFile:
    """A file as it was when it was opened first.

    Raises:
        BadCheckpoint: if it is no regular file.
        OSError: if it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
        if not os.path.isfile(path):
            raise BadCheckpoint(f"{path} is not a regular file")
        self.size, self._identity = status.st_size, _identity(status)

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on."""
        data = np.empty(size, np.uint8)
        self.read_into(data, offset)
        return data.tobytes()

    def read_into(self, data: np.ndarray, offset: int) -> None:
        """Fill an array of bytes with those from `offset` on. Holes are not read.

        Raises:
            BadCheckpoint: if the file ends before, or has changed.
            OSError: if the file system fails.
        """
        file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if _identity(os.fstat(file)) != self._identity:
                raise BadCheckpoint(f"{self.path} has changed since it was opened")
            if offset + data.size > self.size:
                raise BadCheckpoint(f"{self.path}: the file ends before byte {offset + data.size}")
            done = 0
            while done < data.size:
                begin = _seek(file, offset + done, os.SEEK_DATA, self.size) - offset
                data[done:begin] = 0
                end = _seek(file, offset + begin, os.SEEK_HOLE, self.size) - offset
                done = begin + os.preadv(file, [data[begin:end]], offset + begin)
                if done == begin < data.size:
                    raise BadCheckpoint(f"{self.path}: the file ends before byte {offset + data.size}")
        finally:
            os.close(file)


class FileTensor:
    """A tensor whose elements lie in C order, little-endian, in a file from byte `offset` on.

    Raises:
        BadCheckpoint: if it lies outside the file.
    """

    def __init__(self, file: SourceFile, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self._file, self._offset = dtype, shape, file, offset
        if offset < 0 or offset + prod(shape) * dtype.itemsize > file.size:
            raise BadCheckpoint(f"{file.path}: a tensor of shape {shape} ends outside the file")

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor.read_into."""
        self._file.read_into(out.view(np.uint8), self._offset + start * self.dtype.itemsize)


def _seek(file: int, offset: int, kind: int, size: int) -> int:
    """Where data or a hole begins, at `offset` or behind, or where a file of this size ends.

    Where the file system knows of no holes, all is data.
    """
    try:
        return os.lseek(file, offset, kind)
    except OSError as error:
        return offset if kind == os.SEEK_DATA and error.errno != errno.ENXIO else size


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # or a pipe without a writer would wait for one


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
