"""The files of a run: its directory, metrics.jsonl with one JSON object per line, the loss curve.

Everything that shows a run reads metrics.jsonl. Only rank 0 writes.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import count
from math import fsum, log
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.faults.lock import LOCK, lock
from shardrt.train import charts
from shardrt.train.screen import Screen
from shardrt.train.trackers import TrackedRun, Tracking
from shardrt.untrusted import strict_json

__all__ = ["BITS", "METRICS", "PIPELINE", "RunLog"]

RUNS = Path("runs")
METRICS = "metrics.jsonl"
PIPELINE = "pipeline.csv"  # the table of a run in stages
BITS = 1 / log(2)  # bits in a nat


def new_run_directory(name: str) -> Path:
    """Make runs/`name`; with an empty name runs/<date and time>, and a number behind it if that exists.

    Raises:
        FileExistsError: for a name that is taken.
        ValueError: for one that leads out of runs/.
    """
    if name:
        if not _is_plain(name):
            raise ValueError(f"name {name!r} must be a plain folder name: the run goes to {RUNS}/NAME")
        directory = RUNS / name
        if directory.exists():
            raise FileExistsError(f"{directory} exists already: pass another --name, or remove the folder")
        directory.mkdir(parents=True)
        return directory
    RUNS.mkdir(exist_ok=True)
    for directory in _default_names():
        try:
            directory.mkdir()
        except FileExistsError:  # a run that began in the same second
            continue
        return directory


def resumed_run_directory(name: str) -> Path:
    """runs/`name`, made if need be.

    Raises:
        ValueError: for a name that is empty or leads out of runs/.
    """
    if not _is_plain(name):
        raise ValueError(f"resume = 'auto' needs the name of a run, a folder in {RUNS}/; got name {name!r}")
    (RUNS / name).mkdir(parents=True, exist_ok=True)
    return RUNS / name


def _is_plain(name: str) -> bool:
    """Whether it names a folder here, in characters that can be seen and written to a file."""
    return bool(name) and Path(name).name == name and name != ".." and name.isprintable()


class RunLog:
    """Rank 0's prints and writes to the run's directory; where `directory` is None, it does neither.

    metrics.jsonl holds the records, loss.png their curves. While it is open, no other job can have the run
    (lock.py): raises Locked, naming the directory, if one has it.

    A full disk, or a directory that goes away, ends no run: one message says so, records wait in memory
    until they can be written, and a directory that was moved or removed is made again, with all records.
    """

    def __init__(self, directory: Path | None, *, resumed: bool = False) -> None:
        self.directory, self._resumed = directory, resumed
        self.screen = Screen(shown=directory is not None)
        self._lock = self._metrics = -1  # descriptors
        self._unwritten = b""
        self._reported = False  # that something can't be written
        self._tracking: Tracking | None = None
        if directory is None:
            return
        self._lock = lock(directory)
        try:
            if resumed:
                _drop_unfinished_line(directory / METRICS)
            self._metrics = _opened(directory / METRICS, new=not resumed)
        except BaseException:
            self.close()
            raise

    def rewind(self, step: int, *, finished: bool = False) -> None:
        """Drop the records after `step`: the run goes on from there.

        Args:
            finished: no step follows, and the last evaluation is made again: drop that, too.

        Raises:
            ValueError: for a damaged file.
            OSError: if the file system fails.
        """
        if self._metrics < 0:
            return
        path = self.directory / METRICS
        kept = [record for record in read_metrics(path) if _stays(record, step, finished)]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        temporary.replace(path)
        os.close(self._metrics)
        self._metrics = _opened(path)

    def track(self, trackers: Sequence[str], settings: dict[str, Any], step: int) -> None:
        """From now on send figures to these trackers too.

        Args:
            settings: of the run, in the types of JSON.
            step: updates of the weights so far.
        """
        if self.directory is not None and trackers:
            folder = self.directory.resolve()
            run = TrackedRun(folder.name, folder, settings, self._resumed, step)
            self._tracking = Tracking(trackers, run, self.say)

    def discard(self) -> None:
        """Remove the directory, which is new, and write nothing more."""
        if self._metrics >= 0:
            self.close()
            shutil.rmtree(self.directory)

    def say(self, line: str) -> None:
        """Print a line."""
        self.screen.say(line)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Add {"kind": kind, **record} to metrics.jsonl, at once. ValueError for NaN, which JSON has not."""
        if self._metrics < 0:
            return
        self._unwritten += json.dumps({"kind": kind, **record}, allow_nan=False).encode() + b"\n"
        self.flush()
        if self._tracking:
            self._tracking.write(kind, record)

    def flush(self) -> None:
        """Write the records that wait, if that is possible now; see that the directory is there.

        Raises:
            Locked: if it is not, and another job has the one that has its name.
        """
        if self._metrics < 0:
            return
        try:
            if not _is(self._metrics, self.directory / METRICS):
                self._begin_again()
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._metrics, self._unwritten) :]
        except OSError as error:
            if not self._reported:
                message = f"warning: {self.directory / METRICS}: {error.strerror}"
                self.say(f"{message}; training goes on, and records are written when there is a way")
            self._reported = True
        else:
            self._reported = False

    def _begin_again(self) -> None:
        """Make the moved or removed directory again, or the file in it, with the contents of the old one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not _is(self._lock, self.directory / LOCK):
            taken = lock(self.directory, patience=0)
            os.close(self._lock)
            self._lock = taken
        metrics = _opened(self.directory / METRICS, new=True)
        size = os.fstat(self._metrics).st_size
        self._unwritten = os.pread(self._metrics, size, 0) + self._unwritten
        os.close(self._metrics)
        self._metrics = metrics
        self.say(f"warning: {self.directory} was moved or removed: made again, with the records so far")

    def close(self, status: str = "failed") -> None:
        """Write nothing more, and let another job have the run. status: how it ended, for trackers."""
        self.flush()
        if self._tracking:
            self._tracking.close(status)
        self._tracking = None
        if self._unwritten:
            self.say(f"warning: {self._unwritten.count(10)} records of {METRICS} could not be written")
            self._unwritten = b""
        for file in (self._metrics, self._lock):
            if file >= 0:
                os.close(file)
        self._metrics = self._lock = -1

    def finish(self, record: dict[str, Any]) -> None:
        """Write the last record and the picture."""
        self.write("end", record)
        if self._metrics < 0:
            return
        self.close("finished")
        try:
            plot_losses(read_metrics(self.directory / METRICS), self.directory / "loss.png")
        except OSError as error:
            self.say(f"warning: {self.directory / 'loss.png'}: {error.strerror}")


def _opened(path: Path, new: bool = False) -> int:
    """A descriptor that adds to a file. Raises FileExistsError if it is to be a new one."""
    return os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else 0), 0o666
    )


def _is(file: int, path: Path) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _stays(record: dict[str, Any], step: int, finished: bool) -> bool:
    """Whether a run that goes on from `step` leaves a record as it is."""
    again = finished and record["kind"] == "evaluation" and record["step"] == step
    return record["kind"] != "end" and record.get("step", 0) <= step and not again


def _drop_unfinished_line(path: Path) -> None:
    """A run that was killed may have been writing one."""
    if path.exists():
        text = path.read_bytes()
        os.truncate(path, text.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a killed run left incomplete is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [strict_json(line) for line in lines[:-1] if line]


@charts.look()
def plot_losses(records: list[dict[str, Any]], path: Path) -> None:
    """A PNG with the training and the held-out loss over the steps, and the accuracy where there is one."""
    chosen = {kind: [r for r in records if r["kind"] == kind] for kind in ("run", "step", "evaluation")}
    unit = chosen["run"][0].get("unit") if chosen["run"] else "token"
    one_batch = charts.Series.of("training (one batch)", chosen["step"], "loss")
    held_out = charts.Series.of("held out", chosen["evaluation"], "held_out_loss", dots=True)
    axes = charts.lines("", [one_batch, held_out], y=f"loss (nats per {unit})")
    rated = [record for record in chosen["evaluation"] if "held_out_accuracy" in record]
    if rated:
        right = axes.twinx()
        values = [100 * record["held_out_accuracy"] for record in rated]
        right.plot([record["step"] for record in rated], values, "s--", color="C2", markersize=4)
        right.set_ylabel("held out: % right (dashed)")
    elif chosen["run"] and unit == "token":
        bits = BITS / chosen["run"][0].get("bytes_per_token", 1.0)
        scale = (lambda nats: nats * bits, lambda value: value / bits)
        axes.secondary_yaxis("right", functions=scale).set_ylabel("bits per byte")
    axes.figure.savefig(path, dpi=144)


def over_ranks(mesh: DeviceMesh, op: str, *values: float) -> tuple[float, ...]:
    """The "sum", "max" or "min" of each value over all ranks, the same on each. Collective."""
    numbers = np.array(values, np.float64)
    mesh.communicator("control").all_reduce(numbers, op=op, stream=device.current().current_stream)
    return tuple(numbers.tolist())


def exact_sum(mesh: DeviceMesh, values: list[float]) -> float:
    """The sum of all ranks' values, rounded once: bitwise identical however they are shared. Collective."""
    return fsum(value for own in all_gather_object(mesh.communicator("control"), values) for value in own)


def _default_names() -> Iterator[Path]:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    yield RUNS / stamp
    for number in count(2):
        yield RUNS / f"{stamp}_{number}"
