"""Layout: where each parameter of a group lies in the flat buffer, and which part of it each rank holds.

A Layout has integers only, no arrays. The buffer is cut into `shards` equal shards, and a parameter may
straddle ranks. Each parameter and each shard starts at a multiple of ALIGNMENT elements, for vector loads and
16-byte copies. The gaps and the end are padding, which is zero in parameters and in gradients.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardrt.nn.extents import Extents, contiguous, cut

ALIGNMENT = 16  # elements: one cache line of float32


@dataclass(frozen=True)
class Entry:
    """One parameter: elements [offset, offset + size) of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Elements of the parameter, without padding."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """The element of the flat buffer after the last one."""
        return self.offset + self.size


@dataclass(frozen=True)
class Layout:
    """The flat buffer of one group: `total` = shards * shard_size elements."""

    entries: tuple[Entry, ...]
    shards: int
    shard_size: int
    copies: int = 1  # number of ranks that hold each shard

    @classmethod
    def plan(
        cls, named_shapes: Iterable[tuple[str, tuple[int, ...]]], shards: int, copies: int = 1
    ) -> "Layout":
        """Lay the parameters out one after the other, in the order given.

        The shard size is a multiple of `copies`, so that the ranks that hold a shard can all-reduce it in
        equal parts.
        """
        entries = []
        end = 0
        for name, shape in named_shapes:
            entries.append(Entry(name, tuple(shape), end))
            end = aligned(entries[-1].stop)
        shard_size = aligned(max(1, -(-end // (shards * copies)))) * copies  # no buffer is empty
        return cls(tuple(entries), shards, shard_size, copies)

    @property
    def total(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shards * self.shard_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """(start, stop) of a rank's shard in the flat buffer."""
        return rank * self.shard_size, (rank + 1) * self.shard_size

    def in_shard(self, entry: Entry, rank: int) -> tuple[int, int, Extents]:
        """(start, stop, part): a rank's shard[start:stop] holds elements `part` of the parameter."""
        low, high = self.shard_range(rank)
        start = min(max(entry.offset, low), high)
        stop = min(max(entry.stop, start), high)
        return (
            start - low,
            stop - low,
            cut(contiguous(0, entry.size), start - entry.offset, stop - entry.offset),
        )

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every gap between parameters and of the rest at the end, without empty ranges."""
        stops = [entry.stop for entry in self.entries]
        starts = [entry.offset for entry in self.entries[1:]] + [self.total]
        return tuple((stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start)


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT
