"""`shardrt config convert FILE -o recipe.toml`: Accelerate's or DeepSpeed's configuration as a recipe.

Exit code 0; 65 where a key has no counterpart, or the file can't be read: nothing is written then.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from shardrt.train import accelerate, deepspeed
from shardrt.train.conversion import Converted, Key, Unconverted
from shardrt.untrusted import Refused, open_regular, say

REFUSED = 65
_SECTION = re.compile(r"^(zero_optimization|\w+_config)\.")  # no two of their keys have one name
_SHOWN = 20  # refusals, and letters of a value


def add_to(commands: Any) -> None:
    """Add `config` and its own commands to argparse's subparsers."""
    group = commands.add_parser("config", help="configurations of other libraries", description=__doc__)
    actions = group.add_subparsers(title="commands", required=True)
    what = "write a recipe for the training command from Accelerate's YAML or DeepSpeed's JSON, by content"
    made = actions.add_parser("convert", help=what, description=what)
    made.add_argument("file", metavar="FILE", type=Path, help="of `accelerate config`, or ds_config.json")
    made.add_argument("-o", "--out", metavar="RECIPE.toml", type=Path, help="a new file; else only shown")
    made.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="KEY",
        help="leave out a key that is refused, by its whole name; may be repeated",
    )
    made.add_argument("--ranks", metavar="N", type=int, help="of the run, for DeepSpeed's batch of a rank")
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write and print; returns the exit code."""
    try:
        found = _converted(options.file, options.drop, options.ranks)
    except Unconverted as error:
        say(*(f"error: {options.file}: {line}" for line in error.lines[:_SHOWN]), file=sys.stderr)
        if len(error.lines) > _SHOWN:
            say(f"error: {options.file}: {len(error.lines) - _SHOWN} more", file=sys.stderr)
        return REFUSED
    if options.out is not None:
        text = found.toml(f"Made of {options.file.name!r} by `shardrt config convert`.")
        try:
            with open(options.out, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise Refused(f"{options.out}: it is there already; give another name") from None
    for title, keys in (
        ("settings", [key for key in found.keys if key.settings]),
        ("without a setting", [key for key in found.keys if not key.settings]),
    ):
        say(f"{title}:", *_rows(keys)) if keys else None
    say(f"to train: {_command(found, options.out)}")
    return 0


def _converted(path: Path, drop: list[str], ranks: int | None) -> Converted:
    """Of Accelerate a file has a distributed_type, in YAML or JSON; DeepSpeed's is JSON without it."""
    with open_regular(path) as file:
        is_json = file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    table = deepspeed.read_json(path) if is_json else accelerate.read_yaml(path)
    if ranks is not None and not 1 <= ranks < 1 << 20:
        raise Unconverted([f"--ranks {ranks}: must be at least 1 and below {1 << 20}"])
    if is_json and "distributed_type" not in table:
        return deepspeed.convert(table, drop, ranks)
    if ranks is not None:
        raise Unconverted([f"--ranks {ranks}: num_processes in the file has the ranks"])
    return accelerate.convert(table, drop)


def _rows(keys: list[Key]) -> list[str]:
    named = [f"{_SECTION.sub('', key.name)} = {_short(key.value)}" for key in keys]
    width = max(map(len, named))
    return [f"  {name:{width}}  {_meaning(key)}" for name, key in zip(named, keys, strict=True)]


def _meaning(key: Key) -> str:
    settings = ", ".join(
        f"{name} = {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in key.settings.items()
    )
    return f"{settings} ({key.note})" if settings and key.note else settings or key.note


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."


def _command(found: Converted, recipe: Path | None) -> str:
    hosts = ["-f", found.hosts] if found.hosts else []
    words = ["mpirun", *hosts, "-n", str(found.ranks or "N"), "shardrt", "train"]
    return shlex.join([*words, "--config", str(recipe or "RECIPE.toml")])
