"""`shardrt ckpt convert A B --to FORMAT`: a checkpoint of one program as a checkpoint of another.

A and B are folders. The format of A is known by its files. What B can't hold is named, a line each. After a
kill the same command goes on from there.

    shardrt ckpt convert runs/NAME out --to safetensors
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.exchange import names
from shardrt.exchange.checkpoint import PARAMETER, BadCheckpoint, Checkpoint, Training
from shardrt.exchange.formats import FORMATS, SYNONYMS, Options, Plan, format_of, module_of
from shardrt.exchange.groups import checked, completed, settings
from shardrt.exchange.output import Output
from shardrt.exchange.views import Cast
from shardrt.untrusted import read_regular, say

__all__ = ["add_to", "convert"]

_SECONDS = 5.0  # between lines of progress
_STOPPED = 130  # the exit code after Ctrl-C
_CHOICES = ("to", "source_format", "ranks", "dtype", "weights_only", "dialect", "family", "layout")
_EXAMPLES = """examples:
  shardrt ckpt convert runs/NAME out --to safetensors --dtype bfloat16
  shardrt ckpt convert outputs/checkpoint/step-1000 runs/NAME --to shardrt --config config.json
"""


def add_to(actions: Any) -> None:
    """Add `convert` to the commands of `ckpt`."""
    what = "turn a checkpoint into one of another program"
    action = actions.add_parser(
        "convert",
        help=what,
        description=what,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action.set_defaults(run=run)
    formats = (*FORMATS, *SYNONYMS)
    action.add_argument("source", metavar="A", type=Path, help="a run, a folder of checkpoints, or one")
    action.add_argument("target", metavar="B", type=Path, help="a new folder, or a run")
    action.add_argument("--to", required=True, choices=formats, help="format of B")
    action.add_argument("--from", dest="source_format", choices=formats, help="format of A")
    action.add_argument("--ranks", type=_ranks, default=1, metavar="N", help="ranks that B has files for (1)")
    action.add_argument(
        "--zero-stage", type=int, choices=(1, 2, 3), default=3, help="stage of DeepSpeed's ZeRO (3)"
    )
    action.add_argument(
        "--zero-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type in which DeepSpeed computes: bfloat16 if its configuration enables bf16",
    )
    action.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="type of the weights; without it they keep theirs"
    )
    action.add_argument("--weights-only", action="store_true", help="leave the state of training out")
    action.add_argument(
        "--optimizer",
        type=settings,
        default={},
        metavar="SETTINGS",
        help="the optimizer's, where A lacks them or B needs others: 'lr = 3e-4, weight_decay = 0.1'",
    )
    action.add_argument("--names", type=Path, metavar="FILE.toml", help="a table of names, applied to A's")
    action.add_argument("--dialect", choices=tuple(names.DIALECTS), help="program whose names B gets")
    action.add_argument("--family", default="", metavar="NAME", help="kind of model, as llama")
    action.add_argument("--config", type=Path, metavar="FILE", help="config.json of the model, if A has none")
    action.add_argument(
        "--layout",
        default="",
        choices=("flat", "nested"),
        help='tables of dcp: torchtitan\'s, or {"model", "optim"}; by the names without it',
    )
    action.add_argument("--restart", action="store_true", help="remove what another conversion left of B")


def run(options: argparse.Namespace) -> int:
    """Convert, and print what was converted and what was left out; returns the exit code."""
    try:
        say(*convert(options))
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here", file=sys.stderr)
        return _STOPPED
    return 0


def convert(options: argparse.Namespace) -> list[str]:
    """Write B; returns lines about it.

    Raises:
        BadCheckpoint: if A can't be read, or B can't hold it.
        OSError: if the file system fails. What is written stays, and the same call goes on.
    """
    if not options.source.exists():
        raise FileNotFoundError(2, "No such checkpoint", str(options.source))
    target = SYNONYMS.get(options.to, options.to)
    if target == "shardrt" and options.dtype not in (None, "float32"):
        raise BadCheckpoint(f"--dtype {options.dtype}: shardrt's checkpoints hold float32")
    if target == "shardrt" and options.optimizer:
        raise BadCheckpoint("--optimizer: the recipe of a shardrt run sets it")
    source = options.source_format or format_of(options.source)
    if (source, target) == ("peft", "shardrt"):
        raise BadCheckpoint(
            f"{options.source}: an adapter alone is no run; `shardrt train --init-from MODEL --lora.adapter "
            f"{options.source}` goes on from it"
        )
    reader, writer = module_of(source), module_of(target)
    if not hasattr(writer, "files"):
        raise BadCheckpoint(f"--to {options.to}: this format is only read")
    opened = reader.read(options.source)
    checked(opened.training.groups, opened.path)
    checkpoint = _in_names(opened, options, options.dialect or writer.DIALECT)
    checkpoint = _chosen(checkpoint, options)
    if not (writer.STATE or options.weights_only):
        checkpoint = _without_state(checkpoint, options.to)
    elif target != "shardrt":
        checkpoint = completed(checkpoint, options.optimizer)
    how = Options(
        options.target,
        options.ranks,
        zero_stage=options.zero_stage,
        zero_dtype=options.zero_dtype,
        layout=options.layout,
    )
    plan: Plan = writer.files(checkpoint, how)
    into = _place(plan.target or options.target, opened.path)
    with _progress() as progress:
        identity = _identity(options, opened)
        Output(into, identity, restart=options.restart, progress=progress).write(plan.files)
    return _report(checkpoint, plan, into)


def _place(target: Path, source: Path) -> Path:
    """The folder that B gets: behind a link, the one that it leads to.

    Raises:
        BadCheckpoint: if the folder can't get its name at the end, or lies in A, whose files must not change.
    """
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if os.path.ismount(target):
        raise BadCheckpoint(f"{target}: a file system is mounted here; give a folder in it")
    if source.is_dir() and source.resolve() in target.resolve().parents:
        raise BadCheckpoint(f"{target}: this is inside the checkpoint {source} that is read")
    return target


def _in_names(checkpoint: Checkpoint, options: argparse.Namespace, dialect: str) -> Checkpoint:
    """With the names of a dialect; "" keeps the names."""
    if options.names is not None:
        checkpoint = _with(checkpoint, names.from_table(checkpoint.tensors, options.names))
    source = names.dialect_of(name for _, name in checkpoint.tensors)
    if dialect and not source:
        line = "names: they are not those of a known family, and stay; --names FILE.toml changes them"
        return replace(checkpoint, left=[*checkpoint.left, line])
    family = _family(checkpoint, options)
    if checkpoint.config is None and family is not None:
        checkpoint = replace(checkpoint, config=dict(family.settings))
    if not dialect:
        return checkpoint
    return _with(checkpoint, names.renamed(checkpoint.tensors, source, dialect, family, checkpoint.path))


def _family(checkpoint: Checkpoint, options: argparse.Namespace) -> names.Family | None:
    """The model's family: by --config, A's config.json, one in a folder above, or the recipe of A's run."""
    from shardrt.checkpoint.tensorfiles import read_json

    tensors = len(checkpoint.tensors)
    places = [options.config] if options.config else []
    config, where = checkpoint.config, checkpoint.path / "config.json"
    if config is None and not places:
        folders = (checkpoint.path, *checkpoint.path.parents[:2])
        places = [folder / "config.json" for folder in folders if (folder / "config.json").is_file()]
    if places:
        where = places[0]
        try:
            config = read_json(where)
        except ValueError as error:
            raise BadCheckpoint(str(error)) from None
    if config is not None:
        return names.family_of(config, where, tensors, options.family)
    recipe = checkpoint.training.extra.get("config")
    if not isinstance(recipe, dict):
        return None
    if isinstance(begun := recipe.get("init_from"), str):  # the recipe's own shape was not read
        where = Path(begun) / "config.json"
        if not where.is_file():
            raise BadCheckpoint(
                f"{where}, which has the shape of the run's model, is not there; give --config FILE"
            )
        return names.family_of(read_json(where), where, tensors, options.family)
    return names.family_of_recipe(recipe, checkpoint.path, tensors)


