"""Files of torch.save, read and written without PyTorch: a zip of a pickle and one entry for each storage.

The layout is that of PyTorch's inline_container.cc and torch/serialization.py: entries are stored, not
compressed, and begin at multiples of 64 bytes. Tensors are read in ranges from where they lie.
"""

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.source import FileTensor
from shardrt.exchange.unpickle import Called, Global, unpickle
from shardrt.untrusted import SourceFile

LARGEST_PICKLE = 64 << 20  # bytes: 250,000 tensors
LARGEST_DIRECTORY = 32 << 20  # bytes of a zip's list of entries: 300,000 storages
_DIMENSIONS = 64  # that a tensor of PyTorch has at most
_LOCAL = 30  # bytes of the header before an entry, without its name
STORAGES = {
    "torch.DoubleStorage": np.dtype(np.float64),
    "torch.FloatStorage": np.dtype(np.float32),
    "torch.HalfStorage": np.dtype(np.float16),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype(np.int64),
    "torch.IntStorage": np.dtype(np.int32),
    "torch.ShortStorage": np.dtype(np.int16),
    "torch.CharStorage": np.dtype(np.int8),
    "torch.ByteStorage": np.dtype(np.uint8),
    "torch.BoolStorage": np.dtype(np.bool_),
}
TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
SUBCLASS = "torch._tensor._rebuild_from_type_v2"  # also a tensor that a program has given attributes
_CALLS = (TENSOR, *_PARAMETERS, SUBCLASS)
_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")


def open_torch(path: Path, allowed: tuple[str, ...] = (), offset: int = 0, length: int | None = None) -> Any:
    """What torch.save has written: plain values with tensors, whose elements are read when they are needed.

    Args:
        allowed: names of further classes and functions, whose objects are given as Called.
        offset, length: where the zip lies in the file.

    Raises:
        BadCheckpoint: in one line, for anything else and for what is damaged.
        OSError: if the file system fails.
    """
    file = SourceFile(path)
    length = file.size - offset if length is None else length
    if offset < 0 or length < 0 or offset + length > file.size:
        raise BadCheckpoint(f"{path}: bytes {offset} to {offset + length} lie outside the file")
    zipped = _Zip(file, offset, length)
    order = zipped.small("byteorder", 16)
    if order not in (None, b"little"):
        raise BadCheckpoint(
            f"{path}: numbers in the order of bytes {order!r} are not read, only little-endian"
        )
    data = zipped.small("data.pkl", LARGEST_PICKLE)
    if data is None:
        raise BadCheckpoint(f"{path}: the zip has no data.pkl, so torch.save has not made it")
    names = {*_CALLS, *_CLASSES, *STORAGES, *allowed}
    return _with_tensors(unpickle(data, path, names, zipped.storage), path, {})


@dataclass(frozen=True)
class _Storage:
    """Numbers of one type in an entry of a zip."""

    dtype: np.dtype
    file: SourceFile
    offset: int
    size: int  # elements


