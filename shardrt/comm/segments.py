"""Memory that the ranks of a node have in common, and which of it an array lies in.

A segment is an anonymous file in memory (memfd) that one rank makes and all map: it counts as memory, not
against /dev/shm (64 MB in a default container), and goes away with the last process that maps it.
"""

import mmap
import os
from bisect import bisect
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from shardrt.comm.flags import SharedMemoryUnavailable

_PAGE = mmap.PAGESIZE
_HUGE = 1 << 21


@dataclass(frozen=True)
class Segment:
    """One allocation: a region of bytes per rank, all the same region where `shared`."""

    number: int
    shared: bool
    regions: list[np.ndarray]  # uint8, by rank
    start: int  # address of this rank's region
    nbytes: int


class Place(NamedTuple):
    """Where an array lies: `offset` bytes into every rank's region of `segment`."""

    segment: Segment
    offset: int

    @property
    def word(self) -> int:
        """The place as one integer, the same on all ranks that made the same allocation."""
        return (self.segment.number + 1) << 44 | self.offset

    def of(self, rank: int, like: np.ndarray) -> np.ndarray:
        """The counterpart of `like` in the region of `rank`."""
        return self.segment.regions[rank][self.offset : self.offset + like.nbytes].view(like.dtype)


class Segments:
    """The allocations of one group of ranks, found by address. Memory is kept as long as this object."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        """Collective over `mpi`. Raises SharedMemoryUnavailable."""
        self._segments: list[Segment] = []  # in the order of their addresses here
        self._starts: list[int] = []
        _map(mpi, _PAGE)  # whether it works at all is known now, before anyone builds on it

    def allocate(self, mpi: MPI.Intracomm, count: int, dtype: Any, shared: bool) -> np.ndarray:
        """A 1-D array of zeros: this rank's own region, or the one region of all. Collective over `mpi`."""
        nbytes = count * np.dtype(dtype).itemsize
        stride = -(-max(nbytes, 1) // _PAGE) * _PAGE
        ranks = mpi.size
        memory = _map(mpi, stride if shared else stride * ranks)
        starts = [0] * ranks if shared else range(0, stride * ranks, stride)
        regions = [memory[start : start + nbytes] for start in starts]
        own = regions[mpi.rank]
        segment = Segment(len(self._segments), shared, regions, own.ctypes.data, nbytes)
        index = bisect(self._starts, segment.start)
        self._starts.insert(index, segment.start)
        self._segments.insert(index, segment)
        return own.view(dtype)

    def find(self, array: np.ndarray) -> Place | None:
        """Where `array` lies; None for memory that did not come from here, and for no memory."""
        address = MPI.Get_address(array)
        index = bisect(self._starts, address) - 1
        if index < 0 or array.nbytes == 0:  # an empty array may lie at the border of two segments
            return None
        segment = self._segments[index]
        offset = address - segment.start
        return Place(segment, offset) if offset + array.nbytes <= segment.nbytes else None


def _map(mpi: MPI.Intracomm, nbytes: int) -> np.ndarray:
    """`nbytes` of memory, mapped by all ranks of `mpi`. Pages come when they are first written."""
    file = error = None
    path = ""
    if mpi.rank == 0:
        file = os.memfd_create("shardrt")
        os.ftruncate(file, nbytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
    path = mpi.bcast(path)
    try:
        file = os.open(path, os.O_RDWR) if file is None else file
        region = mmap.mmap(file, nbytes)
    except OSError as raised:
        error = f"rank {mpi.rank} cannot map {nbytes} bytes of rank 0's memory: {raised}"
    errors = [text for text in mpi.allgather(error) if text]
    if file is not None:
        os.close(file)
    if errors:
        raise SharedMemoryUnavailable(errors[0])
    if nbytes >= _HUGE:
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)
