"""Ranks of one node that read each other's memory: no copy, or one.

An all_gather on a buffer from `allocate(shared=True)` only waits until every rank has written its slice: it
takes microseconds at any size. A reduce_scatter on a buffer from `allocate(shared=False)` is one pass that
reads my slice from every rank's buffer and writes the sum; an all_to_all there is one copy. Little data go
along when ranks tell each other what they call; other arrays go through MPI.
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from shardrt.comm.calls import Names
from shardrt.comm.flags import Flags
from shardrt.comm.mpi import MPICommunicator
from shardrt.comm.reduction import combine
from shardrt.comm.segments import Place, Segments


class ShmCommunicator(MPICommunicator):
    """A group of MPI processes on one node."""

    shares_memory = True

    def __init__(
        self, mpi: MPI.Intracomm, segments: Segments | None = None, names: Names | None = None
    ) -> None:
        """Collective over `mpi`. `segments`: the memory of another communicator over the same ranks.

        `names`: of the communicator that this one was made from.
        """
        self._flags = Flags(mpi)
        super().__init__(mpi, names, self._flags)
        self._segments = segments or Segments(mpi)

    def split(self, color: int | None, key: int) -> "ShmCommunicator | None":
        mpi = self._split(color, key)
        return None if mpi is None else ShmCommunicator(mpi, None, self._names)

    def duplicate(self) -> "ShmCommunicator":
        self._meet("split", None)
        return ShmCommunicator(self._mpi.Dup(), self._segments, self._names)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        return self._segments.allocate(self._mpi, count, dtype, shared)

    def _all_gather(self, buffer: np.ndarray, what: str) -> None:
        place = self._segments.find(buffer)
        n = buffer.size // self.size
        little = self._flags.fits(n * buffer.itemsize, False)
        if place is None or (little and not place.segment.shared):
            return super()._all_gather(buffer, what)
        self._meet("all_gather", buffer, 0, what, "", place.word)
        if place.segment.shared:
            return None  # everyone's slice is written, here
        for step in range(1, self.size):  # each rank begins with another peer
            peer = (self.rank + step) % self.size
            buffer[peer * n : (peer + 1) * n] = place.of(peer, buffer)[peer * n : (peer + 1) * n]
        return self._flags.part("all_gather")

    def _reduce_scatter(
        self,
        output: np.ndarray,
        buffer: np.ndarray,
        scale: float,
        accumulate: bool,
        op: str,
        kind: str,
        what: str,
    ) -> None:
        place = self._separate("reduce_scatter", buffer)
        if place is None or self._flags.fits(buffer.nbytes, True):
            return super()._reduce_scatter(output, buffer, scale, accumulate, op, kind, what)
        self._meet("reduce_scatter", buffer, op, what, kind, place.word)
        own = slice(self.rank * output.size, (self.rank + 1) * output.size)
        combine(output, [place.of(r, buffer)[own] for r in range(self.size)], scale, accumulate, op, kind)
        return self._flags.part("reduce_scatter")

    def _all_reduce(self, buffer: np.ndarray, op: str, what: str) -> None:
        self._separate("all_reduce", buffer)
        super()._all_reduce(buffer, op, what)

    def _broadcast(self, buffer: np.ndarray, root: int, what: str) -> None:
        place = self._segments.find(buffer)
        if place is None or not place.segment.shared:
            super()._broadcast(buffer, root, what)
        else:  # what root wrote is already here
            self._meet("broadcast", buffer, root, what, "", place.word)

    def _all_to_all(self, output: np.ndarray, buffer: np.ndarray, what: str) -> None:
        place = self._separate("all_to_all", buffer)
        if place is None or self._flags.fits(buffer.nbytes, True):
            return super()._all_to_all(output, buffer, what)
        self._meet("all_to_all", buffer, 0, what, "", place.word)
        n = buffer.size // self.size
        own = slice(self.rank * n, (self.rank + 1) * n)
        for step in range(self.size):  # each rank begins with another peer
            peer = (self.rank + step) % self.size
            output[peer * n : (peer + 1) * n] = place.of(peer, buffer)[own]
        return self._flags.part("all_to_all")

    def _separate(self, call: str, buffer: np.ndarray) -> Place | None:
        """Where a buffer lies of which each rank has its own. Raises ValueError if they have one together."""
        place = self._segments.find(buffer)
        if place is not None and place.segment.shared:
            raise ValueError(
                f"{call}: buffer comes from allocate(shared=True), one memory for all ranks, so their values "
                f"cannot differ; allocate it with shared=False"
            )
        return place
