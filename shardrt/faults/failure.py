"""A rank that fails ends the whole job at once, with one traceback that names it.

Without this, a rank whose program raises waits in MPI's shutdown for ranks that wait for it in a collective.
The hooks are installed when the ranks first meet (mpi_world.of_mpi); a world of one needs none. They replace
sys.exit, sys.excepthook and threading.excepthook for the whole process. docs/reference/exit_codes.md lists
exit codes.
"""

import atexit
import fcntl
import os
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shardrt.comm import supervision
from shardrt.comm.errors import OUT_OF_MEMORY, CollectiveMismatch, PeerFailed, Refused
from shardrt.device.cpu import finish_streams
from shardrt.faults.flight import resident_bytes
from shardrt.untrusted import encodable, printable

__all__ = [
    "HANG",
    "MISMATCH",
    "OUT_OF_MEMORY",
    "at",
    "departed",
    "describe_memory",
    "end_job",
    "install_hooks",
    "refusal",
]

MISMATCH = 70  # ranks are out of step; EX_SOFTWARE of sysexits.h
HANG = 124  # as timeout(1) has it

_PATIENCE = 1.0  # seconds: for MPI to end the job before this process just ends; for all ranks to leave
_TURN = 1.0  # seconds for the rank that reports an error of many ranks
_LAST = 2.0  # seconds for all hosts before the last
_FORWARDING = 0.1  # seconds: on an abort MPICH's launcher loses output not yet forwarded
_SILENCE = 0.1  # seconds until a rank that has left sends a message to running ranks
_LEFT = 1  # tag of that message


@dataclass
class _Process:
    """The state of this module, one per process: it replaces the process's sys.exit and excepthooks."""

    job: "_Job | None" = None  # with install_hooks
    witnesses: list[Callable[[str], None]] = field(default_factory=list)
    memory: Callable[[], str] | None = None  # a rank that is out of memory prints this too
    exit_status: Any = None  # of the sys.exit that ended the program


_process = _Process()


def install_hooks(mpi: Any, node: Any) -> None:
    """From now on an uncaught exception, in any thread, aborts the job: `mpi` (all ranks). Once per process.

    KeyboardInterrupt aborts it too (exit code 130), and so does `sys.exit` with a code other than 0, unless
    all ranks call it. For that, `sys.exit` is replaced for the whole process. If a rank ends in another way
    while others wait for it, the others raise PeerFailed. `node` is the communicator of this node's ranks:
    the first to fail prints its traceback, the others print a line each. Of several hosts, rank 0's host
    prints first: ranks often fail alike, and one message suffices. Collective over both.
    """
    if _process.job is not None:
        return
    job = _process.job = _Job(mpi, mpi.allgather(socket.gethostname()) if node.size < mpi.size else [])
    sys.excepthook = job.on_exception  # before anything that can fail on one rank alone
    threading.excepthook = job.on_thread_exception
    sys.exit = _exit
    atexit.register(job.on_program_end)
    job.share_lock(node)
    if node.rank == 0:  # every rank of the node has mapped the segment: all have met in share_lock
        _secure_segments()


def tell(witness: Callable[[str], None]) -> None:
    """Call `witness(how)` when this rank is about to end the job."""
    _process.witnesses.append(witness)


def forget(witness: Callable[[str], None]) -> None:
    """Undo `tell`."""
    _process.witnesses.remove(witness)


def describe_memory(function: Callable[[], str]) -> None:
    """Make a rank that runs out of memory also print `function()`, such as the memory plan."""
    _process.memory = function


def end_job(report: str, code: int) -> None:
    """Print `report` and end all ranks at once, from any thread."""
    if _process.job is not None:
        _process.job.end(report, code)
    _call_witnesses(report)
    _say(report)
    os._exit(code)


def ending() -> bool:
    """Whether this rank has finished and waits for the others, or is ending the job."""
    return _process.job is not None and _process.job.at_end


def exit_code() -> int:
    """The exit code of this program, from the argument of sys.exit."""
    status = _process.exit_status
    return status if isinstance(status, int) else int(status is not None)


def departed() -> set[int]:
    """The ranks whose programs have ended while this one runs, as far as they have said so."""
    return _process.job.departed() if _process.job is not None else set()


def at(ranks: Sequence[int]) -> str:
    """The words " on node1" for ranks that are all on one of several hosts; else none."""
    if _process.job is None or not _process.job.hosts:
        return ""
    hosts = {_process.job.hosts[rank] for rank in ranks}
    return f" on {hosts.pop()}" if len(hosts) == 1 else ""


