"""The process of one tracker; delivery.py starts it and sends JSON lines, each one call of a method.

Whatever the tracker raises, also SystemExit, becomes a report to the run. What it prints is dropped: a
launcher waits for the output of each process. The process ends a while after the run does, in every case.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

_LINGER = 60.0  # seconds that a tracker has after the run's end; the run itself waits less
_NICE = 10  # training has the cores first


def main() -> None:
    """Obey what comes on standard input until it ends."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.nice(_NICE)
    threading.Thread(target=_end_after_run, daemon=True).start()
    first = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = first["path"]
    missed, status = 0, ""
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
                _report(reports, error=_words("log", error))
    if tracker is not None:
        try:
            tracker.finish(status or "failed")  # a run that was killed says nothing
        except BaseException as error:
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


def _end_after_run() -> None:
    """Wait until the run closes the pipe, and end this group of processes if it still is there later."""
    closed = select.poll()
    closed.register(0, 0)  # hang-up alone
    closed.poll()
    time.sleep(_LINGER)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
