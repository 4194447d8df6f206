"""What a section is given and where its rows go: files, because every section is a process.

They stay in the folder of results, so that a call goes on where an earlier one was ended.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .report import Row


@dataclass
class Run:
    """One run of one section, in `seconds`. `ceilings` are those measured before it, by name."""

    section: str
    file: Path
    quick: bool = False
    seconds: float = 60.0
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, figure: float | None = None, unit: str = "", **more: object) -> Row:
        """A row, written down at once: the process may not live to its end."""
        row = Row(self.section, name, figure, unit, **more)
        self.rows.append(row)
        note(self.file, asdict(row))
        return row

    def ceiling(self, key: str, name: str, figure: float, unit: str, **more: object) -> None:
        """A row that later ones are compared with."""
        self.ceilings[key] = figure
        self.add(name, figure, unit, **more)
        note(self.file, {"ceiling": key, "value": figure})

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What fails inside becomes a row."""
        try:
            yield
        except Exception as error:  # anything: the other rows are still wanted
            self.add(name, error=f"{type(error).__name__}: {error}")


@dataclass
class Measured:
    """What a section has written. `done`: it came to its end. `passed`, `failed`: tests that did."""

    of: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def good(self) -> bool:
        """Whether there is nothing to measure again."""
        return self.finished and not any(row.not_run for row in self.rows)

    @property
    def finished(self) -> bool:
        """Whether there is nothing to measure again as long as nothing is installed and no GPU is added."""
        return self.done and bool(self.rows) and not any(row.bad for row in self.rows)


def note(file: Path, values: dict[str, Any]) -> None:
    """One more line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(values) + "\n")


def read(file: Path) -> Measured:
    """All lines of a section's file; nothing where there is none."""
    found = Measured()
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off with its process
        if "ceiling" in values:
            found.ceilings[values["ceiling"]] = values["value"]
        elif "of" in values:
            found.of = values["of"]
        elif "passed" in values:
            found.passed.append(values["passed"])
        elif "failed" in values:
            found.failed.append(values["failed"])
        elif "done" in values:
            found.done = values["done"]
        else:
            found.rows.append(Row(**values))
    return found


def sources(root: Path) -> str:
    """A digest of the code that is measured: figures of other code are not gone on with."""
    digest = hashlib.sha256()
    folders = ("shardrt", "kernels", "models", "bench", "tests/gpu", "tests/cuda")
    files = [file for folder in folders for file in (root / folder).rglob("*")]
    for file in sorted(files):
        if file.suffix in (".py", ".cu", ".cuh"):
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
