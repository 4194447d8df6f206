"""Shared memory of the ranks of a node, and the place of an array in it.

A segment is an anonymous file in memory (memfd) that one rank makes and all ranks map. It counts as memory,
not against /dev/shm (64 MB in a default container). It disappears with the last process that maps it.
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
_OFFSET = 44  # bits of a word for the offset in a segment


class SharedMemoryUnavailable(RuntimeError):
    """These ranks cannot share memory. All of them raise it."""


@dataclass(frozen=True)
class Segment:
    """One allocation: a region of bytes per rank; with `shared` the same region for all ranks."""

    number: int
    shared: bool
    memory: "weakref.ref[np.ndarray]"  # uint8, all regions; this rank's arrays keep it alive
    stride: int  # bytes from one rank's region to the next; 0 if they are the same
    start: int  # address of this rank's region
    nbytes: int

    def region(self, rank: int) -> np.ndarray:
        """The region of `rank`. Valid while an array of this rank is alive."""
        first = rank * self.stride
        return self.memory()[first : first + self.nbytes]


class SharedOffset(NamedTuple):
    """Place of an array: `offset` bytes into a rank's region of `segment`."""

    segment: Segment
    offset: int

    @property
    def word(self) -> int:
        """The place as one integer, the same on all ranks that made the same allocation."""
        return (self.segment.number + 1) << _OFFSET | self.offset

    def in_same_segment(self, word: int) -> bool:
        """Whether the place with this word is in the same segment."""
        return word >> _OFFSET == self.word >> _OFFSET

    def at(self, word: int, rank: int, size: int, dtype: np.dtype) -> np.ndarray:
        """`size` elements at the place with this word, in the same segment, in the region of `rank`."""
        offset = word & (1 << _OFFSET) - 1
        return self.segment.region(rank)[offset : offset + size * dtype.itemsize].view(dtype)

    def of(self, rank: int, like: np.ndarray) -> np.ndarray:
        """The counterpart of `like` in the region of `rank`."""
        return self.segment.region(rank)[self.offset : self.offset + like.nbytes].view(like.dtype)


class Segments:
    """The allocations of one group of ranks, by address.

    Each rank has its own mapping, which disappears with the last array in it.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        """Collective over `mpi`. Raises SharedMemoryUnavailable."""
        self._table: tuple[list[int], list[Segment]] = (
            [],
            [],
        )  # sorted by address; replaced, not changed, since streams read it
        self._numbers = count()
        map_shared(mpi, _PAGE)  # raise now if mapping does not work

    def allocate(self, mpi: MPI.Intracomm, count: int, dtype: Any, shared: bool) -> np.ndarray:
        """A 1-D array of zeros in this rank's region, or in the shared region. Collective over `mpi`."""
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
        """The place of `array`; None for other memory, and for an empty array."""
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
    """`nbytes` of zeros that all ranks of `mpi` map.

    Pages get memory at their first write. Collective.

    A rank's mapping disappears with the last array in it.

    Raises:
        SharedMemoryUnavailable: or Refused if a rank has no memory or too low a limit.
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
    """The error for all ranks if this rank can't make or map a segment."""
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
