"""Memory that the ranks of a node share, and where in it an array lies.

A segment is an anonymous file in memory (memfd) that one rank makes and all map: it counts as memory, not
against /dev/shm (64 MB in a default container), and goes away with the last process that maps it.
"""

import errno
import mmap
import os
import resource
import weakref
from bisect import bisect
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from shardrt.comm.errors import Refused

_PAGE = mmap.PAGESIZE
_HUGE = 1 << 21
_OFFSET = 44  # bits of a word that say where in its segment a place lies


class SharedMemoryUnavailable(RuntimeError):
    """These ranks cannot share memory. Raised on all of them."""


@dataclass(frozen=True)
class Segment:
    """One allocation: a region of bytes per rank, all the same region where `shared`."""

    number: int
    shared: bool
    memory: "weakref.ref[np.ndarray]"  # uint8, every rank's region; arrays of this rank's keep it
    stride: int  # bytes from one rank's region to the next; 0 where it is the same
    start: int  # address of this rank's region
    nbytes: int

    def region(self, rank: int) -> np.ndarray:
        """What `rank` has, as long as an array of this rank's is there."""
        first = rank * self.stride
        return self.memory()[first : first + self.nbytes]


class SharedOffset(NamedTuple):
    """Where an array lies: `offset` bytes into every rank's region of `segment`."""

    segment: Segment
    offset: int

    @property
    def word(self) -> int:
        """The place as one integer, the same on all ranks that made the same allocation."""
        return (self.segment.number + 1) << _OFFSET | self.offset

    def beside(self, word: int) -> bool:
        """Whether a place with this word is in the same segment."""
        return word >> _OFFSET == self.word >> _OFFSET

    def at(self, word: int, rank: int, size: int, dtype: np.dtype) -> np.ndarray:
        """`size` elements at a place beside this one in the region of `rank`."""
        offset = word & (1 << _OFFSET) - 1
        return self.segment.region(rank)[offset : offset + size * dtype.itemsize].view(dtype)

    def of(self, rank: int, like: np.ndarray) -> np.ndarray:
        """The counterpart of `like` in the region of `rank`."""
        return self.segment.region(rank)[self.offset : self.offset + like.nbytes].view(like.dtype)


class Segments:
    """The allocations of one group of ranks, found by address.

    Memory goes when the last array in it does, on each rank by itself: the others have their own mapping.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        """Collective over `mpi`. Raises SharedMemoryUnavailable."""
        self._table: tuple[list[int], list[Segment]] = [], []  # by address; streams read it: never changed
        self._numbers = count()
        map_shared(mpi, _PAGE)  # whether it works at all is known now, before anyone builds on it

    def allocate(self, mpi: MPI.Intracomm, count: int, dtype: Any, shared: bool) -> np.ndarray:
        """A 1-D array of zeros: this rank's own region, or the one region of all. Collective over `mpi`."""
        nbytes = count * np.dtype(dtype).itemsize
        stride = -(-max(nbytes, 1) // _PAGE) * _PAGE
        ranks = mpi.size
        memory = map_shared(mpi, stride if shared else stride * ranks)
        stride = 0 if shared else stride
        start = memory.ctypes.data + mpi.rank * stride
        segment = Segment(next(self._numbers), shared, weakref.ref(memory), stride, start, nbytes)
        alive = [other for other in self._table[1] if other.memory() is not None]
        segments = sorted([*alive, segment], key=lambda each: each.start)
        self._table = [each.start for each in segments], segments
        return segment.region(mpi.rank).view(dtype)

    def find(self, array: np.ndarray) -> SharedOffset | None:
        """Where `array` lies; None for memory that did not come from here, and for an empty array."""
        address = MPI.Get_address(array)
        starts, segments = self._table
        index = bisect(starts, address) - 1
        if index < 0 or array.nbytes == 0:  # an empty array may lie at the border of two segments
            return None
        segment = segments[index]
        offset = address - segment.start
        if offset + array.nbytes > segment.nbytes or segment.memory() is None:
            return None
        return SharedOffset(segment, offset)


def map_shared(mpi: MPI.Intracomm, nbytes: int) -> np.ndarray:
    """`nbytes` of zeros, mapped by all ranks of `mpi`. Pages come when they are first written.

    A rank's mapping goes with the last array in it. Collective. Raises SharedMemoryUnavailable; Refused where
    a rank has no memory for it, or a limit is too low.
    """
    file = error = path = None
    try:
        if mpi.rank == 0:
            file = os.memfd_create("shardrt")
            os.ftruncate(file, nbytes)
            path = f"/proc/{os.getpid()}/fd/{file}"
    except OSError as raised:
        error = raised
    path = mpi.bcast(path)
    try:
        if path is not None:
            file = os.open(path, os.O_RDWR) if file is None else file
            region = mmap.mmap(file, nbytes)
    except OSError as raised:
        error = raised
    errors = [
        found for found in mpi.allgather(None if error is None else _reported(error, mpi, nbytes)) if found
    ]
    if file is not None:
        os.close(file)
    if errors:
        raise errors[0]
    if nbytes >= _HUGE:
        with suppress(OSError):  # a kernel that is built without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)


def _reported(error: OSError, mpi: MPI.Intracomm, nbytes: int) -> RuntimeError:
    """What all ranks raise when this one can't make or map a segment."""
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return Refused(
            f"the limit on the size of files, {limit} bytes, is {nbytes - limit} bytes too low for {nbytes} "
            f"bytes of shared memory: `ulimit -f {-(-nbytes // 1024)}`, or more",
            exit_code=2,
        )
    if error.errno == errno.ENOMEM:
        return Refused(f"out of memory: no room for {nbytes} bytes of shared memory")
    return SharedMemoryUnavailable(f"rank {mpi.rank} cannot map {nbytes} bytes of rank 0's memory: {error}")
