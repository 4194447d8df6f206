"""Page lending: arrays of this process share physical pages of host memory while their addresses stay.

In backward, activations die while gradients appear; in forward the reverse. Each has its own addresses, so
each would keep its pages while the other needs as many. Here an array without values lends its pages, and
an array that is about to be written takes them. mremap moves 2 MiB as one entry of the page table. Unmapping
and a page fault would fill the pages with zeros first. A lent array loses its values.
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

HUGE = 1 << 21  # bytes of a huge page; whole huge pages move
SEGMENT = 1 << 25
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP


class Mapping:
    """`size` bytes from the system at `address`, a multiple of HUGE if `size` is at least HUGE.

    It asks for huge pages.

    Raises:
        MemoryError: if the system has no memory.
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
        whole = size // HUGE * HUGE  # the rest is less than a huge page and stays in small pages
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel that is built without them
                region.madvise(mmap.MADV_HUGEPAGE, self.address - self.start, whole)

    def take(self) -> None:
        """Get pages, before the caller writes to it."""
        take(self.address, self.size)

    def lend(self) -> None:
        """Lend its pages. Its values are lost."""
        lend(self, self.address, self.size)


class Segment:
    """A mapping for blocks that are too short to lend whole huge pages. Its parts are adjacent."""

    __slots__ = ("mapping", "end", "users")

    def __init__(self) -> None:
        self.mapping = Mapping(SEGMENT)
        self.end = self.mapping.address  # end of the last part
        self.users: dict[int, set[int]] = {}  # address of a huge page -> parts on it that are in use

    def part(self, size: int) -> "Part | None":
        """The next part, of `size` bytes in whole pages; None if the segment is full."""
        start, stop = self.end, self.mapping.address + SEGMENT
        if size > stop - start:
            return None
        self.end += size
        return Part(self, start, size)


class Part:
    """`size` bytes at `address` of a segment. When it dies its pages go back to the system."""

    __slots__ = ("segment", "address", "size")

    def __init__(self, segment: Segment, address: int, size: int) -> None:
        self.segment, self.address, self.size = segment, address, size

    def take(self) -> None:
        """Get pages, before the caller writes to it."""
        with _lock:
            for place in self._huge_pages():
                users = self.segment.users.setdefault(place, set())
                users.add(self.address)
                if len(users) == 1:
                    take(place, HUGE)

    def lend(self) -> None:
        """Lend its pages. Its values are lost."""
        with _lock:
            for place in self._huge_pages():
                users = self.segment.users[place]
                users.discard(self.address)
                if not users:
                    lend(self.segment.mapping, place, HUGE)

    def _huge_pages(self) -> range:
        return range(self.address // HUGE * HUGE, self.address + self.size, HUGE)

    def __del__(self) -> None:
        mapping = self.segment.mapping
        mapping.region.madvise(mmap.MADV_DONTNEED, self.address - mapping.start, self.size)


class Buffer:
    """A whole mapping as memory for a NumPy array of zeros."""

    __slots__ = ("mapping", "__array_interface__")

    def __init__(self, nbytes: int) -> None:
        self.mapping = Mapping(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        data = (self.mapping.address, False)
        self.__array_interface__ = {"data": data, "shape": (nbytes,), "typestr": "|u1", "version": 3}


# Address of a lent huge page -> its mapping, which may be gone. `take` uses the first page.
_lent: OrderedDict[int, weakref.ref[Mapping]] = OrderedDict()
_lock = threading.RLock()  # __del__ may run inside, in the same thread, between any two steps


def lend(owner: Mapping, address: int, nbytes: int, *, first: bool = False) -> None:
    """Lend the huge pages in this range, whose values are lost.

    Args:
        first: these pages are taken first.
    """
    with _lock:
        for place in _whole(address, nbytes):
            _lent[place] = weakref.ref(owner)
            if first:
                _lent.move_to_end(place, last=False)


def take(address: int, nbytes: int) -> None:
    """Get pages for this range, which is about to be written: its own pages back, or other lent pages.

    A huge page that sticks out at either end is no longer lent.
    """
    with _lock:
        for end in (address, address + nbytes - 1):
            _unlend(end // HUGE * HUGE, address, nbytes)
        for place in _whole(address, nbytes):
            if _lent.pop(place, None) is None:
                _give(place)


def _unlend(place: int, address: int, nbytes: int) -> None:
    if place not in _whole(address, nbytes):
        _lent.pop(place, None)


def _give(target: int) -> None:
    """Move the first lent page whose mapping still exists to the address `target`."""
    while _lent:
        source, found = _lent.popitem(last=False)
        owner = found()  # this reference keeps it alive
        if owner is not None:
            _remap(source, HUGE, HUGE, _MOVE, target)  # if the system can't, both keep their pages
            return


def _whole(address: int, nbytes: int) -> range:
    """Addresses of the huge pages that lie wholly in this range."""
    return range(-(-address // HUGE) * HUGE, address + nbytes - HUGE + 1, HUGE)


def _of_libc() -> Callable[..., int | None]:
    """The function mremap of Linux; on other systems one that does nothing, so that pages stay."""
    if not sys.platform.startswith("linux"):
        return lambda *given: None
    found = ctypes.CDLL(None).mremap
    found.restype = ctypes.c_void_p
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return found


_remap = _of_libc()
