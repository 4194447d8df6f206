"""What an exhibit is: a public bug of sharded training, as a change of shardrt's source that has that bug here.

The change is made in the code object of a function, so that every importer runs it, and its lines keep their
numbers: a report names lines of shardrt as they are.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

__all__ = ["Bug", "Change"]


@dataclass(frozen=True)
class Change:
    """In `function`, `new` stands in place of `old`, which is there once."""

    function: Callable
    old: str
    new: str

    def apply(self, patch: Any) -> None:
        """Until the end of `patch`, a MonkeyPatch."""
        patch.setattr(self._changed, "__code__", self._code())

    @property
    def _changed(self) -> Any:
        return inspect.unwrap(getattr(self.function, "__func__", self.function))

    def _code(self) -> CodeType:
        function = self._changed
        lines, first = inspect.getsourcelines(function)
        source = "".join(lines)
        assert source.count(self.old) == 1, f"{function.__qualname__} has {self.old!r} {source.count(self.old)} times"
        new = self.new + "\n" * (self.old.count("\n") - self.new.count("\n"))
        source, around = source.replace(self.old, new), "\n" * (first - 1)
        if lines[0][0] == " ":  # a method, which may say super()
            source, around = f"def around(__class__):\n{source}", around[1:]
        code = compile(around + source, inspect.getsourcefile(function), "exec")
        return next(each for each in _codes(code) if each.co_name == function.__name__)

    def __str__(self) -> str:
        function = self._changed
        lines = [f"{function.__module__}, {function.__qualname__}:"]
        lines += [f"  - {line.strip()}" for line in self.old.splitlines()]
        return "\n".join([*lines, *(f"  + {line.strip()}" for line in self.new.splitlines())])


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


@dataclass(frozen=True)
class Bug:
    """A public bug.

    Attributes:
        reference: its thread, as owner/name#number.
        title: of the thread.
        did: what it did there.
        check: which of the checks finds it: one of checks.CHECKS, or "" for none.
        changes: of shardrt's source, which make it here.
        program: what shows it, called on each recorded rank.
        first: a regular expression of the first thing that the check reports.
        ranks: how many there are.
        how: arguments of record_of.
    """

    reference: str
    title: str
    did: str
    check: str
    changes: tuple[Change, ...]
    program: Callable[[], Any]
    first: str
    ranks: int = 2
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def link(self) -> str:
        """The address of its thread."""
        name, _, number = self.reference.partition("#")
        return f"https://github.com/{name}/issues/{number}"
