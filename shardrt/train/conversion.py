"""What the converters of other libraries' configurations share: each key's account, and the recipe.

A converter takes every key of a file from a Reader: the key becomes settings, has no effect here for a
reason, or is refused. accelerate.py and deepspeed.py have the keys; `shardrt config convert` prints them.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from shardrt.train.config import built, check_numbers
from shardrt.train.recipe import Recipe

__all__ = ["Converted", "Key", "Reader", "Unconverted", "is_set"]


@dataclass(frozen=True)
class Key:
    """What became of one key. settings: of the recipe, "fsdp.strategy"; none: no effect, for a reason."""

    name: str
    value: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Converted:
    """keys: every one of the file. ranks, hosts: for mpirun; None where the file has no such key."""

    keys: list[Key]
    ranks: int | None
    hosts: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the recipe, "section.name" -> value."""
        return {name: value for key in self.keys for name, value in key.settings.items()}

    def toml(self, title: str) -> str:
        """The recipe, each setting with the key that it is from. The title is a comment above it."""
        tables: dict[str, list[str]] = {"": []}
        for name, value in self.settings.items():
            section, _, last = name.rpartition(".")
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _number(value)
            sources = ", ".join(key.name for key in self.keys if name in key.settings)
            tables.setdefault(section, []).append(f"{last} = {text}  # {sources}")
        lines = [f"# {title}"]
        for section, rows in tables.items():
            lines += ["", f"[{section}]", *rows] if section else ["", *rows] if rows else []
        return "\n".join(lines) + "\n"


class Unconverted(ValueError):
    """Keys that have no counterpart. lines: one for each."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines


class Reader:
    """Takes keys, and keeps what became of each. left: those that are not taken yet."""

    def __init__(self, table: dict[str, Any], drop: list[str]) -> None:
        self.left, self.keys, self.refused = dict(table), [], []
        self.order = {name: number for number, name in enumerate(table)}
        for name in drop:
            if name in self.left:
                self.no_effect(name, "dropped")
            else:
                self.refused.append(f"--drop {name}: there is no such key")

    def take(self, name: str) -> Any:
        """A key's value, for its account; None if it is not left."""
        return self.left.pop(name, None)

    def setting(self, name: str, value: Any, note: str = "", **settings: Any) -> None:
        """`name` becomes settings: "fsdp__strategy" for fsdp.strategy."""
        named = {setting.replace("__", "."): each for setting, each in settings.items()}
        self.left.pop(name, None)
        self.keys.append(Key(name, value, named, note))

    def change(self, setting: str, value: Any) -> None:
        """Give a setting of a key another value: two keys together decide."""
        for number, key in enumerate(self.keys):
            if setting in key.settings:
                self.keys[number] = replace(key, settings={**key.settings, setting: value})

    def no_effect(self, name: str, why: str) -> None:
        """`name`, which is left, has no setting."""
        self.keys.append(Key(name, self.left.pop(name), note=why))

    def finish(self, ranks: int | None, hosts: str | None = None, nearest: Iterable[str] = ()) -> Converted:
        """All keys in the file's order. nearest: known keys, of which an unknown one is reminded.

        Raises Unconverted for all that was refused, for keys that are left, and for settings that do not fit.
        """
        for name in list(self.left):
            close = get_close_matches(name, nearest, 1)
            self.refuse(name, f"unknown key; the nearest is {close[0]}" if close else "unknown key")
        try:
            _check(self.keys, ranks)
        except ValueError as error:
            self.refused.append(str(error))
        if self.refused:
            raise Unconverted(self.refused)
        keys = sorted(self.keys, key=lambda key: self.order.get(key.name, -1))
        return Converted(keys, ranks, hosts)

    def noted(self, name: str, why: str) -> None:
        """As no_effect, if the key is left."""
        if name in self.left:
            self.no_effect(name, why)

    def refuse(self, name: str, why: str, value: Any = None) -> None:
        """`name` has no counterpart. value: of a key that is not left."""
        value = self.left.pop(name, value)
        shown = str(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
        self.refused.append(f"{name}: {shown[:80]}: {why}")

    def _taken(self, name: str, default: Any, read: Callable[[Any], Any], wanted: str) -> Any:
        if self.left.get(name) is None:
            if name in self.left:
                self.no_effect(name, "it is not set")
            return default
        value = read(self.left[name])
        if value is None:
            self.refuse(name, f"must be {wanted}")
            return default
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is not set."""

        def read(value: Any) -> bool | None:
            text = str(value).lower()
            return True if text in _YES else False if text in _NO else None

        return self._taken(name, False, read, "true or false")

    def count(self, name: str, default: int | None) -> int | None:
        """An integer of at least 1."""

        def read(value: Any) -> int | None:
            text = str(value) if isinstance(value, int | str) else ""
            good = text.isascii() and text.isdecimal() and len(text) < 10
            return int(text) if good and int(text) else None

        return self._taken(name, default, read, "an integer of at least 1")

    def text(self, name: str) -> str | None:
        """A text, or None."""
        return self._taken(name, None, lambda value: value if isinstance(value, str) else None, "a text")

    def choice(
        self, name: str, choices: Iterable[str], default: str | None = None, numbered: bool = False
    ) -> str | None:
        """One of a few words in any case, or its number from 1 on. YAML takes a bare `no` for false."""
        by_name = {choice.lower(): choice for choice in choices}
        if numbered:
            by_name |= {str(number): choice for number, choice in enumerate(choices, start=1)}

        def read(value: Any) -> str | None:
            return by_name.get("no" if value is False else str(value).lower())

        return self._taken(name, default, read, f"one of {', '.join(choices)}")


_YES, _NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def is_set(value: Any) -> bool:
    """Whether a value is neither empty nor false."""
    return bool(value) and str(value).lower() not in _NO


def _number(value: Any) -> str:
    """A number, flag or list of numbers in TOML, which has a word for infinity."""
    return str(list(value) if isinstance(value, tuple) else value).lower()


def _check(keys: list[Key], ranks: int | None) -> None:
    """Raise ValueError for settings that do not fit together, as the training command would."""
    tables: dict[str, Any] = {}
    for key in keys:
        for name, value in key.settings.items():
            section, _, last = name.rpartition(".")
            plain = list(value) if isinstance(value, tuple) else value
            if section:
                tables.setdefault(section, {})[last] = plain
            elif name in _OF_ALL:  # the others are of one kind of model
                tables[name] = plain
    recipe = built(Recipe, tables)
    check_numbers(recipe, **recipe.MOST)
    if ranks is not None:
        recipe.axes(ranks)


_OF_ALL = {field.name for field in fields(Recipe)} - {"architecture"}
