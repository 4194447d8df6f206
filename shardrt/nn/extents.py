"""Which elements of a parameter a rank has: integers only, no arrays and no ranks.

The elements are a tuple of Extents, counted in memory order. A shard of a parameter is one extent. Columns of
a matrix are one extent too: a run for each row, at a stride. Rows of several fused matrices are an extent
for each matrix. The order of the extents is the order in which the rank keeps the elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardrt.device import Array

__all__ = ["Extent", "Extents", "contiguous", "cut", "spans", "take"]


@dataclass(frozen=True)
class Extent:
    """`count` runs of `length` neighbours, each of which begins `stride` elements after the one before.

    length and count are at least 1, and a stride at least `length`.
    """

    first: int
    length: int
    stride: int
    count: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.length * self.count

    @property
    def stop(self) -> int:
        """The end: the last element is stop - 1."""
        return self.first + (self.count - 1) * self.stride + self.length

    def begin(self, number: int) -> int:
        """The first element of a run."""
        return self.first + number * self.stride

    def cut(self, start: int, stop: int) -> "Extents":
        """Elements [start, stop) of this extent: the rest of a run, whole runs, the begin of another run."""
        if start >= stop:
            return ()
        (row, inside), (last, end) = divmod(start, self.length), divmod(stop, self.length)
        if row == last:
            return contiguous(self.begin(row) + inside, end - inside)
        rest = ()
        if inside:
            rest = contiguous(self.begin(row) + inside, self.length - inside)
            row += 1
        whole = (Extent(self.begin(row), self.length, self.stride, last - row),) if row < last else ()
        return rest + whole + contiguous(self.begin(last), end)


Extents = tuple[Extent, ...]


def contiguous(first: int, length: int) -> Extents:
    """One extent of `length` neighbours; () for no elements."""
    return (Extent(first, length, length, 1),) if length else ()


def size_of(extents: Extents) -> int:
    """The number of elements."""
    return sum(extent.size for extent in extents)


def cut(extents: Extents, start: int, stop: int) -> Extents:
    """Elements [start, stop), counted in the order of the extents."""
    found: Extents = ()
    for extent in extents:
        found += extent.cut(max(start, 0), min(stop, extent.size))
        start, stop = start - extent.size, stop - extent.size
    return found


def spans(extents: Extents) -> Iterator[tuple[int, int, int]]:
    """(place, first, length) of each run: it has elements from `first` on, and lies at `place` in a shard."""
    place = 0
    for extent in extents:
        for number in range(extent.count):
            yield place, extent.begin(number), extent.length
            place += extent.length


def take(extents: Extents, whole: Array) -> Array:
    """The elements, 1-D, from an array of the whole parameter; a view if they are neighbours."""
    flat = whole.reshape(-1)
    pieces = [flat[first : first + length] for _, first, length in spans(extents)]
    return pieces[0] if len(pieces) == 1 else np.concatenate([flat[:0], *pieces])
