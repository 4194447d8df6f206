"""Ranks: a set of world ranks, such as a group of a mesh, whose size does not count in time or memory.

Groups of a mesh are regular: {first + i * stride + j * other stride + ...}. Other sets are kept rank by rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

__all__ = ["Ranks"]

Axes = tuple[tuple[int, int], ...]  # (stride, count), the largest stride first


@dataclass(frozen=True)
class Ranks:
    """The ranks `first` + a multiple below `count` of each stride, for each of `firsts`.

    Equal sets are equal: there are several firsts only where the set is irregular, and then no axes.
    """

    firsts: tuple[int, ...]
    axes: Axes = ()

    @classmethod
    def of(cls, ranks: Iterable[int]) -> "Ranks":
        """Ranks in any order."""
        if isinstance(ranks, range) and len(ranks) > 1 and ranks.step > 0:
            return cls((ranks[0],), ((ranks.step, len(ranks)),))
        values = sorted(set(ranks))
        axes = _axes_of(values)
        return cls(tuple(values)) if axes is None else cls((values[0],), axes)

    @property
    def size(self) -> int:
        """How many there are."""
        size = len(self.firsts)
        for _, count in self.axes:
            size *= count
        return size

    def __iter__(self) -> Iterator[int]:
        for first in self.firsts:
            for steps in product(*(range(count) for _, count in self.axes)):
                yield first + sum(step * stride for step, (stride, _) in zip(steps, self.axes, strict=True))

    def __contains__(self, rank: int) -> bool:
        if not self.axes:
            return rank in self.firsts
        left = rank - self.firsts[0]
        for stride, count in self.axes:
            left -= max(0, min(left // stride, count - 1)) * stride
        return left == 0

    def moved(self, by: int) -> "Ranks":
        """Each rank, `by` further."""
        return Ranks(tuple(first + by for first in self.firsts), self.axes) if by else self

    def spread(self, group: "Ranks", origin: int) -> "tuple[Ranks, int]":
        """The union of this set moved from `origin` to each rank of a group, and how often it has each rank.

        The group has `origin`. A rank of the group that is in the set already has the same set.
        """
        if len(self.firsts) == len(group.firsts) == 1:
            axes: Axes | None = self.axes
            first, times, left = self.firsts[0], 1, origin - group.firsts[0]
            for stride, count in group.axes:
                index = min(left // stride, count - 1)
                left -= index * stride
                line = range(origin - index * stride, origin + (count - index) * stride, stride)
                if line[0] in self and line[-1] in self and all(rank in self for rank in line):
                    times *= count
                    continue
                first += line[0] - origin
                axes = _with(axes, (stride, count))
            if axes is not None:
                return Ranks((first,), axes), times
        moved = [self if rank in self else self.moved(rank - origin) for rank in group]
        every = [rank for ranks in moved for rank in ranks]
        found = Ranks.of(every)
        return found, len(every) // found.size


def _axes_of(values: Sequence[int]) -> Axes | None:
    """The axes of ascending ranks; None for an irregular set."""
    if len(values) == 1:
        return ()
    stride = values[1] - values[0]
    count = next((n for n in range(2, len(values)) if values[n] - values[n - 1] != stride), len(values))
    starts = values[::count]
    if len(values) % count or any(
        values[n] != values[n - n % count] + n % count * stride for n in range(len(values))
    ):
        return None
    above = _axes_of(starts)
    return None if above is None else (*above, (stride, count))


def _with(axes: Axes | None, new: tuple[int, int]) -> Axes | None:
    """Axes and one more; None where sums of their steps could meet."""
    if axes is None:
        return None
    merged: list[tuple[int, int]] = []
    for stride, count in sorted((*axes, new)):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0], merged[-1][1] * count
        elif merged and stride < merged[-1][0] * merged[-1][1]:
            return None
        else:
            merged.append((stride, count))
    return tuple(reversed(merged))
