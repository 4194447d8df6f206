"""Shared by the commands that record a script: the script, the number of ranks, the meaning of its end."""

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar

from shardrt.simulate.report import NoStep
from shardrt.simulate.script import NoScript
from shardrt.untrusted import say

USAGE, FAILED = 2, 65
R = TypeVar("R")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the simulated ranks and their machine."""
    parser.add_argument("--ranks", type=positive, default=1, metavar="N", help="in all (1)")
    parser.add_argument(
        "--machine", default="h100-8", metavar="NAME", help="a machine's name, or its TOML file (h100-8)"
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments, which come last, behind "--"."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT ...",
        help="a script or module, or `train`, and its arguments",
    )


def of_script(options: argparse.Namespace, recorded: Callable[[Sequence[str]], R]) -> tuple[int, R | None]:
    """(0, result of `recorded`), or (exit code, None) after a message if the script is missing or fails."""
    try:
        return 0, recorded(options.command[options.command[:1] == ["--"] :])
    except NoScript as error:
        say(f"error: {error}", file=sys.stderr)
        return USAGE, None
    except NoStep as error:
        say(f"error: {error}", file=sys.stderr)
        return FAILED, None
    except (Exception, SystemExit):
        traceback.print_exc()
        return FAILED, None


def name_of(command: Sequence[str]) -> str:
    """The short name of a script or module, for files: "train" of train.py and of shardrt.models.train."""
    words = [word for word in command if word not in ("--", "-m")]
    return re.sub(r"[^\w-]", "_", Path(words[0]).name.removesuffix(".py").rpartition(".")[2])


def positive(text: str) -> int:
    """For argparse: a number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def whole(text: str) -> int:
    """For argparse: a number of 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def seconds(text: str) -> float:
    """For argparse: a finite number of seconds, 0 or more."""
    number = float(text)
    if not 0 <= number < inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number