def _with(checkpoint: Checkpoint, renamed: names.Renamed) -> Checkpoint:
    """Other names, for the state of training too."""
    training, left = checkpoint.training, [*checkpoint.left, *renamed.left]
    steps: dict[str, int] = {}
    for name, of in renamed.of.items():
        counts = [training.steps[one] for one in of if one in training.steps]
        if counts:
            steps[name] = max(counts)
        if len(set(counts)) > 1:
            left.append(f"steps of {name}: its parts were updated {counts} times; {max(counts)} stays")
    groups = []
    for group in training.groups:
        own = set(group.get("params", ()))
        params = [name for name, of in renamed.of.items() if of[0] in own]
        groups.append({**group, "params": params})
    changed = replace(training, steps=steps, groups=groups)
    return replace(checkpoint, tensors=renamed.tensors, training=changed, left=left)


def _chosen(checkpoint: Checkpoint, options: argparse.Namespace) -> Checkpoint:
    """Without what the command line leaves out, and with its type of weights."""
    tensors, training = dict(checkpoint.tensors), checkpoint.training
    if options.weights_only:
        tensors = {key: tensor for key, tensor in tensors.items() if key[0] == PARAMETER}
        training = Training(training.step)
    if options.dtype is not None:
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16 if options.dtype == "bfloat16" else options.dtype)
        for key, tensor in tensors.items():
            if key[0] == PARAMETER and tensor.dtype != dtype and tensor.dtype.kind in "fV":
                tensors[key] = Cast(tensor, dtype)
    return replace(checkpoint, tensors=tensors, training=training)


