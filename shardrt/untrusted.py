"""Files and names from others: read within limits, and shown so that each stays on its line.

A file may be a pipe without a writer, a device without an end, or JSON that is deep or has numbers
beyond every type. A name or a text may hold control characters. All input from outside goes
through here; the caller then checks its content.
"""

import errno
import json
import os
import stat
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

__all__ = [
    "Refused",
    "SourceFile",
    "encodable",
    "natural",
    "number",
    "open_regular",
    "printable",
    "private",
    "read_regular",
    "say",
    "strict_json",
]

DEPTH = 100  # of JSON
_LARGEST = 1e300  # of its numbers: what is below can be multiplied by a million as a float


class Refused(ValueError):
    """A file that is not read at all. The message names it and says why."""


def open_regular(path: Path, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading, of at most `limit` bytes.

    Does not wait, whatever lies there.

    Raises:
        Refused: for pipes, devices, sockets and longer files.
        OSError: folders included.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(21, "Is a directory", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path} is not a regular file")
        if limit is not None and found.st_size > limit:
            raise Refused(f"{path}: the file has {found.st_size} bytes; the limit is {limit}")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


class SourceFile:
    """A regular file that is read in ranges, and must stay as it was when this object was made.

    Attributes:
        path: as given.
        size: bytes.

    Raises:
        Refused, OSError: as open_regular.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
        self.path, self.size, self._identity = path, status.st_size, _identity(status)

    @contextmanager
    def open(self) -> Iterator[int]:
        """A descriptor inside a with block. Raises Refused if the file has changed."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if _identity(os.fstat(descriptor)) != self._identity:
                raise Refused(f"{self.path} has changed since it was opened")
            yield descriptor
        finally:
            os.close(descriptor)

    def fill(self, descriptor: int, data: Any, offset: int) -> None:
        """Fill `data`, bytes of memory, with those from `offset` on. Raises Refused if there are fewer."""
        view = memoryview(data)
        while view:
            done = os.preadv(descriptor, [view], offset)
            if not done:
                raise Refused(f"{self.path}: the file ends before byte {offset + len(view)}")
            view, offset = view[done:], offset + done

    def read_into(self, data: Any, offset: int) -> None:
        """As fill, with a descriptor of its own; holes are not read."""
        if offset + data.size > self.size:
            raise Refused(f"{self.path}: the file ends before byte {offset + data.size}")
        with self.open() as descriptor:
            done = 0
            while done < data.size:
                begin = _seek(descriptor, offset + done, os.SEEK_DATA, self.size) - offset
                data[done:begin] = 0
                done = _seek(descriptor, offset + begin, os.SEEK_HOLE, self.size) - offset
                self.fill(descriptor, data[begin:done], offset + begin)

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on."""
        data = bytearray(size)
        with self.open() as descriptor:
            self.fill(descriptor, data, offset)
        return bytes(data)


def read_regular(path: Path, limit: int) -> bytes:
    """All of a regular file. Raises Refused, OSError as open_regular does; also where it grows meanwhile."""
    with open_regular(path, limit) as file:
        data = file.read(limit + 1)  # files of /proc have no size
    if len(data) > limit:
        raise Refused(f"{path}: the file has more than {limit} bytes, the limit")
    return data


def strict_json(data: bytes | str, *, any_number: bool = False) -> Any:
    """The value of a JSON text that is no deeper than DEPTH and whose numbers are finite, below 1e300.

    Args:
        any_number: numbers but nan may be larger, and infinite.

    Raises:
        ValueError: without the file's name: for other than JSON, and for a key that is there twice.
    """
    constants = _infinity if any_number else _refuse
    try:
        value = json.loads(data, object_pairs_hook=_once, parse_constant=constants)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} levels deep") from None
    level = [value]
    for _ in range(DEPTH):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside.extend(item.values())
            elif isinstance(item, list):
                inside.extend(item)
            elif isinstance(item, int | float) and not any_number and not abs(item) < _LARGEST:
                raise ValueError("it has a number that is too large")
        if not inside:
            return value
        level = inside
    raise ValueError(f"nested more than {DEPTH} levels deep")


def natural(value: Any, below: int = 1 << 62) -> bool:
    """Whether a value of JSON is an integer from 0 on; JSON's true is 1 for Python, and is none."""
    return type(value) is int and 0 <= value < below


def number(value: Any, most: float = 1e30) -> bool:
    """Whether a value of JSON is a number of at most `most` in magnitude, and neither true nor false."""
    return type(value) in (int, float) and -most <= value <= most  # nan is not


def printable(text: Any, *, lines: bool = False) -> str:
    r"""str(text) with control and invisible characters written out: \x1b, \u202e.

    lines: it is a text of several lines, whose ends stay.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept or _is_space(c) else _written_out(c) for c in text)


def say(*texts: Any, file: TextIO | None = None, lines: bool = False) -> None:
    """Print `printable(text)` of each, a line each, at once; what can't be encoded is written out."""
    file = sys.stdout if file is None else file
    for text in texts:
        print(encodable(printable(text, lines=lines), file), file=file)
    file.flush()


def encodable(text: str, file: TextIO | None) -> str:
    """The text with characters that the file's encoding lacks written out, as backslash and number."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def private(path: Path, *users: int) -> str:
    """The fault of a folder into which others than this user, root and `users` can put a file; else "".

    A folder that is not there yet is judged by those above it. Links on the way count as their targets.
    """
    folder = Path(os.path.realpath(path))
    there = [place for place in (folder, *folder.parents) if place.exists()]
    for place in there:
        found = place.stat()
        if found.st_uid not in (0, os.getuid(), *users):
            return f"{place} belongs to another user"
        others = found.st_mode & stat.S_IWOTH or (
            found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid, found.st_uid)
        )
        if others and not (place != there[0] and found.st_mode & stat.S_ISVTX):  # existing files stay there
            return f"{place} can be written by other users"
    return ""


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _seek(descriptor: int, offset: int, kind: int, size: int) -> int:
    """Where data or a hole begins, at `offset` or behind it, or where a file of this size ends.

    Where the file system knows of no holes, all is data.
    """
    try:
        return os.lseek(descriptor, offset, kind)
    except OSError as error:
        return offset if kind == os.SEEK_DATA and error.errno != errno.ENXIO else size


def _own_group(group: int, user: int) -> bool:
    """Whether a group is that of one user, as many systems make one for each."""
    import grp
    import pwd

    try:
        found, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return found.gr_name == owner.pw_name and not set(found.gr_mem) - {owner.pw_name}


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. JSON allows a key twice, and Python takes the last without a word."""
    pairs = list(pairs)
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return table


def _infinity(constant: str) -> float:
    return _refuse(constant) if constant == "NaN" else float(constant)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")
