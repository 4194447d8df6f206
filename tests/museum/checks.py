"""What the four checks of `shardrt prove` say of a bug's program, with the bug and without it."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from shardrt.device.program import Free, Program, Take
from shardrt.simulate.memory import peaks
from shardrt.simulate.provenance import Follow, followed
from shardrt.simulate.script import record_of
from shardrt.tools import prove
from tests.museum.bug import Bug

__all__ = ["Said", "said_with", "said_without"]


@dataclass(frozen=True)
class Said:
    """What the checks say.

    Attributes:
        lines: by check.
        wrong: the checks that do not prove their claim.
        peak: the most bytes that a rank has on the device.
        most: by rank and category, the most bytes that it has there.
    """

    lines: dict[str, list[str]]
    wrong: list[str]
    peak: int
    most: dict[tuple[int, str], int]

    def __str__(self) -> str:
        """As `shardrt prove` prints it."""
        return "\n".join(map(self.part, self.lines))

    @property
    def found(self) -> str:
        """The part of it that is not proved."""
        return "\n".join(map(self.part, self.wrong))

    def part(self, check: str) -> str:
        """That of one check."""
        says = f"{check}: {'NOT PROVED' if check in self.wrong else 'proved'}"
        return "\n".join([says, *(f"  {line}" for line in self.lines[check])])


@cache
def said_without(bug: Bug) -> Said:
    """What the checks say of its program as it should be."""
    with followed() as follow:
        return _said(_recorded(bug, follow), follow)


@cache
def said_with(bug: Bug) -> Said:
    """What the checks say with the bug. A rank may take as much memory as without it."""
    right = said_without(bug)
    with followed() as follow, pytest.MonkeyPatch.context() as patch:
        for change in bug.changes:
            change.apply(patch)
        return _said(_recorded(bug, follow), follow, right)


def _recorded(bug: Bug, follow: Follow) -> list[Program]:
    stands_for = {rank: [rank] for rank in range(bug.ranks)} if bug.each else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # a rank leaves a unit out
        return record_of(bug.program, bug.ranks, stands_for=stands_for, follow=follow)


def _said(programs: list[Program], follow: Follow, right: Said | None = None) -> Said:
    found = {"order": prove._order(programs)}
    try:
        found["races"] = prove._races(programs)
    except ValueError as error:  # ranks wait for each other, so nothing is in order
        found["races"] = True, [str(error)]
    found["gradients"] = prove._gradients(follow)
    found["memory"] = prove._memory(programs, None if right is None else right.peak)
    lines = {name: lines for name, (_, lines) in found.items()}
    if found["memory"][0]:
        lines["memory"].append(f"first   {_first_beyond(programs, right.most)}")
    wrong = [name for name, (is_wrong, _) in found.items() if is_wrong]
    return Said(lines, wrong, max(map(_peak, programs)), _most(programs))


def _peak(program: Program) -> int:
    return sum(peaks(program, 0, len(program.items) - 1).get("device", {}).values())


def _taken(program: Program) -> Iterator[tuple[Take, int]]:
    """Each buffer that a rank takes on the device, and the bytes of its category that it then has."""
    lent: dict[int, tuple[str, int]] = {}
    total: Counter[str] = Counter()
    for item in program.items:
        if isinstance(item, Take) and item.place == "device":
            nbytes = item.memory.stop - item.memory.start
            lent[item.memory.start] = item.category, nbytes
            total[item.category] += nbytes
            yield item, total[item.category]
        elif isinstance(item, Free) and item.start in lent:
            category, nbytes = lent.pop(item.start)
            total[category] -= nbytes


def _most(programs: Sequence[Program]) -> dict[tuple[int, str], int]:
    most: dict[tuple[int, str], int] = {}
    for program in programs:
        for take, nbytes in _taken(program):
            key = program.rank, take.category
            most[key] = max(nbytes, most.get(key, 0))
    return most


def _first_beyond(programs: Sequence[Program], most: dict[tuple[int, str], int]) -> str:
    """The first buffer with which a rank has more of its category than without the bug."""
    beyond = (
        f"{nbytes:,} bytes of {take.category}, taken at {take.site} by rank {program.rank}"
        for program in programs
        for take, nbytes in _taken(program)
        if nbytes > most.get((program.rank, take.category), 0)
    )
    return next(beyond, "")
