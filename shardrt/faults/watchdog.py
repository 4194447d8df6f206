"""The watchdog: ends a job without progress, and reports which rank waits where and for which rank.

A thread per rank checks twice a second whether the flight recorder has advanced. Its only MPI or NCCL call
is the last one, Abort. The first rank at its limit speaks for all hosts whose records it sees. A host that
can't hear that rank's host, because the link is gone, speaks too. As a second layer, a timer of the C
library, which needs no interpreter lock, ends a rank whose watchdog itself can't run.
"""

import faulthandler
import fcntl
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrt.comm import recording
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import threads
from shardrt.faults import failure, guard, reach, reports
from shardrt.faults.deadline import Deadline, within
from shardrt.faults.flight import Flight, Recorder, read_all

__all__ = ["Limits", "REPORT", "Watch", "check_limit"]

REPORT = "hang.txt"
_KINDS = ("rank-*.bin", "stacks-*.txt", REPORT)  # of the files in its folder
_BEAT = 0.5  # seconds
_SIGNAL = signal.SIGUSR2  # asks a rank for its stacks
_GATHERING = 0.3  # seconds in which the others write their stacks
_SPEAKING = 25.0  # seconds that speaking may take at most
_HEARING = 1.0  # seconds for a host to answer
_REPORTING = 4.0  # seconds in which the first rank to speak has written its report
_TURN = 1.5  # seconds for a host that knows better, and for each earlier host, to end the job
_LAST = 4.0  # seconds for all hosts before the last
_STEPS = 64  # latest steps, for the median
_LIKE_EVAL = ("eval", "sample", "end")
_COMPILING = 6  # limits of set-up: half a minute's work for a processor that other jobs may use too
_PREFIX = "shardrt-flight-"  # of temporary directories
_CLOCKS = 1.0  # seconds by which clocks of hosts may differ without a warning
_SHORTEST, _LONGEST = 0.05, 1e7  # seconds: shortest timer; longer is taken for a typing error
_KEPT = 86400.0  # seconds for which reports of hangs stay in temporary directories
_YOUNG = 60.0  # seconds after which a directory without holder is a leftover


def check_limit(name: str, seconds: float) -> None:
    """Raise ValueError for a limit that no timer can keep."""
    if seconds != 0 and not _SHORTEST <= seconds <= _LONGEST:
        raise ValueError(f"{name} must be 0 (never) or {_SHORTEST:g} to {_LONGEST:g} seconds, got {seconds}")


@dataclass(frozen=True)
class Limits:
    """Seconds without progress after which a rank considers the job hung; 0: never.

    Raises:
        ValueError: for a value that is not 0 or 0.05 to 1e7.
    """

    step: float = 30.0  # or 20 median steps, whichever is more
    set_up: float = 300.0  # before the first step, in it, and in the next, until there is a median
    save: float = 600.0
    evaluation: float = 300.0
    medians: float = 20.0
    exit: float = 30.0  # once the program is over: exit handlers, threads while other ranks wait, MPI's end
    outer: float = 600.0  # while hosts exchange outer gradients

    def __post_init__(self) -> None:
        for name in ("step", "set_up", "save", "evaluation", "exit", "outer"):
            check_limit(name, getattr(self, name))

    def of(self, phase: str, steps: int, median: float) -> float:
        """The limit in a phase, after `steps` steps with a median of `median` seconds."""
        if phase in ("save", "outer"):
            return getattr(self, phase)
        if phase in _LIKE_EVAL:
            return self.evaluation
        if phase == "compile":
            return _COMPILING * self.set_up
        if phase == "set-up" or steps < 1:
            return self.set_up
        return self.step and max(self.step, self.medians * median)


