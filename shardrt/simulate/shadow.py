"""Shadow memory: who wrote each byte last, and who has read it since.

FastTrack (Flanagan and Freund 2009, "FastTrack: Efficient and Precise Dynamic Race Detection", PLDI) keeps of
each place in memory the last write and the reads since, each as (thread, clock): what went before them was
compared when they came. An access is compared with these alone. If each such pair of *neighbours* is in
order, so is every pair of accesses in conflict: one leads to the other over neighbours.

Which accesses are neighbours follows from the order in which they are given, and from no wait. So shadow
memory is gone through once, and the pairs are then held against as many orders as one likes (waits.py).

A place is a cell of addresses. Cells are split where an access begins or ends, and a write makes one cell of
all that it covers.
"""

from bisect import bisect_left
from collections.abc import Iterable

from shardrt.device.program import Range


class Shadow:
    """Points (order.py) stand for (thread, clock). `access` them in ascending order."""

    def __init__(self) -> None:
        self._starts = [0]  # of cells, ascending; a cell ends where the next begins
        self._writes = [-1]  # of each cell, the last point that wrote it
        self._reads: list[dict[int, int]] = [{}]  # of each cell, by thread, the last point since that read it

    def access(
        self, point: int, thread: int, reads: Iterable[Range], writes: Iterable[Range]
    ) -> list[tuple[int, int]]:
        """What `point` does in `thread`; gives (earlier point, address) of its neighbours.

        A point may come more than once, and may be of the same thread.
        """
        found = []
        reads, writes = ([r for r in ranges if r.start < r.stop] for ranges in (reads, writes))
        for memory in reads:
            for cell in self._cells(memory):
                found += self._written(cell)
                self._reads[cell][thread] = point
        for memory in writes:
            found += self.conflicts(memory)
            cells = self._cells(memory)
            whole = slice(cells.start, cells.stop)
            self._starts[whole], self._writes[whole], self._reads[whole] = [memory.start], [point], [{}]
        return [neighbour for neighbour in found if neighbour[0] < point]

    def conflicts(self, memory: Range) -> list[tuple[int, int]]:
        """The neighbours that a write of this memory would have now."""
        found = []
        for cell in self._cells(memory) if memory.start < memory.stop else ():
            found += [(earlier, self._starts[cell]) for earlier in self._reads[cell].values()]
            found += self._written(cell)
        return found

    def _written(self, cell: int) -> list[tuple[int, int]]:
        """The last write of a cell, with its address."""
        return [(self._writes[cell], self._starts[cell])] if self._writes[cell] >= 0 else []

    def _cells(self, memory: Range) -> range:
        """The cells of a range that is not empty, split so that they are it exactly."""
        return range(self._split(memory.start), self._split(memory.stop))

    def _split(self, address: int) -> int:
        """The cell that begins at an address, made if there is none."""
        cell = bisect_left(self._starts, address)
        if cell == len(self._starts) or self._starts[cell] != address:
            self._starts.insert(cell, address)
            self._writes.insert(cell, self._writes[cell - 1])
            self._reads.insert(cell, dict(self._reads[cell - 1]))
        return cell
