"""A lock on a run's folder, held by the process of rank 0: two jobs that write one run would ruin both.

The kernel holds the lock while the process lives, and releases it however the process ends. Nothing is left
to remove.
"""

import errno
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LOCK", "Locked", "lock", "unused"]

LOCK = "lock"
_PATIENCE = 15.0  # seconds: a job that was killed takes a while to go, and may still be writing
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Locked(ValueError):
    """Another job that is alive has this run, or a file server has not noticed that its host is gone."""

    exit_code = 69  # the job itself is fine and may succeed later; EX_UNAVAILABLE of sysexits.h


def lock(directory: Path, patience: float | None = None) -> int:
    """A descriptor that holds the lock of a run's folder until it is closed, or the process ends.

    Waits up to `patience` seconds (15) for a job that holds it. Warns if the file system has no locks.

    Raises:
        Locked: naming the folder and that job's process, if the job still holds it.
        OSError: if the file system fails.
    """
    file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
    try:
        while not _taken(file):
            if time.monotonic() >= deadline:
                holder = os.pread(file, 200, 0).decode(errors="replace")
                named = f" ({holder})" if holder.isprintable() and holder else ""
                raise Locked(
                    f"{directory}: another job{named} is writing this run; stop that job, or pass another "
                    "--name"
                )
            time.sleep(0.05)
        _sign(file)
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def unused(directory: Path) -> Iterator[bool]:
    """Whether no job holds a run's folder, nor takes it inside the block; False if that can't be known.

    It can't be known in a folder without a lock, or on a file system without locks.
    """
    try:
        file = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = True
    except OSError:
        taken = False
    try:
        yield taken
    finally:
        os.close(file)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"the file system has no locks: make sure that no other job writes this run ({error})",
            stacklevel=3,
        )
    return True


def _sign(file: int) -> None:
    """Write which process holds the lock, for refused jobs. A full disk is no reason to stop."""
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except OSError:
        pass
