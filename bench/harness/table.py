"""Lines of figures as text, CSV and JSON."""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from .environment import write_result


class Output:
    """What a command prints: facts and a table as its lines come; or CSV or one JSON object, at the end.

    The object goes to the file of --output, too. speaks: whether this rank prints and writes.
    """

    def __init__(
        self, options: argparse.Namespace, facts: dict[str, Any], head: str, speaks: bool = True
    ) -> None:
        self.facts = facts
        self.lines: list[dict] = []
        self._options, self._speaks = options, speaks
        self._as_text = speaks and not (options.csv or options.json)
        self.say(*(f"# {name}: {value}" for name, value in facts.items()), head)

    def say(self, *lines: str) -> None:
        """Lines for a reader."""
        if self._as_text:
            print("\n".join(lines), flush=True)

    def add(self, line: dict, text: str | None) -> None:
        """A line by the names of its columns, and for a reader, unless that is None."""
        self.lines.append(line)
        if text is not None:
            self.say(text)

    def close(self, **more: Any) -> None:
        """more: what the object has besides facts and lines."""
        if not self._speaks:
            return
        result = {**self.facts, "lines": self.lines, **more}
        if self._options.json:
            print(json.dumps(result))
        elif self._options.csv:
            print(as_csv(self.lines))
        if self._options.output is not None:
            write_result(self._options.output, result)


def as_csv(records: Sequence[dict]) -> str:
    """With a head, one line each."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().rstrip("\n")


def number(value: float | None, width: int) -> str:
    """Two decimals, or "-" for None, to the right."""
    return f"{'-' if value is None else format(value, '.2f'):>{width}}"
