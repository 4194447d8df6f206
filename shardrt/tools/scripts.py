"""Shared by the commands that record a script: the script, the number of ranks, the meaning of its end."""

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from math import inf, prod
from pathlib import Path
from typing import TypeVar

from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Program
from shardrt.device.simulated import SimulatedDevice
from shardrt.simulate.report import NoStep
from shardrt.simulate.script import NoScript, record
from shardrt.untrusted import say

USAGE, FAILED = 2, 65
DEVICES = {"cuda": CUDADevice, "cpu": CPUDevice}
R = TypeVar("R")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the simulated ranks and their machine."""
    parser.add_argument("--ranks", type=positive, default=1, metavar="N", help="in all (1)")
    parser.add_argument(
        "--machine", default="h100-8", metavar="NAME", help="a machine's name, or its TOML file (h100-8)"
    )


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add what a command that proves records: the ranks, their devices, the steps, and the script."""
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="how many there are (2)")
    add_mesh(parser)
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="optimizer steps (2)")
    parser.add_argument("--device", choices=DEVICES, help="what it would run on (cuda; with --shared cpu)")
    parser.add_argument("--each", action="store_true", help="record every rank, not one of each role")
    parser.add_argument(
        "--shared", action="store_true", help="ranks are CPUs of a node, which share memory; as --each"
    )
    add_script(parser)


def recording(
    options: argparse.Namespace, follow: Callable[[SimulatedDevice], None] | None = None
) -> tuple[int, list[Program] | None]:
    """Record the script as `add_recording`'s options say; returns what `of_script` does."""
    if options.shared and options.device == "cuda":
        say("error: --shared: only CPUs share memory, not --device cuda", file=sys.stderr)
        return USAGE, None
    if wrong := wrong_mesh(options):
        say(f"error: {wrong}", file=sys.stderr)
        return USAGE, None
    each = options.each or options.shared
    return of_script(
        options,
        lambda command: record(
            command,
            options.ranks,
            steps=options.steps,
            like=DEVICES[options.device or ("cpu" if options.shared else "cuda")],
            stands_for={rank: [rank] for rank in range(options.ranks)} if each else None,
            local_size=options.ranks if options.shared else 8,
            shared=options.shared,
            shape=options.mesh,
            follow=follow,
            exact=each,
        ),
    )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the shape of a mesh."""
    words = "the shape, where the script says none: copies x shards"
    parser.add_argument("--mesh", type=_shape, metavar="512x8", help=words)


def wrong_mesh(options: argparse.Namespace) -> str:
    """What is wrong with --mesh; "" if nothing is."""
    if options.mesh is None or prod(options.mesh) == options.ranks:
        return ""
    return f"--mesh: {options.mesh} has {prod(options.mesh)} ranks, but --ranks is {options.ranks}"


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(positive(size) for size in text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"must be sizes such as 512x8, got {text}") from None


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
