"""What is tokenised before training: records of several paths, in batches, each with the place behind it.

prepare.py and chat_file.py read it. A preparation that was killed goes on at such a place.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from shardrt.train.progress import clock
from shardrt.train.records import Place, has_records, plain_text, record_files, records
from shardrt.train.screen import Screen
from shardrt.untrusted import open_regular

__all__ = ["Progress", "Row", "batches", "made_from", "rows"]

TEXT = 256 << 20  # bytes of a file that is one document, where a tokenizer needs all of it


@dataclass(frozen=True)
class Row:
    """A record, or the bytes of a file that is one document."""

    value: Any
    where: str  # for messages
    size: int  # bytes or characters, about
    place: list[int]  # where reading goes on behind it: the number of the path, and Place
    part: float  # of all paths, from 0 to 1, that is read


def rows(
    paths: Sequence[Path],
    columns: Sequence[str] | None,
    split: str,
    place: Sequence[int] = (),
    limit: int | None = None,
    texts: bool = True,
) -> Iterator[Row]:
    """The records of paths, one after the other, from a place on.

    Args:
        limit: bytes of a file without records, at most.
        texts: there may be such files.

    Raises:
        BadRecords, Refused: naming the file, the row and what is wrong.
        OSError: for what can't be read.
    """
    sizes = [sum(file.stat().st_size for file in _files(path, split)) for path in paths]
    whole, (first, *inside) = max(1, sum(sizes)), place or [0]
    for number, path in enumerate(paths[first:], start=first):
        before = sum(sizes[:number])
        if texts and not has_records(path):
            with open_regular(path, limit) as file:
                text = plain_text(path, file.read())
            yield Row(text, str(path), len(text), [number + 1], (before + sizes[number]) / whole)
            continue
        start = Place(*inside) if number == first else Place()
        found = records(path, columns, split=split, start=start)
        for record in found:
            part = (before + found.part * sizes[number]) / whole
            yield Row(record, found.where, size_of(record), [number, *astuple(found.place)], part)


def size_of(value: Any) -> int:
    """Characters of all texts in a value of JSON; 1 for other values."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list):
        return sum(map(size_of, value))
    return len(value) if isinstance(value, str) else 1


def batches(found: Iterator[Row], most: int) -> Iterator[list[Row]]:
    """Neighbouring rows, until they have `most` characters; the last may be smaller."""
    batch, size = [], 0
    for row in found:
        batch.append(row)
        size += row.size
        if size >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def made_from(paths: Sequence[Path], split: str, *how: Any) -> str:
    """A hash of all that decides what becomes of the records of paths.

    how: values of JSON. A file is judged by its name, size and time.
    """
    from xxhash import xxh3_128_hexdigest

    files = [(str(file.resolve()), file.stat()) for path in paths for file in _files(path, split)]
    sources = [(name, found.st_size, found.st_mtime_ns) for name, found in files]
    return xxh3_128_hexdigest(json.dumps([sources, *how]).encode())


class Progress:
    """How far a preparation is: a line that moves, or one every ten seconds."""

    def __init__(self, screen: Screen, paths: Sequence[Path], rows_before: int) -> None:
        """rows_before: documents that an earlier process has kept."""
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        self._name, self._screen, self._rows = f"{paths[0].name}{more}", screen, rows_before
        self._began, self._first, self._read = time.perf_counter(), None, 0
        if rows_before:
            screen.say(f"{self._name}: goes on after {rows_before} documents, which are tokenised")
        screen.show(self._name, 0, 100)

    def show(self, batch: Sequence[Row]) -> None:
        """Say how far it is behind a batch."""
        end = batch[-1].part
        self._first = batch[0].part if self._first is None else self._first
        self._rows, self._read = self._rows + len(batch), self._read + sum(row.size for row in batch)
        seconds = max(1e-9, time.perf_counter() - self._began)
        left = seconds * (1 - end) / (end - self._first) if end > self._first else float("nan")
        how = f"{self._rows} documents, {self._read / seconds / 1e6:.1f} MB/s, left {clock(left)}"
        self._screen.show(f"{self._name}: {how}, %", max(1, int(100 * end)), 100, lines=True)


def _files(path: Path, split: str) -> list[Path]:
    return record_files(path, split) if has_records(path) else [path]
