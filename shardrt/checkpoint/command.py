"""`python -m shardrt ckpt`: list, verify, compare, thin out and export checkpoints.

DIR is a run, a folder of checkpoints, or one checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.checkpoint.manifest import DTYPES, Damaged, Manifest
from shardrt.checkpoint.rankfile import Reader
from shardrt.checkpoint.store import MANIFEST, Store, read_manifest, verify


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
    ):
        name = "verify" if function is check else function.__name__
        action = actions.add_parser(name, help=help_text, description=help_text)
        action.set_defaults(run=function)
        action.add_argument("directory", metavar="DIR", type=Path)
        if function is diff:
            action.add_argument("other", metavar="OTHER", type=Path)
        if function is prune:
            action.add_argument("--keep", type=_positive, default=3, metavar="N", help="how many stay (3)")
        if function is export:
            action.add_argument("file", metavar="FILE", type=Path, help="a name that does not exist yet")


def ls(options: argparse.Namespace) -> int:
    """Print a line for each checkpoint."""
    for path in _found(options.directory):
        try:
            manifest = read_manifest(path)
            size = sum(file.bytes for file in manifest.files) / 1e6
            print(f"{path}  step {manifest.step}  {size:.1f} MB  {len(manifest.files)} ranks")
        except (Damaged, OSError) as error:
            print(f"{path}  not whole: {error}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Print whether each checkpoint is whole; 65 if one is not."""
    worst = 0
    for path in _found(options.directory):
        try:
            verify(path)
            print(f"{path}  whole")
        except (Damaged, OSError) as error:
            worst = 65
            print(f"{path}  DAMAGED  {error}")
    return worst


def diff(options: argparse.Namespace) -> int:
    """Print what differs; 1 if anything does."""
    paths = [_found(directory)[0] for directory in (options.directory, options.other)]
    first, second = map(read_manifest, paths)
    lines = [] if first.step == second.step else [f"step: {first.step} and {second.step}"]
    lines += _differences("", first.extra, second.extra)
    for name in sorted(first.parameters.keys() | second.parameters.keys()):
        one, other = first.parameters.get(name), second.parameters.get(name)
        if one != other:
            lines.append(f"{name}: {one and one.shape} and {other and other.shape}")
            continue
        for kind in sorted({p.kind for m in (first, second) for p in m.pieces if p.parameter == name}):
            values = [_whole(path, m, kind, name) for path, m in zip(paths, (first, second), strict=True)]
            if values[0] is None or values[1] is None:
                lines.append(f"{kind} of {name}: in one of them only")
            elif not np.array_equal(*values):
                largest = np.abs(values[0].astype(np.float64) - values[1]).max()
                lines.append(f"{kind} of {name}: differs by up to {largest:.3g}")
    print("\n".join(lines) or "the same")
    return int(bool(lines))


def prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints."""
    store = Store(_root(options.directory))
    store.clean()
    gone = store.prune(options.keep)
    print(f"removed steps {', '.join(map(str, gone))}" if gone else "nothing to remove")
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the parameters, whole, under their names: what checkpoint.load reads."""
    from safetensors.numpy import save_file

    if options.file.exists():
        raise FileExistsError(17, "File exists", str(options.file))
    path = _found(options.directory)[0]
    manifest = read_manifest(path)
    weights = {
        name: _whole(path, manifest, "parameter", name).reshape(parameter.shape)
        for name, parameter in manifest.parameters.items()
    }
    save_file(weights, options.file, metadata={"format": "shardrt", "step": str(manifest.step)})
    print(f"wrote {options.file}: {len(weights)} tensors of {path}")
    return 0


def _root(directory: Path) -> Path:
    """The folder of checkpoints that is meant: itself, or that of a run."""
    inside = directory / "checkpoints"
    return inside if inside.is_dir() else directory


def _found(directory: Path) -> list[Path]:
    """The checkpoints that are meant, the newest first. Raises FileNotFoundError if there is none."""
    if (directory / MANIFEST).exists():
        return [directory]
    paths = [path for _, path in Store(_root(directory)).checkpoints()]
    if not paths:
        raise FileNotFoundError(2, "No checkpoint here", str(directory))
    return paths


def _whole(path: Path, manifest: Manifest, kind: str, name: str) -> np.ndarray | None:
    """All elements of one kind of a parameter, verified; None if it was not saved."""
    parameter, result = manifest.parameters[name], None
    for piece in manifest.pieces:
        if (piece.kind, piece.parameter) != (kind, name):
            continue
        if result is None:
            result = np.empty(parameter.size, DTYPES[parameter.dtype])
        reader = Reader(path, manifest.files[piece.file])
        try:
            part = result[piece.first : piece.first + piece.count]
            reader.read_into(part, piece.offset, f"{kind} {name!r}")
        finally:
            reader.close()
    return result


def _differences(prefix: str, first: Any, second: Any) -> list[str]:
    """ "a.b: 1 and 2" for every leaf in which two nests of dicts differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted(first.keys() | second.keys())
        return [
            line for key in keys for line in _differences(f"{prefix}{key}.", first.get(key), second.get(key))
        ]
    return [] if first == second else [f"{prefix.rstrip('.')}: {first} and {second}"]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
