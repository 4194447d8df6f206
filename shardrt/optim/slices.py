"""Slices: what an optimizer owns of each flat storage, and one update of it as arrays and ranges.

Parameters become ranges here; what follows (the kernels, offload) never sees a parameter's shape.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardrt.comm import world
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage, Storage
from shardrt.nn.utils import merged

Array = Any


class Slice:
    """What an optimizer keeps for one storage: its ranges by group, its state arrays, its step count.

    members: (parameter, group) for each parameter in it. `applied`: backward has issued the update of this
    step already.
    """

    __slots__ = ("storage", "members", "starts", "stops", "groups", "state", "steps", "applied", "_trained")

    def __init__(self, storage: Storage, members: list[tuple[Parameter, int]]) -> None:
        self.storage = storage
        self.members = members
        self.state: dict[str, Array] = {}
        self.steps = 0
        self.applied = False
        self._arrange()

    @property
    def name(self) -> str:
        """That of the first parameter in it, for messages."""
        return self.members[0][0].name

    def claim(self, optimizer: Any) -> None:
        """Note that `optimizer` updates this. Raises ValueError if another one updates other parts of it.

        A storage has one gradient, which the first of the two to call zero_grad would forget for both.
        """
        own = {id(parameter) for parameter, _ in self.members}
        others = [(owner, known) for owner, known in self.storage.owners if owner() is not None]
        if any(not own & known for _, known in others):
            raise ValueError(
                f"{type(optimizer).__name__}: parameter {self.name!r} is in one unit with parameters that "
                "another optimizer has; give both to one optimizer as groups, or make them units of their own"
            )
        self.storage.owners = [*others, (weakref.ref(optimizer), own)]

    def _arrange(self) -> None:
        """Find the ranges of the parameters that are trained now."""
        self._trained = [parameter.requires_grad for parameter, _ in self.members]
        by_group: dict[int, list[tuple[int, int]]] = {}
        for (parameter, group), trained in zip(self.members, self._trained, strict=True):
            if trained:
                by_group.setdefault(group, []).append(self.storage.range_of(parameter)[:2])
        ranges = sorted((start, stop, g) for g, pieces in by_group.items() for start, stop in merged(pieces))
        self.starts = np.array([start for start, _, _ in ranges], np.int64)
        self.stops = np.array([stop for _, stop, _ in ranges], np.int64)
        self.groups = [group for _, _, group in ranges]

    def arrays(self) -> dict[str, Array]:
        """What an update reads and writes: "shard", "gradient" and the state by name; 1-D, equally long."""
        return {"shard": self.storage.shard, "gradient": self.storage.gradient, **self.state}

    def ranges(self, numbers: list[tuple[float, ...]]) -> Array:
        """The ranges with the numbers that a kernel wants for each: those of its group, from `numbers`.

        Float64 (ranges, 2 + numbers). Leaves out what was frozen since the optimizer was made.
        """
        if any(p.requires_grad != was for (p, _), was in zip(self.members, self._trained, strict=True)):
            self._arrange()
        rows = [
            (start, stop, *numbers[group])
            for start, stop, group in zip(self.starts, self.stops, self.groups, strict=True)
        ]
        return np.array(rows, np.float64).reshape(-1, 2 + len(numbers[0]))


@dataclass(frozen=True, eq=False)
class Update:
    """One call of an optimizer's kernel: Slice.arrays; Slice.ranges, on the host or where it runs."""

    arrays: dict[str, Array]
    ranges: Array

    @property
    def start(self) -> int:
        """The first element of the first range. There is one."""
        return int(self.ranges[0, 0])

    @property
    def stop(self) -> int:
        """The element behind the last range."""
        return int(self.ranges[-1, 1])

    def part(self, start: int, stop: int) -> "Update":
        """The same for the elements [start, stop) alone, counted from `start`."""
        inside = np.clip(self.ranges[:, :2], start, stop)
        ranges = np.column_stack([inside - start, self.ranges[:, 2:]])
        return Update(
            arrays={name: array[start:stop] for name, array in self.arrays.items()},
            ranges=ranges[inside[:, 0] < inside[:, 1]],
        )

    def on(self, arrays: dict[str, Array]) -> "Update":
        """The same with some arrays replaced."""
        return replace(self, arrays={**self.arrays, **arrays})


def slices_of(groups: list[dict]) -> list[Slice]:
    """One Slice per storage of the parameters in `groups`.

    Raises ValueError for a parameter given twice, or in no unit where others are.
    """
    members: dict[Storage, list[tuple[Parameter, int]]] = {}
    seen: set[int] = set()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ValueError(f"optimizer: parameter {parameter.name!r} is given twice")
            seen.add(id(parameter))
            if parameter.requires_grad:
                parameter.storage.range_of(parameter)  # builds it, if it is a unit's
                members.setdefault(parameter.storage, []).append((parameter, index))
    _refuse_partly_sharded(members)
    return [Slice(storage, pairs) for storage, pairs in members.items()]


def _refuse_partly_sharded(members: dict[Storage, list[tuple[Parameter, int]]]) -> None:
    """Beside sharded parameters, plain ones would differ more and more between ranks, unnoticed."""
    plain = [storage for storage in members if isinstance(storage, LocalStorage)]
    forgotten = [members[storage][0][0] for storage in plain if not storage.ignored]
    if world.current().size > 1 and forgotten and len(plain) < len(members):
        raise ValueError(
            f"optimizer: parameter {forgotten[0].name!r} is in no unit, so nobody would reduce its gradient "
            "over the ranks; call fully_shard(model) last, or name it in ignored"
        )
