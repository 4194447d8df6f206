"""Whether a checkpoint fits this model and optimizer, and which saved elements a rank needs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint import rankfile
from shardrt.checkpoint.manifest import DTYPES, Manifest, SavedPiece
from shardrt.checkpoint.pieces import PARAMETER, Piece, is_error
from shardrt.nn.module import Module
from shardrt.nn.overlaps import overlaps
from shardrt.nn.parameter_placement import whole_shape
from shardrt.optim.optimizer import Optimizer


class OtherRun(ValueError):
    """A checkpoint is intact, but from another model or optimizer."""


def transfers(
    wanted: list[Piece], manifest: Manifest
) -> dict[int, list[tuple[SavedPiece, Piece, int, int, int]]]:
    """File number -> (saved piece, wanted piece, place there, place here, count), in file order."""
    saved: dict[tuple[str, str], list[SavedPiece]] = {}
    for piece in manifest.pieces:
        saved.setdefault((piece.kind, piece.parameter), []).append(piece)
    found: dict[int, list[tuple[SavedPiece, Piece, int, int, int]]] = {}
    for piece in wanted:
        for other in saved.get((piece.kind, piece.parameter), ()):
            for here, there, count in overlaps(piece.extents, other.runs):
                found.setdefault(other.file, []).append((other, piece, there, here, count))
    for transfers in found.values():
        transfers.sort(key=lambda transfer: transfer[0].offset + transfer[2])
    return found


def transfer(
    reader: rankfile.Reader, saved: SavedPiece, piece: Piece, first: int, place: int, count: int
) -> None:
    """Copy `count` elements of a saved piece, from its `first` on, to this rank's, from `place` on."""
    itemsize = piece.dtype.itemsize
    target = piece.array[place : place + count]
    step = max(1, rankfile.BLOCK // itemsize)
    for start in range(0, count, step):
        part = target[start : start + step]
        offset = saved.offset + (first + start) * itemsize
        if isinstance(part, np.ndarray) and part.dtype == piece.dtype:
            reader.read_into(part, offset, f"{saved.kind} {saved.parameter!r}")
        else:
            host = np.empty(part.size, piece.dtype)
            reader.read_into(host, offset, f"{saved.kind} {saved.parameter!r}")
            piece.write(place + start, host)


def named_arrays(model: Module) -> Iterator[tuple[str, Any]]:
    """The arrays of a model in a checkpoint: parameters and buffers."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def check_fits(model: Module, manifest: Manifest, folder: Path) -> None:
    """Raise OtherRun unless names, shapes and types equal the model's."""
    own = {name: (whole_shape(array), array.dtype.name) for name, array in named_arrays(model)}
    theirs = {name: (p.shape, DTYPES[p.dtype]) for name, p in manifest.parameters.items()}
    if own.keys() != theirs.keys():
        missing, extra = sorted(own.keys() - theirs.keys()), sorted(theirs.keys() - own.keys())
        lacks = [f"it lacks {', '.join(missing[:10])}"] if missing else []
        lacks += [f"this model lacks {', '.join(extra[:10])}"] if extra else []
        raise OtherRun(f"{folder}: the checkpoint does not fit this model: {'; '.join(lacks)}")
    for name in own:
        if own[name] != theirs[name]:
            raise OtherRun(
                f"{folder}: parameter {name!r} has (shape, type) {theirs[name]} in the checkpoint "
                f"and {own[name]} in the model"
            )


def check_kinds(wanted: list[Piece], optimizer: Optimizer, manifest: Manifest, folder: Path) -> None:
    """Raise OtherRun if the kinds of optimizer state differ from the saved kinds.

    Parameters without an update before the save need no state.
    """
    there = {(piece.kind, piece.parameter) for piece in manifest.pieces if not is_error(piece.kind)}
    states = (p for p in wanted if p.kind != PARAMETER and not is_error(p.kind))
    kept = {(p.kind, p.parameter) for p in states if not begins(p, manifest)}
    names = optimizer.state_names
    unknown = sorted({kind for kind, _ in there} - {PARAMETER, *names})
    missing = sorted(kept - there)
    if missing or unknown:
        has = f"has no {missing[0][0]!r} of {missing[0][1]!r}" if missing else f"has {unknown[0]!r}"
        raise OtherRun(
            f"{folder}: it was saved with another optimizer: it {has}, {type(optimizer).__name__} keeps "
            f"{', '.join(map(repr, names)) or 'nothing'}; restore with weights_only=True"
        )


def begins(piece: Piece, manifest: Manifest) -> bool:
    """Whether this begins with zeros: state of a parameter that was frozen in the saved run, error feedback.

    Saved error feedback is read over the zeros.
    """
    if is_error(piece.kind):
        return True
    return piece.kind != PARAMETER and bool(manifest.steps) and piece.parameter not in manifest.steps


def dropped_errors(wanted: list[Piece], manifest: Manifest) -> str:
    """A message if error feedback was saved that no rank reads, or is missing; else ""."""
    there = {piece.kind for piece in manifest.pieces if is_error(piece.kind)}
    here = {piece.kind for piece in wanted if is_error(piece.kind)}
    if here <= there and bool(here) == bool(there):
        return ""
    saved, own = (_hosts(kinds) for kinds in (there, here))
    return (
        f"quantisation errors were saved {saved} and are kept {own}: they begin with zeros, so training "
        "goes on, but not bitwise identically"
    )


def _hosts(kinds: set[str]) -> str:
    """By how many hosts errors of these kinds are kept."""
    hosts = sorted({kind.split(".")[1] for kind in kinds}, key=int)
    return f"for {' and '.join(hosts)} hosts" if hosts else "for none"