class _Zip:
    """The entries of a zip that lies in a part of a file."""

    def __init__(self, file: SourceFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        try:
            with zipfile.ZipFile(_Part(file, offset, length)) as zipped:
                entries = zipped.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OverflowError) as error:
            raise BadCheckpoint(f"{file.path}: not a file of torch.save: {error}") from None
        # The folder in which all entries lie has the name of the file when it was saved.
        names = [entry.filename.partition("/") for entry in entries]
        if len({folder for folder, _, _ in names}) > 1:
            raise BadCheckpoint(f"{file.path}: the zip has more than one folder")
        self._entries = {name: entry for (_, _, name), entry in zip(names, entries, strict=True)}
        if len(self._entries) != len(entries):
            raise BadCheckpoint(f"{file.path}: the zip has an entry twice")

    def small(self, name: str, most: int) -> bytes | None:
        """The bytes of an entry, None if there is none."""
        if name not in self._entries:
            return None
        start, size = self._place(name)
        if size > most:
            raise BadCheckpoint(f"{self._file.path}: {name} has {size} bytes, more than {most}")
        data, checksum = self._file.read(start, size), self._entries[name].CRC
        if checksum and zlib.crc32(data) != checksum:  # PyTorch writes 0 where it computes none
            raise BadCheckpoint(f"{self._file.path}: {name} is damaged: its checksum differs")
        return data

    def storage(self, reference: Any) -> _Storage:
        """What a persistent id of torch.save stands for."""
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
            raise BadCheckpoint("the pickle refers to what is no storage")
        _, kind, key, _, size = reference
        if (
            type(kind) is not Global
            or kind.name not in STORAGES
            or type(key) is not str
            or type(size) is not int
        ):
            raise BadCheckpoint("the pickle refers to a storage of no known type")
        dtype, name = STORAGES[kind.name], f"data/{key}"
        if name not in self._entries:
            raise BadCheckpoint(f"the zip has no entry {name[:80]!r}")
        start, nbytes = self._place(name)
        if size < 0 or size * dtype.itemsize > nbytes:
            raise BadCheckpoint(f"storage {key[:80]!r} has {nbytes} bytes, fewer than {size} elements take")
        return _Storage(dtype, self._file, start, size)

    def _place(self, name: str) -> tuple[int, int]:
        """(offset in the file, bytes) of an entry."""
        entry, shown = self._entries[name], f"{self._file.path}: {name[:80]!r}"
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise BadCheckpoint(f"{shown} is compressed or encrypted, as torch.save never does")
        if entry.compress_size != entry.file_size:
            raise BadCheckpoint(f"{shown} has two sizes, {entry.compress_size} and {entry.file_size} bytes")
        stored = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")
        begin = entry.header_offset + _LOCAL + len(stored)
        if entry.header_offset < 0 or begin > self._length:
            raise BadCheckpoint(f"{shown} lies outside the zip")
        local = self._file.read(self._offset + entry.header_offset, _LOCAL + len(stored))
        if local[:4] != b"PK\3\4" or local[_LOCAL:] != stored:
            raise BadCheckpoint(f"{shown} is not where the zip's directory says")
        start = begin + int.from_bytes(local[28:30], "little")
        if start + entry.file_size > self._length:
            raise BadCheckpoint(f"{shown} lies outside the zip")
        return self._offset + start, entry.file_size


class _Part(io.RawIOBase):
    """Some bytes of a file as a file for zipfile, which reads no more at once than a directory may have."""

    def __init__(self, file: SourceFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + {0: 0, 1: self._at, 2: self._length}[whence]
        if at < 0:
            raise OSError(22, "Invalid argument")  # zipfile expects it of files
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"its list of entries has {size} bytes")
        data = self._file.read(self._offset + self._at, size)
        self._at += size
        return data


def _with_tensors(value: Any, path: Path, known: dict[int, Any]) -> Any:
    """A value in which a tensor stands for each call that makes one. Unpickled values are not deep."""
    if id(value) in known:
        return known[id(value)]
    if type(value) is dict:
        result: Any = {key: _with_tensors(item, path, known) for key, item in value.items()}
    elif type(value) in (list, tuple):
        result = type(value)(_with_tensors(item, path, known) for item in value)
    elif type(value) is Called and value.name in _CALLS:
        result = _tensor(value, path, known)
    elif type(value) is Called:
        args = _with_tensors(value.args, path, known)
        result = Called(value.name, args, _with_tensors(value.state, path, known))
    else:
        return value
    known[id(value)] = result
    return result


def _tensor(call: Called, path: Path, known: dict[int, Any]) -> Any:
    if call.name in _PARAMETERS:
        return _with_tensors(call.args[0], path, known) if call.args else None
    if call.name == SUBCLASS:
        function, _, args, *_ = (*call.args, None, None, None)
        if type(function) is not Global or type(args) is not tuple:
            raise BadCheckpoint(f"{path}: a tensor of a class of its own has no values")
        return (
            _tensor(Called(function.name, args), path, known)
            if function.name in (TENSOR, *_PARAMETERS)
            else None
        )
    storage, offset, shape, strides, *_ = (*call.args, None, None, None, None)
    plain = isinstance(storage, _Storage) and all(
        type(sizes) is tuple and all(type(n) is int and 0 <= n < 1 << 48 for n in sizes)
        for sizes in (shape, strides, (offset,))
    )
    if not plain or len(shape) != len(strides) or len(shape) > _DIMENSIONS:
        raise BadCheckpoint(f"{path}: a tensor has no storage, shape or strides that PyTorch gives")
    if prod(shape) and not _is_contiguous(shape, strides):
        raise BadCheckpoint(
            f"{path}: a tensor of shape {shape} has strides {strides}; only contiguous tensors are read: "
            "save its contiguous()"
        )
    if offset + prod(shape) > storage.size:
        raise BadCheckpoint(f"{path}: a tensor of shape {shape} ends outside its storage")
    return FileTensor(storage.file, storage.offset + offset * storage.dtype.itemsize, storage.dtype, shape)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
