"""`python -m shardrt ckpt`: list, verify, compare, thin out, export and convert checkpoints.

DIR is a run, a folder of checkpoints, or one checkpoint.
"""

import argparse
import sys
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint import apart
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.manifest import DTYPES, Damaged, Manifest
from shardrt.checkpoint.rankfile import Reader
from shardrt.checkpoint.store import MANIFEST, Store, is_here, read_manifest, verify
from shardrt.comm import create, objects
from shardrt.comm.differences import differing
from shardrt.faults.lock import unused
from shardrt.nn.extents import spans
from shardrt.untrusted import Refused, say


class _Values:
    """The values in a checkpoint. Each file is open once: neighbours share a verified block."""

    def __init__(self, path: Path) -> None:
        self.manifest = read_manifest(path)
        self._files = ExitStack()
        self._readers = [
            self._files.enter_context(closing(Reader(path, file))) for file in self.manifest.files
        ]

    def __enter__(self) -> "_Values":
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.close()

    def whole(self, kind: str, name: str) -> np.ndarray | None:
        """All elements of one kind of a parameter, verified; None if it was not saved."""
        parameter, result = self.manifest.parameters[name], None
        for piece in self.manifest.pieces:
            if (piece.kind, piece.parameter) != (kind, name):
                continue
            if result is None:
                result = np.empty(parameter.size, DTYPES[parameter.dtype])
            reader, what = self._readers[piece.file], f"{kind} {name!r}"
            for place, first, length in spans((piece.runs,)):
                offset = piece.offset + place * result.itemsize
                reader.read_into(result[first : first + length], offset, what)
        return result


def add_to(commands: Any) -> None:
    """Add `ckpt` and its own commands to argparse's subparsers."""
    group = commands.add_parser("ckpt", help="checkpoints", description=__doc__.split("\n")[0])
    actions = group.add_subparsers(title="commands", required=True)
    for function, help_text in (
        (ls, "steps, sizes and ranks of the checkpoints in DIR"),
        (check, "read every byte, and say which checkpoints are whole"),
        (diff, "compare two checkpoints: settings, shapes, values"),
        (prune, "remove all but the newest"),
        (export, "whole weights as one safetensors file"),
        (gather, "bring the parts of a checkpoint together that hosts have in folders of their own"),
    ):
        name = "verify" if function is check else function.__name__
        action = actions.add_parser(name, help=help_text, description=help_text)
        action.set_defaults(run=function)
        action.add_argument("directory", metavar="DIR", type=Path)
        if function is diff:
            action.add_argument("other", metavar="OTHER", type=Path)
        if function is prune:
            action.add_argument("--keep", type=_positive, default=3, metavar="N", help="how many stay (3)")
        if function is gather:
            message = "copies of the same folder of other hosts; none: under mpirun, a rank on each host"
            action.add_argument("others", metavar="OTHER", type=Path, nargs="*", help=message)
        if function is export:
            action.add_argument("file", metavar="FILE", type=Path, help="a name that does not exist yet")
    import_module("shardrt.exchange.convert").add_to(actions)  # which is built on this package


def ls(options: argparse.Namespace) -> int:
    """Print a line for each checkpoint."""
    for path in _found(options.directory):
        try:
            manifest = read_manifest(path, part=True)
            size = sum(file.bytes for file in manifest.files) / 1e6
            ranks = f"{len(manifest.files)} rank{'s' if len(manifest.files) != 1 else ''}"
            part = _part(path, manifest)
            say(f"{path}  step {manifest.step}  {size:.1f} MB  {ranks}{'  ' if part else ''}{part}")
        except (Damaged, OSError) as error:
            say(f"{path}  not whole: {error}")
    return 0


def _part(path: Path, manifest: Manifest) -> str:
    """The number of missing files of a checkpoint, as text; "" if all are here."""
    lacking = sum(not is_here(path, file) for file in manifest.files)
    return f"a part: {lacking} of {len(manifest.files)} files are not here" if lacking else ""


def check(options: argparse.Namespace) -> int:
    """Print whether each checkpoint is complete; returns 65 if one is damaged or lacks files here."""
    worst = 0
    for path in _found(options.directory):
        try:
            part = _part(path, verify(path, part=True))
            worst = 65 if part else worst
            say(f"{path}  {part}, the others are whole" if part else f"{path}  whole")
        except (Damaged, OSError) as error:
            worst = 65
            say(f"{path}  DAMAGED  {error}")
    return worst


def diff(options: argparse.Namespace) -> int:
    """Print what differs; 1 if anything does."""
    with _Values(_found(options.directory)[0]) as first, _Values(_found(options.other)[0]) as second:
        lines = _compared(first, second)
    say(*(lines or ["the same"]))
    return int(bool(lines))


