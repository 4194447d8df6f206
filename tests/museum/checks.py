"""What the four checks of `shardrt prove` say of a bug's program, with the bug and without it."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from shardrt.device.program import Free, Program, Take
from shardrt.simulate.memory import peaks
from shardrt.simulate.provenance import followed
from shardrt.simulate.script import record_of
from shardrt.tools import prove
from tests.museum.bug import Bug

__all__ = ["CHECKS", "Said", "said_of"]

CHECKS = prove.CHECKS


@dataclass(frozen=True)
class Said:
    """lines: of each check. wrong: the checks that don't prove their claim. peak: bytes of one rank at most.
    most: by rank and category."""

    lines: dict[str, list[str]]
    wrong: list[str]
    peak: int
    most: dict[tuple[int, str], int]

    def __str__(self) -> str:
        """As `shardrt prove` prints it."""
        parts = []
        for name, lines in self.lines.items():
            parts += [f"{name}: {'NOT PROVED' if name in self.wrong else 'proved'}"]
            parts += [f"  {line}" for line in lines]
        return "\n".join(parts)


def said_of(bug: Bug, right: Said | None = None) -> Said:
    """Record the program of a bug, and check it.

    Args:
        right: what they say without the bug, with as much memory as it may take. None: the bug is left out.
    """
    with followed() as follow, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # a rank that leaves a unit out
        for change in () if right is None else bug.changes:
            change.apply(patch)
        programs = record_of(bug.program, bug.ranks, follow=follow, **bug.how)
    found = {
        "order": prove._order(programs),
        "races": (True, ["not known: ranks wait for each other for ever"]),
        "gradients": prove._gradients(follow, len(programs)),
        "memory": prove._memory(programs, None if right is None else right.peak),
    }
    if not _deadlocks(found["order"]):
        found["races"] = prove._races(programs)
    lines = {name: lines for name, (_, lines) in found.items()}
    if found["memory"][0]:
        lines["memory"] += [f"first   {_first_beyond(programs, right.most)}"]
    return Said(lines, [name for name, (wrong, _) in found.items() if wrong], max(map(_peak, programs)), _most(programs))


def _deadlocks(order: tuple[bool, list[str]]) -> bool:
    return order[0] and "deadlock" in order[1][0]


def _peak(program: Program) -> int:
    return sum(peaks(program, 0, len(program.items) - 1).get("device", {}).values())


def _lent(program: Program) -> Iterator[tuple[Take, int]]:
    """Each buffer that a rank takes on the device, and the bytes of its category that are lent with it."""
    lent: dict[int, tuple[str, int]] = {}
    total: Counter[str] = Counter()
    for item in program.items:
        if isinstance(item, Take) and item.place == "device":
            lent[item.memory.start] = item.category, item.memory.stop - item.memory.start
            total[item.category] += item.memory.stop - item.memory.start
            yield item, total[item.category]
        elif isinstance(item, Free) and item.start in lent:
            category, nbytes = lent.pop(item.start)
            total[category] -= nbytes


def _most(programs: Sequence[Program]) -> dict[tuple[int, str], int]:
    """Bytes on the device that a rank has lent at most, by category."""
    most: dict[tuple[int, str], int] = {}
    for program in programs:
        for take, nbytes in _lent(program):
            key = program.rank, take.category
            most[key] = max(nbytes, most.get(key, 0))
    return most


def _first_beyond(programs: Sequence[Program], most: dict[tuple[int, str], int]) -> str:
    """The first buffer with which a rank has more of its category than it may."""
    for program in programs:
        for take, nbytes in _lent(program):
            if nbytes > most.get((program.rank, take.category), 0):
                return f"{nbytes:,} bytes of {take.category} at {take.site} of rank {program.rank}"
    return ""
