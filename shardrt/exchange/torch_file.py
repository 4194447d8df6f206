"""Files of torch.save, laid out for output.py: PyTorch loads them, also with weights_only.

A zip as torch_zip.py reads it. CRC-32 of an entry is known when its bytes are written, so it stands in a data
descriptor behind them and in the directory at the end (APPNOTE.TXT, 4.3.9 and 4.4.4, with Zip64).
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

from shardrt.exchange.checkpoint import BadCheckpoint, Tensor
from shardrt.exchange.output import Elements, Late, Segment
from shardrt.exchange.torch_zip import STORAGES, TENSOR
from shardrt.exchange.unpickle import Called, Global

_ALIGNED = 64  # bytes: entries begin at multiples, so that PyTorch can map them
_LARGE = 0xFFFFFFFF  # sizes and offsets from here on need Zip64
_FLAGS = 1 << 3 | 1 << 11  # a data descriptor; names are UTF-8
_NAMES = {dtype: name for name, dtype in STORAGES.items()}


def torch_segments(value: Any, file: str, first: int = 0, folder: str = "archive") -> list[Segment]:
    """The segments of what torch.save would write of a value.

    Args:
        value: plain values, Global, Called and tensors (unpickle.py, checkpoint.py).
        file: the name of the File that will have the segments, whose sums must be "crc".
        first: the number of the first segment in that file.
        folder: in which the zip's entries lie.
    """
    pickled = _Pickle()
    entries: list[tuple[str, bytes | Elements]] = [
        ("data.pkl", pickled.dump(value)),
        ("byteorder", b"little"),
        *((f"data/{key}", Elements.all(tensor)) for key, tensor in enumerate(pickled.tensors)),
        ("version", b"3\n"),
    ]
    return list(_zipped(entries, folder, file, first))


def pickled(value: Any) -> bytes:
    """A pickle of protocol 2 of plain values, Global and Called.

    Raises:
        TypeError: for values of other types, tensors among them.
    """
    writer = _Pickle()
    data = writer.dump(value)
    if writer.tensors:
        raise TypeError("pickled: a pickle alone can't hold tensors")
    return data


class _Pickle:
    """A writer of pickles. `tensors`: those that it has met, whose storages lie elsewhere."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def dump(self, value: Any) -> bytes:
        """All of a pickle."""
        return b"\x80\x02" + b"".join(self._of(value)) + b"."

    def _of(self, value: Any) -> Iterator[bytes]:
        if value is None or value is True or value is False:
            yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            yield _integer(value)
        elif isinstance(value, float):
            yield b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            yield b"X" + struct.pack("<I", len(data)) + data
        elif isinstance(value, bytes):
            yield from self._of(Called("_codecs.encode", (value.decode("latin1"), "latin1")))
        elif isinstance(value, Global):
            module, _, name = value.name.rpartition(".")
            yield f"c{module}\n{name}\n".encode()
        else:
            yield from self._of_container(value)

    def _of_container(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, list | tuple):
            yield b"(" if isinstance(value, tuple) else b"]("
            for item in value:
                yield from self._of(item)
            yield b"t" if isinstance(value, tuple) else b"e"
        elif isinstance(value, Mapping):
            yield b"}("
            for key, item in value.items():
                yield from self._of(key)
                yield from self._of(item)
            yield b"u"
        elif isinstance(value, Called):
            yield from self._of(Global(value.name))
            yield from self._of(value.args)
            yield b"\x81" if value.state is not None and not value.args else b"R"  # NEWOBJ, REDUCE
            if value.state is not None:
                yield from self._of(value.state)
                yield b"b"
        elif hasattr(value, "read_into"):
            yield from self._of_tensor(value)
        else:
            raise TypeError(f"a pickle of torch.save can't hold a {type(value).__name__} here")

    def _of_tensor(self, tensor: Tensor) -> Iterator[bytes]:
        key, shape = str(len(self.tensors)), tuple(tensor.shape)
        if tensor.dtype not in _NAMES:
            raise BadCheckpoint(
                f"torch.save has no storage of {tensor.dtype} here: {', '.join(map(str, _NAMES))}"
            )
        self.tensors.append(tensor)
        strides = tuple(accumulate((shape[:0:-1]), lambda a, b: a * b, initial=1))[::-1] if shape else ()
        yield from self._of(Global(TENSOR))
        yield b"("
        yield from self._of(("storage", Global(_NAMES[tensor.dtype]), key, "cpu", prod(shape)))
        yield b"Q"  # BINPERSID
        for item in (0, shape, strides, False, Called("collections.OrderedDict", ())):
            yield from self._of(item)
        yield b"tR"


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data  # LONG1
    return b"\x8b" + struct.pack("<i", len(data)) + data  # LONG4


