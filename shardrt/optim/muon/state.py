"""Muon's optimizer state: a momentum for every parameter, AdamW's second moment for AdamW's parameters alone.

The second moments of a shard are one array without hidden matrices. So an update of AdamW's parameters
goes range by range of the shard, with the range of the second moments that belongs to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardrt import device
from shardrt.device import Array
from shardrt.nn.storage import Storage
from shardrt.nn.utils import merged
from shardrt.optim.slices import Slice

__all__ = ["MATRIX", "MuonSlice", "AdamWRange", "elements_of", "adamw_ranges"]

ALIGNMENT = 16  # elements: where parameters begin in a shard (fsdp/layout.py)
MATRIX = {"m": "momentum_buffer"}  # state of a hidden matrix, and its name in torch.optim.Muon


@dataclass(frozen=True)
class AdamWRange:
    """The second moments of shard[start:stop] begin at `offset` of their array."""

    start: int
    stop: int
    offset: int

    def arrays(self, piece: Slice) -> dict[str, Array]:
        """What an update of this part reads and writes, 1-D and equally long."""
        storage, part = piece.storage, slice(self.start, self.stop)
        second = piece.state["v"][self.offset : self.offset + self.stop - self.start]
        return {
            "shard": storage.shard[part],
            "gradient": storage.gradient[part],
            "m": piece.state["m"][part],
            "v": second,
        }


class MuonSlice(Slice):
    """A slice whose "v" leaves out hidden matrices.

    ranges: of the shard that "v" has.
    """

    __slots__ = ("ranges",)

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.ranges: tuple[AdamWRange, ...] = ()

    def new_second_moments(self, hidden: Iterable[tuple[int, int]]) -> None:
        """Make "v". hidden: ranges of hidden matrices in the shard."""
        self.ranges = adamw_ranges(self.storage.shard.size, hidden)
        self.state["v"] = _zeros(self.storage, elements_of(self.ranges))

    def state_range(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        if kind != "v":
            return start, stop
        first, last = (sum(max(0, min(end, r.stop) - r.start) for r in self.ranges) for end in (start, stop))
        return first, last

    def as_shard(self, kind: str) -> Array:
        """state[kind] at shard length, zero at hidden matrices."""
        array, size = self.state[kind], self.storage.shard.size
        if array.size == size:
            return array
        values, whole = device.of(array).to_numpy(array), np.zeros(size, array.dtype)
        for each in self.ranges:
            whole[each.start : each.stop] = values[each.offset : each.offset + each.stop - each.start]
        return whole


def adamw_ranges(size: int, hidden: Iterable[tuple[int, int]]) -> tuple[AdamWRange, ...]:
    """AdamW's ranges of a shard of `size` elements: without the ranges `hidden` and padding after them."""
    holes = merged((start, min(size, -(-stop // ALIGNMENT) * ALIGNMENT)) for start, stop in hidden)
    ranges, begin, offset = [], 0, 0
    for start, stop in [*holes, (size, size)]:
        if begin < start:
            ranges.append(AdamWRange(begin, start, offset))
            offset += start - begin
        begin = stop
    return tuple(ranges)


def elements_of(ranges: tuple[AdamWRange, ...]) -> int:
    """Elements of the second moments."""
    return sum(each.stop - each.start for each in ranges)


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
