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

__all__ = ["Said", "report_of", "said_of"]


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
        parts = []
        for name, lines in self.lines.items():
            parts += [f"{name}: {'NOT PROVED' if name in self.wrong else 'proved'}"]
            parts += [f"  {line}" for line in lines]
        return "\n".join(parts)


def said_of(bug: Bug, right: Said | None = None) -> Said:
    """Record the program of a bug, and check it.

    Args:
        right: what is said without the bug; a rank may take as much memory as there. None: leave the bug out.
    """
    with followed() as follow, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # a rank leaves a unit out
        for change in () if right is None else bug.changes:
            change.apply(patch)
        stands_for = {rank: [rank] for rank in range(bug.ranks)} if bug.each else None
        programs = record_of(bug.program, bug.ranks, stands_for=stands_for, follow=follow)
    found = {"order": prove._order(programs)}
    if "deadlock" in found["order"][1][0]:
        found["races"] = True, ["not known: ranks wait for each other"]
    else:
        found["races"] = prove._races(programs)
    found["gradients"] = prove._gradients(follow, len(programs))
    found["memory"] = prove._memory(programs, None if right is None else right.peak)
    lines = {name: lines for name, (_, lines) in found.items()}
    if found["memory"][0]:
        lines["memory"].append(f"first   {_first_beyond(programs, right.most)}")
    wrong = [name for name, (is_wrong, _) in found.items() if is_wrong]
    return Said(lines, wrong, max(map(_peak, programs)), _most(programs))


def report_of(bug: Bug) -> str:
    """What `shardrt prove` prints of a program with the bug."""
    return str(said_of(bug, said_of(bug)))


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
