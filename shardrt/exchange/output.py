"""Writes the files of a conversion: read, checksummed and written at the same time, and resumable.

A format describes each file as a sequence of segments. All files go into one temporary folder, which gets its
name when it is complete. A journal there says how far each file is on the disk, so the same command goes on
after a kill.
"""

import fcntl
import json
import mmap
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.manifest import BLOCK
from shardrt.exchange.checkpoint import CHUNK, BadCheckpoint, Tensor
from shardrt.untrusted import read_regular, strict_json

JOURNAL = ".journal"
_WRITE = 1 << 20  # bytes of a call: calls of 16 MiB were 3 to 10 times slower on ext4
_SYNCED = 1 << 30  # bytes from one entry of the journal to the next
_BUFFERS = 4  # of CHUNK bytes: one is read, one is written, two wait
_LARGEST_JOURNAL = 256 << 20  # bytes
_CRC_32 = 0xEDB88320  # its polynomial, with the highest power in bit 0
_BEGINNING = {"bytes": 0, "crcs": [], "blocks": [], "running": 0, "done": False}  # of a file in the journal


@dataclass(frozen=True)
class Elements:
    """Elements [start, stop) of a tensor, little-endian, converted to `dtype`."""

    tensor: Tensor
    start: int
    stop: int
    dtype: np.dtype

    @classmethod
    def all(cls, tensor: Tensor, dtype: np.dtype | None = None) -> "Elements":
        """All of a tensor."""
        return cls(tensor, 0, prod(tensor.shape), tensor.dtype if dtype is None else dtype)

    @property
    def size(self) -> int:
        """Bytes."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True)
class Late:
    """Bytes that depend on checksums of what was written before.

    Attributes:
        make: given the checksums of all files so far, by name, this file's up to here.
        size: of the bytes; None for the last segment of a file whose size matters to no other segment.
    """

    make: Callable[[Mapping[str, "Sums"]], bytes]
    size: int | None = None


Segment = bytes | Elements | Late


@dataclass
class Sums:
    """Checksums of a file: CRC-32 of each segment, or XXH3-128 of each BLOCK of the file in hex."""

    bytes: int = 0
    crcs: list[int] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class File:
    """A file to write.

    Attributes:
        name: a relative path, with one folder in it at most.
        sums: "crc" or "blocks": which checksums a Late needs; "" for none.
    """

    name: str
    segments: Sequence[Segment]
    sums: str = ""

    @property
    def size(self) -> int:
        """Bytes; those of a Late without a size are not counted."""
        return sum(_size(segment) or 0 for segment in self.segments)


class Output:
    """A folder that is written.

    Args:
        target: gets its name at the end; must not exist, or be empty.
        identity: JSON of what is converted and how: only the same is resumed.
        restart: remove an unfinished folder that another conversion has left.
        progress: called with (bytes written of all, bytes of all).

    Raises:
        BadCheckpoint: if another conversion is unfinished there, or is writing.
        OSError: if the file system fails, or `target` exists.
    """

    def __init__(
        self,
        target: Path,
        identity: dict[str, Any],
        *,
        restart: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
        disk: Disk | None = None,
    ) -> None:
        self.target, self._disk = target, disk or Disk()
        self._identity = strict_json(json.dumps(identity))
        self._progress = progress
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FileExistsError(17, "File exists", str(target))
        self.folder = target.with_name(f".tmp-{target.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BadCheckpoint(f"{self.folder}: another conversion is writing here") from None
        self._files: dict[str, dict[str, Any]] = {}
        try:
            self._resume(restart)
        except BaseException:
            os.close(self._lock)
            raise
        self.resumed = sum(state["bytes"] for state in self._files.values())

    def write(self, files: Sequence[File]) -> None:
        """Write all files, in order, and give the folder its name.

        Raises:
            BadCheckpoint: if a source is damaged; what is written so far stays, and is resumed.
            OSError: if the file system fails; likewise.
        """
        self._total, self._before = sum(file.size for file in files), 0
        sums: dict[str, Sums] = {}
        try:
            for file in files:
                sums[file.name] = self._write(file, sums)
                self._before += file.size
            (self.folder / JOURNAL).unlink(missing_ok=True)
            self._disk.sync_directory(self.folder)
            self._disk.rename(self.folder, self.target)
            self._disk.sync_directory(self.target.parent)
        finally:
            os.close(self._lock)

    def _write(self, file: File, sums: dict[str, Sums]) -> Sums:
        """Write a file, from where the journal says that it is."""
        state = self._files.get(file.name, _BEGINNING)
        summer = _Summer(file, state)
        sums[file.name] = summer.sums
        if state["done"]:
            return summer.sums
        path = self.folder / file.name
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            os.ftruncate(descriptor, state["bytes"])
            self._fill(file, descriptor, summer, sums)
            summer.finish()
            os.ftruncate(descriptor, summer.sums.bytes)  # a hole at the end is part of the file
            os.fsync(descriptor)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(descriptor)
        self._note(file, summer.state(), done=True)
        return summer.sums

    def _fill(self, file: File, descriptor: int, summer: "_Summer", sums: dict[str, Sums]) -> None:
        """Checksum and write the chunks of a file, while a thread reads the next ones."""
        synced = summer.sums.bytes
        with _Ahead(_chunks(file, summer.sums)) as ahead:
            for chunk in ahead:
                data = chunk.content
                if data is None:
                    data = _late(file, chunk, sums)
                if not chunk.zeros:
                    _put(descriptor, data, summer.sums.bytes)
                summer.add(chunk.ends, data, chunk.zeros)
                ahead.free(chunk.buffer)
                self._progress(self._before + summer.sums.bytes, self._total)
                if summer.sums.bytes - synced >= _SYNCED:
                    synced = summer.sums.bytes
                    os.fdatasync(descriptor)
                    self._note(file, summer.state())

    def _note(self, file: File, state: dict[str, Any], done: bool = False) -> None:
        """Enter the state of a file, which is on the disk, into the journal."""
        self._files[file.name] = {**state, "done": done}
        text = json.dumps({"identity": self._identity, "files": self._files})
        new = self.folder / f"{JOURNAL}-new"
        new.write_text(text)
        with open(new, "rb") as written:
            os.fsync(written.fileno())
        os.replace(new, self.folder / JOURNAL)

    def _resume(self, restart: bool) -> None:
        """Read the journal, if there is one; without one, or to restart, empty the folder."""
        path = self.folder / JOURNAL
        if path.exists() and not restart:
            try:
                journal = strict_json(read_regular(path, _LARGEST_JOURNAL))
                same, self._files = journal["identity"] == self._identity, journal["files"]
            except (ValueError, KeyError, TypeError):
                same = False
            if not same:
                raise BadCheckpoint(
                    f"{self.folder} is what another conversion has left unfinished; finish that one, "
                    "or give --restart to remove it"
                )
            return
        for child in self.folder.iterdir():
            if child.is_dir() and not child.is_symlink():
                self._disk.remove(child)
            else:
                child.unlink()


class _Summer:
    """The checksums of a file, as they grow."""

    def __init__(self, file: File, state: Mapping[str, Any]) -> None:
        self.sums = Sums(state["bytes"], list(state["crcs"]), list(state["blocks"]))
        self._kind, self._crc = file.sums, state["running"]
        self._block: Any = None

    def add(self, ends: bool, data: np.ndarray, zeros: bool = False) -> None:
        """Count bytes, which end a segment or not, and are all zero if `zeros` says so."""
        if self._kind == "crc":
            self._crc = crc_after_zeros(self._crc, data.size) if zeros else zlib.crc32(data, self._crc)
            if ends:
                self.sums.crcs.append(self._crc)
                self._crc = 0
        elif self._kind == "blocks":
            self._add_to_blocks(data)
        self.sums.bytes += data.size

    def finish(self) -> None:
        """The file has no more bytes."""
        if self._block is not None:
            self.sums.blocks.append(self._block.hexdigest())
            self._block = None

    def state(self) -> dict[str, Any]:
        """From where on to resume, as JSON: with an unfinished block, from its first byte."""
        begun = self.sums.bytes % BLOCK if self._block is not None else 0
        return {
            "bytes": self.sums.bytes - begun,
            "crcs": list(self.sums.crcs),
            "blocks": list(self.sums.blocks),
            "running": self._crc,
        }

    def _add_to_blocks(self, data: np.ndarray) -> None:
        from xxhash import xxh3_128

        position = self.sums.bytes
        while data.size:
            self._block = xxh3_128() if self._block is None else self._block
            part = data[: BLOCK - position % BLOCK]
            self._block.update(part)
            position, data = position + part.size, data[part.size :]
            if position % BLOCK == 0:
                self.finish()


@dataclass(frozen=True)
class _Chunk:
    """Some bytes of a segment: `content`, None for a Late, without its first `skipped` bytes.

    ends: they are its last. buffer: the memory that they take. zeros: a page or more, all zero: a hole.
    """

    number: int
    ends: bool
    content: np.ndarray | Elements | None
    skipped: int = 0
    buffer: np.ndarray | None = None
    zeros: bool = False


class _Ahead:
    """Reads chunks in a thread, a few before their use, into the same buffers again and again.

    Iterating gives chunks whose content is bytes, or None. It raises what reading has raised.
    """

    def __init__(self, chunks: Iterator[_Chunk]) -> None:
        self._chunks, self._stopped = chunks, False
        self._ready: queue.Queue[_Chunk | BaseException | None] = queue.Queue()
        self._free: queue.Queue[np.ndarray | None] = queue.Queue()
        for _ in range(_BUFFERS):
            self._free.put(np.empty(CHUNK, np.uint8))
        self._thread = threading.Thread(target=self._read, name="shardrt-convert", daemon=True)

    def __enter__(self) -> "_Ahead":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stopped = True
        self._free.put(None)
        self._thread.join()

    def __iter__(self) -> Iterator[_Chunk]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def free(self, buffer: np.ndarray) -> None:
        """The caller is done with the bytes that it was given as the base of a chunk."""
        self._free.put(buffer)

    def _read(self) -> None:
        try:
            for chunk in self._chunks:
                buffer = self._free.get()
                if buffer is None or self._stopped:
                    return
                if isinstance(chunk.content, Elements):
                    data = _filled(buffer, chunk.content)[chunk.skipped :]
                    chunk = replace(chunk, content=data, zeros=_are_zeros(data))
                elif chunk.content is not None:
                    buffer[: chunk.content.size] = chunk.content
                    chunk = replace(chunk, content=buffer[: chunk.content.size])
                self._ready.put(replace(chunk, buffer=buffer))
            self._ready.put(None)
        except BaseException as error:  # raised again in the thread that iterates
            self._ready.put(error)


def _filled(buffer: np.ndarray, wanted: Elements) -> np.ndarray:
    """The bytes of a range of a tensor, in a buffer."""
    data = buffer[: wanted.size]
    if wanted.dtype == wanted.tensor.dtype:
        wanted.tensor.read_into(data.view(wanted.dtype), wanted.start)
    else:
        values = np.empty(wanted.stop - wanted.start, wanted.tensor.dtype)
        wanted.tensor.read_into(values, wanted.start)
        data.view(wanted.dtype)[...] = values.astype(wanted.dtype)
    return data


def _chunks(file: File, sums: Sums) -> Iterator[_Chunk]:
    """The bytes of a file from where `sums` ends on, at most CHUNK at a time."""
    position = 0
    for number, segment in enumerate(file.segments):
        size = _size(segment)
        begin = max(sums.bytes - position, 0)
        position += size or 0
        if number < len(sums.crcs) or (size is not None and begin >= size and file.sums != "crc"):
            continue
        if isinstance(segment, Elements):
            yield from _of_elements(number, segment, begin)
        elif isinstance(segment, bytes):
            yield from _of_bytes(number, np.frombuffer(segment, np.uint8), begin)
        else:
            yield _Chunk(number, True, None, begin)


def _of_bytes(number: int, data: np.ndarray, begin: int) -> Iterator[_Chunk]:
    for start in range(begin, max(data.size, begin + 1), CHUNK):
        yield _Chunk(number, start + CHUNK >= data.size, data[start : start + CHUNK])


def _of_elements(number: int, segment: Elements, begin: int) -> Iterator[_Chunk]:
    """A range from byte `begin` on; a chunk has at most CHUNK bytes in either dtype."""
    each = CHUNK // max(segment.dtype.itemsize, segment.tensor.dtype.itemsize)
    before, skipped = divmod(begin, segment.dtype.itemsize)
    start, ends = segment.start + before, False
    while not ends:
        stop = min(start + each, segment.stop)
        ends = stop == segment.stop
        yield _Chunk(number, ends, replace(segment, start=start, stop=stop), skipped)
        start, skipped = stop, 0


def _size(segment: Segment) -> int | None:
    return len(segment) if isinstance(segment, bytes) else segment.size


def _late(file: File, chunk: _Chunk, sums: Mapping[str, Sums]) -> np.ndarray:
    """The bytes of a Late, of the size that the file's layout has for it."""
    segment = file.segments[chunk.number]
    data = segment.make(sums)
    last = chunk.number == len(file.segments) - 1
    if len(data) != segment.size and (segment.size is not None or not last):
        raise AssertionError(f"{file.name}: segment {chunk.number} has {len(data)} bytes, not {segment.size}")
    return np.frombuffer(data, np.uint8)[chunk.skipped :]


