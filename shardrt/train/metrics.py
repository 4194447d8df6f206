"""What a run leaves behind: its directory, metrics.jsonl with one JSON object per line, the loss curve.

Everything that shows a run reads metrics.jsonl. Only rank 0 writes.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from itertools import count
from math import fsum, log
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.talk import from_all
from shardrt.train.screen import Screen
from shardrt.train.tensorboard import FOLDER, Events

RUNS = Path("runs")
METRICS = "metrics.jsonl"
BITS = 1 / log(2)  # bits in a nat


def new_run_directory(name: str) -> Path:
    """Make runs/`name`; with an empty name runs/<date and time>, and a number behind it if that exists.

    Raises FileExistsError for a name that is taken, ValueError for one that leads out of runs/.
    """
    if name:
        if Path(name).name != name or name == "..":
            raise ValueError(f"name {name!r} must be a plain folder name: the run goes to {RUNS}/NAME")
        directory = RUNS / name
        if directory.exists():
            raise FileExistsError(f"{directory} exists already: give another --name, or remove it")
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
    """runs/`name`, made if need be. Raises ValueError for a name that is empty or leads out of runs/."""
    if not name or Path(name).name != name or name == "..":
        raise ValueError(f"resume = 'auto' needs the name of a run, a folder in {RUNS}/; got name {name!r}")
    (RUNS / name).mkdir(parents=True, exist_ok=True)
    return RUNS / name


class RunLog:
    """What rank 0 prints and writes to the run's directory; where `directory` is None, it does neither.

    metrics.jsonl holds the records, loss.png their curves. tensorboard: write events as well.
    """

    def __init__(self, directory: Path | None, *, resumed: bool = False, tensorboard: bool = False) -> None:
        self.directory = directory
        self._events = Events(directory / FOLDER) if directory and tensorboard else None
        if directory and resumed:
            _drop_unfinished_line(directory / METRICS)
        mode = "a" if resumed else "x"
        self._metrics = open(directory / METRICS, mode, encoding="utf-8") if directory else None
        self.screen = Screen(shown=directory is not None)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: the run goes on from there."""
        if self._metrics is None:
            return
        self._metrics.close()
        path = self.directory / METRICS
        kept = [r for r in read_metrics(path) if r["kind"] != "end" and r.get("step", 0) <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        temporary.replace(path)
        self._metrics = open(path, "a", encoding="utf-8")
        if self._events:
            self._events.rewind(step)

    def discard(self) -> None:
        """Remove the directory, which is new, and write nothing more."""
        if self._metrics:
            self.close()
            self._metrics = None
            (self.directory / METRICS).unlink()
            if self._events:
                shutil.rmtree(self.directory / FOLDER)
            self.directory.rmdir()

    def say(self, line: str) -> None:
        """Print a line."""
        self.screen.say(line)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Add {"kind": kind, **record} to metrics.jsonl, at once. ValueError for NaN, which JSON has not."""
        if self._metrics:
            self._metrics.write(json.dumps({"kind": kind, **record}, allow_nan=False) + "\n")
            self._metrics.flush()
            if self._events:
                self._events.write(kind, record)

    def close(self) -> None:
        """Write nothing more."""
        if self._metrics:
            self._metrics.close()
        if self._events:
            self._events.close()

    def finish(self, record: dict[str, Any]) -> None:
        """Write the last record and the picture."""
        self.write("end", record)
        if self._metrics:
            self.close()
            plot_losses(read_metrics(self.directory / METRICS), self.directory / "loss.png")


def _drop_unfinished_line(path: Path) -> None:
    """A run that was killed may have been writing one."""
    if path.exists():
        text = path.read_bytes()
        os.truncate(path, text.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that was cut off when a run was killed is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def plot_losses(records: list[dict[str, Any]], path: Path) -> None:
    """A PNG with the training and the held-out loss over the steps, and the accuracy where there is one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, key, style, label in (
        ("step", "loss", "-", "training (one batch)"),
        ("evaluation", "held_out_loss", "o-", "held out"),
    ):
        chosen = [record for record in records if record["kind"] == kind]
        axes.plot([r["step"] for r in chosen], [r[key] for r in chosen], style, label=label, markersize=4)
    run = next((record for record in records if record["kind"] == "run"), {})
    axes.set(xlabel="step", ylabel=f"loss (nats per {run.get('unit', 'token')})")
    rated = [record for record in records if "held_out_accuracy" in record and record["kind"] == "evaluation"]
    if rated:
        right = axes.twinx()
        values = [100 * record["held_out_accuracy"] for record in rated]
        right.plot([record["step"] for record in rated], values, "s--", color="C2", markersize=4)
        right.set_ylabel("held out: % right (dashed)")
    elif run.get("unit") == "token":
        bits = BITS / run.get("bytes_per_token", 1.0)
        scale = (lambda nats: nats * bits, lambda value: value / bits)
        axes.secondary_yaxis("right", functions=scale).set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def over_ranks(mesh: DeviceMesh, op: str, *values: float) -> tuple[float, ...]:
    """The "sum", "max" or "min" of each value over all ranks, the same on each. Collective."""
    numbers = np.array(values, np.float64)
    mesh.communicator("control").all_reduce(numbers, op=op, stream=device.current().current_stream)
    return tuple(numbers.tolist())


def exact_sum(mesh: DeviceMesh, values: list[float]) -> float:
    """The sum of all ranks' values, rounded once: the same bits however they are shared. Collective."""
    return fsum(value for own in from_all(mesh.communicator("control"), values) for value in own)


def _default_names() -> Iterator[Path]:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    yield RUNS / stamp
    for number in count(2):
        yield RUNS / f"{stamp}_{number}"
