"""Lines of figures as text, CSV and JSON."""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

from shardrt.train.errors import one_line

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
            print(json.dumps(result), flush=True)
        elif self._options.csv:
            print(as_csv(self.lines), flush=True)
        if self._options.output is not None:
            with one_line(1):
                write_result(self._options.output, result)


def as_csv(records: Sequence[dict]) -> str:
    """With a head, one line each. Figures in a dict get names such as each_p50; lists are left out."""
    flat = [_flat(record) for record in records]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(chain.from_iterable(flat))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue().rstrip("\n")


def _flat(record: dict) -> dict:
    found = {}
    for name, value in record.items():
        inner = (
            {f"{name}_{key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        found |= {key: each for key, each in inner.items() if not isinstance(each, dict | list)}
    return found


def number(value: float | None, width: int) -> str:
    """Two decimals, or "-" for None, to the right."""
    return f"{'-' if value is None else format(value, '.2f'):>{width}}"
