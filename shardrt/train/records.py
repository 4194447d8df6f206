"""Records of JSON lines, Parquet, Arrow and datasets of Hugging Face, one after the other, from any place.

A file is read part by part and never whole. pyarrow runs in a process of its own (records_process.py), so a
file that crashes it, or takes all memory, is one line. JSON lines need no package.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from re import fullmatch
from typing import Any

from shardrt.train import records_process
from shardrt.train.reader_process import ReaderProcess
from shardrt.untrusted import Refused, open_regular, printable, read_regular, strict_json

__all__ = ["BadRecords", "Place", "Records", "has_records", "plain_text", "record_files", "records"]

LINE = 64 << 20  # bytes of one line of JSON
FILES = 100_000  # of a folder
_STATE = 64 << 20  # bytes of a dataset's state.json
# The system's allocator reserves no more than is used, which a limit would count.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_TABLES = (".parquet", ".arrow", ".feather")
# How files begin that are no text, and what their names should end in.
_PACKED = {
    b"\x1f\x8b": "compressed; uncompress it, or call JSON lines NAME.jsonl.gz",
    b"\x28\xb5\x2f\xfd": "compressed; uncompress it",
    b"\xfd7zXZ\0": "compressed; uncompress it",
    b"BZh": "compressed; uncompress it",
    b"PK\x03\x04": "compressed; uncompress it",
    b"PAR1": "Parquet, whose name must end in .parquet",
    b"ARROW1": "Arrow, whose name must end in .arrow",
}
_SPLITS = "train|validation|valid|val|dev|test|eval"


class BadRecords(Refused):
    """A file of records that can't be used; the message names file and row, and what is wrong."""


@dataclass(frozen=True)
class Place:
    """Where a record is, as reading can begin there without what is before it."""

    file: int = 0  # its number
    at: int = 0  # a byte, a row group or a record batch of it
    skip: int = 0  # rows that come before, there
    row: int = 0  # of the file, for messages


def records(
    path: Path | str, columns: Sequence[str] | None = None, *, split: str = "train", start: Place = Place()
) -> "Records":
    """The records of a file or a folder, as dicts of JSON's types.

    Args:
        path: a .jsonl or .ndjson (also .gz), .parquet, .arrow or .feather file, a folder of those in the
            order of their names, or a folder of Hugging Face's `save_to_disk` or with a downloaded dataset.
        columns: the keys that are taken, which each record must have; all if None.
        split: of a folder whose files belong to several, as train-00000-of-00002.parquet does.
        start: the `place` of Records at which an earlier reading ended.

    Raises:
        BadRecords: naming the file and the row, while reading too.
        OSError: for what can't be read.

    Example:
        for record in records("corpus.parquet", ["text"]):
            print(record["text"])
    """
    return Records(record_files(Path(path), split), columns, start)


def has_records(path: Path) -> bool:
    """Whether a path is a folder, or has the name of a file of records."""
    return path.name.endswith((*_LINES, *_TABLES)) or path.is_dir()


def plain_text(path: Path, data: bytes) -> bytes:
    """The content of a file that is one document. Raises BadRecords for tables and compressed files."""
    for begin, what in _PACKED.items():
        if data.startswith(begin):
            raise BadRecords(f"{path}: not a text, but {what}")
    return data


def record_files(path: Path, split: str = "train") -> list[Path]:
    """The files of records of a path, in their order. Raises BadRecords, OSError as `records` does."""
    if not path.is_dir():
        if not has_records(path):
            kinds = ", ".join((*_LINES, *_TABLES))
            raise BadRecords(f"{path}: not a file of records: its name ends in none of {kinds}")
        open_regular(path).close()
        return [path]
    if (path / "dataset_dict.json").exists():
        names = _entries(path / "dataset_dict.json", "splits")
        path = _below(path, _split_of(path, names, split))
    if (path / "state.json").exists():
        state = path / "state.json"
        if _load(state).get("_indices_files") or _load(state).get("_indices_data_files"):
            raise BadRecords(f"{state}: rows are selected by indices; save the dataset again")
        found = _entries(state, "_data_files")
        return [_below(path, each.get("filename") if isinstance(each, dict) else None) for each in found]
    return _of_split(path, _walk(path), split)


