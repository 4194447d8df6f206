"""PyTorch's distributed checkpoints, as FSDP, torchtitan and Accelerate write them with torch.distributed.

A folder has files `__R_N.distcp`, and `.metadata`: a pickle that says for each tensor in which chunks it was
saved, and in which bytes of which file each chunk lies, as what torch.save has written
(torch/distributed/checkpoint/{metadata,filesystem}.py). Chunks are read from any mesh. They are written as
FSDP2 cuts parameters: along the first dimension, in as many parts as there are ranks.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.exchange import names
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint, Checkpoint, Joined, Tensor, Training
from shardrt.exchange.formats import Options, Plan
from shardrt.exchange.output import File, Segment
from shardrt.exchange.torch_file import pickled, torch_segments
from shardrt.exchange.torch_zip import STORAGES, open_torch
from shardrt.exchange.unpickle import Called, Global, unpickle
from shardrt.untrusted import SourceFile, natural, read_regular

DIALECT, STATE = "huggingface", True
METADATA = ".metadata"
LAYOUTS = ("flat", "nested")  # torchtitan's; {"model": ..., "optim": ...}
_LARGEST = 256 << 20  # bytes of the metadata
_LARGEST_VALUE = 64 << 20  # bytes of a value that is no tensor
_OPENED = 1024  # chunks whose place in their file is kept
_CUT = 4  # dimensions along which a tensor may be cut

_CLASS = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_OLD = "torch.distributed._shard.sharded_tensor.metadata."
_DTYPES = {f"torch.{dtype.name}": dtype for dtype in STORAGES.values()}
_TORCH = {dtype: name for name, dtype in _DTYPES.items()}
_ALLOWED = {
    *(f"{_CLASS}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata")),
    *(f"{_CLASS}{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    *(f"{_CLASS}_MEM_FORMAT_ENCODING", f"{_OLD}TensorProperties", f"{_OLD}MEM_FORMAT_ENCODING"),
    *(_INFO, "torch.serialization._get_layout", *_DTYPES),
    *("pathlib.Path", "pathlib.PosixPath", "pathlib._local.Path", "pathlib._local.PosixPath"),
}
_MODEL = ("model", "model_state_dict", "state_dict")  # tables of weights
_OPTIMIZER = re.compile(r"optim\w*")
_FLAT = re.compile(r"(?:[\w-]+\.){0,3}?(optim\w*)\.((?:state|param_groups)\..+)")
_STEP = re.compile(r"step-(\d{1,18})")
_RESERVED = ("config", "data", "scaler", "versions")  # of a run of shardrt's
# What torch.optim.AdamW has in a group; a program looks for all of it when it loads.
_ADAMW = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def recognises(path: Path) -> bool:
    """Whether a folder is such a checkpoint, two of Accelerate's, or holds torchtitan's steps."""
    return bool(_folders(path))


def read(path: Path) -> Checkpoint:
    """Open a checkpoint: its metadata, and the values that are no tensors.

    Raises:
        BadCheckpoint: for damaged or missing files, and for what no chunk covers or two chunks do.
    """
    folders = _folders(path)
    if not folders:
        raise BadCheckpoint(f"{path}: the folder has no {METADATA}")
    found = _Found()
    for folder in folders:
        for entry in _Saved(folder).entries():
            found.add(entry)
    where = folders[0] if len(folders) == 1 else path
    return found.checkpoint(where)


def files(checkpoint: Checkpoint, options: Options) -> Plan:
    """A file for each rank, and the metadata."""
    held = {name for _, name in checkpoint.tensors}
    layout = options.layout or ("flat" if names.dialect_of(held).startswith("torchtitan") else "nested")
    entries, left = _entries(checkpoint, layout == "flat")
    writer = _Writer(options.ranks)
    for path, value in entries:
        writer.add(path, value)
    return Plan(writer.files(), left=left)


def _folders(path: Path) -> list[Path]:
    """The folders with the metadata of a checkpoint."""
    if (path / METADATA).is_file():
        return [path]
    try:
        inside = sorted(child for child in path.iterdir() if (child / METADATA).is_file())
    except OSError:
        return []
    of_accelerate = [child for child in inside if child.name in ("pytorch_model_fsdp_0", "optimizer_0")]
    steps = [(int(found[1]), child) for child in inside if (found := _STEP.fullmatch(child.name))]
    return of_accelerate[::-1] or [child for _, child in sorted(steps)[-1:]]


@dataclass(frozen=True)
class _Place:
    """Bytes of a file, which torch.save has written."""

    file: SourceFile
    offset: int
    length: int

    def open(self) -> Any:
        """What they hold."""
        return open_torch(self.file.path, (), self.offset, self.length)


@dataclass(frozen=True)
class _Entry:
    """A tensor or another value, and the keys that lead to it in the tables that were saved."""

    path: tuple[str | int, ...]
    value: "_Sharded | _Place"
    where: Path

    @property
    def name(self) -> str:
        """The path in one text."""
        return ".".join(map(str, self.path))


class _Saved:
    """A folder's metadata, checked against its files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._where = folder, folder / METADATA
        self._files: dict[str, SourceFile] = {}
        value = unpickle(read_regular(self._where, _LARGEST), self._where, _ALLOWED)
        fields = self._fields(value, "Metadata")
        self._kinds, self._planned = fields.get("state_dict_metadata"), fields.get("planner_data")
        if type(self._kinds) is not dict or type(fields.get("storage_data")) is not dict:
            raise BadCheckpoint(f"{self._where}: the metadata has no tables of tensors and of their places")
        self._places = dict(self._storage(fields["storage_data"]))
        self._opened = lru_cache(_OPENED)(_opened)

    def entries(self) -> Iterator[_Entry]:
        """All that the checkpoint holds."""
        for name, kind in self._kinds.items():
            if type(name) is not str or type(kind) is not Called:
                raise self._bad("an entry that is none of a tensor or a value")
            if kind.name == f"{_CLASS}BytesStorageMetadata":
                value: Any = self._place(name, None)
            else:
                value = self._tensor(name, self._fields(kind, "TensorStorageMetadata"))
            yield _Entry(self._path(name), value, self._where)

    def _path(self, name: str) -> tuple[str | int, ...]:
        path = self._planned.get(name) if type(self._planned) is dict else None
        if type(path) is tuple and path and all(type(key) in (str, int) for key in path):
            return path
        flat = _FLAT.fullmatch(name)
        return (flat[1], flat[2]) if flat else (name,)

    def _tensor(self, name: str, fields: dict[str, Any]) -> "_Sharded":
        shape = self._sizes(name, fields.get("size"))
        properties = fields.get("properties")
        state = properties.state if type(properties) is Called else None
        first = state.get("dtype") if type(state) is dict else state[0] if type(state) is tuple else None
        if type(first) is not Global or first.name not in _DTYPES or type(fields.get("chunks")) is not list:
            raise self._bad(f"a tensor {name[:120]!r} of no known type")
        parts = []
        for chunk in fields["chunks"]:
            values = self._fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = (self._sizes(name, values.get(key)) for key in ("offsets", "sizes"))
            if prod(sizes):
                parts.append((offsets, sizes, self._place(name, offsets)))
        return _Sharded(f"{self._where}: {name[:120]!r}", _DTYPES[first.name], shape, parts, self._opened)

    def _sizes(self, name: str, value: Any) -> tuple[int, ...]:
        if (
            type(value) is not tuple
            or not all(natural(size, 1 << 48) for size in value)
            or len(value) > 32
            or prod(value) >= 1 << 48
        ):
            raise self._bad(f"a tensor {name[:120]!r} with wrong sizes")
        return value

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> _Place:
        info = self._places.get((name, offsets))
        if info is None:
            raise self._bad(f"no place of {name[:120]!r}, chunk {offsets}")
        if info.get("transform_descriptors"):
            said = str(info["transform_descriptors"])[:120]
            raise BadCheckpoint(
                f"{self._where}: {name[:120]!r} was transformed by {said}, which is not read here"
            )
        path, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if type(path) is not str or not natural(offset) or not natural(length):
            raise self._bad(f"a wrong place of {name[:120]!r}")
        file = self._file(path)
        if offset + length > file.size:
            raise BadCheckpoint(f"{file.path}: it ends before {name[:120]!r}, at byte {offset + length}")
        return _Place(file, offset, length)

    def _file(self, name: str) -> SourceFile:
        if name not in self._files:
            path = self._folder / name
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise self._bad(f"a file {name[:120]!r}, which is not in its folder")
            if path.is_symlink() or not path.is_file():
                raise BadCheckpoint(f"{path} is not there, or is no regular file")
            self._files[name] = SourceFile(path)
        return self._files[name]

    def _storage(self, table: dict[Any, Any]) -> Iterator[tuple[tuple[str, Any], dict[str, Any]]]:
        """The table of places, by name and offsets."""
        for index, info in table.items():
            fields = self._fields(index, "MetadataIndex")
            name, offsets = fields.get("fqn"), fields.get("offset")
            if type(info) is not Called or info.name != _INFO or type(info.state) is not dict:
                raise self._bad("a place that is none")
            if type(name) is not str or not (offsets is None or type(offsets) is tuple):
                raise self._bad("a place of no name")
            if offsets is not None:
                self._sizes(name, offsets)
            yield (name, offsets), info.state

    def _fields(self, value: Any, name: str) -> dict[str, Any]:
        if type(value) is not Called or value.name != _CLASS + name or type(value.state) is not dict:
            raise self._bad(f"something else where a {name} should be")
        return value.state

    def _bad(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._where}: the metadata has {what}")


