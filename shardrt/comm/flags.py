"""Counters that the ranks of a node show each other, and a way to sleep until one of them moves.

Every rank has its own cache lines in shared memory: how far it has come, what it calls, and the data of a
small call. A waiting rank looks for a moment and then sleeps in the kernel (futex.py).
"""

import weakref
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from shardrt.comm import futex, supervision
from shardrt.comm.calls import HEAD, PACKED, left
from shardrt.comm.notices import Page, parts_of
from shardrt.comm.segments import map_shared

LITTLE = 1 << 13  # bytes of data that go along, for which there is room in shared memory
_READY, _DONE, _LEFT, _ASLEEP = range(4)  # int64 words at the start of a rank's row
_BOX = HEAD + LITTLE  # bytes; what the last two calls were comes behind a line for the words
_ROW = 64 + 2 * _BOX
_WORDS = _ROW // 8
_BOXES = 64, 64 + _BOX
_LOOKS = 150  # before a rank sleeps; about 20 us
_NAP = 50_000_000  # nanoseconds until a sleeper looks again unwoken, in case a peer has left

_open: "weakref.WeakSet[Flags]" = weakref.WeakSet()


class Shown(NamedTuple):
    """One call of this rank, prepared: as it is shown when the sequence is even, and when it is odd.

    places: for this rank's data, None where they don't go along.
    """

    call: bytes
    pages: list[Page]
    places: list[np.ndarray | None]


class Flags:
    """The counters of one communicator, whose ranks share a node."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        """Collective over `mpi`. Raises SharedMemoryUnavailable where the system is not known."""
        futex.check()
        self.rank = mpi.rank
        self.size = mpi.size
        self.sequence = 0  # of the collectives of this communicator, the latest
        self._window = futex.fence()
        # Not an MPI window, which only a collective call frees, and which lies in /dev/shm.
        memory = map_shared(mpi, _ROW * mpi.size)
        rows = memoryview(memory)
        self._words = rows.cast("q")
        boxes = [[rows[row + at : row + at + _BOX] for row in range(0, len(rows), _ROW)] for at in _BOXES]
        self._boxes = boxes  # for even and odd calls, by rank
        self._heads = [[box[:PACKED] for box in half] for half in boxes]
        self._address = memory.ctypes.data
        self._own = _WORDS * mpi.rank
        _open.add(self)

    def close(self) -> None:
        """Give the memory back, when nothing that was prepared is left."""
        _open.discard(self)
        self._boxes.clear()
        self._heads.clear()
        self._words.release()

    def forget(self) -> None:
        """What was prepared is not told any more."""

    def fits(self, nbytes: int, sliced: bool) -> bool:
        """Whether so many bytes of data go along."""
        return nbytes <= LITTLE

    def prepare(
        self, call: bytes, data: np.ndarray | None = None, sliced: bool = False, root: int | None = None
    ) -> Shown:
        """`call` to be told with data like these, that fit: all of them, or to each rank its slice.

        root: only what this rank has is shown.
        """
        if data is None:
            return Shown(call, [Page(heads, []) for heads in self._heads], [None, None])
        count = data.size // self.size if sliced else data.size
        start = self.rank * count if sliced else 0
        parts = [parts_of(boxes, data.dtype, start, count) for boxes in self._boxes]
        pages = [Page(*both) for both in zip(self._heads, parts, strict=True)]
        if root not in (None, self.rank):
            return Shown(call, pages, [None, None])
        return Shown(
            call, pages, [parts_of([boxes[self.rank]], data.dtype, 0, data.size)[0] for boxes in self._boxes]
        )

    def exchange(self, notice: Shown, data: np.ndarray | None, doing: str) -> Page:
        """Say what this rank calls, with its data, and wait until all ranks have said it.

        The page lasts until this rank's next call: two suffice, for a rank fills the one of call s + 2 only
        after it has seen everyone arrive at s + 1. What ranks wrote before they came here is seen.
        Raises PeerFailed.
        """
        self.sequence += 1
        half = self.sequence % 2
        shown = notice.pages[half]
        shown.heads[self.rank][:] = notice.call
        place = notice.places[half]
        if place is not None:
            place[:] = data
        self._publish(_READY)
        self._wait(_READY, doing)
        return shown

    def part(self, doing: str) -> None:
        """Return when every rank is done with the memory of the others in this call."""
        self._publish(_DONE)
        self._wait(_DONE, doing)

    def has_left(self, rank: int) -> bool:
        """Whether a rank's program has ended."""
        return bool(self._words[rank * _WORDS + _LEFT])

    def leave(self) -> None:
        """Tell the others that this rank's program ends: whoever waits for it would wait forever."""
        self._words[self._own + _LEFT] = 1
        self._window.Sync()
        for column in (_READY, _DONE):  # the words that others sleep on; they look again
            self._wake(column)

    def _publish(self, column: int) -> None:
        """Say that this rank has come so far, after everything it has written; wake those who sleep on it.

        A rank that goes to sleep first says in which call. Several may, of which one is a call ahead.
        """
        self._window.Sync()
        self._words[self._own + column] = self.sequence
        self._window.Sync()
        if self._words[self._own + _ASLEEP] >= self.sequence - 1:
            self._wake(column)

    def _wait(self, column: int, doing: str) -> None:
        """Return when every rank has come so far; then what they wrote before is seen."""
        for rank in range(self.size):
            if self._words[rank * _WORDS + column] < self.sequence:
                self._wait_for(rank, column, doing)
        self._window.Sync()

    def _wait_for(self, rank: int, column: int, doing: str) -> None:
        row, value = rank * _WORDS, self.sequence
        for _ in range(_LOOKS):
            self._window.Sync()
            if self._words[row + column] >= value:
                return
        while True:
            self._words[row + _ASLEEP] = value
            has_left = self._words[row + _LEFT]  # before the counter: it may arrive and then leave
            self._window.Sync()
            seen = self._words[row + column]
            if seen >= value:
                return
            if has_left:
                raise left(rank, self.rank, doing)
            futex.sleep(self._address + 8 * (row + column), seen, _NAP)

    def _wake(self, column: int) -> None:
        futex.wake(self._address + 8 * (self._own + column))


@supervision.at_program_end
def _leave() -> None:
    for flags in list(_open):
        flags.leave()
