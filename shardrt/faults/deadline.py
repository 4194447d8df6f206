"""A timer of the C library that ends this process, even if Python code holds the interpreter lock.

A thread of the C library calls _exit(code): SIGEV_THREAD of timer_create(3). faulthandler can end a process
too, but only with exit code 1.
"""

import ctypes
from collections.abc import Iterator
from contextlib import closing, contextmanager

from shardrt.faults.failure import HANG

_SIGEV_THREAD = 2
_SAYING = 0.1  # seconds between the last words and the end


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
    """Ends the process with `code` when the latest time set is over.

    Args:
        words: the message to stderr, by warnx(3), which puts the program's name before it.

    Raises:
        OSError: if the file system fails.
    """

    def __init__(self, code: int, words: str = "") -> None:
        self._library = ctypes.CDLL("librt.so.1", use_errno=True)  # newer systems have it in libc
        self._words = ctypes.c_char_p(words.replace("%", "%%").encode())
        self._timers = [self._timer("_exit", code)]
        if words:
            self._timers.append(self._timer("warnx", ctypes.cast(self._words, ctypes.c_void_p).value))

    def _timer(self, function: str, value: int) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
        event = _Event(value=value, notify=_SIGEV_THREAD, function=address)
        if self._library.timer_create(1, ctypes.byref(event), ctypes.byref(timer)):  # CLOCK_MONOTONIC
            raise OSError(ctypes.get_errno(), "timer_create")
        return timer

    def set(self, seconds: float) -> None:
        """End in `seconds` from now; 0: never."""
        for timer, later in zip(self._timers, (_SAYING * (len(self._timers) - 1), 0.0), strict=False):
            whole, part = divmod(seconds + later if seconds else 0.0, 1)
            after = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))  # struct itimerspec
            self._library.timer_settime(timer, 0, after, None)

    def close(self) -> None:
        """Cancel the timer and free it."""
        for timer in self._timers:
            self._library.timer_delete(timer)


@contextmanager
def within(seconds: float, words: str) -> Iterator[None]:
    """End the process as hung, with these words, if the block takes longer than `seconds`; 0: no limit."""
    if not seconds:
        yield
        return
    try:
        deadline = Deadline(HANG, f"{words}; the job ends with exit code {HANG}")
    except OSError:  # not this system, or no memory for a thread
        yield
        return
    with closing(deadline):
        deadline.set(seconds)
        yield