def code_of(error: BaseException) -> int:
    """The exit code for an uncaught error, by its root cause."""
    refused = refusal(error)
    if refused is not None:
        return refused.exit_code
    for kind, code in ((MemoryError, OUT_OF_MEMORY), (CollectiveMismatch, MISMATCH)):
        if _root(error, kind) is not None:
            return code
    return 1


def refusal(error: BaseException) -> Refused | None:
    """The refusal of the system that caused `error`. Python has no error class for threads alone."""
    root = _root(error, Refused)
    if root is None:
        root = _root(error, RuntimeError)
        if root is None or str(root) != "can't start new thread":
            return None
        root = Refused(f"out of memory, or of processes (`ulimit -u`): {root}")
    return root


def out_of_memory(error: BaseException) -> str:
    """A report: the bytes asked for, if the error says so, the bytes resident, and the plan."""
    root = _root(error, MemoryError)
    lines = [f"out of memory: {root}" if str(root) else "out of memory"]
    lines.append(f"{resident_bytes() / 1e6:.1f} MB are resident{_limit()}")
    if _process.memory is not None:
        lines.append(_process.memory())
    return "\n".join(lines) + "\n"


class _Job:
    """What the hooks of one process know."""

    def __init__(self, mpi: Any, hosts: Sequence[str]) -> None:
        """hosts: by rank, where there are several."""
        self.at_end = False
        self.hosts = hosts
        self._mpi = mpi
        self._leaving = mpi.Dup()
        self._departed: set[int] = set()
        self._farewells: list[Any] = []
        self._file = os.memfd_create("shardrt-lock")  # a disk may be full
        self._name = f"rank {mpi.rank} of {mpi.size}{f' on {hosts[mpi.rank]}' if hosts else ''}"
        self._lock = threading.Lock()

    def share_lock(self, node: Any) -> None:
        """Make one file the lock of all ranks of the node, if the system permits it. Collective."""
        path = node.bcast(f"/proc/{os.getpid()}/fd/{self._file}")
        own = self._file
        if node.rank != 0:
            with suppress(OSError):
                self._file = os.open(path, os.O_RDWR)
                os.close(own)
        node.Barrier()

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Handle an uncaught exception, as sys.excepthook."""
        if issubclass(kind, KeyboardInterrupt):
            self.end(f"{self._name} was interrupted\n", 130)
        else:
            self._fail("main thread", error)

    def on_thread_exception(self, args: Any) -> None:
        """Handle an uncaught exception of a thread, as threading.excepthook."""
        if not issubclass(args.exc_type, SystemExit):  # SystemExit ends only its thread, as in Python
            self._fail(f"thread {args.thread.name if args.thread else '?'}", args.exc_value)

    def on_program_end(self) -> None:
        """At exit, before MPI's own shutdown, which would wait for all ranks."""
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        self.at_end, code = True, exit_code()
        programs = self._leaving.Ibarrier()
        if code and not _done(programs, _PATIENCE):
            self.end(f"{self._name} called sys.exit({_process.exit_status!r})\n", code)
        finish_streams()  # a rank with a stream in a collective has not left
        everyone = self._leaving.Ibarrier()
        for function in supervision.last_words:
            function()
        if not _done(everyone, _SILENCE):
            self._wait_for(everyone)
        reported = self._leaving.allgather(bool(self._farewells))
        while {rank for rank, said in enumerate(reported) if said} - {self._mpi.rank} - self.departed():
            time.sleep(0.001)
        MPI.Request.Waitall([programs, *self._farewells])
        for function in supervision.very_last:
            function()

    def departed(self) -> set[int]:
        """Receive the messages of the ranks that have left."""
        while (message := self._leaving.Improbe(tag=_LEFT)) is not None:
            word = bytearray(8)
            message.Recv(word)
            self._departed.add(int.from_bytes(word, "little"))
        return set(self._departed)

    def _wait_for(self, everyone: Any) -> None:
        """Send the others a message that this rank has left: a rank that waits for it would wait forever."""
        word = self._mpi.rank.to_bytes(8, "little")
        others = (rank for rank in range(self._mpi.size) if rank != self._mpi.rank)
        self._farewells = [self._leaving.Isend(word, rank, _LEFT) for rank in others]
        while not everyone.Test():
            self.departed()
            time.sleep(0.01)

    def _fail(self, where: str, error: BaseException) -> None:
        last = traceback.format_exception_only(error)[-1].strip()
        short, code = f"{self._name} failed as well: {last}\n", code_of(error)
        if code == MISMATCH or _root(error, PeerFailed):
            short = ""  # the first report is for all
        refused, how, more = refusal(error), "failed", ""
        if refused is not None:  # usually all ranks are refused alike: one line for all
            limit = _limit() if code == OUT_OF_MEMORY else ""
            line = f"error: {self._name}: {refused}{limit}\n"
            return self.end("", code, line, last, self._turn(error))
        if code == OUT_OF_MEMORY:
            how, more = "is out of memory", out_of_memory(error)
        full = f"{self._name} {how} in its {where}:\n{''.join(traceback.format_exception(error))}{more}"
        self.end(short, code, full, last, self._turn(error))

    def _turn(self, error: BaseException) -> float:
        """Seconds in which the rank that reports an error may end the job before this rank speaks."""
        mismatch = _root(error, CollectiveMismatch)
        if mismatch is not None and mismatch.is_leader:
            return 0.0
        own = turn(self.hosts[self._mpi.rank], self.hosts, _TURN, _LAST) if self.hosts else 0.0
        return own if mismatch is None else max(own, _TURN)

    def _wait_turn(self, seconds: float) -> None:
        """Wait while MPI progresses: the rank that speaks may not have this rank's last message yet."""
        deadline = time.monotonic() + seconds
        with suppress(Exception):  # any error of MPI: this rank ends
            while time.monotonic() < deadline:
                self._leaving.Iprobe()
                time.sleep(0.01)

    def end(
        self, report: str, code: int, first_report: str | None = None, how: str = "", turn: float = 0.0
    ) -> None:
        """Write `report` (or `first_report`, if this is the node's first) and end the job.

        turn: seconds to wait before, in which another rank may end the job.
        """
        self.at_end = True
        _call_witnesses(how or report)
        end = threading.Timer(turn + _PATIENCE, os._exit, (code,))
        end.daemon = True
        try:
            end.start()
        except (RuntimeError, MemoryError):  # no memory for a thread: only Abort remains
            end = None
        self._wait_turn(turn)
        # A rank that comes later aborts only after this is written.
        with self._lock, _locked(self._file) as first:
            with suppress(OSError):
                sys.stdout.flush()
            _say(first_report if first and first_report else report)
        time.sleep(_FORWARDING)
        self._mpi.Abort(code)
        if end is not None:  # Abort may return early: going on would report that this rank left
            end.join()
        os._exit(code)


