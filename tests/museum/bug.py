"""What an exhibit is: a public bug of sharded training, with a change of shardrt that has the same bug.

The change is made in the code object of a function, so every importer runs it. Lines keep their numbers: a
report names the lines of shardrt's files.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

__all__ = ["Bug", "Change"]


@dataclass(frozen=True)
class Change:
    """In the source of `function`, `new` stands in place of `old`, which is there once."""

    function: Callable
    old: str
    new: str

    @property
    def changed(self) -> Any:
        """The function that has the source."""
        return inspect.unwrap(getattr(self.function, "__func__", self.function))

    def apply(self, patch: Any) -> None:
        """Until `patch`, a MonkeyPatch, is undone."""
        patch.setattr(self.changed, "__code__", self._code())

    def _code(self) -> CodeType:
        lines, first = inspect.getsourcelines(self.changed)
        source = "".join(lines)
        count = source.count(self.old)
        assert count == 1, f"{self.changed.__qualname__}: {self.old!r} is there {count} times, not once"
        source, around = source.replace(self.old, self.new), "\n" * (first - 1)
        if source.startswith(" "):  # a method, which may use super()
            source, around = f"def around(__class__):\n{source}", around[1:]
        code = compile(around + source, inspect.getsourcefile(self.changed), "exec")
        return next(each for each in _codes(code) if each.co_name == self.changed.__name__)

    def __str__(self) -> str:
        lines = [f"{self.changed.__module__}, {self.changed.__qualname__}"]
        for sign, text in ("-", self.old), ("+", self.new):
            lines += [f"  {sign} {line.strip()}" for line in text.splitlines()]
        return "\n".join(lines)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """All code objects inside."""
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
        check: the check that finds it, "order", "races", "gradients" or "memory"; "" if none does.
        first: a regular expression that what this check reports begins with.
        operation: the first one of the report, in words for the page.
        changes: of shardrt's source, one for each function.
        program: shows it; each recorded rank calls it.
        ranks: how many there are.
        each: whether each rank is recorded.
        why: why no check finds it.
        run: called on each of two ranks that compute; its result on rank 0 is wrong with the bug.
        noticed_by: a test of this repository that fails with the bug.
    """

    reference: str
    title: str
    did: str
    check: str
    first: str
    changes: tuple[Change, ...]
    program: Callable[[], Any]
    operation: str = ""
    ranks: int = 2
    each: bool = False
    why: str = ""
    run: Callable[[], Any] | None = None
    noticed_by: str = ""

    @property
    def name(self) -> str:
        """The reference without its owner."""
        return self.reference.partition("/")[2]

    @property
    def link(self) -> str:
        """The address of its thread."""
        return f"https://github.com/{self.reference.replace('#', '/issues/')}"
