"""Reads the files of a run, while it goes on or after it was killed, as far as they exist.

The files may be damaged or foreign: this module refuses content that a run does not write.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrt.parallel.table import Table
from shardrt.tools import autopsy
from shardrt.train.metrics import METRICS, PIPELINE
from shardrt.train.trace import TRACE
from shardrt.untrusted import natural, number, printable, read_regular, strict_json

LARGEST = 1 << 30  # bytes of a metrics.jsonl, or a trace
_LARGEST_CONFIG = 1 << 24
_LARGEST_TABLE = 1 << 20
_MOST_RANKS = 1 << 24
_TRACED = re.compile("step [0-9]{1,15}")


class BadRun(ValueError):
    """There is no run, or it is empty or damaged."""


@dataclass(frozen=True)
class Run:
    """A run's records, sorted by kind, its settings, its trace, its pipeline and the doctor's findings."""

    path: Path
    about: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    end: dict[str, Any]
    config: str
    events: list[dict[str, Any]]
    doctor: dict[str, Any]
    table: Table | None = None

    @property
    def unit(self) -> str:
        """The unit of the rate: "token", "image"."""
        return printable(self.about.get("unit", "token"))

    @property
    def total(self) -> int | None:
        """The planned number of steps; None if not known."""
        return self.about.get("steps")


def read_run(path: Path) -> Run:
    """Read a run. Raises BadRun or Refused in one line, OSError."""
    records = read_records(path / METRICS)
    found: dict[str, list[dict[str, Any]]] = {"run": [], "step": [], "evaluation": [], "end": []}
    for record in records:
        found.get(record["kind"], []).append(record)
    config = path / "config.toml"
    return Run(
        path,
        (found["run"] or [{}])[-1],  # a resumed run has one for each start
        found["step"],
        found["evaluation"],
        (found["end"] or [{}])[-1],
        read_regular(config, _LARGEST_CONFIG).decode(errors="replace") if config.exists() else "",
        read_trace(path / TRACE) if (path / TRACE).exists() else [],
        autopsy.examine(path),
        read_table(path / PIPELINE) if (path / PIPELINE).exists() else None,
    )


def read_table(path: Path) -> Table:
    """The table of a pipeline. Raises BadRun, Refused, OSError."""
    read_regular(path, _LARGEST_TABLE)
    try:
        table = Table.load(path)
        table.check()
    except (ValueError, csv.Error) as error:
        raise BadRun(f"{path}: {error}") from None
    return table


def pipeline_described(facts: dict[str, Any]) -> str:
    """Describe a pipeline in a line."""
    return (
        f"{printable(facts['schedule'])}, {len(facts['stages'])} stages, {facts['micro_batches']} "
        f"micro-batches, idle for {100 * facts['bubble']:.0f} % where forward takes half of backward"
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without a truncated last line.

    Raises BadRun, Refused, OSError.
    """
    check_there(path)
    records = []
    *whole, _ = read_regular(path, LARGEST).split(b"\n")
    for place, line in enumerate(whole, start=1):
        record = parsed(line)
        if record is None:
            raise BadRun(f"{path}: line {place} is damaged")
        records.append(record)
    if not records:
        raise BadRun(f"{path}: the file is empty: the run has recorded no step yet")
    return records


def check_there(path: Path) -> None:
    """Raise FileNotFoundError if the folder of a metrics.jsonl is missing, BadRun if the file is."""
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(path.parent))
    if not path.exists():
        raise BadRun(f"{path.parent}: not a run of models.train: {path.name} is missing")


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is not a record."""
    try:
        record = strict_json(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    kind = record["kind"]
    if kind in ("step", "evaluation"):
        figures = (value for name, value in record.items() if name != "kind")
        well = natural(record.get("step"), 1 << 53) and all(f is None or number(f) for f in figures)
    else:
        known = _FIELDS.get(kind, {}).items()
        well = all(is_it(record[name]) for name, is_it in known if name in record)
    return record if well else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_pipeline(value: Any) -> bool:
    described = isinstance(value, dict) and isinstance(value.get("schedule"), str)
    numbers = described and natural(value.get("micro_batches")) and number(value.get("bubble"), 1)
    return bool(numbers and isinstance(value.get("stages"), list) and all(map(_is_text, value["stages"])))


def _is_table_of_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(number, value.values()))


_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {  # fields read from other kinds of records
    "run": {
        **dict.fromkeys(("architecture", "unit"), _is_text),
        **dict.fromkeys(("steps", "ranks"), natural),
        **dict.fromkeys(("parameters", "trained_parameters", "memory_mb_before"), number),
        **dict.fromkeys(("device_bytes", "host_bytes", "axes"), _is_table_of_numbers),
        "environment": _is_table,
        "pipeline": _is_pipeline,
        "began": lambda value: number(value, 1e11),
    },
    "end": {"seconds": number},
}


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a shardrt trace. Raises BadRun, Refused, OSError."""
    data = read_regular(path, LARGEST)
    try:
        events = strict_json(data)["traceEvents"]
        if not isinstance(events, list) or not all(_is_event(event) for event in events):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise BadRun(f"{path}: not a complete trace") from None
    for event in events:  # the fonts lack other characters
        event["name"] = printable(event["name"])
        if event["ph"] == "X":
            event["cat"] = printable(event["cat"])
    return events


def _is_event(event: dict[str, Any]) -> bool:
    """Whether an event has the fields of a picture. Raises KeyError, TypeError if it is not an event."""
    if not (isinstance(event["name"], str) and isinstance(event["ph"], str)):
        return False
    if not natural(event["pid"], _MOST_RANKS):
        return False
    times = event["ph"] != "X" or all(number(event[name]) and event[name] >= 0 for name in ("ts", "dur"))
    return times and (event["ph"] != "X" or isinstance(event["cat"], str))


def traced_step(event: dict[str, Any]) -> int | None:
    """The number of the step whose compute-stream span this event is; None for other events."""
    spans = event["ph"] == "X" and event["cat"] == "compute"
    return int(event["name"][5:]) if spans and _TRACED.fullmatch(event["name"]) else None
