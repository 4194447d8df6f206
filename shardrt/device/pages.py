"""Memory of the CPU that is not needed for now, for others of this process: pages move, addresses stay.

Activations go as gradients come, and the other way round. Both have addresses of their own, so each would
keep its pages while the other needs as many. Here who does not need pages for now lends them, and who writes
next takes them: mremap moves 2 MiB as one entry of the page table. Unmapping and a page fault would fill them
with zeros first. What is lent has no values any more.
"""

import ctypes
import mmap
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import numpy as np

HUGE = 1 << 21  # bytes of what moves
SEGMENT = 1 << 25
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP


class Mapping:
    """`size` bytes of the system at `address`, a multiple of HUGE, with huge pages asked for.

    Raises MemoryError where there are none.
    """

    __slots__ = ("region", "start", "address", "size", "__weakref__")

    def __init__(self, size: int) -> None:
        room = size + HUGE if size >= HUGE else size
        try:  # private, so that it counts as memory of this process, and gets huge pages
            region = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for an array of {size} bytes: {error.strerror}") from error
        self.region, self.start = region, np.frombuffer(region, np.uint8).ctypes.data
        self.address = -(-self.start // HUGE) * HUGE if size >= HUGE else self.start
        self.size = size
        whole = size // HUGE * HUGE  # the rest in small pages: less than a huge one is needed
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel that is built without them
                region.madvise(mmap.MADV_HUGEPAGE, self.address - self.start, whole)

    def take(self) -> None:
        """It is about to be written."""
        take(self.address, self.size)

    def lend(self) -> None:
        """Nobody needs it."""
        lend(self, self.address, self.size)


class Segment:
    """A mapping for what is too short to lend huge pages of its own: parts of it lie one behind the other."""

    __slots__ = ("mapping", "end", "users")

    def __init__(self) -> None:
        self.mapping = Mapping(SEGMENT)
        self.end = self.mapping.address  # of the parts
        self.users: dict[int, set[int]] = {}  # place of a huge page -> parts on it in use

    def part(self, size: int) -> "Part | None":
        """One more, of whole pages; None if it has no room."""
        start, stop = self.end, self.mapping.address + SEGMENT
        if size > stop - start:
            return None
        self.end += size
        return Part(self, start, size)


class Part:
    """`size` bytes at `address` of a segment. Its pages go back to the system with it."""

    __slots__ = ("segment", "address", "size")

    def __init__(self, segment: Segment, address: int, size: int) -> None:
        self.segment, self.address, self.size = segment, address, size

    def take(self) -> None:
        """It is about to be written."""
        with _lock:
            for place in self._places():
                users = self.segment.users.setdefault(place, set())
                users.add(self.address)
                if len(users) == 1:
                    take(place, HUGE)

    def lend(self) -> None:
        """Nobody needs it."""
        with _lock:
            for place in self._places():
                users = self.segment.users[place]
                users.discard(self.address)
                if not users:
                    lend(self.segment.mapping, place, HUGE)

    def _places(self) -> range:
        return range(self.address // HUGE * HUGE, self.address + self.size, HUGE)

    def __del__(self) -> None:
        mapping = self.segment.mapping
        mapping.region.madvise(mmap.MADV_DONTNEED, self.address - mapping.start, self.size)


class Buffer:
    """What NumPy makes an array of zeros of, which has all of a mapping."""

    __slots__ = ("mapping", "__array_interface__")

    def __init__(self, nbytes: int) -> None:
        self.mapping = Mapping(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        data = (self.mapping.address, False)
        self.__array_interface__ = {"data": data, "shape": (nbytes,), "typestr": "|u1", "version": 3}


# Place of a huge page -> the mapping that it is of, which may be gone; who takes has the first.
_lent: OrderedDict[int, weakref.ref[Mapping]] = OrderedDict()
_lock = threading.RLock()  # __del__ may run inside, in the same thread, between any two steps


def lend(owner: Mapping, address: int, nbytes: int, *, first: bool = False) -> None:
    """Nobody needs what is there until it has been taken back, if with other values. first: give it first."""
    with _lock:
        for place in _whole(address, nbytes):
            _lent[place] = weakref.ref(owner)
            if first:
                _lent.move_to_end(place, last=False)


def take(address: int, nbytes: int) -> None:
    """What is there is about to be written: it gets its own pages back, or others that are lent.

    A page at an end, which goes on beyond, is not lent any more.
    """
    with _lock:
        for end in (address, address + nbytes - 1):
            _lent_no_more(end // HUGE * HUGE, address, nbytes)
        for place in _whole(address, nbytes):
            if _lent.pop(place, None) is None:
                _give(place)


def _lent_no_more(place: int, address: int, nbytes: int) -> None:
    if place not in _whole(address, nbytes):
        _lent.pop(place, None)


def _give(target: int) -> None:
    """Move a page there from the first who still has one."""
    while _lent:
        source, found = _lent.popitem(last=False)
        owner = found()  # stays as long as this name
        if owner is not None:
            _remap(source, HUGE, HUGE, _MOVE, target)  # where the system can't, both keep what they have
            return


def _whole(address: int, nbytes: int) -> range:
    """Where huge pages begin that lie inside."""
    return range(-(-address // HUGE) * HUGE, address + nbytes - HUGE + 1, HUGE)


def _of_libc() -> Callable[..., int | None]:
    """mremap, which Linux has; elsewhere who takes keeps its own pages."""
    if not sys.platform.startswith("linux"):
        return lambda *given: None
    found = ctypes.CDLL(None).mremap
    found.restype = ctypes.c_void_p
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return found


_remap = _of_libc()