class Records(Iterator[dict[str, Any]]):
    """An iterator over records of files.

    `place` is where the next record is: `records(path, start=place)` goes on there.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str] | None, start: Place) -> None:
        self.files = list(files)
        self.columns = None if columns is None else list(dict.fromkeys(columns))
        self.place = start
        self.part = 0.0  # of the files that is read, from 0 to 1
        self._process: ReaderProcess | None = None
        self._ends = list(accumulate((file.stat().st_size for file in self.files), initial=0))
        self._rows = self._read()

    def __next__(self) -> dict[str, Any]:
        record, self.place = next(self._rows)
        return record

    def __iter__(self) -> "Records":
        return self

    def close(self) -> None:
        """End reading."""
        self._rows.close()
        if self._process is not None:
            self._process.end()
        self._process = None

    @property
    def where(self) -> str:
        """File and number of the record that was given last, for messages."""
        file = self.files[min(self.place.file, len(self.files) - 1)]
        lines = file.name.endswith(_LINES)
        return f"{file}, {'line' if lines else 'row'} {self.place.row if lines else self.place.row - 1}"

    def _read(self) -> Iterator[tuple[dict[str, Any], Place]]:
        for number in range(self.place.file, len(self.files)):
            if self.place.file != number:
                self.place = Place(number)
            file = self.files[number]
            yield from self._lines(file) if file.name.endswith(_LINES) else self._table(file)
        self.place = Place(len(self.files)) if self.files else self.place
        self.part = 1.0

    def _progress(self, inside: float) -> None:
        begin, end = self._ends[self.place.file : self.place.file + 2]
        self.part = (begin + min(1.0, inside) * (end - begin)) / max(1, self._ends[-1])

    def _lines(self, path: Path) -> Iterator[tuple[dict[str, Any], Place]]:
        place = self.place
        with open_regular(path) as raw:
            size = max(1, path.stat().st_size)
            lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            row = place.row
            try:
                lines.seek(place.at)
                while line := lines.readline(LINE + 1):
                    row += 1
                    if len(line) > LINE:
                        raise BadRecords(f"{path}, line {row}: longer than {LINE} bytes, the limit")
                    place = replace(place, at=place.at + len(line), row=row)
                    self._progress(raw.tell() / size)
                    if line.strip():
                        yield self._record(line, f"{path}, line {row}"), place
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise BadRecords(f"{path}, after line {row}: {error}") from None

    def _record(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            record = strict_json(line)
        except ValueError as error:
            raise BadRecords(f"{where}: {printable(error)}") from None
        if not isinstance(record, dict):
            raise BadRecords(f"{where}: expected a JSON object, got {type(record).__name__}")
        if self.columns is None:
            return record
        for name in self.columns:
            if name not in record:
                known = ", ".join(list(record)[:20])
                raise BadRecords(
                    f"{where}: it has no column {name!r}; its columns are {printable(known)}"[:1000]
                )
        return {name: record[name] for name in self.columns}

    def _table(self, path: Path) -> Iterator[tuple[dict[str, Any], Place]]:
        open_regular(path).close()
        if find_spec("pyarrow") is None:
            raise BadRecords(f"{path}: reading it needs the package pyarrow: pip install 'shardrt[data]'")
        self._process = self._process or ReaderProcess(records_process.__file__, _ENVIRONMENT)
        place = self.place
        where = {"at": place.at, "skip": place.skip}
        request = {"do": "open", "path": str(path.absolute()), "columns": self.columns, **where}
        while True:
            answer, text = self._ask(request, path, place.row)
            if "end" in answer:
                return
            request = {"do": "next"}
            if text.count(b"\n") + 1 != answer["rows"]:
                raise BadRecords(f"{path}, row {place.row}: the reader's answer is damaged")
            self._progress(answer["part"])
            for number, line in enumerate(text.split(b"\n"), start=1):
                place = replace(place, at=answer["at"], skip=answer["skip"] + number, row=place.row + 1)
                yield json.loads(line), place

    def _ask(self, request: dict[str, Any], path: Path, row: int) -> tuple[dict[str, Any], bytes]:
        answer = self._process.ask(request)
        if answer is None:
            ended, self._process = self._process.last_words(records_process.SECONDS, slice(-1, None)), None
            raise BadRecords(f"{path}, from row {row}: pyarrow crashed on this file ({printable(ended)})")
        if "error" in answer[0]:
            raise BadRecords(f"{path}, from row {row}: {printable(answer[0]['error'])}")
        return answer


def _walk(path: Path) -> list[Path]:
    """Files of records in a folder and those in it, without hidden ones, by name."""
    found = []
    for inside in path.rglob("*"):
        hidden = any(part.startswith(".") for part in inside.relative_to(path).parts)
        if not hidden and inside.name.endswith((*_LINES, *_TABLES)) and inside.is_file():
            found.append(inside)
        if len(found) > FILES:
            raise BadRecords(f"{path}: the folder has more than {FILES} files of records")
    if not found:
        raise BadRecords(f"{path}: the folder has no file of records: {', '.join((*_LINES, *_TABLES))}")
    return sorted(found)


def _of_split(path: Path, files: list[Path], split: str) -> list[Path]:
    """Those that belong to a split; all where no name says one."""
    labels = {file: _label(file.relative_to(path)) for file in files}
    known = {label for label in labels.values() if label}
    if not known:
        return files
    wanted = _split_of(path, sorted(known), split)
    return [file for file in files if labels[file] == wanted]


def _label(name: Path) -> str:
    """The split that a name says, as train-00000-of-00002.parquet and train/a.parquet do; "" for others."""
    for part in reversed(name.parts):
        if match := fullmatch(rf"({_SPLITS})([-._].*)?", part):
            return match[1]
    return ""


def _split_of(path: Path, names: list[Any], split: str) -> str:
    if split in names:
        return split
    if len(names) == 1 and isinstance(names[0], str):
        return names[0]
    raise BadRecords(
        f"{path}: it has no split {split!r}; it has {printable(', '.join(map(str, names[:20])))}"
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        found = strict_json(read_regular(path, _STATE))
    except ValueError as error:
        raise BadRecords(f"{path}: {printable(error)}") from None
    if not isinstance(found, dict):
        raise BadRecords(f"{path}: expected a JSON object")
    return found


def _entries(path: Path, key: str) -> list[Any]:
    found = _load(path).get(key)
    if not isinstance(found, list) or not found:
        raise BadRecords(f"{path}: expected a list {key!r}")
    return found


def _below(folder: Path, name: Any) -> Path:
    """A file of a folder. Raises BadRecords for a name that leads out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise BadRecords(f"{folder}: {printable(repr(name))[:200]} is not the name of a file in it")
    return folder / name
