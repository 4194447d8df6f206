"""A timer of the C library that ends this process, whatever its interpreter does or holds.

A thread of the library's own calls _exit(code): SIGEV_THREAD of timer_create(3). faulthandler can do it, too,
but with exit code 1 alone.
"""

import ctypes
import time

_SIGEV_THREAD = 2


class _Event(ctypes.Structure):
    """struct sigevent: `function(value)` in a new thread."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class Deadline:
    """Ends the process with `code` when the time that was set last is over. Raises OSError."""

    def __init__(self, code: int) -> None:
        self._library = ctypes.CDLL("librt.so.1", use_errno=True)  # and libc, which newer ones have it in
        self._timer = ctypes.c_void_p()
        end = ctypes.cast(self._library._exit, ctypes.c_void_p)
        event = _Event(value=code, notify=_SIGEV_THREAD, function=end)
        if self._library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def set(self, seconds: float) -> None:
        """End in `seconds` from now; 0: never."""
        whole, part = divmod(seconds, 1)
        after = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))  # struct itimerspec
        self._library.timer_settime(self._timer, 0, after, None)

    def close(self) -> None:
        """Never, and give back what it takes."""
        self._library.timer_delete(self._timer)