class Watch:
    """Records what this rank does, and watches it, inside a with block. Collective.

    The flight files are in a temporary directory until `keep` names a folder. Ranks that are threads are
    recorded but not watched.
    """

    def __init__(self, mesh: DeviceMesh, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._meshes: list[DeviceMesh] = []
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._step_began = 0.0
        self._steps_done = 0
        message = f"hang: rank {mesh.rank} has waited {self.limits.set_up:g} s for all ranks to begin a Watch"
        limit = self.limits.set_up if mesh.world.kind == "mpi" else 0
        with within(limit, message):
            made = _temporary_folder() if mesh.rank == 0 else ""
            message = mesh.communicator("control").all_gather_bytes(
                os.fsencode(f"{socket.gethostname()}\0{made}")
            )
        self._hosts = [os.fsdecode(each).partition("\0")[0] for each in message]  # by rank
        self._folder = Path(os.fsdecode(message[0]).partition("\0")[2])
        self._addresses: dict[str, str] = {}  # of other hosts that answered at the start
        self.recorder = Recorder(self._folder, mesh.rank, mesh.size, _ahead(mesh, self._hosts))
        self._temporary: Path | None = self._folder
        self._hold: int | None = _held(self._folder)
        self._kind = mesh.world.kind
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: Any = None
        self._lock = threading.Lock()  # of the file of stacks, which moves
        self._deadline: Deadline | None = None
        self.record(mesh)

    def record(self, mesh: DeviceMesh) -> None:
        """Record the calls of this mesh's communicators too."""
        recording.record(mesh, self.recorder)
        self._meshes.append(mesh)

    def keep(self, folder: Path | None) -> None:
        """Continue in `folder`, as rank 0 names it, which may be a link. Collective.

        Records, stacks and reports of an earlier run there are removed, and nothing else.
        """
        mesh = self._meshes[-1]
        if mesh.rank == 0:
            for path in (path for kind in _KINDS for path in folder.glob(kind)):
                with suppress(OSError):
                    path.unlink()
        folder = Path(_first(mesh, str(folder)))
        self.recorder.move(folder)
        self._folder = folder
        self._open_stacks()
        self._forget_temporary()

    def step(self, number: int) -> None:
        """Step `number` begins, with its data."""
        self._end_step()
        self._step_began = time.monotonic()
        self.recorder.mark("data", number)

    def phase(self, name: str) -> None:
        """One of flight.PHASES begins. What is not part of a step does not count as its duration."""
        if name in ("save", "eval", "sample", "end", "outer"):
            self._end_step()
        self.recorder.mark(name)

    def _end_step(self) -> None:
        """Keep the duration of a step, except the first, in which kernels are compiled."""
        if self._step_began:
            if self._steps_done:
                self._durations.append(time.monotonic() - self._step_began)
            self._steps_done += 1
        self._step_began = 0.0

    def __enter__(self) -> "Watch":
        failure.tell(self.recorder.end)
        guard.allow_exit(self.limits.exit)
        if self._kind != "thread":
            try:
                self._deadline = Deadline(failure.HANG)
            except OSError:  # no memory for a thread
                pass
            self._open_stacks()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
            if len(set(self._hosts)) > 1:  # in a thread: resolving names may take long
                threading.Thread(target=self._look_around, name="reach", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            how = "done"
        elif isinstance(error, SystemExit):
            how = f"exit code {error.code}"
        else:
            how = traceback.format_exception_only(error)[-1].strip()
        self.recorder.end(how)
        for mesh in self._meshes:
            recording.record(mesh, None)
        failure.forget(self.recorder.end)
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=2 * _BEAT)
            self._close_stacks()
            if self._deadline is not None:
                self._deadline.close()
        self._forget_temporary()
        if self._kind == "single" and failure.code_of(error) == failure.OUT_OF_MEMORY:
            refused = failure.refusal(error)
            if refused is None:
                traceback.print_exception(error)
                sys.stderr.write(f"the program is out of memory\n{failure.out_of_memory(error)}")
            else:
                sys.stderr.write(f"error: {refused}\n")
            sys.exit(failure.OUT_OF_MEMORY)

    # -- the thread

    def _run(self) -> None:
        seen, idle, before = -1, 0.0, time.monotonic()
        names = ("step", "set_up", "save", "evaluation", "outer")
        limits = [getattr(self.limits, name) for name in names]
        tick = min([_BEAT, *(limit / 8 for limit in limits if limit)])
        while not self._stop.wait(tick):
            threads.enter()
            now = time.monotonic()
            idle += min(now - before, 4 * tick)  # time in which this process was stopped itself is not idle
            before = now
            self.recorder.beat()
            limit = self._limit()
            if self.recorder.latest != seen:
                seen, idle = self.recorder.latest, 0.0
                self._arm(limit)
            elif limit and idle > limit:
                self._speak(idle, limit)

    def _look_around(self) -> None:
        """Find the other hosts that answer, to notice later when a host stops answering."""
        threads.enter()
        own = self._hosts[self.recorder.rank]
        known = reach.addresses(dict.fromkeys(host for host in self._hosts if host != own))
        heard = reach.answering(known, reports.LISTENING)
        self._addresses = {host: known[host] for host in known if host in heard}

    def _limit(self) -> float:
        steps = list(self._durations)
        return self.limits.of(self.recorder.phase, len(steps), statistics.median(steps) if steps else 0.0)

    def _arm(self, limit: float) -> None:
        """The second layer: stacks, then the end, by timers in C, in case this thread never runs again."""
        seconds = 1.5 * limit + _BEAT
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
            if limit and self._stacks is not None:
                try:
                    faulthandler.dump_traceback_later(seconds, file=self._stacks)
                except RuntimeError:  # no memory for a thread
                    pass
            if self._deadline is not None:
                self._deadline.set(seconds + _GATHERING if limit else 0)

    def _speak(self, idle: float, limit: float) -> None:
        """End the job: the first rank that comes here writes the report, the others write nothing."""
        if self._deadline is not None:
            self._deadline.set(_SPEAKING)
        if self._is_gone(self._hosts[0]):  # or this host is, and no rank would hear it: others go first
            self._rest(_REPORTING)
        try:
            with open(self._folder / REPORT, "x", encoding="utf-8") as file:
                report = self._report(idle, limit)
                report += f"the Python stacks of the ranks: {self._folder}/stacks-*.txt\n"
                file.write(report)
        except FileExistsError:
            self._dump_own()
            report = self._unheard(idle, limit)
            if not report:
                self._rest(2 * _REPORTING + _LAST)  # until the one that speaks has ended the job
        except OSError as error:
            report = f"rank {self.recorder.rank} hangs, and can't write to {self._folder}: {error}\n"
        failure.end_job(report, failure.HANG)

    def _report(self, idle: float, limit: float) -> str:
        """Where each rank stands, and which rank is behind; asks each rank for its stacks."""
        self._ask_for_stacks(read_all(self._folder)[0])
        recorder, hosts = self.recorder, self._hosts
        heard = reports.listen(self._folder, recorder.rank, hosts, self._addresses, recorder.beat)
        report = reports.hang(recorder, heard, hosts, idle, limit)
        if reports.is_guess(report, heard, hosts):
            self._rest(_TURN + failure.turn(hosts[recorder.rank], hosts, _TURN, _LAST))
        return report

    def _unheard(self, idle: float, limit: float) -> str:
        """The report that this rank must write because no rank hears the first speaker's host; else "".

        One rank per host is enough; hosts take turns.
        """
        own = self._hosts[self.recorder.rank]
        if not self._addresses or self._hosts.index(own) != self.recorder.rank:
            return ""
        for _ in range(int(_REPORTING / _BEAT)):
            speaker = reports.speaker(self._folder / REPORT, self._hosts)
            if speaker:
                if not self._is_gone(speaker):
                    return ""
                left = [host for host in self._hosts if host != speaker]
                self._rest(failure.turn(own, left, _TURN, _LAST))
                return self._report(idle, limit)
            self._rest(_BEAT)
        return ""

    def _is_gone(self, host: str) -> bool:
        """Whether another host answered when this watch began, but does not answer now."""
        address = self._addresses.get(host)
        return address is not None and not reach.answering({host: address}, _HEARING)

    def _rest(self, seconds: float) -> None:
        """Sleep, and give signs of life."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.recorder.beat()
            time.sleep(min(left, _BEAT))

    def _ask_for_stacks(self, flights: list[Flight]) -> None:
        """Make every rank of this host write its stacks, even ranks that hold the interpreter lock."""
        self._dump_own()
        own = next((flight for flight in flights if flight.rank == self.recorder.rank), None)
        for flight in flights:
            if own is not None and flight is not own and flight.host == own.host and not flight.ended:
                try:
                    os.kill(flight.pid, _SIGNAL)
                except OSError:  # it is gone
                    pass
        if len(flights) > 1:
            time.sleep(_GATHERING)

    # -- stacks

    def _dump_own(self) -> None:
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _open_stacks(self) -> None:
        """Open a file for stacks in the folder, in place of the earlier file."""
        if self._kind == "thread":
            return
        try:
            file = open(self._folder / f"stacks-{self.recorder.rank}.txt", "w", encoding="utf-8")
        except OSError:  # no room: there will be no stacks
            return
        with self._lock:
            before, self._stacks = self._stacks, file
            if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, None):  # the program's own handler stays
                faulthandler.register(_SIGNAL, file=file, all_threads=True)
        self._arm(self._limit())
        if before is not None:
            before.close()

    def _close_stacks(self) -> None:
        """Close the file; remove it if it is empty."""
        self._arm(0)
        faulthandler.unregister(_SIGNAL)
        with self._lock:
            file, self._stacks = self._stacks, None
        if file is None:
            return
        file.close()
        path = Path(file.name)
        if path.exists() and not path.stat().st_size:
            path.unlink()

    def _forget_temporary(self) -> None:
        """Remove the temporary directory if this is the last rank that leaves it."""
        if self._temporary is None:
            return
        if self._hold is not None:
            os.close(self._hold)
        for name in (f"rank-{self.recorder.rank}.bin", f"stacks-{self.recorder.rank}.txt"):
            (self._temporary / name).unlink(missing_ok=True)
        try:
            self._temporary.rmdir()
        except OSError:  # others are still in it
            pass
        self._temporary = None


def _first(mesh: DeviceMesh, path: str) -> str:
    """The path that rank 0 gives. Collective."""
    return os.fsdecode(mesh.communicator("control").all_gather_bytes(os.fsencode(path))[0])


def _ahead(mesh: DeviceMesh, hosts: Sequence[str]) -> float:
    """Seconds by which this host's clock is ahead of rank 0's. Rank 0 warns of much. Collective.

    Ranks have just met, so the error is at most the time of a message.
    """
    if len(set(hosts)) == 1:
        return 0.0
    times = [
        float(each) for each in mesh.communicator("control").all_gather_bytes(repr(time.time()).encode())
    ]
    off = {host: seconds - times[0] for host, seconds in zip(hosts, times, strict=True)}
    message = [f"{host} {seconds:+.0f} s" for host, seconds in off.items() if abs(seconds) > _CLOCKS]
    if message and mesh.rank == 0:
        warnings.warn(f"clocks differ from the clock of {hosts[0]}: {', '.join(message)}", stacklevel=3)
    return times[mesh.rank] - times[0]


def _temporary_folder() -> str:
    """A new temporary folder; os.devnull if there is no room. Removes leftovers of killed jobs."""
    root = Path(tempfile.gettempdir())
    for path in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            _remove_leftover(path)
    try:
        return tempfile.mkdtemp(prefix=_PREFIX)
    except OSError:
        return os.devnull


def _remove_leftover(path: Path) -> None:
    """Remove a temporary directory of this user that no process holds. Raises OSError."""
    found, age = path.lstat(), time.time() - path.lstat().st_mtime
    report = (path / REPORT).exists()
    if found.st_uid != os.getuid() or age < (_KEPT if report else _YOUNG):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    finally:
        os.close(folder)


def _held(folder: Path) -> int | None:
    """The directory, open and locked while this process lives, so that no job takes it for a leftover."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return held
