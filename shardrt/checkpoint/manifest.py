"""The manifest of a checkpoint: the place of each piece, and a checksum of every 8 MiB. Untrusted JSON.

It may be damaged or forged: types, names, sizes and ranges are checked before any of them is used, or before
anything is allocated because of it. JSON has no infinity: one in `extra` is written as 1e999, which is read
as infinity. Manifests of earlier versions have "Infinity" there; these are read too.

A piece is a row of six: file, kind, parameter, first element, elements, offset. Format 2 also has rows of
eight, which end with the length and the stride of an extent's runs (nn/extents.py). A manifest without such
rows is written as format 1, which earlier versions read.
"""

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.nn.extents import Extent
from shardrt.nn.overlaps import miscounted
from shardrt.untrusted import strict_json

FORMATS = (1, 2)
BLOCK = 8 << 20  # bytes under one checksum
LARGEST = 256 << 20  # bytes of a manifest; GPT-3's on 1,000 ranks has a fifth of that
SMALL = 16 << 20  # always allowed; above, a hundredth of the described bytes
DTYPES = {  # safetensors' names of element types
    **{"F16": "float16", "F32": "float32", "F64": "float64", "BOOL": "bool"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
}
ITEM = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
_HASH = re.compile("[0-9a-f]{32}")
_INFINITY = re.compile(r'"(?:[^"\\]|\\.)*"|Infinity')  # or a string, which may hold the word


class Damaged(ValueError):
    """A checkpoint is damaged. The message names the file and the fault."""


@dataclass(frozen=True)
class SavedFile:
    """A file of pieces: its plain name, its length, the XXH3-128 of each BLOCK of it, in hex."""

    name: str
    bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class SavedPiece:
    """Some elements of a parameter, side by side from byte `offset` of file number `file` on."""

    file: int
    kind: str
    parameter: str
    runs: Extent
    offset: int

    @property
    def row(self) -> list:
        """As a manifest has it."""
        runs = self.runs
        shape = [] if runs.count == 1 else [runs.length, runs.stride]
        return [self.file, self.kind, self.parameter, runs.first, runs.size, self.offset, *shape]

    @classmethod
    def of(cls, row: Any) -> "SavedPiece":
        """Parse such a row.

        Raises:
            Damaged: for an invalid row.
        """
        strided = isinstance(row, list) and len(row) == 8
        file, kind, parameter, first, size, offset, *shape = _row(
            row, int, str, str, int, int, int, *(int, int) * strided
        )
        length, stride = shape or (size, size)
        if not 0 < length <= stride or size <= 0 or size % length:
            raise Damaged(f"a piece of {parameter!r} has {size} elements in runs of {length}, {stride} apart")
        return cls(file, kind, parameter, Extent(first, length, stride, size // length), offset)


@dataclass(frozen=True)
class SavedParameter:
    """Shape and element type ("F32") of a whole parameter."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """step: updates done. steps: the same by parameter. extra: values of the training program."""

    step: int
    files: tuple[SavedFile, ...]
    parameters: dict[str, SavedParameter]
    pieces: tuple[SavedPiece, ...]
    steps: dict[str, int]
    extra: dict[str, Any]

    def dump(self) -> bytes:
        """Serialize as JSON, with its own checksum."""
        rows = [piece.row for piece in self.pieces]
        body = {
            "format": 2 if any(len(row) == 8 for row in rows) else 1,
            "step": self.step,
            "files": [[f.name, f.bytes, list(f.blocks)] for f in self.files],
            "parameters": {name: [list(p.shape), p.dtype] for name, p in self.parameters.items()},
            "pieces": rows,
            "steps": self.steps,
            "extra": self.extra,
        }
        text = json.dumps({**body, "self": _checksum(body)}, indent=0)
        if "Infinity" in text:
            text = _INFINITY.sub(lambda found: found[0] if found[0][0] == '"' else "1e999", text)
        return text.encode()

    @classmethod
    def parse(cls, data: bytes, where: Path) -> "Manifest":
        """Parse the bytes of a manifest file.

        Raises:
            Damaged: naming the file and the fault.
        """
        try:
            body = strict_json(data, any_number=True)
            if body["format"] not in FORMATS:
                raise Damaged(
                    f"format {str(body['format'])[:80]!r} is unknown; this version of shardrt reads 1 and 2"
                )
            own = body.pop("self")
            if own != _checksum(body):
                raise Damaged("wrong checksum")
            manifest = cls(
                _natural(body["step"]),
                tuple(_file(entry) for entry in body["files"]),
                {_text(name): _parameter(entry) for name, entry in body["parameters"].items()},
                tuple(map(SavedPiece.of, body["pieces"])),
                {_text(name): _natural(steps) for name, steps in body["steps"].items()},
                dict(body["extra"]),
            )
            manifest._check()
            return manifest
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            message = (
                error if isinstance(error, Damaged) else f"it is malformed ({type(error).__name__}: {error})"
            )
            raise Damaged(f"{where}: {message}") from None

    def _check(self) -> None:
        """Check that pieces lie inside files and parameters, and that each kind covers each parameter."""
        if len({file.name for file in self.files}) != len(self.files):
            raise Damaged("a file is listed twice")
        found: dict[tuple[str, str], list[Extent]] = {}
        for piece in self.pieces:
            parameter = self.parameters.get(piece.parameter)
            if parameter is None or not 0 <= piece.file < len(self.files):
                raise Damaged(f"a piece of {piece.parameter!r} belongs to no parameter of the checkpoint")
            stop = piece.offset + piece.runs.size * ITEM[parameter.dtype]
            if piece.offset < 0 or stop > self.files[piece.file].bytes:
                raise Damaged(f"a piece of {piece.parameter!r} lies outside its file")
            if piece.runs.first < 0 or piece.runs.stop > parameter.size:
                raise Damaged(f"a piece of {piece.parameter!r} lies outside the parameter")
            found.setdefault((piece.kind, piece.parameter), []).append(piece.runs)
        uncounted = {name for kind, name in found if kind != "parameter"} - self.steps.keys()
        if uncounted or self.steps.keys() - self.parameters.keys():
            raise Damaged("the step counts and the optimizer state name different parameters")
        missing = {("parameter", name) for name, p in self.parameters.items() if p.size} - found.keys()
        if missing:
            raise Damaged(f"{len(missing)} parameters have no values, for example {sorted(missing)[0][1]!r}")
        for (kind, name), runs in found.items():
            message = f"the pieces of {name!r} ({kind})"
            size = sum(one.size for one in runs)
            if size != self.parameters[name].size:
                raise Damaged(f"{message} have {size} elements, not {self.parameters[name].size}")
            if len({one.stride for one in runs if one.count > 1}) > 1:
                raise Damaged(f"{message} are runs of several strides")
            if (wrong := miscounted(runs, size)) is not None:
                raise Damaged(f"element {wrong[0]} lies in {wrong[1]} of {message}")


def _file(entry: Any) -> SavedFile:
    name, nbytes, blocks = _row(entry, str, int, list)
    if not plain(name):
        raise Damaged(f"{name!r} is not a plain file name")
    if nbytes < 0 or len(blocks) != -(-nbytes // BLOCK):
        raise Damaged(f"{name} has {nbytes} bytes and {len(blocks)} checksums")
    if not all(isinstance(block, str) and _HASH.fullmatch(block) for block in blocks):
        raise Damaged(f"{name} has an invalid checksum")
    return SavedFile(name, nbytes, tuple(blocks))


def _parameter(entry: Any) -> SavedParameter:
    shape, dtype = _row(entry, list, str)
    if dtype not in ITEM or len(shape) > 32:
        raise Damaged(f"a parameter is of type {dtype!r} and has {len(shape)} dimensions")
    return SavedParameter(tuple(map(_natural, shape)), dtype)


def plain(name: str) -> bool:
    """Whether a name stays in its folder: letters, digits, dots, dashes and underscores, not only dots."""
    return 0 < len(name.strip(".")) <= 255 and all(c.isalnum() or c in ".-_" for c in name) and name.isascii()


def _row(entry: Any, *kinds: type) -> list:
    if not isinstance(entry, list) or [type(item) for item in entry] != list(kinds):
        raise Damaged(f"{str(entry)[:80]} is not a row of {', '.join(kind.__name__ for kind in kinds)}")
    return entry


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Damaged(f"{str(value)[:80]!r} is not a natural number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise Damaged("a name is not a string, or is too long")
    return value


def as_read(extra: dict[str, Any]) -> dict[str, Any]:
    """A copy of `extra` as a manifest gives it back: with lists for tuples, and strings for keys.

    Raises:
        TypeError or ValueError: for values that would not survive: not JSON, nan, a duplicate key.
    """
    try:
        return strict_json(json.dumps(extra), any_number=True)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"a checkpoint's extra must be JSON: {error}") from None


def _checksum(body: dict[str, Any]) -> str:
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
