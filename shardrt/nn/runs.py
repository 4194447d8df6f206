"""Which elements of a whole a rank has: integers only, no arrays and no ranks.

A part is a tuple of Runs of a parameter's elements, counted in memory order. A shard of a parameter is one
run; rows of several matrices that lie in one are a run for each; columns of a matrix are a run for each row,
in one Runs. The elements of a part have an order, in which they lie side by side where the rank keeps them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Runs:
    """`count` runs of `length` neighbours, each of which begins `stride` elements after the one before.

    length and count are at least 1, and a stride at least `length`.
    """

    first: int
    length: int
    stride: int
    count: int

    @property
    def size(self) -> int:
        """How many elements these are."""
        return self.length * self.count

    @property
    def stop(self) -> int:
        """The element behind the last one."""
        return self.first + (self.count - 1) * self.stride + self.length

    def begin(self, number: int) -> int:
        """The first element of a run."""
        return self.first + number * self.stride

    def cut(self, start: int, stop: int) -> "Part":
        """The elements [start, stop) of these: the rest of a run, whole runs, the begin of another."""
        if start >= stop:
            return ()
        (row, inside), (last, end) = divmod(start, self.length), divmod(stop, self.length)
        if row == last:
            return run(self.begin(row) + inside, end - inside)
        rest = ()
        if inside:
            rest = run(self.begin(row) + inside, self.length - inside)
            row += 1
        whole = (Runs(self.begin(row), self.length, self.stride, last - row),) if row < last else ()
        return rest + whole + run(self.begin(last), end)


Part = tuple[Runs, ...]


def run(first: int, length: int) -> Part:
    """`length` neighbours; of no elements, the empty part."""
    return (Runs(first, length, length, 1),) if length else ()


def size_of(part: Part) -> int:
    """How many elements a part has."""
    return sum(runs.size for runs in part)


def cut(part: Part, start: int, stop: int) -> Part:
    """The elements [start, stop) of a part, counted in its order."""
    found: Part = ()
    for runs in part:
        found += runs.cut(max(start, 0), min(stop, runs.size))
        start, stop = start - runs.size, stop - runs.size
    return found


def spans(part: Part) -> Iterator[tuple[int, int, int]]:
    """(place, first, length) of each run: from `place` on the part has the elements from `first` on."""
    place = 0
    for runs in part:
        for number in range(runs.count):
            yield place, runs.begin(number), runs.length
            place += runs.length


def take(part: Part, whole: Array) -> Array:
    """The elements of a part, 1-D, from an array of the whole: a view where they are neighbours."""
    flat = whole.reshape(-1)
    pieces = [flat[first : first + length] for _, first, length in spans(part)]
    return pieces[0] if len(pieces) == 1 else np.concatenate([flat[:0], *pieces])


def put(part: Part, whole: np.ndarray, values: np.ndarray) -> None:
    """Set the elements of a part, in an array of the whole, to `values` (1-D)."""
    flat = whole.reshape(-1)
    for place, first, length in spans(part):
        flat[first : first + length] = values[place : place + length]
