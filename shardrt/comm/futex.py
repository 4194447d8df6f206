"""Sleeps in the kernel until a word of shared memory changes, and orders memory accesses.

futex(2): "sleep while this word has this value". A sleeping rank uses no core and wakes in microseconds.
MPI's Win.Sync is the memory barrier.
"""

import ctypes
import platform
import sys
from functools import cache

from mpi4py import MPI

from shardrt.comm import supervision
from shardrt.comm.segments import SharedMemoryUnavailable

# The number of the system call.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF
_LOW_HALF = 0 if sys.byteorder == "little" else 4  # a futex is 32 bits wide

_libc = ctypes.CDLL(None)


def check() -> None:
    """Raise SharedMemoryUnavailable on an unknown system."""
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        raise SharedMemoryUnavailable(f"no futex known on {sys.platform} {platform.machine()}")


def sleep(address: int, seen: int, nanoseconds: int) -> None:
    """Return when the int64 at `address` may have another value than `seen`, or after so long.

    The caller checks the word again after each return. The interpreter lock is free meanwhile.
    """
    limit = _Time(*divmod(nanoseconds, 10**9))
    _system(address, _WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake all ranks that sleep on the int64 at `address`."""
    _system(address, _WAKE, _EVERYONE)


def _system(address: int, operation: int, value: int, time: object = None) -> None:
    place = ctypes.c_void_p(address + _LOW_HALF)
    _libc.syscall(
        ctypes.c_long(_NUMBERS[platform.machine()]), place, operation, ctypes.c_uint32(value), time, None, 0
    )


@cache
def fence() -> MPI.Win:
    """A window whose Sync is a full barrier for all reads and writes of this process.

    It is a window of shared memory, for which MPI needs the barrier. On others Open MPI's Sync has none.
    """
    window = MPI.Win.Allocate_shared(8, comm=MPI.COMM_SELF)
    window.Lock_all()
    return window


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@supervision.after_all_programs
def _free() -> None:
    if fence.cache_info().currsize:
        window = fence()
        window.Unlock_all()
        window.Free()
