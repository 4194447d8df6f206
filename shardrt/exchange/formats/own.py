"""shardrt's own checkpoints: a manifest, and a file for each rank with checksums of every 8 MiB.

They are read from any layout, in verified blocks. They are written in contiguous parts of each parameter, for
as many ranks as are wanted; any number of ranks restores them.
"""

import json
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from enum import Enum
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.manifest import (
    BLOCK,
    DTYPES,
    Damaged,
    Manifest,
    SavedFile,
    SavedParameter,
    SavedPiece,
    as_read,
)
from shardrt.checkpoint.pieces import is_error
from shardrt.checkpoint.rankfile import Reader, kind_of
from shardrt.checkpoint.store import MANIFEST, STEP, Store, read_manifest
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint, Checkpoint, Tensor, Training
from shardrt.exchange.formats import Options, Plan
from shardrt.exchange.groups import SETTINGS
from shardrt.exchange.output import Elements, File, Late, Segment, Sums
from shardrt.exchange.views import Cast
from shardrt.nn.extents import Extent
from shardrt.nn.overlaps import within
from shardrt.optim.adamw import STATE as KINDS
from shardrt.optim.optimizer import NO_DECAY
from shardrt.train.config import OptimizerConfig

DIALECT, STATE = "shardrt", True
_BLOCKS = 16  # that are kept, verified
_OF_RUNS = ("scaler", "config", "data", "versions")  # of `extra`: what a run has put there
_OF_OTHERS = "exchange"  # of `extra`: what other programs have put there, for a conversion back
_OWN_KINDS = {theirs: ours for ours, theirs in KINDS.items()}


def recognises(path: Path) -> bool:
    """Whether a folder is a checkpoint, a folder of checkpoints, or a run that has one."""
    return (path / MANIFEST).is_file() or bool(_steps(path))


