"""Tensors that lie in files as plain numbers, read in ranges."""

from math import prod

import numpy as np

from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.untrusted import SourceFile


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
