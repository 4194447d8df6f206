"""The process of one tracker; delivery.py starts it and sends JSON lines, each one call of a method.

Whatever the tracker raises, also SystemExit, becomes a report to the run. What it prints is dropped: a
launcher waits for the output of each process. The process ends a while after the run does, in every case.

There are two processes: the tracker's, and its parent, which outlives all that the tracker started.
"""

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_LINGER = 60.0  # seconds that a tracker has after the run's end; the run itself waits less
_NICE = 10  # training has the cores first
_SUBREAPER = 36  # Linux's PR_SET_CHILD_SUBREAPER


def main() -> None:
    """Obey what comes on standard input until it ends."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    _leave_a_parent()
    os.nice(_NICE)
    first = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = first["path"]
    missed, status = 0, ""
    said: set[str] = set()  # a tracker may raise the same in each method
    tracker = _started(first, reports)
    for line in sys.stdin.buffer:
        call = json.loads(line)
        if "status" in call:
            status = call["status"]
            break
        if tracker is None:
            missed += 1
            continue
        try:
            tracker.log(call["values"], call["step"])
        except BaseException as error:
            missed += 1
            if missed == 1:
                said.add(_words("", error))
                _report(reports, error=_words("log", error))
    if tracker is not None:
        try:
            tracker.finish(status or "failed")  # a run that was killed says nothing
        except BaseException as error:
            if _words("", error) not in said:
                _report(reports, error=_words("finish", error))
    _report(reports, missed=missed)
    os._exit(0)  # libraries wait for dead servers in their exit handlers


def _started(first: dict[str, Any], reports: TextIO) -> Any:
    """The tracker; None if it could not start."""
    try:
        from shardrt.train.trackers.protocol import TrackedRun, tracker_of

        run = first["run"]
        tracker = tracker_of(first["tracker"])
        tracker.start(TrackedRun(**(run | {"folder": Path(run["folder"])})))
    except BaseException as error:
        _report(reports, error=_words("start", error))
        return None
    return tracker


def _words(method: str, error: BaseException) -> str:
    """One line about an exception."""
    said = " ".join(str(error).split())[:300]
    return f"{method}: {type(error).__name__}" + (f": {said}" if said else "")


def _report(reports: TextIO, **what: Any) -> None:
    try:
        print(json.dumps(what), file=reports, flush=True)
    except OSError:  # the run is gone
        pass


def _leave_a_parent() -> None:
    """Return in a child; the parent waits for its end, ends what it left running, and exits as it did.

    As Linux's subreaper, the parent gets each process whose own parent has ended, also one of another
    session or group. SIGTERM to the parent ends all of them now.
    """
    with suppress(AttributeError):  # systems without it
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    tracker = os.fork()
    if not tracker:
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(tracker, signal.SIGKILL))
    threading.Thread(target=_kill_after_run, args=(tracker,), daemon=True).start()
    ended = status = 0
    while ended != tracker:
        ended, status = os.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while children := _children():
        for child in children:
            with suppress(PermissionError):
                os.kill(child, signal.SIGKILL)
        os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL if code == -signal.SIGTERM else -code)
    os._exit(code)


def _children() -> list[int]:
    """The children of this process, also those that have ended; none where the system does not list them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(child) for child in listed.split()]


def _kill_after_run(tracker: int) -> None:
    """Wait until the run closes the pipe, and kill the tracker if it still is there later."""
    closed = select.poll()
    closed.register(0, 0)  # hang-up alone
    closed.poll()
    time.sleep(_LINGER)
    os.kill(tracker, signal.SIGKILL)


if __name__ == "__main__":
    main()
