"""Folders of safetensors files of other programs: one file, or several with an index.

They are read in ranges and written tensor by tensor. The safetensors library checks a header. This module
also checks the points on which the library is lenient, before it uses any value of a file. Names of files in
an index are plain names of regular files in the same folder.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.disk import Disk
from shardrt.nn.extents import Extent
from shardrt.untrusted import SourceFile, read_regular, strict_json

__all__ = [
    "BESIDE",
    "TOKENIZER_FILES",
    "FolderWriter",
    "StoredTensor",
    "open_file",
    "open_folder",
    "plain_files",
    "read_json",
]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
BESIDE = (*TOKENIZER_FILES, "generation_config.json", "preprocessor_config.json")  # small files that go along
BLOCK = 4 << 20  # bytes that are read, and converted, at a time
LARGEST_JSON = 64 << 20  # bytes
_ITEM = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2}  # types that a parameter can be read from


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its type ("F32"), shape, file, and the bytes of that from `offset` on."""

    dtype: str
    shape: tuple[int, ...]
    file: SourceFile
    offset: int

    def pieces(self, runs: Extent, transposed: bool) -> Iterator[np.ndarray]:
        """The elements `runs`, in C order, float32 or float64, BLOCK bytes, a run or a row at a time.

        Each piece is valid until the next. Several runs lie so, one below the other.

        Args:
            transposed: of the transpose of a matrix, of which only the columns that are needed are read, and
                of runs that lie in a row each only those rows.

        Raises:
            OSError, ValueError: where the file has changed since it was opened.
        """
        with self.file.open() as file:
            read = self._columns if transposed else self._runs
            yield from read(file, runs)

    def _runs(self, file: int, runs: Extent) -> Iterator[np.ndarray]:
        item = _ITEM[self.dtype]
        each = min(runs.length, BLOCK // item)
        raw, numbers = _scratch(each, np.uint8, item), self._room(each)
        for begin in map(runs.begin, range(runs.count)):
            for start in range(begin, begin + runs.length, each):
                size = min(each, begin + runs.length - start)
                self.file.fill(file, raw[: size * item], self.offset + start * item)
                yield self._converted(raw[: size * item], numbers[:size])

    def _columns(self, file: int, runs: Extent) -> Iterator[np.ndarray]:
        """Of the file's (rows, columns) a block is read and turned, some columns at a time."""
        item = _ITEM[self.dtype]
        rows, columns = self.shape
        start, top = divmod(runs.first, rows)
        height, stop, skipped = runs.length, start + runs.count, 0
        if top + runs.length > rows:  # one run over several columns
            height, stop, skipped, top = rows, -(-runs.stop // rows), top, 0
        each = min(max(1, BLOCK // (height * item)), stop - start)
        raw, numbers, turned = _scratch(height * each, np.uint8, item), self._room(height * each), None
        for low in range(start, stop, each):
            wide = min(each, stop - low)
            data, before = raw[: height * wide * item], (low - start) * height
            if wide == columns:
                self.file.fill(file, data, self.offset + top * columns * item)
            else:
                for row, line in enumerate(data.reshape(height, wide * item), top):
                    self.file.fill(file, line, self.offset + (row * columns + low) * item)
            values = self._converted(data, numbers[: height * wide])
            turned = _scratch(height * each, values.dtype) if turned is None else turned
            turned[: values.size].reshape(wide, height)[...] = values.reshape(height, wide).T
            yield turned[max(0, skipped - before) : min(values.size, skipped + runs.size - before)]

    def _room(self, count: int) -> np.ndarray:
        """Memory for numbers to convert."""
        return _scratch(count if self.dtype in ("BF16", "F16") else 0, np.float32)

    def _converted(self, data: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The numbers whose bytes are `data`: a view of it, or in `out`."""
        if self.dtype == "BF16":
            np.left_shift(data.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
            return out
        if self.dtype == "F16":
            out[...] = data.view(np.float16)
            return out
        return data.view(np.float32 if self.dtype == "F32" else np.float64)


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Map name to tensor, of all files of `folder`.

    Reads headers alone.

    Raises:
        ValueError: in one line that names the file, for what is damaged or points elsewhere, and for types
            that are not floats.
        FileNotFoundError: where there is neither file nor index.
    """
    if (folder / SINGLE).exists():
        return open_file(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise FileNotFoundError(f"{folder}: the folder has neither {SINGLE} nor {INDEX}")
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must be a table of tensor names and file names")
    headers = {name: open_file(_inside(folder, name)) for name in sorted(set(where.values()))}
    strangers = sorted((file, name) for file, names in headers.items() for name in names.keys() - where)
    if strangers:
        raise ValueError(
            f"{folder / strangers[0][0]}: the index does not know {_few(n for _, n in strangers)}"
        )
    missing = sorted(name for name, file in where.items() if name not in headers[file])
    if missing:
        raise ValueError(f"{folder / INDEX}: the files that the index names lack {_few(missing)}")
    return {name: headers[file][name] for name, file in where.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A file with a JSON object.

    Raises:
        ValueError: naming it, for anything else.
        FileNotFoundError: if the file does not exist.
    """
    data = read_regular(path, LARGEST_JSON)
    try:
        value = strict_json(data, any_number=True)  # callers check the numbers
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def plain_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Name -> content of those of `names` that are files here, or links as a download cache makes them."""
    found = {}
    for name in names:
        path = folder / name
        leads_out = path.is_symlink() and _target(path).parent != _blobs(folder)
        if path.is_file() and not leads_out and path.stat().st_size <= LARGEST_JSON:
            found[name] = path.read_bytes()
    return found


class FolderWriter:
    """Writes a folder that exists under its name only when it is complete.

    Args:
        tensors: name -> shape, all float32, in the order in which they lie; a new file begins where one would
            have more than `file_bytes`.

    Raises:
        FileExistsError: where `folder` is there and not empty.
        OSError: if the file system fails.
    """

    def __init__(self, folder: Path, tensors: dict[str, tuple[int, ...]], file_bytes: int) -> None:
        self._folder, self._disk = folder, Disk()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists already")
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        self._disk.make_directory(self._temporary)
        self._files: dict[str, int] = {}
        self._places: dict[str, tuple[int, int]] = {}  # tensor -> (descriptor, offset)
        try:
            self._lay_out(tensors, file_bytes)
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, values: np.ndarray) -> None:
        """Put a whole tensor, of any strides, into its place, BLOCK bytes at a time."""
        file, offset = self._places[name]
        rows = values.reshape(1) if values.ndim == 0 else values
        each = max(1, BLOCK // max(1, rows[:1].size * 4))
        for start in range(0, len(rows), each):
            data = np.ascontiguousarray(rows[start : start + each], np.float32)
            _write(file, memoryview(data).cast("B"), offset)
            offset += data.nbytes

    def publish(self, config: dict[str, Any], beside: Mapping[str, bytes] | None = None) -> None:
        """Add config.json and the files in `beside`, wait for the disk, and give the folder its name."""
        self._text("config.json", config)
        for name, content in (beside or {}).items():
            self._add(name, content)
        for file in self._files.values():
            self._disk.sync(file)
        self._close()
        self._disk.sync_directory(self._temporary)
        self._disk.rename(self._temporary, self._folder)
        self._disk.sync_directory(self._folder.parent)

    def abandon(self) -> None:
        """Remove all unfinished files."""
        self._close()
        if self._temporary.exists():
            self._disk.remove(self._temporary)

    def _lay_out(self, tensors: dict[str, tuple[int, ...]], file_bytes: int) -> None:
        parts: list[list[str]] = [[]]
        room = file_bytes
        for name, shape in tensors.items():
            if parts[-1] and 4 * prod(shape) > room:
                parts.append([])
                room = file_bytes
            parts[-1].append(name)
            room -= 4 * prod(shape)
        names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
        names = names if len(parts) > 1 else [SINGLE]
        for file, members in zip(names, parts, strict=True):
            self._begin(file, {name: tensors[name] for name in members})
        if len(parts) > 1:
            where = {name: file for file, members in zip(names, parts, strict=True) for name in members}
            total = sum(4 * prod(shape) for shape in tensors.values())
            self._text(INDEX, {"metadata": {"total_size": total}, "weight_map": where})

    def _begin(self, name: str, tensors: dict[str, tuple[int, ...]]) -> None:
        """Begin a new file: write its header and allocate the rest."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
        end = 0
        for tensor, shape in tensors.items():
            start, end = end, end + 4 * prod(shape)
            entries[tensor] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = self._files[name] = self._disk.create(self._temporary / name)
        self._disk.write(file, memoryview(len(text).to_bytes(8, "little") + text))
        os.truncate(file, 8 + len(text) + end)
        for tensor in tensors:
            self._places[tensor] = file, 8 + len(text) + entries[tensor]["data_offsets"][0]

    def _text(self, name: str, value: dict[str, Any]) -> None:
        self._add(name, (json.dumps(value, indent=2) + "\n").encode())

    def _add(self, name: str, content: bytes) -> None:
        file = self._files[name] = self._disk.create(self._temporary / name)
        self._disk.write(file, memoryview(content))

    def _close(self) -> None:
        for file in self._files.values():
            self._disk.close(file)
        self._files = {}


def _scratch(count: int, dtype: Any, times: int = 1) -> np.ndarray:
    """Memory of its own pages, which all go back when it is freed; malloc would keep some of each piece."""
    dtype = np.dtype(dtype)
    pages = mmap.mmap(-1, max(1, count * times * dtype.itemsize))
    return np.frombuffer(pages, dtype, count * times)


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Map name to tensor, of one file, of which only the header is read.

    Raises:
        ValueError: in one line that names the file, for what is damaged, and for types that are not floats.
        OSError: if the file can't be read.
    """
    from safetensors import SafetensorError, safe_open

    file = SourceFile(path)
    try:
        with safe_open(path, "np"):  # refuses wrong lengths, holes and overlaps
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    length = int.from_bytes(file.read(0, 8), "little")
    header = file.read(8, length)
    try:
        entries = strict_json(header)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in _ITEM:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}; supported: {', '.join(_ITEM)}")
    return {
        name: StoredTensor(e["dtype"], tuple(e["shape"]), file, 8 + length + e["data_offsets"][0])
        for name, e in entries.items()
    }


def _inside(folder: Path, name: str) -> Path:
    """The file with that plain name. Raises ValueError for a path outside the folder."""
    path = folder / name
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise ValueError(f"{folder / INDEX}: {name!r} is not a plain file name")
    if path.is_symlink() and _target(path).parent != _blobs(folder):
        raise ValueError(
            f"{folder / INDEX}: {name!r} is a link that leads outside the blobs of a download cache"
        )
    if not path.exists():
        raise ValueError(f"{folder / INDEX}: the index names {name!r}, which does not exist")
    return path


def _target(link: Path) -> Path:
    """Where a link leads; unlike Path.resolve, also of links that lead to each other."""
    return Path(os.path.realpath(link))


def _blobs(folder: Path) -> Path | None:
    """The folder of a download cache to which its snapshots link; None for other folders."""
    revision = folder.resolve()
    return revision.parents[1] / "blobs" if revision.parent.name == "snapshots" else None


def _few(names: Any) -> str:
    """The first ten, and how many more."""
    names = list(names)
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + rest


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done
