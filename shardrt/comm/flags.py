"""Counters that the ranks of a node show each other, and a way to sleep until one of them moves.

Every rank has its own cache lines in a shared MPI window: how far it has come, and its calls. A waiting rank
looks for a moment and then sleeps in the kernel (a futex: "sleep while this word has this value"): it
takes no core from the ranks that compute and wakes in microseconds. MPI's Win.Sync orders the memory.
"""

import ctypes
import platform
import sys
import weakref

import numpy as np
from mpi4py import MPI

from shardrt.comm import failure
from shardrt.comm.calls import WORDS, Call, Names, mismatch
from shardrt.comm.protocol import PeerFailed


class SharedMemoryUnavailable(RuntimeError):
    """These ranks cannot share memory. Raised on all of them."""


READY, DONE, _LEFT, _CALLS = 0, 1, 2, 8  # columns of a rank's row
_LINE = 8  # int64 words of a cache line
_ROW = 3 * _LINE  # one line for the counters, one each for what the last two calls were
_LOOKS = 50  # before a rank sleeps; about 10 us
_NAP = 50_000_000  # nanoseconds until a sleeper looks again unwoken, in case a peer has left

# The number of the system call futex(2).
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF
_LOW_HALF = 0 if sys.byteorder == "little" else 4  # a futex is 32 bits wide

_libc = ctypes.CDLL(None)
_open: "weakref.WeakSet[Flags]" = weakref.WeakSet()


class Flags:
    """The counters of one communicator, whose ranks share a node."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        """Collective over `mpi`. Raises SharedMemoryUnavailable where the system is not known."""
        if sys.platform != "linux" or platform.machine() not in _FUTEX:
            raise SharedMemoryUnavailable(f"no futex known on {sys.platform} {platform.machine()}")
        self.rank = mpi.rank
        self.size = mpi.size
        self._futex = _FUTEX[platform.machine()]
        self._window = MPI.Win.Allocate_shared(8 * _ROW * mpi.size if mpi.rank == 0 else 0, 8, comm=mpi)
        self._window.Lock_all()
        memory, _ = self._window.Shared_query(0)
        self._words = memoryview(memory).cast("B").cast("q")
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._own = _ROW * mpi.rank
        self._words[self._own : self._own + _ROW] = memoryview(np.zeros(_ROW, np.int64)).cast("B").cast("q")
        self._window.Sync()
        mpi.Barrier()
        _open.add(self)

    def close(self) -> None:
        """Give the window back. Collective."""
        _open.discard(self)
        self._words.release()
        self._window.Unlock_all()
        self._window.Free()

    def publish(self, column: int, value: int) -> None:
        """Set one of this rank's counters, after everything it has written, and wake who sleeps on it."""
        self._window.Sync()
        self._words[self._own + column] = value
        self._system(self._own + column, _FUTEX_WAKE, _EVERYONE)

    def wait(self, column: int, value: int, doing: str) -> None:
        """Return when that counter of every rank is at least `value`; then what they wrote before is seen."""
        for rank in range(self.size):
            if self._words[rank * _ROW + column] < value:
                self._wait_for(rank, column, value, doing)
        self._window.Sync()

    def describe(self, sequence: int, call: Call) -> None:
        """Say what this rank's collective number `sequence` is; before it is published."""
        start = self._own + _CALLS + _LINE * (sequence % 2)
        for word, value in enumerate(call, start):
            self._words[word] = value

    def compare(self, sequence: int, names: Names) -> None:
        """Raise CollectiveMismatch unless all ranks described this collective alike.

        Two places suffice: a rank describes s + 2 only after it has seen everyone arrive at s + 1, and then
        everyone has compared s.
        """
        starts = range(_CALLS + _LINE * (sequence % 2), self.size * _ROW, _ROW)
        calls = [self._words[start : start + WORDS].tolist() for start in starts]
        if calls.count(calls[0]) < self.size:
            raise mismatch(sequence, [tuple(call) for call in calls], names)

    def leave(self) -> None:
        """Tell the others that this rank's program ends: whoever waits for it would wait forever."""
        self.publish(_LEFT, 1)
        for column in (READY, DONE):  # the words that others sleep on; they look again
            self._system(self._own + column, _FUTEX_WAKE, _EVERYONE)

    def _wait_for(self, rank: int, column: int, value: int, doing: str) -> None:
        word = rank * _ROW + column
        for _ in range(_LOOKS):
            self._window.Sync()
            if self._words[word] >= value:
                return
        while True:
            left = self._words[rank * _ROW + _LEFT]  # before the counter: it may arrive and then leave
            self._window.Sync()
            seen = self._words[word]
            if seen >= value:
                return
            if left:
                raise PeerFailed(f"rank {rank} has left; rank {self.rank} waits for it in {doing}")
            self._system(word, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(_Time(0, _NAP)))

    def _system(self, word: int, operation: int, value: int, time: object = None) -> None:
        """futex(2) on a word. Whatever it returns, the caller looks again; the interpreter lock is free."""
        address = ctypes.c_void_p(self._address + 8 * word + _LOW_HALF)
        _libc.syscall(ctypes.c_long(self._futex), address, operation, ctypes.c_uint32(value), time, None, 0)


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@failure.at_program_end
def _leave() -> None:
    for flags in list(_open):
        flags.leave()
