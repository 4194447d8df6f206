"""Lines of figures as text and CSV."""

import csv
import io
from collections.abc import Sequence


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
