"""Muon's optimizer state: a momentum for every parameter, AdamW's second moment for AdamW's parameters alone.

The second moments of a shard are one array without places for hidden matrices. So an update of AdamW's
parameters goes run by run: a part of the shard, and the part of the second moments that belongs to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardrt import device
from shardrt.device import Array
from shardrt.nn.storage import Storage
from shardrt.nn.utils import merged
from shardrt.optim.slices import Slice

__all__ = ["MATRIX", "MuonSlice", "Run", "elements_of", "runs_of"]

ALIGNMENT = 16  # elements: where parameters begin in a shard (fsdp/layout.py)
MATRIX = {"m": "momentum_buffer"}  # state of a hidden matrix, and its name in torch.optim.Muon


@dataclass(frozen=True)
class Run:
    """The second moments of shard[start:stop] begin at `place` of their array."""

    start: int
    stop: int
    place: int

    def arrays(self, piece: Slice) -> dict[str, Array]:
        """What an update of this part reads and writes, 1-D and equally long."""
        storage, part = piece.storage, slice(self.start, self.stop)
        second = piece.state["v"][self.place : self.place + self.stop - self.start]
        return {
            "shard": storage.shard[part],
            "gradient": storage.gradient[part],
            "m": piece.state["m"][part],
            "v": second,
        }


class MuonSlice(Slice):
    """A slice whose "v" has no places for hidden matrices.

    runs: the parts of the shard that "v" has.
    """

    __slots__ = ("runs",)

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.runs: tuple[Run, ...] = ()

    def new_second_moments(self, hidden: Iterable[tuple[int, int]]) -> None:
        """Make "v". hidden: ranges of hidden matrices in the shard."""
        self.runs = runs_of(self.storage.shard.size, hidden)
        self.state["v"] = _zeros(self.storage, elements_of(self.runs))

    def place_of(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        if kind != "v":
            return start, stop
        first, last = (sum(max(0, min(end, r.stop) - r.start) for r in self.runs) for end in (start, stop))
        return first, last

    def as_shard(self, kind: str) -> Array:
        """With zeros for hidden matrices."""
        array, size = self.state[kind], self.storage.shard.size
        if array.size == size:
            return array
        values, whole = device.of(array).to_numpy(array), np.zeros(size, array.dtype)
        for run in self.runs:
            whole[run.start : run.stop] = values[run.place : run.place + run.stop - run.start]
        return whole


def runs_of(size: int, hidden: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """The runs of a shard of `size` elements. hidden: ranges of hidden matrices, whose padding is theirs."""
    holes = merged((start, min(size, -(-stop // ALIGNMENT) * ALIGNMENT)) for start, stop in hidden)
    runs, begin, place = [], 0, 0
    for start, stop in [*holes, (size, size)]:
        if begin < start:
            runs.append(Run(begin, start, place))
            place += start - begin
        begin = stop
    return tuple(runs)


def elements_of(runs: tuple[Run, ...]) -> int:
    """Elements of the second moments."""
    return sum(run.stop - run.start for run in runs)


def _zeros(storage: Storage, count: int) -> Array:
    """An array of optimizer state, on the host where the storage has it there."""
    here, dtype = device.current(), storage.shard.dtype
    if not count:  # all of it is in hidden matrices
        array = here.empty(0, dtype)
    elif storage.offloaded.optimizer_state:
        array = storage.settings.offload.host_buffer(here, count, dtype)
    else:
        array = here.buffer(count, dtype)
    return here.set_tag(array, "optimizer state", getattr(storage, "label", None))
