"""Shadow memory: the last writer of each byte, and its readers since.

FastTrack (Flanagan and Freund 2009, "FastTrack: Efficient and Precise Dynamic Race Detection", PLDI) keeps of
each place in memory the last write and the reads since, each as (thread, clock): what went before them was
compared when they came. An access is compared with these alone. If each such pair of *neighbours* is in
order, so is every pair of accesses in conflict: one leads to the other over neighbours.

Which accesses are neighbours follows from the order in which they are given, and from no wait. So shadow
memory is gone through once, and the pairs are then held against as many orders as one likes (waits.py).

A place is a cell of addresses. Cells are split where an access begins or ends, and a write makes one cell of
all that it covers. Most accesses are of one cell as it is, which is looked up by its address.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardrt.device.program import Range

_END = 1 << 64  # behind all addresses


@dataclass(slots=True, eq=False)
class _Cell:
    """write: the last point that wrote it, -1 if none has. reads: by thread, the last since that read it."""

    start: int
    stop: int
    write: int = -1
    reads: dict[int, int] = field(default_factory=dict)


class Shadow:
    """Points (order.py) stand for (thread, clock). `access` them in ascending order."""

    def __init__(self) -> None:
        self._starts = [-1]  # of cells, ascending
        self._cells = {-1: _Cell(-1, _END)}  # by their starts

    def access(
        self, point: int, thread: int, reads: Iterable[Range], writes: Iterable[Range]
    ) -> list[tuple[int, int]]:
        """What `point` does in `thread`; gives (earlier point, address) of its neighbours.

        A point may come more than once, and may be of the same thread.
        """
        found = []
        for memory in reads:
            for cell in self._cells_of(memory):
                if cell.write >= 0:
                    found.append((cell.write, cell.start))
                cell.reads[thread] = point
        for memory in writes:
            cells = self._cells_of(memory)
            for cell in cells:
                found += _conflicts(cell)
            if cells:
                written = self._joined(cells)
                written.write, written.reads = point, {}
        return [neighbour for neighbour in found if neighbour[0] < point]

    def conflicts(self, memory: Range) -> list[tuple[int, int]]:
        """The neighbours that a write of this memory would have now."""
        return [each for cell in self._cells_of(memory) for each in _conflicts(cell)]

    def _cells_of(self, memory: Range) -> list[_Cell]:
        """The cells of a range, split so that they are it exactly."""
        start, stop = memory.start, memory.stop
        cell = self._cells.get(start)
        if cell is not None and cell.stop == stop:
            return [cell]
        if start >= stop:
            return []
        self._split(start)
        self._split(stop)
        starts = self._starts
        return [self._cells[each] for each in starts[bisect_left(starts, start) : bisect_left(starts, stop)]]

    def _split(self, address: int) -> None:
        """Have a cell begin at an address."""
        if address not in self._cells:
            place = bisect_right(self._starts, address)
            cell = self._cells[self._starts[place - 1]]
            self._cells[address] = _Cell(address, cell.stop, cell.write, dict(cell.reads))
            self._starts.insert(place, address)
            cell.stop = address

    def _joined(self, cells: list[_Cell]) -> _Cell:
        """Neighbouring cells as one."""
        first, *others = cells
        if others:
            place = bisect_right(self._starts, first.start)
            del self._starts[place : place + len(others)]
            for cell in others:
                del self._cells[cell.start]
            first.stop = others[-1].stop
        return first


def _conflicts(cell: _Cell) -> list[tuple[int, int]]:
    """What a write of it conflicts with, with its address."""
    found = [(earlier, cell.start) for earlier in cell.reads.values()]
    if cell.write >= 0:
        found.append((cell.write, cell.start))
    return found