def _without_state(checkpoint: Checkpoint, to: str) -> Checkpoint:
    """The weights, and lines about the rest."""
    kinds = Counter(kind for kind, _ in checkpoint.tensors if kind != PARAMETER)
    training = checkpoint.training
    left = [f"{kind} of {count} parameters" for kind, count in kinds.items()]
    left += [f"step {training.step}"] if training.step is not None else []
    left += ["the optimizer's settings"] if training.groups else []
    left += [f"{', '.join(training.extra)} of the run"] if training.extra else []
    weights = {key: tensor for key, tensor in checkpoint.tensors.items() if key[0] == PARAMETER}
    lines = [*checkpoint.left, *(f"{line}: {to} holds weights alone" for line in left)]
    return replace(checkpoint, tensors=weights, training=Training(), left=lines)


def _identity(options: argparse.Namespace, source: Checkpoint) -> dict[str, Any]:
    """What is converted, and how: files by name, size and time of change."""
    found = [source.path] if source.path.is_file() else sorted(_files(source.path))
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in found]
    tables = [options.names, options.config]
    return {
        "source": str(source.path.resolve()),
        "files": files,
        "texts": [read_regular(path, 1 << 26).decode(errors="replace") if path else "" for path in tables],
        "options": {
            name: str(getattr(options, name))
            for name in (
                "to",
                "source_format",
                "ranks",
                "dtype",
                "weights_only",
                "dialect",
                "family",
                "layout",
                "zero_stage",
                "zero_dtype",
                "optimizer",
            )
        },
    }


def _files(folder: Path) -> Iterator[Path]:
    for where, _, inside in os.walk(folder):
        yield from (path for name in inside if (path := Path(where, name)).is_file())


def _report(checkpoint: Checkpoint, plan: Plan, target: Path) -> list[str]:
    """Lines: what is written, and what is not."""
    written = checkpoint.tensors
    if plan.tensors is not None:
        written = {key: tensor for key, tensor in written.items() if key in plan.tensors}
    weights = [tensor for (kind, _), tensor in written.items() if kind == PARAMETER]
    others = len(written) - len(weights)
    size = sum(file.size for file in plan.files)
    rates = sorted({group["lr"] for group in checkpoint.training.groups if "lr" in group})
    parts = [f"{len(weights)} tensors of weights ({sum(prod(t.shape) for t in weights)} elements)"]
    parts += [f"{others} of optimizer state"] if others else []
    parts += [f"{size / 1e9:.3f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"]
    parts += [f"step {checkpoint.training.step}"] if checkpoint.training.step is not None else []
    parts += [f"lr {', '.join(f'{rate:g}' for rate in rates)}"] if rates else []
    lost = sorted(checkpoint.files.keys() - {file.name for file in plan.files})
    left = [
        *checkpoint.left,
        *plan.left,
        *(f"{name}: there is no place for it here; copy it" for name in lost),
    ]
    return [f"wrote {target}: {', '.join(parts)}", *(f"left out: {line}" for line in dict.fromkeys(left))]


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line every few seconds, on stderr: bytes, rate, time left."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, of: bar.update(task, completed=done, total=of)
        return
    yield _Lines()


class _Lines:
    """Prints progress where there is no terminal."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._begun: int | None = None  # bytes that were there before

    def __call__(self, done: int, total: int) -> None:
        """Called for each chunk."""
        now = time.monotonic()
        self._begun = done if self._begun is None else self._begun
        if now - self._last < _SECONDS:
            return
        self._last = now
        rate = (done - self._begun) / (now - self._start)
        left = f"{max(total - done, 0) / rate:.0f} s left" if rate > 0 else "stopped"
        say(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB  {rate / 1e6:.0f} MB/s  {left}", file=sys.stderr)


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65536:
        raise argparse.ArgumentTypeError(f"must be from 1 to 65536, got {value}")
    return value