def read(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest one of a folder or a run."""
    found = path if (path / MANIFEST).is_file() else (_steps(path) or [path])[0]
    try:
        manifest = read_manifest(found)
    except Damaged as error:
        raise BadCheckpoint(str(error)) from None
    blocks = _Blocks(found, manifest.files)
    pieces: dict[tuple[str, str], list[SavedPiece]] = {}
    errors = {piece.parameter for piece in manifest.pieces if is_error(piece.kind)}
    for piece in manifest.pieces:
        if is_error(piece.kind):
            continue
        pieces.setdefault((KINDS.get(piece.kind, piece.kind), piece.parameter), []).append(piece)
    for name, parameter in manifest.parameters.items():
        pieces.setdefault((PARAMETER, name), []) if not parameter.size else None
    tensors = {
        (kind, name): _Saved(manifest.parameters[name], parts, blocks, f"{kind} of {name!r}")
        for (kind, name), parts in pieces.items()
    }
    extra = dict(manifest.extra)
    others = extra.pop(_OF_OTHERS, {})
    if not isinstance(others, dict):
        raise BadCheckpoint(f"{found / MANIFEST}: {_OF_OTHERS!r} must be a table")
    groups = others.pop("param_groups", None) or _groups(manifest)
    training = Training(manifest.step, dict(manifest.steps), groups, others | extra)
    left = [f"quantisation errors of {len(errors)} parameters: they begin with zeros"] if errors else []
    return Checkpoint(found, tensors, training, left=left)


def files(checkpoint: Checkpoint, options: Options) -> Plan:
    """A file for each rank, and the manifest."""
    tensors: dict[tuple[str, str], Tensor] = {}
    strange: Counter[str] = Counter()
    for (kind, name), tensor in checkpoint.tensors.items():
        if kind != PARAMETER and kind not in _OWN_KINDS:
            strange[kind] += 1
        else:
            tensors[kind, name] = _storable(tensor, name)
    left = [
        f"{kind} of {count} parameters: shardrt's optimizers keep no such state"
        for kind, count in strange.items()
    ]
    left += _lost(checkpoint.training, {name for kind, name in tensors if kind != PARAMETER})
    step = checkpoint.training.step or 0
    ranks = [_rank_file(tensors, rank, options.ranks) for rank in range(options.ranks)]
    layout = _Layout(checkpoint.training, tensors, [pieces for _, pieces in ranks], step)
    rank_files = [file for file, _ in ranks]
    manifest = File(MANIFEST, [Late(lambda sums: layout.manifest(rank_files, sums).dump())])
    return Plan([*rank_files, manifest], _place(options.target, step), left)


class _Blocks:
    """The last verified blocks of the files of a checkpoint."""

    def __init__(self, folder: Path, saved: Sequence[SavedFile]) -> None:
        self._folder, self._files = folder, saved
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def read_into(self, out: np.ndarray, file: int, offset: int) -> None:
        """Fill `out`, bytes, with those of a file from `offset` on."""
        done = 0
        while done < out.size:
            number, inside = divmod(offset + done, BLOCK)
            block = self._block(file, number)
            count = min(out.size - done, len(block) - inside)
            out[done : done + count] = np.frombuffer(block, np.uint8, count, inside)
            done += count

    def _block(self, file: int, number: int) -> bytes:
        key = file, number
        if key not in self._kept:
            while len(self._kept) >= _BLOCKS:
                self._kept.popitem(last=False)
            with closing(Reader(self._folder, self._files[file])) as reader:
                self._kept[key] = reader.block(number)
        self._kept.move_to_end(key)
        return self._kept[key]


class _Saved:
    """A parameter, or one kind of its optimizer state, in the pieces in which it was saved."""

    def __init__(
        self, parameter: SavedParameter, pieces: list[SavedPiece], blocks: _Blocks, what: str
    ) -> None:
        self.dtype, self.shape = np.dtype(DTYPES[parameter.dtype]), parameter.shape
        self._pieces = sorted(pieces, key=lambda piece: piece.runs.first)
        self._firsts = [piece.runs.first for piece in self._pieces]
        self._in_turn = all(
            one.runs.stop <= other.runs.first
            for one, other in zip(self._pieces, self._pieces[1:], strict=False)
        )
        self._blocks, self._what = blocks, what

    def read_into(self, out: np.ndarray, start: int) -> None:
        """As Tensor."""
        stop = start + out.size
        begin = max(bisect_right(self._firsts, start) - 1, 0) if self._in_turn else 0
        for piece in self._pieces[begin:]:
            if piece.runs.first >= stop:
                break
            if piece.runs.stop > start:
                try:
                    self._read_piece(out, start, piece)
                except Damaged as error:
                    raise BadCheckpoint(f"{error} ({self._what})") from None

    def _read_piece(self, out: np.ndarray, start: int, piece: SavedPiece) -> None:
        """Put what a piece has of elements from `start` on into its places."""
        runs, stop = piece.runs, start + out.size
        for number in within(runs, start, stop):
            first = runs.begin(number)
            low, high = max(first, start), min(first + runs.length, stop)
            offset = piece.offset + (number * runs.length + low - first) * self.dtype.itemsize
            self._blocks.read_into(out[low - start : high - start].view(np.uint8), piece.file, offset)


class _Layout:
    """What the manifest says: all but the checksums is known before."""

    def __init__(
        self,
        training: Training,
        tensors: Mapping[tuple[str, str], Tensor],
        pieces: Sequence[Sequence[SavedPiece]],
        step: int,
    ) -> None:
        self._pieces, self._step = tuple(piece for of_rank in pieces for piece in of_rank), step
        self._parameters = {
            name: SavedParameter(tensor.shape, kind_of(tensor.dtype))
            for (kind, name), tensor in tensors.items()
            if kind == PARAMETER
        }
        trained = [name for kind, name in tensors if kind != PARAMETER]
        for kind, name in tensors:
            if kind != PARAMETER and name not in self._parameters:
                raise BadCheckpoint(f"{kind} of {name}: there is no such parameter")
        self._steps = {name: training.steps.get(name, step) for name in trained}
        try:
            self._extra = as_read(_extra(training))
        except (TypeError, ValueError) as error:
            raise BadCheckpoint(str(error)) from None

    def manifest(self, files: Sequence[File], sums: Mapping[str, Sums]) -> Manifest:
        """With the checksums of the files, which are written."""
        saved = [SavedFile(f.name, sums[f.name].bytes, tuple(sums[f.name].blocks)) for f in files]
        return Manifest(self._step, tuple(saved), self._parameters, self._pieces, self._steps, self._extra)


def _rank_file(
    tensors: Mapping[tuple[str, str], Tensor], rank: int, ranks: int
) -> tuple[File, list[SavedPiece]]:
    """A rank's file: its part of each tensor, and the places of those."""
    entries: dict[str, Any] = {}
    parts: list[tuple[str, str, Elements]] = []
    end = 0
    for (kind, name), tensor in tensors.items():
        size = prod(tensor.shape)
        part = Elements(tensor, size * rank // ranks, size * (rank + 1) // ranks, tensor.dtype)
        if not part.size:
            continue
        kind = _OWN_KINDS.get(kind, kind)
        stop = end + part.size
        entries[f"{kind}/{name}"] = {
            "dtype": kind_of(tensor.dtype),
            "shape": [part.stop - part.start],
            "data_offsets": [end, stop],
        }
        parts.append((kind, name, part))
        end = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header: list[Segment] = [len(text).to_bytes(8, "little") + text]
    offset, pieces = 8 + len(text), []
    for kind, name, part in parts:
        count = part.stop - part.start
        pieces.append(SavedPiece(rank, kind, name, Extent(part.start, count, count, 1), offset))
        offset += part.size
    file = File(Store.FILE.format(rank), [*header, *(part for _, _, part in parts)], "blocks")
    return file, pieces


def _storable(tensor: Tensor, name: str) -> Tensor:
    """A tensor in a type that a run restores: 16 bits of a float become 32, which is exact."""
    if tensor.dtype.name in ("bfloat16", "float16"):
        return Cast(tensor, np.dtype(np.float32))
    if tensor.dtype.name not in DTYPES.values():
        raise BadCheckpoint(f"{name}: shardrt's checkpoints have no type {tensor.dtype}")
    return tensor


def _extra(training: Training) -> dict[str, Any]:
    """A run's own values as it puts them there; apart from them, those that no run reads."""
    extra = {name: value for name, value in training.extra.items() if name in _OF_RUNS}
    others = {name: value for name, value in training.extra.items() if name not in _OF_RUNS}
    if "config" not in extra and training.groups:  # else the recipe says it
        others["param_groups"] = training.groups
    return extra | ({_OF_OTHERS: others} if others else {})


def _lost(training: Training, trained: set[str]) -> list[str]:
    """Lines about what runs of shardrt's do not go on from."""
    lines = [
        f"{name}: a run does not use it; it is kept for a conversion back"
        for name in training.extra
        if name not in _OF_RUNS
    ]
    if not trained:
        lines.append("optimizer state: there is none, so `--resume` finds no run here to go on from")
    if training.groups and "config" not in training.extra:
        said = [{name: group[name] for name in SETTINGS if name in group} for group in training.groups]
        for settings in sorted({json.dumps(one) for one in said if one}):
            words = ", ".join(f"{name} {value}" for name, value in json.loads(settings).items())
            lines.append(f"the optimizer's {words}: the recipe of the run sets them")
    return lines


def _place(target: Path, step: int) -> Path:
    """Where a checkpoint is written: as B itself, or in B, a run or a folder of checkpoints."""
    name = Store.name(step)
    if STEP.fullmatch(target.name):
        return target
    if target.name == "checkpoints":
        return target / name
    return target / "checkpoints" / name


def _steps(path: Path) -> list[Path]:
    """The checkpoints of a run or of a folder, newest first."""
    inside = path / "checkpoints"
    return [found for _, found in Store(inside if inside.is_dir() else path).checkpoints()]


def _groups(manifest: Manifest) -> list[dict[str, Any]]:
    """The groups of AdamW, as the recipe of a run has made them (optim.decay_groups)."""
    recipe = manifest.extra.get("config")
    chosen = recipe.get("optimizer") if isinstance(recipe, dict) else None
    if not isinstance(chosen, dict) or chosen.get("name") != "adamw" or not manifest.steps:
        return []
    try:
        config = _optimizer(chosen)
        lr = config.lr_at(max(manifest.step - 1, 0), int(recipe["steps"]))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, ZeroDivisionError):
        return []
    groups = [
        {"lr": lr, "betas": list(config.betas), "eps": 1e-8, "weight_decay": decay, "params": []}
        for decay in (config.weight_decay, 0.0)
    ]
    for name in manifest.steps:
        groups[any(fnmatch(name.lower(), pattern) for pattern in NO_DECAY)]["params"].append(name)
    return [group for group in groups if group["params"]]


def _optimizer(table: Mapping[str, Any]) -> OptimizerConfig:
    """The recipe's settings of the optimizer, from JSON."""
    given: dict[str, Any] = {}
    for field in fields(OptimizerConfig):
        if field.name in table:
            value, default = table[field.name], field.default
            given[field.name] = (
                type(default)[value]
                if isinstance(default, Enum)
                else tuple(value)
                if isinstance(default, tuple)
                else value
            )
    return OptimizerConfig(**given)
