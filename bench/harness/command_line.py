"""What the command lines of the benchmarks share: one line for nonsense, lists, sizes, forms of output."""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


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
    """An argparse type: a,b,c, each once."""
    return list(dict.fromkeys(word for word in text.split(",") if word))


def nbytes(text: str) -> int:
    """1024, 1K, 1.5M, 1G, and 1KiB or 1KB for the same. Raises ArgumentTypeError."""
    short = text.strip().upper().removesuffix("B").removesuffix("I")
    digits = short.rstrip("KMG")
    if not digits.replace(".", "", 1).isdigit() or short[len(digits) :] not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 4096, 4K, 16M or 1G, got {text!r}")
    return int(float(digits) * _UNITS[short[len(digits) :]])


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


def add_forms(parser: argparse.ArgumentParser, short: bool = True) -> None:
    """Add --csv, --json and --output; short: which has -o for a short name."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print the lines as CSV")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    output = ("--output", "-o") if short else ("--output",)
    parser.add_argument(*output, type=Path, metavar="FILE", help="write the JSON object there, too")
