"""Tensors that are made of others, and read in ranges as these are: converted, joined, cut, turned.

A view reads what it is asked for, and holds no more than a few times CHUNK bytes.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from shardrt.exchange.checkpoint import CHUNK, BadCheckpoint, Joined, Tensor

__all__ = ["Cast", "Heads", "Reshaped", "Rows", "Transposed", "concat"]

_HEAD = 256 << 20  # bytes of a head that is turned in memory


class Cast:
    """A tensor in another type: rounded to nearest where that has fewer bits."""

    def __init__(self, tensor: Tensor, dtype: np.dtype) -> None:
        self.dtype, self.shape, self._of = dtype, tensor.shape, tensor

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor."""
        each = max(1, (CHUNK // 4) // self._of.dtype.itemsize)
        values = np.empty(min(each, out.size), self._of.dtype)
        for first in range(0, out.size, each):
            some = values[: min(each, out.size - first)]
            self._of.read_into(some, start + first)
            out[first : first + some.size] = some.astype(self.dtype)


class Reshaped:
    """The same elements in the same order, in another shape."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self._of = tensor.dtype, shape, tensor
        self.read_into = tensor.read_into


def concat(parts: Sequence[Tensor], name: str) -> Joined:
    """Tensors one after the other along their first dimension.

    Raises:
        BadCheckpoint: if their types or rows differ; naming `name`.
    """
    first = parts[0]
    if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts):
        found = ", ".join(f"{part.dtype.name} {part.shape}" for part in parts[:4])
        raise BadCheckpoint(f"{name}: its parts have types and shapes that can't be joined: {found}")
    if any(not part.shape for part in parts):
        raise BadCheckpoint(f"{name}: its parts are single numbers, which have no rows")
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return Joined(first.dtype, shape, [(part, 0, prod(part.shape)) for part in parts])


class Rows:
    """Rows [first, first + count) of a matrix, of several matrices below each other, or of a vector.

    Raises:
        BadCheckpoint: if it has fewer; naming `name`.
    """

    def __init__(self, tensor: Tensor, first: int, count: int, name: str) -> None:
        row = tensor.shape[max(1, len(tensor.shape) - 1) :]
        rows = prod(tensor.shape[: max(1, len(tensor.shape) - 1)])
        if not 0 <= first <= first + count <= rows:
            raise BadCheckpoint(f"{name}: rows {first} to {first + count} are wanted of {rows}")
        self.dtype, self.shape = tensor.dtype, (count, *row)
        self._of, self._start = tensor, first * prod(row)

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor."""
        self._of.read_into(out, self._start + start)


class Transposed:
    """The transpose of a matrix.

    Raises:
        BadCheckpoint: if it is no matrix; naming `name`.
    """

    def __init__(self, tensor: Tensor, name: str) -> None:
        if len(tensor.shape) != 2:
            raise BadCheckpoint(f"{name}: a matrix is wanted, not shape {tensor.shape}")
        self.dtype, self.shape, self._of = tensor.dtype, tensor.shape[::-1], tensor

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor: some columns of the matrix, cut from each of its rows."""
        rows, columns = self._of.shape
        low, high = start // rows, -(-(start + out.size) // rows)
        each = max(1, min(high - low, CHUNK // max(1, rows * self.dtype.itemsize)))
        turned = np.empty((each, rows), self.dtype)
        line = np.empty(each, self.dtype)
        for first in range(low, high, each):
            wide = min(each, high - first)
            for row in range(rows):
                self._of.read_into(line[:wide], row * columns + first)
                turned[:wide, row] = line[:wide]
            _copy_overlap(out, start, turned[:wide].reshape(-1), first * rows)


class Heads:
    """A matrix whose rows are those of heads, with the two halves of each head's rows interleaved, or back.

    Rotary embeddings turn pairs of a head's rows. Hugging Face pairs row i with row i + half; the Llama of
    Meta and of torchtitan pairs neighbours.

    Args:
        interleave: from halves to neighbours; else from neighbours to halves.

    Raises:
        BadCheckpoint: if the rows are not those of `heads` heads of pairs; naming `name`.
    """

    def __init__(self, tensor: Tensor, heads: int, interleave: bool, name: str) -> None:
        rows = tensor.shape[0] if tensor.shape else 0
        if heads < 1 or not rows or rows % (2 * heads):
            raise BadCheckpoint(f"{name}: shape {tensor.shape} is not that of {heads} heads of pairs of rows")
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._of, self._pairs, self._interleave = tensor, rows // heads // 2, interleave
        self._row = prod(tensor.shape[1:])
        self._head = 2 * self._pairs * self._row
        if self._head * self.dtype.itemsize > _HEAD:
            raise BadCheckpoint(f"{name}: a head has {self._head} elements, more than {_HEAD} bytes hold")

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor: whole heads are read."""
        if not out.size:
            return
        values = np.empty(self._head, self.dtype)
        shape = (2, self._pairs, self._row) if self._interleave else (self._pairs, 2, self._row)
        for head in range(start // self._head, -(-(start + out.size) // self._head)):
            self._of.read_into(values, head * self._head)
            turned = values.reshape(shape).transpose(1, 0, 2).reshape(-1)
            _copy_overlap(out, start, turned, head * self._head)


def _copy_overlap(out: np.ndarray, start: int, values: np.ndarray, begin: int) -> None:
    """Copy what `out`, elements from `start` on, and `values`, elements from `begin` on, have in common."""
    low, high = max(start, begin), min(start + out.size, begin + values.size)
    if low < high:
        out[low - start : high - start] = values[low - begin : high - begin]
