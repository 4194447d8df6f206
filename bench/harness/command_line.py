"""What the command lines of the benchmarks share: one line for nonsense, lists, sizes, forms of output."""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

import psutil

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST = 1 << 60  # bytes


class Parser(argparse.ArgumentParser):
    """Raises ValueError for a wrong command line, so that of several ranks one can say so (`one_line`)."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError instead of exiting."""
        raise ValueError(message)


def program(name: str) -> str:
    """How a benchmark was started: it is shardrt.bench in a wheel, and bench in a checkout."""
    here = __package__.removesuffix(".harness")
    return f"python -m {here}.{name}" if here == "bench" else f"shardrt bench {name}"


def words(text: str) -> list[str]:
    """An argparse type: a,b,c, each once. Raises ArgumentTypeError where there is none."""
    found = list(dict.fromkeys(word for word in text.split(",") if word))
    if not found:
        raise argparse.ArgumentTypeError(f"must be one or more, with commas between them, got {text!r}")
    return found


def nbytes(text: str) -> int:
    """1024, 1K, 1.5M, 1G, and 1KiB or 1KB for the same. Raises ArgumentTypeError."""
    short = text.strip().upper().removesuffix("B").removesuffix("I")
    digits = short.rstrip("KMG")
    if not digits.replace(".", "", 1).isdecimal() or short[len(digits) :] not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 4096, 4K, 16M or 1G, got {text!r}")
    found = float(digits) * _UNITS[short[len(digits) :]]
    if found > _LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {_LARGEST >> 30}G, got {text!r}")
    return int(found)


def check_known(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError for the first of `given` that is not among `known`."""
    for name in given:
        if name not in known:
            raise ValueError(f"{what}: unknown {name!r}; known: {', '.join(known)}")


def check_least(given: Mapping[str, tuple[int, int]]) -> None:
    """Raise ValueError for the first option whose (value, least value) are in the wrong order."""
    for name, (value, least) in given.items():
        if value < least:
            raise ValueError(f"{name}: must be at least {least}, got {value}")


def check_memory(what: str, nbytes: int, ranks: int = 1) -> None:
    """Raise ValueError where `ranks` ranks of this machine, of `nbytes` each, have more than its memory."""
    room = psutil.virtual_memory().total
    if nbytes * ranks > room:
        raise ValueError(f"{what}: this run needs {nbytes * ranks} bytes of memory, and here are {room}")


def check_files(options: argparse.Namespace) -> None:
    """Raise ValueError for a file of --output, --picture or -J that can't be written; makes none."""
    named = {"--output": "output", "--picture": "picture", "-J": "output_file"}
    files = {flag: getattr(options, name, None) for flag, name in named.items()}
    files = {flag: path for flag, path in files.items() if path is not None}
    for flag, path in files.items():
        there = path.exists()
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise ValueError(f"{flag}: {path} can't be written: {error.strerror}") from None
        if not there:
            path.unlink()
    if len({path.absolute() for path in files.values()}) < len(files):
        raise ValueError(f"{', '.join(files)}: must be files of different names")


def add_forms(parser: argparse.ArgumentParser, short: bool = True) -> None:
    """Add --csv, --json and --output; short: which has -o for a short name."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print the lines as CSV")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    output = ("--output", "-o") if short else ("--output",)
    parser.add_argument(*output, type=Path, metavar="FILE", help="write the JSON object there, too")
