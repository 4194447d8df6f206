"""Reads what a run has left, while it goes on or after it was killed: whatever of it is there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardrt.tools import autopsy
from shardrt.train.metrics import METRICS
from shardrt.train.trace import TRACE


class BadRun(ValueError):
    """No run, nothing in it yet, or damaged."""


@dataclass(frozen=True)
class Run:
    """A run's records, sorted by kind, its settings, its trace and what the doctor says."""

    path: Path
    about: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    end: dict[str, Any]
    config: str
    events: list[dict[str, Any]]
    doctor: dict[str, Any]

    @property
    def unit(self) -> str:
        """What the rate counts: "token", "image"."""
        return self.about.get("unit", "token")

    @property
    def total(self) -> int | None:
        """How many steps it is to have; None where that is not known."""
        return self.about.get("steps")


def read_run(path: Path) -> Run:
    """Raises BadRun in one line, OSError."""
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
        config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
        read_trace(path / TRACE) if (path / TRACE).exists() else [],
        autopsy.examine(path),
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that is cut off is left out. Raises BadRun, OSError."""
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(path.parent))
    if not path.exists():
        raise BadRun(f"{path.parent}: no {path.name}, so no run of models.train")
    records = []
    *whole, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, start=1):
        record = parsed(line)
        if record is None:
            raise BadRun(f"{path}: line {number} is damaged")
        records.append(record)
    if not records:
        raise BadRun(f"{path}: nothing in it yet")
    return records


def parsed(line: bytes) -> dict[str, Any] | None:
    """A record of a line; None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    numbered = isinstance(record.get("step"), int) or record["kind"] not in ("step", "evaluation")
    return record if numbered else None


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace of ours. Raises BadRun, OSError."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        if not all(_is_event(event) for event in events):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise BadRun(f"{path}: not a whole trace") from None
    return events


def _is_event(event: dict[str, Any]) -> bool:
    """Whether an event has what a picture needs. Raises KeyError, TypeError if it is none at all."""
    named = isinstance(event["name"], str) and isinstance(event["pid"], int)
    span = event["ph"] != "X" or (isinstance(event["cat"], str) and event["ts"] >= 0 and event["dur"] >= 0)
    return named and span
