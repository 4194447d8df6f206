"""Chunks: full gradients that are never there as a whole, but made and reduced chunk by chunk.

A unit that others run inside of, as the one with a large embedding, would have its full gradients beside
theirs from the first op of backward to the last. Instead ops leave what makes the gradient of a matrix, rows
of it at a time, until all of the unit's gradients are complete. Then each chunk is made in a slot that the
units inside have used, and reduced from there. What is left meanwhile are arrays that backward has had
anyway: inputs of products, and gradients of their results.
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

Array = Any

IN_CHUNKS = 1 << 25  # bytes of full gradients from which on a unit around others makes them in chunks
# Rows of the largest matrix that a chunk has of each shard, at least. The CPU's kernel makes tiles of 256
# rows and repeats those at either end: here a gradient in chunks costs half as much again as a whole one.
SHORTEST = 512


@dataclass(frozen=True)
class Chunks:
    """Of each shard of `layout`, `each` elements at a time."""

    layout: Layout
    each: int

    @classmethod
    def plan(cls, layout: Layout, count: int) -> "Chunks":
        """Chunks that fit into a slot of `count` elements: whole rows of the largest matrix, if possible."""
        width = _width_of_largest(layout)
        most, step = count // layout.shards, lcm(width, ALIGNMENT)
        step = step if step <= most else ALIGNMENT
        return cls(layout, most // step * step)

    @property
    def worthwhile(self) -> bool:
        """Whether a chunk has enough rows of each shard for what is repeated at its ends."""
        return self.each >= SHORTEST * _width_of_largest(self.layout)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, stop) in a shard, one chunk after the other."""
        size = self.layout.shard_size
        return ((start, min(start + self.each, size)) for start in range(0, size, self.each))


class ChunkedGradient(GradientPath):
    """Collects what the gradients are made of while backward runs; makes and sends chunk after chunk."""

    def __init__(self, group: ParameterGroup, layout: Layout, slot: int) -> None:
        super().__init__(group, layout)
        self.chunks = Chunks.plan(layout, slot)
        self.full = self.sent = slot
        self.kept = self.chunks.each
        # By position, what is to be made, in order; or the gradient, where an op has written all of it.
        self._fills: dict[int, list[Fill]] = {}
        self._arrays: dict[int, Array] = {}

    @classmethod
    def choose(cls, group: ParameterGroup, layout: Layout, slot: int | None) -> "ChunkedGradient | None":
        fits = slot is None or slot >= layout.total
        return None if fits else cls(group, layout, slot)

    @classmethod
    def fits_in(
        cls, group: ParameterGroup, layout: Layout, slot: int, device: Device, accumulates: bool
    ) -> bool:
        """Whether its full gradients are long, and each is sent when it is complete, one time, as it lies.

        On a device whose matmuls have the same bits in a slot as in a gradient that is there as a whole.
        """
        dtype = dtypes.exact(device.compute_dtype(group.key.param))
        long = layout.total * dtype.itemsize >= IN_CHUNKS
        fixed_tree = group.sharded_gradient.fixed_tree
        once = not (fixed_tree or accumulates or group.placement.gradients)
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
        """Leave `fill` until the chunks are made."""
        if position in self._arrays:
            fill(0, len(self._arrays[position]), self._arrays[position], True)
        else:
            self._fills.setdefault(position, []).append(fill)
        self.written.add(position)

    def discard(self) -> None:
        self.is_open, self._fills, self._arrays = False, {}, {}

    def reduce(self) -> None:
        """Make the next chunk while the one before is reduced, where there are two slots."""
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
        """Make elements [start, stop) of each shard, side by side in 1-D `out`; 0 where nothing is."""
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
        """Make elements [start, stop) of a parameter's gradient in 1-D `out`."""
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
        if not whole:  # a shard begins or ends inside of a row
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
    """Elements of a row."""
    return max(1, prod(shape[1:]))
