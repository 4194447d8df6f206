"""CUDA's calls about memory, by CuPy's names: allocations, copies, and what processes share.

Memory that is new or given back holds 0xFF bytes, which are NaN in every floating type. So a wait that is
missing shows as other bits or as NaN.
"""

import ctypes
import os
from bisect import bisect
from collections import Counter, deque
from functools import cache

import numpy as np

from tests.softgpu import errors
from tests.softgpu.errors import failed
from tests.softgpu.scheduler import Work
from tests.softgpu.streams import Streams

PAGE = 2 << 20  # of the driver: allocations of one and more have theirs to themselves
_KEPT = 64 << 20  # bytes of what was freed last are still known as such, and hold NaN
_HANDLE = np.dtype([*((name, "i8") for name in ("process", "file", "nbytes", "rank")), ("unused", "u1", 32)])


_PIECE = 16 << 20  # bytes of poison, of which large blocks are made
_READ_WRITE, _SHARED, _PRIVATE, _FIXED, _FRESH = 3, 1, 2, 0x10, 0x20  # of mmap, on Linux
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Block:
    """Memory of the device, or of the host if it is pinned. rank: None if it is another process's.

    Large ones are copies of a file of poison, page by page when they are written: most of what is taken is
    never touched. They become files of their own when they are shared.
    """

    def __init__(self, size: int, pinned: bool, rank, shared: tuple[int, int] | None = None) -> None:
        """shared: (process, file) of an allocation there."""
        self.size, self.pinned, self.rank, self.freed = size, pinned, rank, False
        self.shared, self.opener = shared, None
        self.device: int | None = None  # where it was allocated, if on a device by this process
        self.file, self._mapped = -1, size if size >= PAGE or shared else 0
        if not self._mapped:
            self._memory = np.empty(size + 512, np.uint8)
            self.address = self._memory.ctypes.data + -self._memory.ctypes.data % 512
        elif shared:
            self.file = os.open("/proc/{}/fd/{}".format(*shared), os.O_RDWR)
            self.address = _map(None, size, _SHARED, self.file)
        else:
            self.address = _map(None, size, _PRIVATE | _FRESH, -1)
        if not shared:
            self.poison()

    def __del__(self) -> None:
        if self._mapped:
            _libc.munmap(self.address, self._mapped)
        if self.file >= 0:
            os.close(self.file)

    def poison(self) -> None:
        if not self._mapped or self.file >= 0:
            ctypes.memset(self.address, 0xFF, self.size)
            return
        for start in range(0, self.size, _PIECE):
            nbytes = min(_PIECE, self.size - start)
            _map(self.address + start, nbytes, _PRIVATE | _FIXED, _poisoned())

    def share(self) -> None:
        """Put it into a file, which other processes can open."""
        if self.file < 0:
            self.file = os.memfd_create("device memory")
            os.truncate(self.file, self.size)
            os.pwrite(self.file, ctypes.string_at(self.address, self.size), 0)
            _map(self.address, self.size, _SHARED | _FIXED, self.file)


def _map(address: int | None, nbytes: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, nbytes, _READ_WRITE, flags, file, 0)
    if found == _FAILED:
        raise failed(errors.OUT_OF_MEMORY, os.strerror(ctypes.get_errno()))
    return found


@cache
def _poisoned() -> int:
    """A file that holds 0xFF."""
    file = os.memfd_create("poison")
    os.write(file, b"\xff" * _PIECE)
    return file


