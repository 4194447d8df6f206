"""Ends a rank that no launcher would end: its launcher is gone, or it hangs after the end of its program.

It is a thread in each rank with a launcher, from before MPI to the end of the process. A training loop
calls `lost` in every step and saves first. Without such a loop the rank ends at once with exit code 129.
"""

import faulthandler
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardrt.comm import supervision
from shardrt.device import threads
from shardrt.faults import failure, launcher
from shardrt.faults.deadline import Deadline

__all__ = ["LOST", "heeded", "leaving", "lost", "start"]

UNOWNED = 129  # 128 + SIGHUP: the launcher has hung up
LOST = "the loss of its launcher"
EXIT = 30.0  # seconds that a rank may take for its exit handlers, or for a thread while others wait
_LOOK = 0.5  # seconds
_GRACE = 1.0  # seconds in which ranks without a launcher wait for each other at their end
_STOPPED = 2.0  # seconds for which the launcher may be stopped; Ctrl-Z does not stop it

_guard: "_Guard | None" = None


def start(rank: int, variable: str) -> None:
    """Watch over this process, which a launcher started as `rank`, with `variable` set. Once per process."""
    global _guard
    if _guard is None:
        _guard = _Guard(rank, variable)


def lost() -> str:
    """Why this rank should save and stop: "the loss of its launcher"; "" while it has one."""
    return _guard.reason if _guard is not None else ""


@contextmanager
def heeded() -> Iterator[None]:
    """Inside, the training loop calls `lost` regularly and stops by itself."""
    if _guard is None:
        yield
        return
    _guard.loops += 1
    try:
        yield
    finally:
        _guard.loops -= 1


def leaving(is_lost: bool) -> None:
    """Mark that the rank stops by itself from now on, even if its loop is over.

    Args:
        is_lost: some rank has lost its launcher.
    """
    if _guard is not None:
        _guard.is_leaving = True
        if is_lost:
            _guard.lose()


def allow_exit(seconds: float) -> None:
    """Limit exit handlers, and threads for which other ranks wait, to `seconds`; 0: no limit."""
    if _guard is not None:
        _guard.exit = seconds


class _Guard:
    """The guard's thread and its state."""

    def __init__(self, rank: int, variable: str) -> None:
        self.rank = rank
        self.reason = ""
        self.loops = 0
        self.is_leaving = False
        self.exit = EXIT
        self.last: Deadline | None = None
        self._launcher = launcher.find(variable)
        self._stopped = self._exiting = self._waiting = 0.0  # seconds
        self._threads = False  # whether other threads than the program's were left at the last look
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_LOOK)
            threads.enter()
            now = time.monotonic()
            passed, before = min(now - before, 2 * _LOOK), now  # this process may have been stopped itself
            self._look_at_launcher(passed)
            self._look_at_exit(passed)

    def _look_at_launcher(self, passed: float) -> None:
        if not self.reason and self._launcher is not None:
            trouble = self._launcher.trouble()
            self._stopped = self._stopped + passed if trouble == "stopped" else 0.0
            if trouble == "gone" or self._stopped >= _STOPPED:
                self.lose()
        if self.reason and failure.ending():  # it may wait for an ended rank
            self._waiting += passed
            if self._waiting > _GRACE:
                os._exit(failure.exit_code() or UNOWNED)
        elif self.reason and not self.loops and not self.is_leaving:
            failure.end_job(f"rank {self.rank} has lost its launcher\n", UNOWNED)

    def lose(self) -> None:
        """Mark that no launcher looks after this rank any more."""
        if not self.reason:
            self.reason = LOST
            _to_nobody()

    def has_launcher(self) -> bool:
        """Whether the launcher is running and not stopped."""
        return not self.reason and (self._launcher is None or not self._launcher.trouble())

    def _look_at_exit(self, passed: float) -> None:
        """End a rank that exit handlers, or threads that other ranks wait for, have kept for too long."""
        main = threading.main_thread()
        left = [repr(each.name) for each in threading.enumerate() if each is not main and not each.daemon]
        running = main.is_alive() or (left and not failure.departed())
        same = bool(left) == self._threads  # exit handlers begin after the last thread
        if running or failure.ending() or not same:
            self._exiting, self._threads = 0.0, bool(left)
        else:
            self._exiting += passed
        if self.exit and self._exiting > self.exit:
            message = f"has been in its exit handlers for {self._exiting:.0f} s"
            if left:
                message = (
                    f"has ended but for its thread {', '.join(left[:8])}, for which others have waited "
                    f"{self._exiting:.0f} s"
                )
            else:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
            message = f"hang: rank {self.rank} {message}; the job ends with exit code {failure.HANG}\n"
            failure.end_job(message, failure.HANG)


def _to_nobody() -> None:
    """Discard all later output: the reader of a pipe is gone, or will never read."""
    null = os.open(os.devnull, os.O_WRONLY)
    for file in (1, 2):
        with suppress(OSError):
            kind = os.fstat(file).st_mode
            if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
                os.dup2(null, file)
    os.close(null)


@supervision.after_all_programs
def _end() -> None:
    """Before MPI's own exit, which asks the launcher and waits for all ranks: end or limit this process."""
    if _guard is not None and not _guard.has_launcher():
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(failure.exit_code())
    if _guard is not None and _guard.exit:
        message = f"hang: rank {_guard.rank} has been at its exit for {_guard.exit:.0f} s"
        with suppress(OSError, RuntimeError):  # no memory for a thread
            _guard.last = Deadline(failure.HANG, f"{message}; the job ends with exit code {failure.HANG}")
            _guard.last.set(_guard.exit)
