"""Requests to stop: signals, a file, a time limit, the loss of the launcher.

Asked once in a step, by all ranks, who then agree.

A signal may reach one rank only, and clocks differ, so the ranks combine their answers.
"""

import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.faults import guard

STOPPED = 75  # exit code: stopped on request and saved, start me again; EX_TEMPFAIL of sysexits.h
FILE = "stop"  # in the run's directory
# The largest of the ranks counts.
_REASONS = ("", "the time limit", "the stop file", "SIGTERM", "SIGUSR1", guard.LOST)
_SIGNALS = {signal.SIGTERM: 3, signal.SIGUSR1: 4}


class StopRequests:
    """Collects requests from now on; use it in a with block, which puts the signals back.

    Args:
        directory: of the run, on rank 0, where a file called "stop" is one.
        minutes: a limit; 0 for none.
    """

    def __init__(self, mesh: DeviceMesh, directory: Path | None, minutes: float = 0) -> None:
        self._mesh = mesh
        self._file = directory / FILE if directory is not None else None
        self._end = time.monotonic() + 60 * minutes if minutes else None
        self._signal = 0
        self._before: dict[int, Any] = {}
        self._heeded = guard.heeded()

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        self._heeded.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._heeded.__exit__(*error)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """The reason for a stop; "" if there is none. Collective."""
        found = np.array([self._own()], np.int64)
        stream = device.current().current_stream
        self._mesh.communicator("control").all_reduce(found, op="max", stream=stream)
        reason = _REASONS[found[0]]
        if reason:
            guard.leaving(reason == guard.LOST)
        if reason and self._file is not None:
            self._file.unlink(missing_ok=True)  # so that the next start is not stopped by it
        return reason

    def _own(self) -> int:
        if guard.lost():
            return len(_REASONS) - 1
        if self._signal:
            return self._signal
        if self._file is not None and self._file.exists():
            return _REASONS.index("the stop file")
        return int(self._end is not None and time.monotonic() >= self._end)

    def _note(self, number: int, frame: Any) -> None:
        self._signal = max(self._signal, _SIGNALS[number])
