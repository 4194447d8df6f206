"""ChunkedGradient: computes and reduces full gradients chunk by chunk, never as a whole.

An outer unit (with a large embedding, say) would hold its full gradients from the first op of backward to the
last, next to those of the inner units. With this path, ops leave functions instead, which compute rows of a
matrix's gradient. When backward has finished with the unit, the path computes one chunk at a time in a slot
of the inner units, and reduces the chunk from there. Until then, the functions hold arrays that backward
holds anyway: inputs of matmuls and gradients of their outputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Any

from shardrt import dtypes
from shardrt.autograd import Fill
from shardrt.device import Device
from shardrt.device.arena import Slot
from shardrt.fsdp import collectives
from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import ALIGNMENT, Layout

__all__ = ["IN_CHUNKS"]

Array = Any

IN_CHUNKS = 1 << 25  # bytes of full gradients at which an outer unit begins to use chunks
# The least rows of the largest matrix that a chunk must have of each shard. The CPU kernel computes tiles of
# 256 rows, and a chunk repeats the tiles at both its ends. At 512 rows, chunks cost 1.5 times as much as one
# whole gradient.
SHORTEST = 512


@dataclass(frozen=True)
class Chunks:
    """Chunks of `layout` that have `each` elements of every shard; the last chunk may have fewer."""

    layout: Layout
    each: int

    @classmethod
    def plan(cls, layout: Layout, count: int) -> "Chunks":
        """The largest chunks that fit into a slot of `count` elements.

        A chunk has whole rows of the largest matrix if a row fits, else a multiple of ALIGNMENT elements.
        """
        width = _width_of_largest(layout)
        most, step = count // layout.shards, lcm(width, ALIGNMENT)
        step = step if step <= most else ALIGNMENT
        return cls(layout, most // step * step)

    @property
    def worthwhile(self) -> bool:
        """Whether a chunk has enough rows of each shard to outweigh the tiles that it repeats."""
        return self.each >= SHORTEST * _width_of_largest(self.layout)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) in a shard of one chunk after the other."""
        size = self.layout.shard_size
        return ((start, min(start + self.each, size)) for start in range(0, size, self.each))


