"""Roles: the ranks that have equal collectives and equal bytes, of which one is recorded for all.

    programs = recorded(lambda stands_for, on_divergence: ..., ranks)

Sharding, hybrids and tensor parallelism have one role. Stages of a pipeline come apart (comm/mesh.py), and
each is a role. What ranks of a role still differ in is how their shards are cut: a few launches of clipping
and of the optimizer. `compared` tells whether that is all, of ranks that were recorded too.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardrt.comm import mesh_layout
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.device.program import Collective, Item, Program, Step, Take

Roles = Mapping[int, Sequence[int]]  # the rank that is recorded -> all that do the same, itself among them


class Apart(BaseException):
    """Ranks that one recorded rank stands for come apart along these digits."""

    def __init__(self, digits: MeshLayout) -> None:
        self.digits = digits


def roles_of(digits: MeshLayout, ranks: int) -> Roles:
    """Ranks of one place along `digits` have one role, whose first rank is recorded."""
    if not digits:
        return {0: range(ranks)}
    places = mesh_layout.index_in(digits, np.arange(ranks))
    members = [np.flatnonzero(places == place).tolist() for place in range(mesh_layout.size_of(digits))]
    return {some[0]: some for some in members}


def recorded(
    record: Callable[[Roles, Callable[[MeshLayout], None]], list[Program]], ranks: int
) -> list[Program]:
    """What `record` gives for the roles.

    It gets the roles, and calls back with axes along which ranks differ. It begins with one role, and again
    when that is too few.
    """
    digits: MeshLayout = ()

    def parts(found: MeshLayout) -> None:
        if mesh_layout.union(digits, found) != digits:
            raise Apart(mesh_layout.union(digits, found))

    while True:
        try:
            return record(roles_of(digits, ranks), parts)
        except Apart as more:
            digits = more.digits


def columns(programs: Sequence[Program], count: int) -> list[Roles]:
    """Other choices of a rank for each role, as many, far from each other: each at one place of its role."""
    least = min(len(program.alike) for program in programs)
    places = range(1, least) if count >= least - 1 else np.linspace(least - 1, 1, count).round().astype(int)
    return [{program.alike[place]: program.alike for program in programs} for place in places]


@dataclass(frozen=True)
class Compared:
    """differs: what two ranks of a role don't have in common, "" if nothing. launches: of the last step."""

    rank: int
    like: int
    launches: int
    of_the_other: int
    differs: str = ""

    def __str__(self) -> str:
        if self.differs:
            return f"rank {self.rank} does not do what rank {self.like} does: {self.differs}"
        launches = f"{self.launches:,} launches, not {self.of_the_other:,}"
        alike = "as many launches" if self.launches == self.of_the_other else launches
        return f"rank {self.rank} has the collectives and bytes of rank {self.like}, and {alike}"


def compared(program: Program, other: Program) -> Compared:
    """Whether their last steps have the same collectives, and they have taken the same memory."""
    differs = ""
    if (mine := _calls(program)) != (theirs := _calls(other)):
        streams = [s for s in {**mine, **theirs} if mine.get(s) != theirs.get(s)]
        counts = [f"{len(mine.get(s, ()))} of {s}, not {len(theirs.get(s, ()))}" for s in streams]
        differs = f"other collectives ({', '.join(counts)})"
    elif (taken := _bytes(program)) != (elsewhere := _bytes(other)):
        places = [place for place in {**taken, **elsewhere} if taken[place] != elsewhere[place]]
        differences = [f"{' '.join(place)} {taken[place]:,}, not {elsewhere[place]:,}" for place in places]
        differs = f"other bytes ({'; '.join(differences)})"
    return Compared(program.rank, other.rank, launches(program), launches(other), differs)


def launches(program: Program) -> int:
    """Of kernels and collectives in the last step."""
    return sum(getattr(item, "launches", 0) for item in _last_step(program))


def _last_step(program: Program) -> list[Item]:
    """All, where no step ended."""
    items = program.items
    ends = [index for index, item in enumerate(items) if isinstance(item, Step)]
    return items[ends[-2] + 1 if len(ends) > 1 else 0 : ends[-1] if ends else None]


def _calls(program: Program) -> dict[str, list[tuple]]:
    """By stream. A rank's own are groups, peers, and how many values it says: one for each piece."""
    found: dict[str, list[tuple]] = {}
    for item in _last_step(program):
        if isinstance(item, Collective):
            size = len(program.groups[item.group].ranks)
            nbytes = item.nbytes if item.reads or item.writes else 0
            found.setdefault(item.stream, []).append((item.call, nbytes, size, item.peer < 0))
    return found


def _bytes(program: Program) -> Counter[tuple[str, str]]:
    """Taken in all, by place and category; but results, which an array for each piece of a shard is."""
    found: Counter[tuple[str, str]] = Counter()
    for item in program.items:
        if isinstance(item, Take) and item.category not in ("results", "activations"):
            found[item.place, item.category] += item.memory.stop - item.memory.start
    return found
