"""`python -m shardrt watch RUN`: a run's figures as they come, in another terminal, until it ends.

Exit code 0 where the run is done or goes on, 1 where it ended in another way, 65 where nothing can be read.
"""

import argparse
import os
import time
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

from shardrt.tools import autopsy
from shardrt.tools.runs import LARGEST, BadRun, check_there, parsed, pipeline_described
from shardrt.train.metrics import METRICS
from shardrt.train.progress import evaluation_line, step_line
from shardrt.train.screen import Screen
from shardrt.untrusted import open_regular, say

EVERY = 0.5  # seconds from one look at the metrics to the next
_LOOKS = 4  # looks at the metrics per look at the flight files


def add_to(commands: Any) -> None:
    """Add `watch` to argparse's subparsers."""
    message = "print a run's figures as they come, until it ends"
    parser = commands.add_parser("watch", help=message, description=message)
    parser.add_argument("path", metavar="RUN", type=Path, help="a run's folder, runs/NAME")
    parser.add_argument("--once", action="store_true", help="print the latest figures and leave")
    parser.set_defaults(run=watch)


def watch(options: argparse.Namespace) -> int:
    """Follow a run, or print its state; returns the exit code. Raises BadRun, OSError."""
    metrics, teller = Metrics(options.path / METRICS), Teller()
    if options.once:
        return once(options.path, metrics, teller)
    try:
        with teller.screen.moving():
            return follow(options.path, metrics, teller)
    except KeyboardInterrupt:
        return 0


def once(path: Path, metrics: "Metrics", teller: "Teller") -> int:
    """Print the run, its latest step and evaluation, and its state."""
    latest = {record["kind"]: record for record in metrics.new()}
    for kind in ("run", "step", "evaluation"):
        if kind in latest:
            teller.tell(latest[kind])
    if "end" in latest:
        teller.tell(latest["end"])
        return 0
    found = autopsy.examine(path)
    say(found["verdict"] if found["ranks"] else "no flight files: whether it goes on is not known")
    return found["code"] if found["ranks"] else 0


def follow(path: Path, metrics: "Metrics", teller: "Teller") -> int:
    """Print old records, then new ones, until the last record or the flight files show the end."""
    look = 0
    while True:
        over = look % _LOOKS == 0 and ended(path)  # before the last records are read
        for record in metrics.new():
            teller.tell(record)
            if record["kind"] == "end":
                return 0
        if over:
            found = autopsy.examine(path)
            say(f"the run has ended: {found['verdict']}")
            return found["code"]
        look += 1
        time.sleep(EVERY)


def ended(path: Path) -> bool:
    """Whether every rank is known to have ended."""
    ranks = autopsy.examine(path)["ranks"]
    return bool(ranks) and all(rank["state"] != "alive" for rank in ranks)


class Metrics:
    """The records of a growing metrics.jsonl, each once."""

    def __init__(self, path: Path) -> None:
        check_there(path)
        self._path = path
        self._file: tuple[int, int] | None = None
        self._read = 0  # bytes

    def new(self) -> Iterator[dict[str, Any]]:
        """The new records, each once its line is complete. Raises BadRun for a damaged line; Refused."""
        with open_regular(self._path, LARGEST) as file:
            facts = os.fstat(file.fileno())
            resumed = self._file not in (None, (facts.st_dev, facts.st_ino))
            self._file = facts.st_dev, facts.st_ino
            self._read = 0 if resumed or facts.st_size < self._read else self._read
            file.seek(self._read)
            *lines, _ = file.read(LARGEST).split(b"\n")
        self._read += sum(len(line) + 1 for line in lines)
        records = [parsed(line) for line in lines]
        if None in records:
            raise BadRun(f"{self._path}: a line is damaged: {lines[records.index(None)][:60]!r}")
        if resumed:  # records before the last start have been printed
            starts = [place for place, record in enumerate(records) if record["kind"] == "run"]
            records = records[starts[-1] :] if starts else records
        yield from records


class Teller:
    """Formats records as aligned lines. The run's own description decides the columns."""

    def __init__(self) -> None:
        self._steps, self._unit = 0, "token"
        self.screen = Screen()

    def tell(self, record: dict[str, Any]) -> None:
        """Print a record; on a terminal, with a progress line below."""
        self.screen.say(self.line(record))
        if record["kind"] == "step":
            self.screen.show("training", record["step"], self._steps)

    def line(self, record: dict[str, Any]) -> str:
        """Format a record as one line. Raises BadRun for a record that lacks a field."""
        try:
            return self._line(record)
        except (LookupError, TypeError, ValueError) as error:
            message = f"a record of kind {record['kind']!r} is not as expected ({error!r})"
            raise BadRun(f"{METRICS}: {message}") from None

    def _line(self, record: dict[str, Any]) -> str:
        kind = record["kind"]
        finite = {name: nan if value is None else value for name, value in record.items()}
        if kind == "run":
            self._steps, self._unit = record["steps"], record["unit"]
            size = f"{record['parameters'] / 1e6:.2f} M parameters"
            ranks = f"{record['ranks']} rank{'s' if record['ranks'] != 1 else ''}"
            piped = f"\n{pipeline_described(record['pipeline'])}" if "pipeline" in record else ""
            return f"{record['architecture']}, {size}, {ranks}, {self._steps} steps{piped}"
        if kind == "step":
            return step_line(finite, self._steps, self._unit, self.screen.width)
        if kind == "evaluation":
            return evaluation_line(finite, self._steps)
        return f"done in {record['seconds']:.0f} s" if kind == "end" else f"{kind}: {record}"