class ChunkedGradient(GradientPath):
    """Collects functions that compute the gradients while backward runs; then computes and sends chunks."""

    def __init__(self, group: ParameterGroup, layout: Layout, slot: int) -> None:
        super().__init__(group, layout)
        self.chunks = Chunks.plan(layout, slot)
        self.full = self.sent = slot
        self.kept = self.chunks.each
        # Position -> functions that compute terms of the gradient, in order; or -> the whole gradient, if an
        # op needs an array to write to.
        self._fills: dict[int, list[Fill]] = {}
        self._arrays: dict[int, Array] = {}

    @classmethod
    def choose(cls, group: ParameterGroup, layout: Layout, slot: int | None) -> "ChunkedGradient | None":
        fits = slot is None or slot >= layout.total
        return None if fits else cls(group, layout, slot)

    @classmethod
    def fits_in(
        cls, group: ParameterGroup, layout: Layout, slot: int, device: Device, own_slots: bool
    ) -> bool:
        """Whether chunks are worthwhile and keep the gradients bitwise identical.

        The full gradients must be long. Each must be sent exactly once, when complete, in the flat buffer's
        order. The results of the device's matmuls must not depend on where the output lies.
        """
        dtype = dtypes.exact(device.compute_dtype(group.key.param))
        long = layout.total * dtype.itemsize >= IN_CHUNKS
        fixed_tree = group.sharded_gradient.fixed_tree
        once = not (fixed_tree or own_slots or group.offloaded.gradients)
        cut = layout.shards > 1 and layout.copies == 1
        if not (long and once and cut):
            return False
        return Chunks.plan(layout, slot).worthwhile and device.matmul_ignores_place()

    def open(self) -> None:
        super().open()
        self._fills, self._arrays = {}, {}

    def _empty(self, shape: tuple[int, ...]) -> Array:
        dtype = self.group.arenas["gradients"].slots[0].array.dtype
        return self.streams.device.empty(shape, dtype)

    def target(self, position: int) -> tuple[Array, bool]:
        there, before = position in self._arrays, self._fills.pop(position, [])
        if not there:
            self._arrays[position] = self._empty(self.layout.entries[position].shape)
        array = self._arrays[position]
        for number, fill in enumerate(before):
            fill(0, len(array), array, number > 0)
        self.written.add(position)
        return array, there or bool(before)

    def put_rows(self, position: int, fill: Fill) -> None:
        """Keep `fill` until the chunks are computed, unless the gradient has an array already."""
        if position in self._arrays:
            fill(0, len(self._arrays[position]), self._arrays[position], True)
        else:
            self._fills.setdefault(position, []).append(fill)
        self.written.add(position)

    def discard(self) -> None:
        self.is_open, self._fills, self._arrays = False, {}, {}

    def reduce(self) -> None:
        """Compute and send chunk after chunk. With two slots, one is computed while the other is reduced."""
        try:
            for start, stop in self.chunks:
                slot = self.acquire()
                full = slot.array[: self.layout.shards * (stop - start)]
                with self.handing_over(slot):
                    self._write(start, stop, full)
                    self.send_from(slot, partial(self._send, slot, full), (start, stop))
        finally:
            self.discard()

    def _send(self, slot: Slot, full: Array, out: Array, accumulate: bool) -> None:
        collectives.reduce_scatter(self.group, slot, full, out, accumulate, self.streams)

    def _write(self, start: int, stop: int, out: Array) -> None:
        """Compute elements [start, stop) of each shard, next to each other in 1-D `out`, with 0 in gaps."""
        for shard in range(self.layout.shards):
            row = out[shard * (stop - start) : (shard + 1) * (stop - start)]
            low = self.layout.shard_range(shard)[0]
            done, low, high = low + start, low + start, low + stop
            for position, entry in enumerate(self.layout.entries):
                first, last = max(entry.offset, low), min(entry.stop, high)
                if first < last and position in self.written:
                    row[done - low : first - low].fill(0)
                    place = row[first - low : last - low]
                    self._put(position, first - entry.offset, last - entry.offset, place)
                    done = last
            row[done - low :].fill(0)

    def _put(self, position: int, start: int, stop: int, out: Array) -> None:
        """Compute elements [start, stop) of a parameter's gradient in 1-D `out`."""
        copy, compute = self.streams.device.copy, self.streams.compute
        if position in self._arrays:
            compute.submit(copy, out, self._arrays[position].reshape(-1)[start:stop])
            return
        width = _width(self.layout.entries[position].shape)
        first, last = start // width, -(-stop // width)
        whole = (first * width, last * width) == (start, stop)
        rows = out.reshape(-1, width) if whole else self._empty((last - first, width))
        for number, fill in enumerate(self._fills[position]):
            fill(first, last, rows, number > 0)
        if not whole:  # the range begins or ends inside of a row
            compute.submit(copy, out, rows.reshape(-1)[start - first * width : stop - first * width])

    def move(self, target: Callable[[int], tuple[Array, bool]]) -> None:
        for position in sorted(self.written):
            array, _ = target(position)
            if position in self._arrays:
                self.streams.compute.submit(self.streams.device.copy, array, self._arrays[position])
            for number, fill in enumerate(self._fills.get(position, [])):
                fill(0, len(array), array, number > 0)


def _width_of_largest(layout: Layout) -> int:
    """Elements of a row of the largest parameter."""
    return _width(max(layout.entries, key=lambda entry: entry.size).shape)


def _width(shape: tuple[int, ...]) -> int:
    """Elements of a row of a parameter."""
    return max(1, prod(shape[1:]))
