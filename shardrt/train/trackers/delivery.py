"""The run's side of trackers: one process for each, and writes that never wait.

Processes, not threads: a library's work would take Python's lock from the training loop, its exit handlers
wait for dead servers, and a crash in it would end the rank.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardrt.train.trackers import process
from shardrt.train.trackers.protocol import TrackedRun

__all__ = ["Tracking"]

ROOM = 1 << 20  # bytes that wait for a slow tracker; then records are dropped
PATIENCE = 10.0  # seconds that the end of a run waits for all trackers together
_GRACE = 1.0  # seconds to end the processes that a tracker started
_PAUSE = 0.005  # seconds between two looks at a process that ends
_REPORTS = 1 << 16  # bytes of reports that are read at once
_GROUPS = {"step": "train", "evaluation": "evaluation"}  # kind of record -> prefix of its figures
# A process that has them would join the job of the ranks.
_LAUNCHERS = ("PMI", "MPI_", "MPIR_", "MPICH_", "HYDRA_", "HYDI_", "I_MPI_", "OMPI_", "PRTE_", "MV2_")
# Nothing leaves the machine unless the user's environment says so.
_QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "BROWSER": "true",  # the command that does nothing
}


class Tracking:
    """Sends a run's figures to trackers. No method raises or waits, but `close` for PATIENCE seconds at most.

    Args:
        trackers: names, as `protocol.tracker_of` knows them.
        say: shows a line to the reader.
    """

    def __init__(self, trackers: Iterable[str], run: TrackedRun, say: Callable[[str], None]) -> None:
        self._deliveries = [_Delivery(name, run, say) for name in trackers]

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """The numbers of a "step" or an "evaluation" of metrics.jsonl; of other records nothing."""
        if kind not in _GROUPS or not self._deliveries:
            return
        values = {
            f"{_GROUPS[kind]}/{name}": number
            for name, number in record.items()
            if isinstance(number, int | float) and name != "step"
        }
        line = _line(values=values, step=record["step"])
        for each in self._deliveries:
            each.log(line)

    def close(self, status: str) -> None:
        """Finish all. What is not there in time is ended. status: as in Tracker.finish."""
        deadline = time.monotonic() + PATIENCE
        for each in self._deliveries:
            each.finish(status)
        for each in self._deliveries:
            each.end(deadline)
        self._deliveries = []


class _Delivery:
    """The process of one tracker, and the lines that it has not taken yet."""

    def __init__(self, name: str, run: TrackedRun, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._waiting = bytearray()
        self._sent = self._dropped = 0  # records
        self._missed: int | None = None  # records that it failed to log, once it has said so
        self._reports = b""
        self._child: subprocess.Popen | None = None
        facts = asdict(run) | {"folder": str(run.folder)}
        begin = _line(tracker=name, path=[place for place in sys.path if isinstance(place, str)], run=facts)
        # -P: the modules next to that file have the names of the libraries that they use.
        command = [sys.executable, "-P", process.__file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._child = subprocess.Popen(
                command, bufsize=0, env=_environment(), start_new_session=True, **pipes
            )
            os.set_blocking(self._child.stdin.fileno(), False)
            os.set_blocking(self._child.stdout.fileno(), False)
        except OSError as error:
            self._warn(f"could not start: {error.strerror}")
            return
        self._waiting += begin
        self._write()

    def log(self, line: bytes) -> None:
        """Send a record, now or later; drop it if too much waits."""
        if self._child is None:
            self._dropped += 1
            return
        if len(self._waiting) + len(line) > ROOM:
            self._dropped += 1
            if self._dropped == 1:
                self._warn("it is slower than the run: records are dropped")
        else:
            self._sent += 1
            self._waiting += line
        self._write()
        if self._child is not None:
            self._listen()

    def finish(self, status: str) -> None:
        """Send that the run has ended."""
        if self._child is not None:
            self._waiting += _line(status=status)
            self._write()

    def end(self, deadline: float) -> None:
        """Wait for it until then; say what it has not got."""
        while self._child is not None and self._child.poll() is None and time.monotonic() < deadline:
            self._write()
            if self._child is not None:
                self._listen()
                time.sleep(_PAUSE)
        if self._child is not None:
            self._listen()
        if self._child is not None and self._missed is None:
            late = self._child.poll() is None
            self._lose(f"not done in {PATIENCE:.0f} s: ended" if late else None)
        self._stop()
        lost = self._dropped + (self._sent if self._missed is None else self._missed)
        if lost:
            at_most = "up to " if self._missed is None and self._sent else ""
            self._warn(f"{at_most}{lost} of {self._sent + self._dropped} records are not there")

    def _write(self) -> None:
        """Send what the pipe takes without waiting."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._child.stdin.fileno(), self._waiting[:_REPORTS])]
        except BlockingIOError:
            pass
        except OSError:
            self._listen()
            if self._missed is None:
                self._lose(None)

    def _listen(self) -> None:
        """Show what it reports."""
        try:
            self._reports += os.read(self._child.stdout.fileno(), _REPORTS)
        except OSError:  # nothing there
            return
        *lines, self._reports = self._reports.split(b"\n")
        for line in lines:
            with suppress(ValueError, AttributeError):
                report = json.loads(line)
                self._missed = report.get("missed", self._missed)
                if "error" in report:
                    self._warn(report["error"])
        self._reports = self._reports[-_REPORTS:]

    def _lose(self, why: str | None) -> None:
        """Send nothing more. why: None for a process that ended by itself."""
        child = self._child
        if why is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.1)
            code = child.returncode
            ended = "" if code is None else f" (exit code {code})"
            if code is not None and code < 0:
                ended = f" ({signal.Signals(-code).name})"
            why = f"its process ended{ended}"
        self._warn(why)
        self._stop()

    def _stop(self) -> None:
        """End the process, with those that it started."""
        if self._child is None:
            return
        child, self._child = self._child, None
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        child.stdin.close()
        child.stdout.close()

    def _warn(self, what: str) -> None:
        self._say(f"warning: tracker {self._name}: {what}")


def _line(**what: Any) -> bytes:
    return json.dumps(what).encode() + b"\n"


def _environment() -> dict[str, str]:
    """The environment of a tracker's process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return _QUIET | own
