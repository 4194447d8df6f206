"""What the four checks of `shardrt prove` say of a bug's program, with the bug and without it."""

from collections.abc import Sequence
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
    """lines: of each check. wrong: the checks that don't prove their claim. peak: bytes of one rank at most."""

    lines: dict[str, list[str]]
    wrong: list[str]
    peak: int

    def __str__(self) -> str:
        """As `shardrt prove` prints it."""
        parts = []
        for name, lines in self.lines.items():
            parts += [f"{name}: {'NOT PROVED' if name in self.wrong else 'proved'}"]
            parts += [f"  {line}" for line in lines]
        return "\n".join(parts)


def said_of(bug: Bug, at_most: int | None = None, without: bool = False) -> Said:
    """Record the program of a bug, and check it.

    Args:
        at_most: bytes that a rank may take on the device.
        without: leave the bug out.
    """
    with followed() as follow, pytest.MonkeyPatch.context() as patch:
        for change in () if without else bug.changes:
            change.apply(patch)
        programs = record_of(bug.program, bug.ranks, follow=follow, **bug.how)
    most = max(map(_peak, programs))
    found = {
        "order": prove._order(programs),
        "races": (False, ["a deadlock has no order"]),
        "gradients": prove._gradients(follow, len(programs)),
        "memory": prove._memory(programs, at_most),
    }
    if not _deadlocks(found["order"]):
        found["races"] = prove._races(programs)
    lines = {name: lines for name, (_, lines) in found.items()}
    if at_most is not None and most > at_most:
        lines["memory"] += [f"first   {_first_beyond(programs, at_most)}"]
    return Said(lines, [name for name, (wrong, _) in found.items() if wrong], most)


def _deadlocks(order: tuple[bool, list[str]]) -> bool:
    return order[0] and "deadlock" in order[1][0]


def _peak(program: Program) -> int:
    return sum(peaks(program, 0, len(program.items) - 1).get("device", {}).values())


def _first_beyond(programs: Sequence[Program], at_most: int) -> str:
    """The first buffer with which a rank takes more bytes on the device."""
    for program in programs:
        lent: dict[int, int] = {}
        for item in program.items:
            if isinstance(item, Take) and item.place == "device":
                lent[item.memory.start] = item.memory.stop - item.memory.start
            elif isinstance(item, Free):
                lent.pop(item.start, None)
            if sum(lent.values()) > at_most:
                return f"{item.category} {item.label}".strip() + f", taken at {item.site}, rank {program.rank}"
    return ""
