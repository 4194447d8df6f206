"""One rank's pieces as a safetensors file, written and hashed in one pass, read block by verified block.

The library's writer can't hash, sync, or accept one array after another, so this module has a writer. Tests
check that the library reads the files.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.manifest import BLOCK, DTYPES, Damaged, SavedFile, SavedPiece
from shardrt.checkpoint.pieces import PARAMETER, Piece

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NotFinite(ValueError):
    """Trained weights or their optimizer state are nan or infinite. The message names the first."""


def kind_of(dtype: np.dtype) -> str:
    """The name that safetensors has for an element type.

    Raises:
        TypeError: for one that a checkpoint can't hold.
    """
    if dtype.name not in _NAMES:
        raise TypeError(f"a checkpoint can't hold dtype {dtype}; supported: {', '.join(_NAMES)}")
    return _NAMES[dtype.name]


def write(disk: Disk, path: Path, pieces: list[Piece], number: int) -> tuple[SavedFile, list[SavedPiece]]:
    """Write a new file with `pieces` and wait until it is on the disk; returns its manifest entries.

    Args:
        number: the file's number in the manifest.

    Raises:
        OSError: which names the file.
        NotFinite: if values are NaN or infinite.
    """
    from xxhash import xxh3_128_hexdigest

    header, saved = _lay_out(pieces, number)
    file, size, checksums = disk.create(path, True), 0, []
    try:
        for block in _blocks(header, pieces):
            checksums.append(xxh3_128_hexdigest(block))
            disk.write(file, block)
            size += len(block)
        disk.sync(file)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        disk.close(file)
    return SavedFile(path.name, size, tuple(checksums)), saved


def _lay_out(pieces: list[Piece], number: int) -> tuple[bytes, list[SavedPiece]]:
    """The header after its length, and the place of each piece in the file."""
    entries, end = {}, 0
    for piece in pieces:
        stop = end + piece.array.size * piece.dtype.itemsize
        entries[f"{piece.kind}/{piece.parameter}"] = {
            "dtype": kind_of(piece.dtype),
            "shape": [piece.array.size],
            "data_offsets": [end, stop],
        }
        end = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header, offset, saved = len(text).to_bytes(8, "little") + text, 8 + len(text), []
    for piece in pieces:
        for runs in piece.extents:
            saved.append(SavedPiece(number, piece.kind, piece.parameter, runs, offset))
            offset += runs.size * piece.dtype.itemsize
    return header, saved


def _blocks(header: bytes, pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """The bytes of the file in blocks of BLOCK; the last may be shorter. Each block overwrites the last one.

    Blocks are whole pages, so that writes can bypass the page cache and take less processor time: other
    threads train.
    """
    block, filled = np.frombuffer(mmap.mmap(-1, BLOCK, mmap.MAP_PRIVATE), np.uint8), 0
    for data in _parts(header, pieces):
        while data.size:
            part = data[: BLOCK - filled]
            block[filled : filled + part.size] = part
            filled, data = filled + part.size, data[part.size :]
            if filled == BLOCK:
                yield memoryview(block)
                filled = 0
    if filled:
        yield memoryview(block)[:filled]


def _parts(header: bytes, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
    """The bytes of the file, of each piece at most a block's worth on the host at a time."""
    yield np.frombuffer(header, np.uint8)
    for piece in pieces:
        each = BLOCK // piece.dtype.itemsize
        for start in range(0, piece.array.size, each):
            host = piece.read(start, start + each)
            if piece.trained:
                check_finite(host, piece.kind, piece.parameter)
            yield np.ascontiguousarray(host).view(np.uint8)


def check_finite(values: np.ndarray, kind: str, parameter: str) -> None:
    """Raise NotFinite for trained weights or optimizer state from which training can't continue.

    An infinite second moment is allowed: it only stops updates of its element.
    """
    least, most = values.min(), values.max()  # nan wins in both
    if np.isnan(least) or (kind == PARAMETER and np.isinf([least, most]).any()):
        what = f"{parameter!r}" if kind == PARAMETER else f"{kind!r} of {parameter!r}"
        raise NotFinite(f"{what} has NaN or infinite values")


class Reader:
    """Reads ranges of a saved file.

    Each block is verified before any byte of it is returned.

    Holds one block.

    Raises:
        Damaged: naming the file, if the length or a checksum differs.
        OSError: if the file system fails.
    """

    def __init__(self, folder: Path, saved: SavedFile) -> None:
        self.path = folder / saved.name
        self._saved = saved
        self._number = -1
        self._block = b""
        self._file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        size = os.fstat(self._file).st_size
        if size != saved.bytes:
            self.close()
            raise Damaged(f"{self.path}: the file has {size} bytes, but {saved.bytes} were saved")

    def read_into(self, target: np.ndarray, offset: int, what: str) -> None:
        """Fill a 1-D array with the bytes from `offset` on.

        Args:
            what: the owner of the bytes, for messages.
        """
        out, done = target.view(np.uint8), 0
        while done < out.size:
            number, inside = divmod(offset + done, BLOCK)
            block = self._verified(number, what)
            count = min(out.size - done, len(block) - inside)
            out[done : done + count] = np.frombuffer(block, np.uint8, count, inside)
            done += count

    def block(self, number: int) -> bytes:
        """The block of this number."""
        return self._verified(number, "")

    def verify(self) -> None:
        """Read every block."""
        for number in range(len(self._saved.blocks)):
            self._verified(number, "")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _verified(self, number: int, what: str) -> bytes:
        if number != self._number:
            from xxhash import xxh3_128_hexdigest

            wanted = min(BLOCK, self._saved.bytes - number * BLOCK)
            block = self._read(wanted, number * BLOCK)
            if len(block) != wanted or xxh3_128_hexdigest(block) != self._saved.blocks[number]:
                of = f" of {what}" if what else ""
                raise Damaged(
                    f"{self.path}: bytes {number * BLOCK} to {number * BLOCK + wanted}{of} are damaged "
                    "(wrong checksum)"
                )
            self._number, self._block = number, block
        return self._block

    def _read(self, wanted: int, offset: int) -> bytes:
        """Read `wanted` bytes, or up to the end of the file. Some file systems return less per call."""
        parts = []
        while wanted and (part := os.pread(self._file, wanted, offset)):
            parts.append(part)
            wanted, offset = wanted - len(part), offset + len(part)
        return b"".join(parts)
