"""The command line of settings: an option for each field of a dataclass, whose comment is its help.

Arguments become values as in the TOML file, so the same code checks both (config.py).
"""

import argparse
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from shardrt.train.config import built, is_enum, load, plain, sole_type
from shardrt.train.errors import launched_rank
from shardrt.untrusted import printable

__all__ = ["Option", "command_line", "last_of", "parse", "sections"]

Settings = TypeVar("Settings")
_TRUTH = {"true": True, "false": False}
_parsing = threading.Lock()  # CPython 3.11 may raise SystemError where two threads parse at once


def parse(kind: type[Settings], arguments: Sequence[str], *, file: Path | None, program: str) -> Settings:
    """Settings of dataclass `kind` from a TOML file, or None, and the other arguments over it.

    Prints help on rank 0 and exits where asked to.

    Raises:
        ValueError: that names the option, or the file and the key.
        OSError: if the file cannot be read.
    """
    return command_line(
        kind, arguments, program=program, start=load(kind, file, size=last_of(arguments, "--size")), file=file
    )


def command_line(
    kind: type[Settings],
    arguments: Sequence[str],
    *,
    program: str,
    start: Settings | None = None,
    file: Path | None = None,
) -> Settings:
    """Settings of dataclass `kind` from the arguments; a field without a default is positional.

    Prints help on rank 0 and exits where asked to.

    Args:
        start: the settings without arguments, which also makes --config an option, whose value is not used;
            by default those of `kind()`.
        file: where they are from.

    Raises:
        ValueError: that names the option.
    """
    for argument in arguments:
        if not argument.isascii() and argument.encode(errors="replace").decode() != argument:
            raise ValueError(
                f"{printable(argument)}: its bytes are not UTF-8, so no file of settings can hold it"
            )
    words = [option.kind.__name__.upper() for option in next(sections(kind, start))[1] if option.positional]
    usage = " ".join(["%(prog)s", *words, "[OPTIONS]"])
    parser = _Parser(prog=program, description=kind.__doc__, allow_abbrev=False, usage=usage)
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=8)
    if start is not None:
        report = "TOML file with settings, over which the other options go"
        report += f" (default: {file})" if file else ""
        parser.add_argument("--config", metavar="PATH", help=_escaped(report))
    known = {}
    for section, options in sections(kind, start):
        group = parser.add_argument_group(f"{section[:-1]} options") if section else parser
        for option in options:
            _add(group, option)
            known[option.name] = option
    given = vars(parser.parse_args([_dashed(argument) for argument in arguments]))
    table = {} if start is None else plain(start)
    for name, words in given.items():
        if name in known and words is not None:
            *path, last = name.split(".")
            inner = table
            for part in path:
                inner = inner[part]
            inner[last] = _value(known[name], words if isinstance(words, list) else [words])
    try:
        return built(kind, table)
    except ValueError as error:
        section, report = getattr(error, "section", ""), str(error)
        raise ValueError(f"{section}: {report}" if not report.startswith(section) else report) from None


def last_of(arguments: Sequence[str], option: str) -> str | None:
    """The value after the last use of an option; None without one, or where nothing follows."""
    found = None
    dashed = [_dashed(argument) for argument in arguments]
    for argument, following in zip(dashed, [*dashed, None][1:], strict=True):
        if argument == option:
            found = following
        elif argument.startswith(f"{option}="):
            found = argument.removeprefix(f"{option}=")
    return found


class _Parser(argparse.ArgumentParser):
    """One that raises and prints on rank 0 alone, also into a pipe whose reader stops early."""

    def error(self, message: str) -> None:
        if message.startswith("unrecognized arguments: --"):
            wrong = message.split()[2].partition("=")[0]
            near = get_close_matches(wrong, [word for a in self._actions for word in a.option_strings], 1)
            message += f"; perhaps you meant {near[0]}" if near else ""
        raise ValueError(message)

    def print_help(self, file: Any = None) -> None:
        if launched_rank() != 0:
            return
        try:
            print(self.format_help(), end="", flush=True)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(frozen=True)
class Option:
    """A field as an option."""

    name: str  # with its section: optimizer.lr
    kind: Any  # without None
    default: Any  # MISSING: it is positional
    help: str

    @property
    def positional(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING

    @property
    def flag(self) -> str:
        """As it is written: --optimizer.min-lr."""
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """Its value in the help: a type, or all choices in braces."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is tuple else self.kind
        choices = ("True", "False") if kind is bool else kind.__members__ if is_enum(kind) else None
        return "{" + ",".join(choices) + "}" if choices else {str: "STR"}.get(kind, kind.__name__.upper())

    @property
    def default_words(self) -> str:
        """Its default as words of a command line; "" where there is none."""
        if self.default in (None, MISSING, "", ()):
            return ""
        value = self.default.name if isinstance(self.default, Enum) else self.default
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def sections(kind: Any, start: Any = None, prefix: str = "") -> Iterator[tuple[str, list[Option]]]:
    """(prefix of the names, options) of a dataclass and those in it."""
    hints, comments, own, inner = get_type_hints(kind), _comments(kind), [], []
    for field in fields(kind):
        hint, name = sole_type(hints[field.name]), prefix + field.name
        default = field.default if start is None else getattr(start, field.name)
        if is_dataclass(hint):
            inner.append(sections(hint, default, f"{name}."))
        else:
            own.append(Option(name, hint, default, comments.get(field.name, "")))
    yield prefix, own
    for each in inner:
        yield from each


def _add(group: Any, option: Option) -> None:
    """Add it to argparse. Values stay strings: _value checks them."""
    many: dict[str, Any] = {}
    if get_origin(option.kind) is tuple:
        inner = get_args(option.kind)
        many = {"nargs": "*" if inner[-1] is ... else len(inner)}
    elif option.kind is bool:
        many = {"nargs": "?", "const": "True"}  # a switch alone is on
    default = f" (default: {option.default_words})" if option.default_words else ""
    report = _escaped(option.help + default)
    if option.positional:
        group.add_argument(option.name, metavar=option.metavar, help=report)
    else:
        group.add_argument(
            option.flag, dest=option.name, metavar=option.metavar, help=report, default=None, **many
        )


def _value(option: Option, words: list[str]) -> Any:
    """The value of a string, in the types of TOML. Raises ValueError that names the option."""
    kind, flag = option.kind, option.flag
    if get_origin(kind) is tuple:
        return [_one(get_args(kind)[0], word, flag) for word in words]
    return _one(kind, words[0], flag)


def _one(kind: Any, word: str, flag: str) -> Any:
    if kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            raise ValueError(f"{flag}: must be {kind.__name__}, got {word!r}") from None
    if kind is bool:
        if word.lower() not in _TRUTH:
            raise ValueError(f"{flag}: must be True or False, got {word!r}")
        return _TRUTH[word.lower()]
    if is_enum(kind) and word not in kind.__members__:
        choices = ", ".join(kind.__members__)
        raise ValueError(f"invalid choice {word!r} for argument '{flag}': must be one of {choices}")
    return word


@cache
def _comments(kind: Any) -> dict[str, str]:
    """Field -> the comment behind it, or in the lines before it."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            with _parsing:
                lines = inspect.getsource(owner).splitlines()
        except (OSError, TypeError):  # no sources here
            continue
        above: list[str] = []
        for line in lines:
            if match := re.match(r"    (\w+): [^#]*(?:# (.*))?$", line):
                found[match[1]] = match[2] or " ".join(above)
            above = [*above, line.strip("# ")] if line.startswith("    #") else []
    return found


def _dashed(argument: str) -> str:
    """An option's name with hyphens, however it was written."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
