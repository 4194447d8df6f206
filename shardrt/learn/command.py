"""`shardrt learn`: lists the exercises, shows one, grades an answer.

Exit code 0 where an answer passes, 1 where it does not, 2 where there is no such exercise.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shardrt.learn import EXERCISES
from shardrt.learn.checking import start
from shardrt.learn.grading import grade
from shardrt.learn.judge import LARGEST
from shardrt.untrusted import read_regular, say

USAGE = 2


def add_to(commands: Any) -> None:
    """Add `learn` to argparse's subparsers."""
    message = "list the exercises, show exercise N, or grade FILE as its answer"
    parser = commands.add_parser("learn", help=message, description=message)
    parser.add_argument("number", type=int, nargs="?", metavar="N", help="which exercise, 1 to 12")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="your answer")
    parser.set_defaults(run=learn)


def learn(options: argparse.Namespace) -> int:
    """List, show or grade; returns the exit code. Raises OSError, Refused."""
    if options.number is None:
        say(listed(), lines=True)
        return 0
    if not 1 <= options.number <= len(EXERCISES):
        say(f"error: there are exercises 1 to {len(EXERCISES)}, not {options.number}", file=sys.stderr)
        return USAGE
    exercise = exercise_of(options.number)
    if options.file is None:
        return _show(options.number)
    read_regular(options.file, LARGEST)  # raises, so that the error names the file
    verdict = grade(EXERCISES[options.number - 1], options.file)
    if verdict.output:
        say("your file printed:", verdict.output, "", lines=True)
    if not verdict.passed:
        say(f"exercise {options.number}, {exercise.TITLE}: not yet", f"hint: {verdict.text}", lines=True)
        return 1
    more = [f"next: shardrt learn {options.number + 1}"] if options.number < len(EXERCISES) else []
    say(
        f"exercise {options.number}, {exercise.TITLE}: passed",
        f"checked: {verdict.text}",
        f"takeaway: {exercise.TAKEAWAY}",
        *more,
        lines=True,
    )
    return 0


def exercise_of(number: int) -> ModuleType:
    """The module of an exercise, counted from 1."""
    return importlib.import_module(f"shardrt.learn.{EXERCISES[number - 1]}")


def start_of(number: int) -> Path:
    """The file that `shardrt learn N` writes."""
    return Path(f"exercise_{number:02}.py")


def listed() -> str:
    """A line for each exercise."""
    rows = [("", "exercise", "level", "you learn", "file to start from")]
    for number in range(1, len(EXERCISES) + 1):
        exercise = exercise_of(number)
        rows.append((str(number), exercise.TITLE, exercise.LEVEL, exercise.TEACHES, str(start_of(number))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    usage = (
        "shardrt learn N shows exercise N and writes the file to start from.",
        "shardrt learn N FILE grades your answer.",
    )
    return "\n".join([*(line.rstrip() for line in lines), "", *usage])


def _show(number: int) -> int:
    text = start(EXERCISES[number - 1])
    say(ast.get_docstring(ast.parse(text)), "", lines=True)
    path = start_of(number)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        say(f"{path} is written. Edit it, then grade it: shardrt learn {number} {path}")
    except FileExistsError:
        say(f"{path} is there already, and stays as it is. Grade it: shardrt learn {number} {path}")
    return 0