class Memory(Streams):
    """capacity: bytes of each device. used: those that are allocated, by device.

    reads_pageable: whether copies read memory of the host that is not pinned when their turn comes, as where
    a GPU shares the host's page tables (HMM, Grace).
    """

    capacity = 1 << 37
    reads_pageable = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.used: Counter[int] = Counter()
        self._blocks: list[Block] = []  # by address
        self._addresses: list[int] = []
        self._given_back: list[Block] = []  # and not freed yet
        self._freed: deque[Block] = deque()
        self._freed_bytes = 0
        self.freed_while_mapped: list[Block] = []

    def malloc(self, size):
        size = max(1, size)
        with self.lock:
            if self.used[self.device] + size > self.capacity:
                raise failed(errors.OUT_OF_MEMORY)
            self.used[self.device] += size
        block = Block(size, False, self.rank)
        block.device = self.device
        return self._add(block)

    def hostAlloc(self, size, flags):
        return self._add(Block(max(1, size), True, self.rank))

    def _add(self, block: Block) -> int:
        self.enter_context()
        with self.lock:
            place = bisect(self._addresses, block.address)
            self._addresses.insert(place, block.address)
            self._blocks.insert(place, block)
        return block.address

    def _remove(self, block: Block) -> None:
        place = self._addresses.index(block.address)
        del self._addresses[place], self._blocks[place]

    def free(self, address):
        """Waits for all streams of this rank, as CUDA does, and then frees what it has given back so far.

        Not in a capture, which has work that nobody can wait for yet. And the garbage collector may come by
        in another rank's thread, which must not wait for this one, or while something runs.
        """
        self.enter_context()
        with self.lock:
            block = self._whole(address)
            if block in self._given_back:
                raise failed(errors.INVALID_VALUE, "freed twice")
            self._given_back.append(block)
            if block.device is not None:
                self.used[block.device] -= block.size
            if block.file >= 0 and any(m.shared == (os.getpid(), block.file) for m in self.mapped):
                self.freed_while_mapped.append(block)
            if self._busy or block.rank is not self.rank or self._captures(block.rank):
                return
        try:
            self.drain(block.rank)
        except RuntimeError:
            if block.rank.error is None:  # which the next call is told of
                raise
        with self.lock:
            for block in [block for block in self._given_back if self._idle(block.rank)]:
                self._given_back.remove(block)
                block.poison()
                block.freed = True
                self._freed.append(block)
                self._freed_bytes += block.size
            while self._freed_bytes > _KEPT:
                self._freed_bytes -= self._freed[0].size
                self._remove(self._freed.popleft())

    freeHost = free

    def _idle(self, rank) -> bool:
        """Whether nothing uses what this rank has given back: this thread's, or of one that has ended."""
        here = rank is self.rank or not rank.thread.is_alive()
        return here and not any(stream.queue for stream in self.of(rank))

    def _captures(self, rank) -> bool:
        return any(stream.capture is not None for stream in self.of(rank))

    def block(self, address: int, nbytes: int) -> Block | None:
        """The one that these bytes are in; None for memory of the host that is not pinned.

        Raises CUDARuntimeError where they are not all in it, or it has been freed.
        """
        with self.lock:
            place = bisect(self._addresses, address) - 1
            block = self._blocks[place] if place >= 0 else None
        if block is None or address >= block.address + block.size + (nbytes == 0):
            return None
        if block.freed:
            raise failed(errors.ILLEGAL_ADDRESS, "memory that was freed")
        if address + nbytes > block.address + block.size:
            raise failed(errors.ILLEGAL_ADDRESS, "beyond the end of an allocation")
        return block

    def _whole(self, address: int) -> Block:
        """The allocation that begins here."""
        block = self.block(address, 1)
        if block is None or block.address != address:
            raise failed(errors.INVALID_VALUE, "not an allocation")
        return block

    # -- copies

    def memcpyAsync(self, target, source, size, kind, stream):
        """Memory that is not pinned is read when the copy is issued, and written before the call returns.

        Not where the GPU reads it itself: there such copies wait for their turn like all others.
        """
        if not size:
            return
        pageable = [self.block(address, size) is None for address in (target, source)]
        if any(pageable):
            self.refuse_in_capture(self.stream(stream))
        if pageable[1] and not self.reads_pageable:
            kept = ctypes.create_string_buffer(ctypes.string_at(source, size), size)
            self.issue("copy", stream, Work(lambda: ctypes.memmove(target, kept, size)))
        else:
            self.issue("copy", stream, Work(lambda: ctypes.memmove(target, source, size)))
        if pageable[0] and not self.reads_pageable:
            self.streamSynchronize(stream)

    def memcpy(self, target, source, size, kind):
        self.memcpyAsync(target, source, size, kind, 0)
        blocks = [self.block(address, size) for address in (target, source)]
        if any(block is not None and block.pinned for block in blocks):
            self.streamSynchronize(0)  # else the host has not to wait, or has waited

    def memsetAsync(self, target, value, size, stream):
        if self.block(target, size) is None:
            raise failed(errors.INVALID_VALUE)
        self.issue("set", stream, Work(lambda: ctypes.memset(target, value, size)))

    def capture_of(self, stream):
        """What a stream is captured in."""
        return self.stream(stream).capture

    def poison(self, address, size, stream, capture):
        """Memory that a pool has taken back, which its stream alone may give out again.

        capture: that it was taken in. What is given back in another, or outside of it, stays as it is.
        """
        with self.lock:
            found = self._streams.get(stream) or self.null()
            if found.handle == stream and found.capture is capture and found.rank.error is None:
                if capture is None or not capture.invalid:
                    self.issue("poison", stream, Work(lambda: ctypes.memset(address, 0xFF, size)))

    def memGetInfo(self):
        return self.capacity - self.used[self.device], self.capacity

    def pointerGetMemoryType(self, address):
        """0: of the host and not known to CUDA, 1: pinned, 2: of a device."""
        block = self.block(address, 1)
        return 0 if block is None else 1 if block.pinned else 2

    # -- other processes; ranks that are threads may pass for them

    @property
    def exported(self) -> list[Block]:
        """Those of this process that others may open."""
        gone = *self._given_back, *self._freed
        return [b for b in self._blocks if b.file >= 0 and not b.shared and b not in gone]

    @property
    def mapped(self) -> list[Block]:
        """Those of other ranks that ranks of this process have open, but for ranks that have ended."""
        return [block for block in self._blocks if block.shared and block.opener.thread.is_alive()]

    def ipcGetMemHandle(self, address):
        """CUDA would take an address within an allocation, and give its beginning: a trap."""
        block = self._whole(address)
        if block.size % PAGE or block.pinned or block.rank is None:
            raise failed(errors.INVALID_VALUE, "what lies beside it in the driver's page would be shared too")
        if block.file >= 0:
            raise failed(errors.INVALID_VALUE, "exported twice")
        block.share()
        handle = np.zeros((), _HANDLE)
        handle["process"], handle["file"], handle["nbytes"] = os.getpid(), block.file, block.size
        handle["rank"] = id(self.rank)
        return handle.tobytes()

    def ipcOpenMemHandle(self, handle, flags=1):
        process, file, nbytes, rank, _ = np.frombuffer(handle, _HANDLE)[0].tolist()
        if (process, rank) == (os.getpid(), id(self.rank)):
            raise failed(errors.DEVICE_UNINITIALIZED, "a process can't open what is its own")
        with self.lock:
            if any(each.shared == (process, file) and each.opener is self.rank for each in self.mapped):
                raise failed(errors.INVALID_VALUE, "mapped twice")
        block = Block(nbytes, False, None, (process, file))
        block.opener = self.rank
        return self._add(block)

    def ipcCloseMemHandle(self, address):
        """Waits for this rank's streams, which may use it."""
        block = self._whole(address)
        if block.rank is not None:
            raise failed(errors.INVALID_VALUE, "not another process's")
        self.drain(self.rank)
        with self.lock:
            self._remove(block)
