"""A one-dimensional array in a file, of which only the used ranges are read.

Not a memory map: where a mapped file is truncated, or its disk fails, the process is killed by SIGBUS. Here
it is an OSError.
"""

from os import preadv
from pathlib import Path
from typing import Any

import numpy as np


class Sliced:
    """What arrays that are read late have in common: length, elements and slices.

    A class gives `size`, and `cut(start, stop)`: a view.
    """

    ndim = 1
    size: int

    @property
    def shape(self) -> tuple[int]:
        """The shape, (size,)."""
        return (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | slice) -> Any:
        """An element, or a view of a slice without a step."""
        if not isinstance(index, slice):
            return np.asarray(self[range(self.size)[index] :][:1])[0]
        start, stop, step = index.indices(self.size)
        if step != 1:
            raise ValueError(f"a slice of {self} must have step 1, got {step}")
        return self.cut(start, stop)


class FileArray(Sliced):
    """`count` elements of `dtype` from byte `offset` on. A slice is another view; np.asarray reads it."""

    def __init__(self, path: Path, dtype: Any, offset: int, count: int, file: Any = None) -> None:
        """Raises OSError where the file can't be opened."""
        self.path = path
        self.dtype = np.dtype(dtype)
        self.size = count
        self._offset = offset
        self._file = open(path, "rb", buffering=0) if file is None else file

    def __str__(self) -> str:
        return str(self.path)

    def cut(self, start: int, stop: int) -> "FileArray":
        """As Sliced."""
        offset = self._offset + start * self.dtype.itemsize
        return FileArray(self.path, self.dtype, offset, max(0, stop - start), self._file)

    def tolist(self) -> list:
        """All of it, as Python's numbers."""
        return np.asarray(self).tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, read now.

        Raises:
            OSError: naming the file, where it has become shorter.
        """
        read = np.empty(self.size, self.dtype)
        rest, offset = memoryview(read).cast("B") if self.size else b"", self._offset
        while len(rest):
            done = preadv(self._file.fileno(), [rest], offset)
            if not done:
                raise OSError(
                    5, f"the file was truncated while in use: {len(rest)} bytes are missing", str(self.path)
                )
            rest, offset = rest[done:], offset + done
        return read if dtype is None else read.astype(dtype, copy=False)
