"""What a section is given and where its rows go: files, because every section is a process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.gpu.report import Row


@dataclass
class Run:
    """One run of one section. `ceilings` are those measured before it, by name."""

    section: str
    file: Path
    quick: bool = False
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, figure: float | None = None, unit: str = "", **more: object) -> Row:
        """A row, written down at once: the process may not live to its end."""
        row = Row(self.section, name, figure, unit, **more)
        self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        return row

    def ceiling(self, key: str, name: str, figure: float, unit: str, **more: object) -> None:
        """A row that later ones are compared with."""
        self.ceilings[key] = figure
        self.add(name, figure, unit, **more)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ceiling": key, "value": figure}) + "\n")

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What fails inside becomes a row."""
        try:
            yield
        except Exception as error:  # anything: the other rows are still wanted
            self.add(name, error=f"{type(error).__name__}: {error}")


def read(file: Path) -> tuple[list[Row], dict[str, float]]:
    """(rows, ceilings) that a section has written."""
    rows, ceilings = [], {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off with its process
        if "ceiling" in values:
            ceilings[values["ceiling"]] = values["value"]
        else:
            rows.append(Row(**values))
    return rows, ceilings