def _put(descriptor: int, data: np.ndarray, position: int) -> None:
    """Write bytes at a position. Where there are only zeros, a hole stays."""
    for begin in range(0, data.size, _WRITE):
        part, at = data[begin : begin + _WRITE], position + begin
        view = memoryview(b"" if _are_zeros(part) else part)
        while view:
            done = os.pwrite(descriptor, view, at)
            view, at = view[done:], at + done


def _are_zeros(data: np.ndarray) -> bool:
    """Whether bytes are all zero, and a page at least. Of other data few bytes are looked at."""
    return data.size >= mmap.PAGESIZE and not data[:: mmap.PAGESIZE].any() and not data.any()


def crc_after_zeros(crc: int, count: int) -> int:
    """CRC-32 of what has `crc` and `count` zero bytes behind it, in O(log count).

    A CRC is a polynomial over GF(2) modulo the method's own, and its highest power is in bit 0. A zero byte
    multiplies it by x^8 (zlib's crc32_combine).
    """
    return _times(crc ^ 0xFFFFFFFF, _power_of_zeros(count)) ^ 0xFFFFFFFF


@lru_cache(64)
def _power_of_zeros(count: int) -> int:
    """The polynomial x^(8 count), by squaring."""
    power, square = 1 << 31, 1 << 23
    while count:
        power = _times(power, square) if count & 1 else power
        square, count = _times(square, square), count >> 1
    return power


def _times(one: int, other: int) -> int:
    """One polynomial times the other, modulo that of CRC-32."""
    total = 0
    for bit in range(31, -1, -1):
        total ^= other if one >> bit & 1 else 0
        other = other >> 1 ^ (_CRC_32 if other & 1 else 0)
    return total