def _compared(first: _Values, second: _Values) -> list[str]:
    """A line for everything that differs."""
    one, other = first.manifest, second.manifest
    lines = [] if one.step == other.step else [f"step: {one.step} and {other.step}"]
    lines += [f"{name}: {a} and {b}" for name, (a, b) in differing([one.extra, other.extra])]
    for name in sorted(one.parameters.keys() | other.parameters.keys()):
        shapes = one.parameters.get(name), other.parameters.get(name)
        if shapes[0] != shapes[1]:
            lines.append(f"{name}: {' and '.join(str(s and s.shape) for s in shapes)}")
            continue
        for kind in sorted({p.kind for m in (one, other) for p in m.pieces if p.parameter == name}):
            values = first.whole(kind, name), second.whole(kind, name)
            if values[0] is None or values[1] is None:
                lines.append(f"{kind} of {name}: in one of them only")
            elif not np.array_equal(*values):
                largest = np.abs(values[0].astype(np.float64) - values[1]).max()
                lines.append(f"{kind} of {name}: differs by up to {largest:.3g}")
    return lines


def prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints; remove unfinished ones only if no job can be writing them."""
    store = Store(_root(options.directory))
    with unused(store.root.parent) as alone:
        if alone:
            store.clean()
    published = (step for step, path in store.checkpoints() if (path / MANIFEST).is_file())
    gone = store.prune(options.keep, newest=next(published, 0))  # above it, a save in a bucket has begun one
    say(f"removed steps {', '.join(map(str, gone))}" if gone else "nothing to remove")
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the whole parameters under their names, in the format of checkpoint.load."""
    from safetensors.numpy import save_file

    if options.file.exists():
        raise FileExistsError(17, "File exists", str(options.file))
    path = _found(options.directory)[0]
    with _Values(path) as values:
        manifest = values.manifest
        weights = {
            name: values.whole("parameter", name).reshape(parameter.shape)
            for name, parameter in manifest.parameters.items()
        }
    save_file(weights, options.file, metadata={"step": str(manifest.step)})
    say(f"wrote {options.file}: {len(weights)} tensors of {path}")
    return 0


def gather(options: argparse.Namespace) -> int:
    """Complete the newest checkpoint in DIR with files of other hosts; returns 65 if some are missing."""
    if not options.others:
        return _gather_over_hosts(options.directory)
    path = _found(options.directory)[0]
    manifest = read_manifest(path, part=True)
    for other in options.others:
        source = _root(other) / path.name
        if source.is_dir() and read_manifest(source, part=True) == manifest:
            say(f"{path}: {apart.copy(Disk(), path, source, manifest)} files from {source}")
        else:
            say(f"{other}: no part of {path.name} as {path} has it", file=sys.stderr)
    return _is_whole(path, manifest)


def _gather_over_hosts(directory: Path) -> int:
    """On every rank: send the first rank's folder the missing files of its newest checkpoint."""
    control = create()
    if control.size == 1:
        raise Refused("ckpt gather: name copies of other hosts' folders, or start it by mpirun on each host")
    errors, found = apart.attempt(control, lambda: control.rank or [str(path) for path in _found(directory)])
    if not errors:
        path = _root(directory) / Path(objects.broadcast_object(control, found)[0]).name

        def wanted(manifest: Manifest) -> list[int]:
            return [] if control.rank else list(range(len(manifest.files)))

        errors = apart.bring(control, Store(path.parent), path, control.rank, wanted)
    if control.rank:
        return 65 if errors else 0
    for line in errors:
        say(f"error: {line.partition(': ')[2]}", file=sys.stderr)
    return 65 if errors else _is_whole(path, read_manifest(path, part=True))


def _is_whole(path: Path, manifest: Manifest) -> int:
    """0, or 65 if files of a checkpoint are not here; prints their names."""
    lacking = [file.name for file in manifest.files if not is_here(path, file)]
    say(f"{path}  a part: {', '.join(lacking)} are not here" if lacking else f"{path}  whole")
    return 65 if lacking else 0


def _root(directory: Path) -> Path:
    """The folder of checkpoints: `directory` itself, or the folder inside a run."""
    inside = directory / "checkpoints"
    return inside if inside.is_dir() else directory


def _found(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, newest first. Raises FileNotFoundError if there is none."""
    if (directory / MANIFEST).exists():
        return [directory]
    paths = [path for _, path in Store(_root(directory)).checkpoints()]
    if not paths:
        raise FileNotFoundError(2, "No checkpoint here", str(directory))
    return paths


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
