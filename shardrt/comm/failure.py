"""A rank that fails ends the whole job at once, with one traceback that names it.

Without this, a rank whose program raises waits in MPI's shutdown for ranks that wait for it in a collective.
The hooks are installed when the ranks first meet (world.of_mpi); a world of one needs none.
"""

import atexit
import fcntl
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE = 1.0  # seconds: for MPI to end the job before this process just ends; for all ranks to leave

_job: "_Job | None" = None
_last_words: list[Callable[[], None]] = []


def install_hooks(mpi: Any, node: Any) -> None:
    """From now on an uncaught exception, in any thread, aborts the job: `mpi` (all ranks). Once per process.

    So do KeyboardInterrupt (exit code 130) and `sys.exit` with a code other than 0, unless all ranks call
    it. (A bare `raise SystemExit` is not seen.) `node` is the communicator of the ranks on this node, of
    which the first to fail prints its traceback and the others a line each. Collective over `node`.
    """
    global _job
    if _job is not None:
        return
    _job = _Job(mpi, _shared_file(node))
    if node.rank == 0:  # every rank of the node has mapped the segment: all have met in _shared_file
        _unlink_segments()
    sys.excepthook = _job.on_exception
    threading.excepthook = _job.on_thread_exception
    sys.exit = _exit
    atexit.register(_job.on_program_end)


def at_program_end(function: Callable[[], None]) -> None:
    """Call `function` when this rank's program ends without having to end the job; MPI still works then."""
    _last_words.append(function)


class _Job:
    """What the hooks of one process know."""

    def __init__(self, mpi: Any, file: int) -> None:
        self._mpi = mpi
        self._leaving = mpi.Dup()
        self._file = file
        self._name = f"rank {mpi.rank} of {mpi.size}"
        self._lock = threading.Lock()

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """sys.excepthook"""
        if issubclass(kind, KeyboardInterrupt):
            self._end(f"{self._name} was interrupted\n", 130)
        else:
            self._fail("main thread", error)

    def on_thread_exception(self, args: Any) -> None:
        """threading.excepthook"""
        if not issubclass(args.exc_type, SystemExit):  # which ends only its thread, as in Python
            self._fail(f"thread {args.thread.name if args.thread else '?'}", args.exc_value)

    def on_program_end(self) -> None:
        """At exit, before MPI's own shutdown, which would wait for all ranks."""
        code = _Exit.status if isinstance(_Exit.status, int) else int(_Exit.status is not None)
        if code and not self._all_leave():
            self._end(f"{self._name} called sys.exit({_Exit.status!r})\n", code)
        for function in _last_words:
            function()

    def _all_leave(self) -> bool:
        """Whether every rank ends its program with an error code now: then nobody has to be stopped."""
        everyone = self._leaving.Ibarrier()
        deadline = time.monotonic() + _PATIENCE
        while not everyone.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _fail(self, where: str, error: BaseException) -> None:
        last = traceback.format_exception_only(error)[-1].strip()
        full = "".join(traceback.format_exception(error))
        self._end(f"{self._name} failed as well: {last}\n", 1, f"{self._name} failed in its {where}:\n{full}")

    def _end(self, report: str, code: int, first_report: str | None = None) -> None:
        """Write `report` (or `first_report`, if this is the node's first) and end the job."""
        sys.stdout.flush()
        with (
            self._lock,
            _locked(self._file) as first,
        ):  # whoever comes later aborts only after this is written
            sys.stderr.write(first_report if first and first_report else report)  # one write: lines don't mix
            sys.stderr.flush()
        timer = threading.Timer(_PATIENCE, os._exit, (code,))
        timer.daemon = True
        timer.start()
        self._mpi.Abort(code)
        timer.join()  # Abort may return before the job has ended: going on would tell the others that we left


class _Exit(SystemExit):
    """What sys.exit raises. Python calls no hook for an uncaught SystemExit, but it reads its `code`."""

    status: Any = None  # of the one that ended the program

    @property
    def code(self) -> Any:
        status = self.args[0] if self.args else None
        if sys._getframe().f_back is None:  # read by the interpreter itself, so nothing has caught it
            _Exit.status = status
        return status


def _exit(status: Any = None) -> None:
    """sys.exit"""
    raise _Exit(status)


def _shared_file(node: Any) -> int:
    """An open file without a name that all ranks of the node have."""
    path = ""
    if node.rank == 0:
        file, path = tempfile.mkstemp(prefix="shardrt-")
    path = node.bcast(path)
    if node.rank != 0:
        file = os.open(path, os.O_RDWR)
    node.Barrier()
    if node.rank == 0:
        os.unlink(path)
    return file


def _unlink_segments() -> None:
    """Take the name from MPICH's shared segment, or every job that is aborted leaves 2 MB in /dev/shm."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/mpich_shm_" in line}
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


@contextmanager
def _locked(file: int) -> Iterator[bool]:
    """Hold the node's lock; gives whether no rank of this node held it before."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    first = os.pread(file, 1, 0) == b""
    os.pwrite(file, b"x", 0)
    yield first
    fcntl.lockf(file, fcntl.LOCK_UN)