def _opened(place: _Place) -> Any:
    return place.open()


@dataclass(frozen=True)
class _Part:
    """A chunk of a tensor: rows of `run` elements, `stride` apart in the tensor, in groups of `rows`."""

    place: _Place
    sizes: tuple[int, ...]
    first: int
    stop: int
    run: int
    rows: int
    stride: int
    groups: tuple[tuple[int, int], ...]  # (size, stride) of each dimension before the rows'

    @classmethod
    def of(
        cls, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], place: _Place
    ) -> "_Part":
        """A chunk by its offsets and sizes."""
        strides = _strides(shape)
        cut = max((axis for axis, size in enumerate(sizes) if size != shape[axis]), default=0)
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        rows, stride = (sizes[cut - 1], strides[cut - 1]) if cut else (1, 1)
        groups = tuple(zip(sizes[: max(cut - 1, 0)], strides, strict=False))
        return cls(place, sizes, first, last + 1, prod(sizes[cut:]), rows, stride, groups)

    def read_into(self, out: np.ndarray, start: int, source: Tensor) -> None:
        """Put what the chunk has of elements from `start` on into their places of `out`."""
        axes = [range(0, size * stride, stride) for size, stride in self.groups]
        for number, steps in enumerate(product(*axes)):
            base, before = self.first + sum(steps), number * self.rows
            if base < start + out.size and base + (self.rows - 1) * self.stride + self.run > start:
                self._read_group(out, start, source, base, before)

    def _read_group(self, out: np.ndarray, start: int, source: Tensor, base: int, before: int) -> None:
        """The rows of a group, whose first begins at element `base`; the chunk has `before` rows before."""
        low = max((start - base - self.run) // self.stride + 1, 0)
        high = min(-(-(start + out.size - base) // self.stride), self.rows)
        for row in {low, high - 1} if high > low else ():
            at = base + row * self.stride
            begin, end = max(at, start), min(at + self.run, start + out.size)
            if begin < end:
                source.read_into(out[begin - start : end - start], (before + row) * self.run + begin - at)
        count = high - low - 2
        if count > 0:
            values = np.empty(count * self.run, out.dtype)
            source.read_into(values, (before + low + 1) * self.run)
            at = base + (low + 1) * self.stride - start
            shape, strides = (count, self.run), (self.stride * out.itemsize, out.itemsize)
            np.lib.stride_tricks.as_strided(out[at:], shape, strides)[...] = values.reshape(shape)


class _Sharded:
    """A tensor in the chunks in which it was saved.

    Raises:
        BadCheckpoint: naming `what`, if the chunks do not cover it once.
    """

    def __init__(
        self,
        what: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        chunks: list[tuple[tuple[int, ...], tuple[int, ...], _Place]],
        opened: Any,
    ) -> None:
        self.dtype, self.shape, self._what, self._open = dtype, shape, what, opened
        _check_cover(what, shape, [(offsets, sizes) for offsets, sizes, _ in chunks])
        self._parts = sorted((_Part.of(shape, *chunk) for chunk in chunks), key=lambda part: part.first)
        self._stops = list(accumulate((part.stop for part in self._parts), max))

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor."""
        for number in range(bisect_right(self._stops, start), len(self._parts)):
            part = self._parts[number]
            if part.first >= start + out.size:
                break
            if part.stop > start:
                part.read_into(out, start, self._source(part))

    def _source(self, part: _Part) -> Tensor:
        value = self._open(part.place)
        if not hasattr(value, "read_into"):
            raise BadCheckpoint(f"{part.place.file.path}: there is no tensor where {self._what} has a chunk")
        if value.dtype != self.dtype or tuple(value.shape) != part.sizes:
            raise BadCheckpoint(
                f"{part.place.file.path}: {value.dtype} {value.shape} is where {self._what} has a chunk of "
                f"{self.dtype} {part.sizes}"
            )
        return value


def _check_cover(
    what: str, shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Raise unless boxes cover a tensor exactly.

    Boxes inside of a box have its volume together, and all corners but its own an even number of times, only
    if they do: the corners say where an odd number of boxes lie.
    """
    for offsets, sizes in chunks:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise BadCheckpoint(f"{what} has a chunk with another number of dimensions")
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise BadCheckpoint(f"{what} has a chunk that ends outside of it")
    if sum(prod(sizes) for _, sizes in chunks) != prod(shape):
        raise BadCheckpoint(f"{what}: its chunks do not cover it, or overlap")
    cut = [axis for axis, size in enumerate(shape) if any(sizes[axis] != size for _, sizes in chunks)]
    if len(cut) > _CUT:
        raise BadCheckpoint(f"{what} is cut along {len(cut)} dimensions, more than {_CUT}")
    corners: set[tuple[int, ...]] = set()
    for offsets, sizes in [*chunks, ((0,) * len(shape), shape)] if prod(shape) else []:
        for corner in product(*((offsets[axis], offsets[axis] + sizes[axis]) for axis in cut)):
            corners ^= {corner}
    if corners:
        raise BadCheckpoint(f"{what}: its chunks overlap")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass
class _Found:
    """The entries of a checkpoint by what they are."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    top: dict[str, Tensor] = field(default_factory=dict)  # tensors that are in no table
    state: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    groups: dict[str | int, dict[str, Any]] = field(default_factory=dict)  # by parameter or number
    extra: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def add(self, entry: _Entry) -> None:
        """Take an entry."""
        for at, key in enumerate(entry.path[:-1]):
            if isinstance(key, str) and _OPTIMIZER.fullmatch(key):
                return self._add_of_optimizer(entry, entry.path[at + 1 :])
            if key in _MODEL and isinstance(entry.value, _Sharded):
                self.weights[".".join(map(str, entry.path[at + 1 :]))] = entry.value
                return None
        if len(entry.path) == 1 and isinstance(entry.value, _Sharded):
            self.top[str(entry.path[0])] = entry.value
            return None
        return self._add_extra(entry)

    def _add_of_optimizer(self, entry: _Entry, path: tuple[str | int, ...]) -> None:
        text = ".".join(map(str, path))
        part, _, rest = text.partition(".")
        if part == "state" and rest:
            name, _, kind = rest.rpartition(".")
            if kind == "step":
                self.steps[name] = _natural(entry)
            elif isinstance(entry.value, _Sharded):
                self.state[kind, name] = entry.value
            else:
                self.left.append(f"{entry.name}: it is no tensor")
        elif part == "param_groups" and not rest:
            found = _plain(entry)
            for number, group in enumerate(found if isinstance(found, list) else [found]):
                if not isinstance(group, dict):
                    raise BadCheckpoint(f"{entry.where}: {entry.name} is no list of tables")
                self.groups.setdefault(number, {}).update(group)
        elif part == "param_groups":
            if len(path) > 2 and isinstance(path[1], int):
                owner, key = path[1], ".".join(map(str, path[2:]))
            else:
                owner, _, key = rest.rpartition(".")
            self.groups.setdefault(owner, {})[key] = _plain(entry)
        else:
            self.left.append(f"{entry.name}: state of an optimizer of no known kind")

    def _add_extra(self, entry: _Entry) -> None:
        table = self.extra
        if entry.path[0] in _RESERVED:
            self.left.append(f"{entry.name}: a run of shardrt has another value of this name")
            return
        try:
            value = _plain(entry)
        except BadCheckpoint as error:
            self.left.append(f"{entry.name[:120]}: {error}")
            return
        for key in entry.path[:-1]:
            table = table.setdefault(str(key), {})
            if not isinstance(table, dict):
                raise BadCheckpoint(f"{entry.where}: {entry.name} lies in what is no table")
        table[str(entry.path[-1])] = value

    def checkpoint(self, path: Path) -> Checkpoint:
        """All of it."""
        if self.weights:
            for name, tensor in self.top.items():
                self._add_extra(_Entry((name,), tensor, path))
        weights = self.weights or self.top
        if not weights:
            raise BadCheckpoint(f"{path}: the checkpoint has no weights")
        tensors: dict[tuple[str, str], Tensor] = {(PARAMETER, name): one for name, one in weights.items()}
        strange = sorted({name for _, name in self.state if name not in weights})
        if strange:
            said = ", ".join(name[:120] for name in strange[:3])
            self.left.append(f"optimizer state of {len(strange)} names that no weight has: {said}")
        tensors |= {key: one for key, one in self.state.items() if key[1] in weights}
        steps = {name: count for name, count in self.steps.items() if name in weights}
        training = Training(self._step(steps), steps, list(self._groups()), self.extra)
        return Checkpoint(path, tensors, training, left=self.left)

    def _step(self, steps: Mapping[str, int]) -> int | None:
        """Updates done: as the program counts them, or else the most that a parameter had."""
        state = self.extra.get("train_state")
        if isinstance(state, dict) and natural(state.get("step")):
            step = state.pop("step")
            if not state:
                del self.extra["train_state"]
            return step
        if natural(self.extra.get("step")):
            return self.extra.pop("step")
        return max(steps.values(), default=None)

    def _groups(self) -> Iterator[dict[str, Any]]:
        """The optimizer's groups; settings that are kept for each parameter make a group where they agree."""
        merged: dict[str, dict[str, Any]] = {}
        for owner, group in self.groups.items():
            params = group.get("params", []) if isinstance(owner, int) else [owner]
            if type(params) is not list or not all(type(name) is str for name in params):
                self.left.append("the optimizer's settings: they are kept by numbers, not by names")
                continue
            settings = {key: value for key, value in sorted(group.items()) if key != "params"}
            key = repr((owner if isinstance(owner, int) else "", settings))
            merged.setdefault(key, {**settings, "params": []})["params"].extend(params)
        yield from merged.values()


def _plain(entry: _Entry) -> Any:
    """A value of numbers, texts, lists and tables, as JSON has them.

    Raises:
        BadCheckpoint: for anything else.
    """
    if isinstance(entry.value, _Sharded):
        return _number(entry.value, entry)
    if entry.value.length > _LARGEST_VALUE:
        raise BadCheckpoint(
            f"{entry.value.file.path}: {entry.name[:120]} has more than {_LARGEST_VALUE} bytes"
        )
    return _as_json(entry.value.open(), entry)


def _as_json(value: Any, entry: _Entry) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [_as_json(item, entry) for item in value]
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {str(key): _as_json(item, entry) for key, item in value.items()}
    if hasattr(value, "read_into"):
        return _number(value, entry)
    kind = value.name if type(value) in (Called, Global) else type(value).__name__
    raise BadCheckpoint(
        f"{entry.where}: {entry.name[:120]} has a value of type {kind[:80]}, not plain values"
    )


def _number(tensor: Tensor, entry: _Entry) -> int | float | bool:
    if prod(tensor.shape) != 1:
        raise BadCheckpoint(f"{entry.where}: {entry.name[:120]} is a tensor of shape {tensor.shape}")
    out = np.empty(1, tensor.dtype)
    tensor.read_into(out, 0)
    value = out.astype(np.float64)[0] if out.dtype.kind in "fV" else out[0]
    return value.item()


def _natural(entry: _Entry) -> int:
    value = _plain(entry)
    if type(value) not in (int, float) or not 0 <= value < 1 << 48 or value != int(value):
        raise BadCheckpoint(f"{entry.where}: {entry.name[:120]} is no count")
    return int(value)


@dataclass(frozen=True)
class _Value:
    """A tensor of one element."""

    dtype: np.dtype
    value: float
    shape: tuple[int, ...] = ()

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor."""
        out[...] = self.value


def _entries(checkpoint: Checkpoint, flat: bool) -> tuple[list[tuple[tuple[str | int, ...], Any]], list[str]]:
    """What a checkpoint of a layout has, by the keys that lead to it; and lines about what it has not."""
    found: list[tuple[tuple[str | int, ...], Any]] = []
    trained: dict[str, None] = {}
    for (kind, name), tensor in checkpoint.tensors.items():
        if kind == PARAMETER:
            found.append(((name,) if flat else ("model", name), tensor))
        else:
            trained[name] = None
            found.append((_of_state(flat, name, kind), tensor))
    training = checkpoint.training
    for name in trained:
        step = training.steps.get(name, training.step or 0)
        found.append((_of_state(flat, name, "step"), _Value(np.dtype(np.float32), step)))
    for number, group in enumerate(_groups(checkpoint)):
        settings = {key: value for key, value in group.items() if key != "params"}
        if flat:
            for name, (key, value) in product(group["params"], settings.items()):
                found.append((("optimizer", f"param_groups.{name}.{key}"), value))
        else:
            for key, value in group.items():
                found.append((("optim", "param_groups", number, key), value))
    if training.step is not None:
        found += _counts(training, flat)
    left = []
    for name, value in training.extra.items():
        if not (flat or name in _RESERVED):
            found += _leaves((name,), value)
        elif not flat or name not in ("train_state", "lr_scheduler"):
            left.append(f"{name}: there is no place for it here")
    if flat and trained:
        left.append("dataloader: torchtitan needs it in checkpoint.exclude_from_loading")
    return found, left


def _leaves(keys: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The values inside tables, as DCP takes a state_dict apart."""
    if isinstance(value, dict) and value:
        for key, inside in value.items():
            yield from _leaves((*keys, key), inside)
    else:
        yield keys, value


def _of_state(flat: bool, name: str, kind: str) -> tuple[str | int, ...]:
    return ("optimizer", f"state.{name}.{kind}") if flat else ("optim", "state", name, kind)


def _counts(training: Training, flat: bool) -> list[tuple[tuple[str | int, ...], Any]]:
    """The updates done, as torchtitan counts them, or as "step"."""
    if not flat:
        return [(("step",), training.step)]
    state = training.extra.get("train_state")
    tokens = state.get("ntokens_seen", 0) if isinstance(state, dict) else 0
    return [
        (("train_state", "step"), training.step),
        (("train_state", "ntokens_seen"), tokens),
        (("lr_scheduler", "last_epoch"), training.step),
    ]


def _groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Groups with all that torch.optim.AdamW has in them, where they are of AdamW: others have no betas."""
    training, has_amsgrad = (
        checkpoint.training,
        any(kind == "max_exp_avg_sq" for kind, _ in checkpoint.tensors),
    )
    recipe = training.extra.get("config")
    chosen = recipe.get("optimizer") if isinstance(recipe, dict) else None
    rate = chosen.get("lr") if isinstance(chosen, dict) else None
    groups = []
    for group in training.groups:
        full = dict(group)
        if "betas" in group:
            full = _ADAMW | group | {"betas": tuple(group["betas"])}
            full["amsgrad"] = full["amsgrad"] and has_amsgrad  # PyTorch looks for its state
        if "lr" in group:
            full.setdefault("initial_lr", rate if isinstance(rate, float) else group["lr"])
        groups.append(full)
    return groups


class _Writer:
    """Lays out the files of ranks, and their metadata."""

    def __init__(self, ranks: int) -> None:
        self._names = [f"__{rank}_0.distcp" for rank in range(ranks)]
        self._segments: list[list[Segment]] = [[] for _ in range(ranks)]
        self._sizes = [0] * ranks
        self._kinds: dict[str, Called] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._places: dict[Called, Called] = {}

    def add(self, path: tuple[str | int, ...], value: Any) -> None:
        """A tensor, cut along its first dimension as torch.chunk does, or another value."""
        name = ".".join(map(str, path))
        if name in self._kinds:
            raise BadCheckpoint(f"{name}: two values would have this name")
        self._paths[name] = path
        if not hasattr(value, "read_into"):
            self._kinds[name] = _made("BytesStorageMetadata", {})
            self._place(0, name, None, value)
            return
        if value.dtype not in _TORCH:
            raise BadCheckpoint(f"{name}: PyTorch has no type {value.dtype}")
        chunks = []
        for rank, (first, count) in enumerate(_cut(value.shape, len(self._names))):
            offsets, sizes = (first,) + (0,) * (len(value.shape) - 1), (count, *value.shape[1:])
            if not value.shape:
                offsets, sizes = (), ()
            row = prod(value.shape[1:])
            part = Joined(value.dtype, sizes, [(value, first * row, prod(sizes))])
            chunks.append(_made("ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)}))
            self._place(rank, name, offsets, part)
        self._kinds[name] = _made(
            "TensorStorageMetadata",
            {"properties": _properties(value.dtype), "size": _size(value.shape), "chunks": chunks},
        )

    def files(self) -> list[File]:
        """The files of all ranks, and the metadata last."""
        meta = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
        fields = {
            "state_dict_metadata": self._kinds,
            "planner_data": self._paths,
            "storage_data": self._places,
            "storage_meta": _made("StorageMeta", meta),
            "version": "1.0.0",
        }
        found = [File(*each, "crc") for each in zip(self._names, self._segments, strict=True) if each[1]]
        return [*found, File(METADATA, [pickled(_made("Metadata", fields))])]

    def _place(self, rank: int, name: str, offsets: tuple[int, ...] | None, value: Any) -> None:
        held = self._segments[rank]
        segments = torch_segments(value, self._names[rank], len(held))
        length = sum(len(one) if isinstance(one, bytes) else one.size or 0 for one in segments)
        index = {"fqn": name, "index": 0, "offset": None if offsets is None else _size(offsets)}
        info = {"relative_path": self._names[rank], "offset": self._sizes[rank], "length": length}
        self._places[_made("MetadataIndex", index)] = Called(_INFO, (), info)
        held += segments
        self._sizes[rank] += length


def _cut(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each chunk; one of a single number, or of no rows."""
    rows = shape[0] if shape else 1
    each = max(-(-rows // ranks), 1)
    for first in range(0, max(rows, 1), each):
        yield first, min(each, rows - first)


def _made(name: str, state: dict[str, Any]) -> Called:
    return Called(_CLASS + name, (), state)


def _size(sizes: tuple[int, ...]) -> Called:
    return Called("torch.Size", (tuple(sizes),))


def _properties(dtype: np.dtype) -> Called:
    layout = Called("torch.serialization._get_layout", ("torch.strided",))
    order = Called(f"{_CLASS}_MEM_FORMAT_ENCODING", (0,))
    properties = Called(f"{_CLASS}TensorProperties", ())
    properties.state = (Global(_TORCH[dtype]), layout, False, order, False)
    return properties