@dataclass
class _Entry:
    """An entry of a zip: where its header begins, its bytes, and the segment that they are."""

    name: bytes
    header: int
    size: int
    segment: int


@dataclass
class _Directory:
    """What a zip ends with."""

    entries: list[_Entry] = field(default_factory=list)

    def size(self) -> int:
        """Bytes, which no checksum changes."""
        return len(self.dump({}, 0))

    def dump(self, crcs: Mapping[int, int] | list[int], begin: int) -> bytes:
        """The directory, which begins at byte `begin` of the zip. Always with the records of Zip64."""
        listed = b"".join(self._listed(entry, crcs) for entry in self.entries)
        count, stop = len(self.entries), begin + len(listed)
        record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listed), begin)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, stop, 1)
        few = min(count, 0xFFFF)
        end = (b"PK\5\6", 0, 0, few, few, min(len(listed), _LARGE), min(begin, _LARGE), 0)
        return listed + record + locator + struct.pack("<4sHHHHIIH", *end)

    @staticmethod
    def _listed(entry: _Entry, crcs: Mapping[int, int] | list[int]) -> bytes:
        crc = crcs[entry.segment] if crcs else 0
        extra = struct.pack("<HHQQQ", 1, 24, entry.size, entry.size, entry.header)
        head = (b"PK\1\2", 45, 45, _FLAGS, 0, 0, 0, crc, _LARGE, _LARGE, len(entry.name), len(extra))
        fixed = struct.pack("<4sHHHHHHIIIHH", *head) + struct.pack("<HHHII", 0, 0, 0, 0, _LARGE)
        return fixed + entry.name + extra


def _zipped(
    entries: list[tuple[str, bytes | Elements]], folder: str, file: str, first: int
) -> Iterator[Segment]:
    directory, at, number = _Directory(), 0, first
    for name, content in entries:
        size = len(content) if isinstance(content, bytes) else content.size
        entry = _Entry(f"{folder}/{name}".encode(), at, size, number + 1)
        directory.entries.append(entry)
        header = _header(entry)
        yield header
        yield content
        yield Late(lambda sums, entry=entry: _descriptor(entry, sums[file].crcs), 24)
        at, number = at + len(header) + size + 24, number + 3
    yield Late(lambda sums, begin=at: directory.dump(sums[file].crcs, begin), directory.size())


def _header(entry: _Entry) -> bytes:
    """The local header, with so much padding that the entry's bytes begin at a multiple of _ALIGNED."""
    sizes = struct.pack("<HHQQ", 1, 16, entry.size, entry.size)
    end = entry.header + 30 + len(entry.name) + len(sizes) + 4
    padding = -end % _ALIGNED
    extra = sizes + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    head = (b"PK\3\4", 45, _FLAGS, 0, 0, 0, 0, _LARGE, _LARGE, len(entry.name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *head) + entry.name + extra


def _descriptor(entry: _Entry, crcs: list[int]) -> bytes:
    return struct.pack("<4sIQQ", b"PK\7\x08", crcs[entry.segment], entry.size, entry.size)