def turn(host: str, hosts: Sequence[str], each: float, last: float) -> float:
    """Seconds in which earlier hosts may speak: `each` per host, at most `last` in all."""
    order = list(dict.fromkeys(hosts))
    return order.index(host) * min(each, last / max(1, len(order) - 1))


def _done(request: Any, patience: float) -> bool:
    """Whether a request completes within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _root(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The error of this kind that is `error` or caused it."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def _limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if soft == resource.RLIM_INFINITY else f"; the address space is limited to {soft / 1e6:.1f} MB"


class _Exit(SystemExit):
    """What sys.exit raises. Python calls no hook for an uncaught SystemExit, but it reads its `code`."""

    @property
    def code(self) -> Any:
        status = self.args[0] if self.args else None
        if sys._getframe().f_back is None:  # read by the interpreter itself, so nothing has caught it
            _process.exit_status = status
        return status


def _exit(status: Any = None) -> None:
    """In place of sys.exit."""
    raise _Exit(status)


def _call_witnesses(how: str) -> None:
    for witness in list(_process.witnesses):
        witness(how)


def _say(report: str) -> None:
    """Write to stderr in one write, so lines of ranks don't mix. The reader may be gone."""
    with suppress(OSError):
        sys.stderr.write(encodable(printable(report, lines=True), sys.stderr))
        sys.stderr.flush()


def _secure_segments() -> None:
    """Unlink MPICH's shared segment: otherwise every aborted job leaves 2 MB in /dev/shm.

    First allocate all of its pages: a store into a hole of a full /dev/shm would kill the process.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/dev/shm/mpich_shm_" in line}
    for path in paths:
        if os.path.exists(path):
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            os.unlink(path)


@contextmanager
def _locked(file: int) -> Iterator[bool]:
    """Hold the node's lock; yields whether no rank of this node held it before."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    first = os.pread(file, 1, 0) == b""
    os.pwrite(file, b"x", 0)
    yield first
    fcntl.lockf(file, fcntl.LOCK_UN)
