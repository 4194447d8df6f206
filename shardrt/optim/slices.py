"""Slices: what an optimizer owns of each flat storage, and one update of it as arrays and ranges.

Parameters become ranges here; what follows (the kernels, offload) never sees a parameter's shape.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardrt.nn.storage import Storage
from shardrt.nn.utils import merged

Array = Any


class Slice:
    """What an optimizer keeps for one storage: its ranges by group, its state arrays, its step count.

    `name` is that of the first parameter in it, for messages. `applied`: backward has issued the update of
    this step already.
    """

    __slots__ = ("storage", "name", "starts", "stops", "groups", "state", "steps", "applied")

    def __init__(self, storage: Storage, name: str, ranges: list[tuple[int, int, int]]) -> None:
        self.storage = storage
        self.name = name
        self.starts = np.array([start for start, _, _ in ranges], np.int64)
        self.stops = np.array([stop for _, stop, _ in ranges], np.int64)
        self.groups = [group for _, _, group in ranges]
        self.state: dict[str, Array] = {}
        self.steps = 0
        self.applied = False

    def update(self, gradient: Array, groups: list[dict]) -> "Update":
        """The next update of this slice, with the settings that `groups` have now."""
        return Update(
            arrays={"shard": self.storage.shard, "gradient": gradient, **self.state},
            starts=self.starts,
            stops=self.stops,
            lrs=np.array([groups[g]["lr"] for g in self.groups], np.float64),
            decays=np.array([groups[g]["weight_decay"] for g in self.groups], np.float64),
            steps=self.steps,
        )


@dataclass(frozen=True, eq=False)
class Update:
    """One call of an optimizer's kernel.

    arrays: "shard", "gradient" and the optimizer's state by name; 1-D and equally long. Ranges k, from
    starts[k] to stops[k], have the learning rate lrs[k] and the weight decay decays[k]. steps: from 1.
    """

    arrays: dict[str, Array]
    starts: Array
    stops: Array
    lrs: Array
    decays: Array
    steps: int

    def part(self, start: int, stop: int) -> "Update":
        """The same for the elements [start, stop) alone, counted from `start`."""
        starts, stops = np.maximum(self.starts, start), np.minimum(self.stops, stop)
        inside = starts < stops
        return Update(
            arrays={name: array[start:stop] for name, array in self.arrays.items()},
            starts=starts[inside] - start,
            stops=stops[inside] - start,
            lrs=self.lrs[inside],
            decays=self.decays[inside],
            steps=self.steps,
        )

    def on(self, arrays: dict[str, Array]) -> "Update":
        """The same with some arrays replaced."""
        return replace(self, arrays={**self.arrays, **arrays})


def slices_of(groups: list[dict]) -> list[Slice]:
    """One Slice per storage of the parameters in `groups`. Raises ValueError for a parameter given twice."""
    owned: dict[Storage, dict[int, list[tuple[int, int]]]] = {}
    names: dict[Storage, str] = {}
    seen: set[int] = set()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ValueError(f"optimizer: parameter {parameter.name!r} is given twice")
            seen.add(id(parameter))
            if parameter.requires_grad:
                start, stop, _ = parameter.storage.range_of(parameter)
                owned.setdefault(parameter.storage, {}).setdefault(index, []).append((start, stop))
                names.setdefault(parameter.storage, parameter.name)
    slices = []
    for storage, by_group in owned.items():
        ranges = [(start, stop, g) for g, pieces in by_group.items() for start, stop in merged(pieces)]
        slices.append(Slice(storage, names[storage], sorted(ranges)))
    return slices
