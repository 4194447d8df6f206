"""Flags: counters in shared memory by which the ranks of a node meet in a call.

Every rank writes its own cache lines: the number of its latest call, the call, and the data of a small call.
A waiting rank polls for a moment and then sleeps in the kernel until a counter changes (futex.py).
"""

import weakref
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from shardrt.comm import futex, supervision
from shardrt.comm.calls import HEAD, PACKED, left
from shardrt.comm.notices import Page, parts_of
from shardrt.comm.segments import map_shared

LITTLE = 1 << 13  # bytes of data that fit into a rank's row with its call
_READY, _DONE, _LEFT, _ASLEEP = range(4)  # int64 words at the start of a rank's row
_BOX = HEAD + LITTLE  # bytes of one call; a row has a line of words, then boxes for two calls
_ROW = 64 + 2 * _BOX
_WORDS = _ROW // 8
_BOXES = 64, 64 + _BOX
_LOOKS = 150  # polls before a rank sleeps; about 20 us
_NAP = 50_000_000  # nanoseconds after which a sleeper checks whether a peer has left

_open: "weakref.WeakSet[Flags]" = weakref.WeakSet()


class Shown(NamedTuple):
    """One call of this rank, prepared for an even and for an odd sequence number.

    Attributes:
        places: where this rank's data go; None if no data travel with the call.
    """

    call: bytes
    pages: list[Page]
    places: list[np.ndarray | None]


class Flags:
    """The counters of one communicator, whose ranks share a node."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        """Collective over `mpi`.

        Raises:
            SharedMemoryUnavailable: on unknown systems.
        """
        futex.check()
        self.rank = mpi.rank
        self.size = mpi.size
        self.sequence = 0  # number of the latest collective of this communicator
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
        """Free the memory. No prepared call may be left."""
        _open.discard(self)
        self._boxes.clear()
        self._heads.clear()
        self._words.release()

    def forget(self) -> None:
        """Prepared calls are not used again: nothing to free."""

    def fits(self, nbytes: int, sliced: bool) -> bool:
        """Whether so many bytes of data can travel with a call."""
        return nbytes <= LITTLE

    def prepare(
        self, call: bytes, data: np.ndarray | None = None, sliced: bool = False, root: int | None = None
    ) -> Shown:
        """Prepare `call` with data like `data`, which fit: all for each rank, or for each its slice.

        Args:
            root: only this rank gives data.
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
        """Publish this rank's call with its data, and wait for the calls of all ranks.

        The page lasts until this rank's next call. Two pages suffice: a rank fills the page of call s + 2
        only after all ranks have come to call s + 1. On return this rank sees all earlier writes of the other
        ranks. Raises PeerFailed.
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
        """Return when every rank has finished reading the other ranks' memory in this call."""
        self._publish(_DONE)
        self._wait(_DONE, doing)

    def has_left(self, rank: int) -> bool:
        """Whether a rank's program has ended."""
        return bool(self._words[rank * _WORDS + _LEFT])

    def leave(self) -> None:
        """Mark that this rank's program ends, so that waiting ranks raise."""
        self._words[self._own + _LEFT] = 1
        self._window.Sync()
        for column in (_READY, _DONE):  # wake ranks that sleep on these words
            self._wake(column)

    def _publish(self, column: int) -> None:
        """Set this rank's counter after all its earlier writes, and wake the ranks that sleep on it.

        Before a rank sleeps it writes the number of its call. A sleeping rank may be one call ahead.
        """
        self._window.Sync()
        self._words[self._own + column] = self.sequence
        self._window.Sync()
        if self._words[self._own + _ASLEEP] >= self.sequence - 1:
            self._wake(column)

    def _wait(self, column: int, doing: str) -> None:
        """Return when every rank's counter has come so far. Then this rank sees their earlier writes."""
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
            has_left = self._words[row + _LEFT]  # read before the counter: the peer may arrive and then leave
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
