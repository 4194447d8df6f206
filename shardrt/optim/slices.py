"""Slices: an optimizer's share of each flat storage, and one update of it as arrays and ranges.

Parameters become ranges here; later code (the kernels, offload) never sees a parameter's shape.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardrt import device, dtypes
from shardrt.device import Array
from shardrt.nn.parameter import Parameter
from shardrt.nn.ranks import shared
from shardrt.nn.storage import LocalStorage, Storage
from shardrt.nn.utils import merged

__all__ = ["BITS", "Slice", "exact_state", "kept_state"]

BITS = np.dtype(np.uint16)  # of state that is kept in bfloat16
Member = tuple[Parameter, int]  # a parameter, and the number of its group
Row = tuple[int, int, int]  # start, stop, and the position of a member that lies in there


@dataclass(frozen=True, eq=False)
class Cut:
    """The range of one step's update: positions of members, and the ranges of the shard that they fill."""

    members: Array
    rows: tuple[Row, ...]


class Slice:
    """An optimizer's data for one storage: its parameters, its state arrays, the numbers of updates.

    members: (parameter, group) of each parameter in it. steps: how often each was updated, int64 (members,).
    """

    __slots__ = ("storage", "members", "state", "steps", "_due", "_cut")

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.members: list[Member] = []
        self.state: dict[str, Array] = {}
        self.steps = np.zeros(0, np.int64)
        self._due: list[bool] = []  # which members `_cut` is of
        self._cut: Cut | None = None

    @property
    def name(self) -> str:
        """The name of the first parameter in it, for messages."""
        return self.members[0][0].name

    def add(self, members: list[Member]) -> None:
        """Take in parameters of the storage, never updated yet."""
        self.members += members
        self.set_steps([*self.steps.tolist(), *(0 for _ in members)])

    def claim(self, optimizer: Any) -> None:
        """Note that `optimizer` updates this.

        A storage has one gradient, which the first of the two to call zero_grad would forget for both.

        Raises:
            ValueError: if another one updates parts of it.
        """
        own = {id(parameter) for parameter, _ in self.members}
        others = [(owner, known) for owner, known in self.storage.owners if owner() not in (None, optimizer)]
        if any(not own & known for _, known in others):
            raise ValueError(
                f"{type(optimizer).__name__}: parameter {self.name!r} is in one unit with parameters that "
                "another optimizer has; give both to one optimizer as groups, or make them units of their own"
            )
        self.storage.owners = [*others, (weakref.ref(optimizer), own)]

    def set_steps(self, steps: Iterable[int]) -> None:
        """How often each member was updated, as a checkpoint says."""
        self.steps = np.array(list(steps), np.int64)
        self._cut = None  # members that are updated together may have been apart, or the other way round

    def state_range(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        """Where the state of shard[start:stop] lies in state[kind]."""
        return start, stop

    def as_shard(self, kind: str) -> Array:
        """state[kind], or its numbers on the host, as long as the shard."""
        return self.state[kind]

    def due(self) -> Cut:
        """The members that a step updates now: trained, and with a gradient. Nothing is counted."""
        due = [p.requires_grad and self.storage.has_gradient(p) for p, _ in self.members]
        if self._cut is None or due != self._due:
            self._due, self._cut = due, self._cut_of(due, joined=True)
        return self._cut

    def due_apart(self) -> Cut:
        """The same with a range for each member, however often each was updated: for replays of a graph."""
        due = [p.requires_grad and self.storage.has_gradient(p) for p, _ in self.members]
        return self._cut_of(due, joined=False)

    def _cut_of(self, due: list[bool], joined: bool) -> Cut:
        """joined: neighbours of one group with equal numbers of updates are one range."""
        members = np.flatnonzero(due)
        alike: dict[Any, list[int]] = {}
        for position in members.tolist():
            key = (self.members[position][1], self.steps[position]) if joined else position
            alike.setdefault(key, []).append(position)
        rows = []
        for positions in alike.values():
            pieces = [self.storage.range_of(self.members[position][0]) for position in positions]
            rows += [(start, stop, positions[0]) for start, stop in merged(pieces)]
        return Cut(members, tuple(sorted(rows)))

    def update(self, ranges: Array, rounds: bool) -> "Update":
        """Arrays that an update reads and writes: "shard", "gradient", the state by name; 1-D, equally long.

        Args:
            rounds: and "rounded", the storage's copy of the shard in 16 bits.
        """
        arrays = {"shard": self.storage.shard, "gradient": self.storage.gradient, **self.state}
        if not rounds:
            return Update(arrays, ranges)
        rounded = self.storage.low_precision_copy
        return Update(arrays | {"rounded": rounded.array}, ranges, rounded.kind)

    def rows(self, cut: Cut, numbers: Callable[[int, int], tuple[float, ...]]) -> list[tuple[float, ...]]:
        """Each range with the kernel's numbers for it: numbers(group, which update this is, from 1)."""
        known: dict[tuple[int, int], tuple[float, ...]] = {}
        table = []
        for start, stop, position in cut.rows:
            # 0 where a graph of the first step is captured, whose replays count before they run
            key = self.members[position][1], max(1, int(self.steps[position]))
            if key not in known:
                known[key] = numbers(*key)
            table.append((start, stop, *known[key]))
        return table


@dataclass(frozen=True, eq=False)
class Update:
    """One kernel call: the arrays of a Slice; float64 Slice.rows, on the host or where it runs.

    Attributes:
        kind: of the array "rounded", if there is one.
    """

    arrays: dict[str, Array]
    ranges: Array
    kind: str = ""

    @property
    def start(self) -> int:
        """The first element of the first range. There is one."""
        return int(self.ranges[0, 0])

    @property
    def stop(self) -> int:
        """The element after the last range."""
        return int(self.ranges[-1, 1])

    def part(self, start: int, stop: int) -> "Update":
        """The same for the elements [start, stop) alone, counted from `start`."""
        inside = np.clip(self.ranges[:, :2], start, stop)
        ranges = np.column_stack([inside - start, self.ranges[:, 2:]])
        return replace(
            self,
            arrays={name: array[start:stop] for name, array in self.arrays.items()},
            ranges=ranges[inside[:, 0] < inside[:, 1]],
        )

    def on(self, arrays: dict[str, Array]) -> "Update":
        """The same with some arrays replaced."""
        return replace(self, arrays={**self.arrays, **arrays})


def members_of(groups: list[dict]) -> list[Member]:
    """Every parameter with the number of its group.

    Raises:
        ValueError: for one that is given twice.
    """
    seen: dict[int, Member] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ValueError(f"optimizer: parameter {parameter.name!r} is in params twice")
            seen[id(parameter)] = parameter, index
    return list(seen.values())


def by_storage(members: list[Member]) -> dict[Storage, list[Member]]:
    """The members in each storage, which is there when this returns."""
    found: dict[Storage, list[Member]] = {}
    for member in members:
        parameter = member[0]
        parameter.storage.range_of(parameter)  # builds it, if it is a unit's
        found.setdefault(parameter.storage, []).append(member)
    return found


def refuse_partly_sharded(slices: list[Slice]) -> None:
    """ValueError for plain parameters next to sharded ones: they would drift apart between ranks unseen."""
    plain = [piece for piece in slices if isinstance(piece.storage, LocalStorage)]
    forgotten = [piece.name for piece in plain if not piece.storage.ignored]
    if forgotten and shared(piece.storage for piece in slices):
        raise ValueError(
            f"optimizer: parameter {forgotten[0]!r} is in no unit, so its gradient would not be "
            "reduced over the ranks; call fully_shard(model) last, or name it in ignored"
        )


def exact_state(values: np.ndarray) -> np.ndarray:
    """State as numbers, on the host: bfloat16 state as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == BITS else values


def kept_state(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers, 1-D on the host, as state of this type is kept."""
    if dtype != BITS:
        return values.astype(dtype, copy=False)
    bits = np.empty(values.shape, BITS)
    device.get("cpu").kernels.cast.pack(np.ascontiguousarray(values, np.float32), bits, dtypes.bfloat16)
    return bits
