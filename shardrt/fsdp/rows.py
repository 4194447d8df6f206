"""Rows: how a group's gradients lie and are sent, where that is not the flat buffer as it is.

Of a group of which only a part is trained, only that part has full gradients, one parameter after the other.
What each shard has of them goes side by side into a row of the buffer that is sent, a row for each rank. The
reduce-scatter sums rows, and each rank puts its own where the optimizer looks for it. A row may begin with a
number for each parameter, whether this rank has used it: the sum tells every rank how many ranks have.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

from shardrt.fsdp.layout import Layout, aligned

Array = Any


@dataclass(frozen=True)
class Move:
    """Gradients [source, source + count): in the row from `place` on, in the shard from `start` on."""

    source: int
    place: int
    start: int
    count: int


@dataclass(frozen=True)
class Rows:
    """Full gradients in `full` elements, sent in rows of `size`; what no move names is read by nobody.

    offsets: position of a trained parameter -> where its full gradient begins. gaps: (start, stop) of what
    lies between them and is sent with them. moves: for each shard. uses: how many numbers a row begins with.
    """

    offsets: dict[int, int]
    gaps: tuple[tuple[int, int], ...]
    full: int
    moves: tuple[tuple[Move, ...], ...]
    size: int
    uses: int

    @classmethod
    def plan(cls, layout: Layout, trained: Collection[int], tell_uses: bool) -> "Rows | None":
        """Rows for the parameters at the positions `trained`; None where they would save nothing."""
        runs = _runs(sorted(trained))
        uses = len(layout.entries) if tell_uses else 0
        offsets: dict[int, int] = {}
        gaps: list[tuple[int, int]] = []
        rows: list[list[Move]] = [[] for _ in range(layout.shards)]
        ends, full = [aligned(uses)] * layout.shards, 0
        for run in runs:
            begin, stop = layout.entries[run[0]].offset, layout.entries[run[-1]].stop
            shift = full - begin
            offsets |= {position: layout.entries[position].offset + shift for position in run}
            gaps += [(layout.entries[p].stop + shift, layout.entries[p + 1].offset + shift) for p in run[:-1]]
            for shard in range(layout.shards):
                low, high = layout.shard_range(shard)
                first, last = max(begin, low), min(stop, high)
                if first < last:
                    rows[shard].append(Move(first + shift, ends[shard], first - low, last - first))
                    ends[shard] = aligned(ends[shard] + last - first)
            full = aligned(stop + shift)
        size = aligned(-(-max(16, *ends) // layout.copies)) * layout.copies
        if not tell_uses and size >= layout.shard_size:
            return None
        gaps = [(start, stop) for start, stop in gaps if start < stop]
        return cls(offsets, tuple(gaps), max(full, size), tuple(map(tuple, rows)), size, uses)

    @property
    def total(self) -> int:
        """Elements of all rows."""
        return len(self.moves) * self.size

    def views(self, array: Array, layout: Layout) -> dict[int, Array]:
        """Position -> the place of its full gradient, in its shape."""
        shapes = {position: layout.entries[position].shape for position in self.offsets}
        return {
            position: array[offset : offset + prod(shapes[position])].reshape(shapes[position])
            for position, offset in self.offsets.items()
        }


def _runs(positions: list[int]) -> list[list[int]]:
    """Neighbours together."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
