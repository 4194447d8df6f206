"""Full gradients that are never there as a whole: made, and reduced, some elements of each shard at a time.

A unit that others run inside of, as the one with a large embedding, would have its full gradients beside
theirs from the first op of backward to the last. Instead ops leave what makes the gradient of a matrix, rows
of it at a time, until all of the unit's gradients are complete. Then each piece is made in a slot that the
units inside have used, and reduced from there. What is left meanwhile are arrays that backward has had
anyway: inputs of products, and gradients of their results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from shardrt.autograd import Fill
from shardrt.device import Device, Stream
from shardrt.fsdp.layout import ALIGNMENT, Layout

Array = Any

# Rows of the largest matrix that a piece has of each shard, at least. The CPU's kernel makes tiles of 256
# rows and repeats those at either end: here a gradient in pieces costs half as much again as a whole one.
SHORTEST = 512


@dataclass(frozen=True)
class Pieces:
    """Of each shard of `layout`, `each` elements at a time."""

    layout: Layout
    each: int

    @classmethod
    def plan(cls, layout: Layout, count: int) -> "Pieces":
        """Pieces that fit into a slot of `count` elements: whole rows of the largest matrix, if possible."""
        width = _width_of_largest(layout)
        most, step = count // layout.shards, lcm(width, ALIGNMENT)
        step = step if step <= most else ALIGNMENT
        return cls(layout, most // step * step)

    @property
    def worthwhile(self) -> bool:
        """Whether a piece has enough rows of each shard for what is repeated at its ends."""
        return self.each >= SHORTEST * _width_of_largest(self.layout)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, stop) in a shard, one piece after the other."""
        size = self.layout.shard_size
        return ((start, min(start + self.each, size)) for start in range(0, size, self.each))


class InPieces:
    """A group's gradient while backward collects what it is made of. Without a slot, unlike OpenGradient."""

    slot = None

    def __init__(self, pieces: Pieces, device: Device, dtype: Any) -> None:
        self.pieces = pieces
        self.written: set[int] = set()  # positions of the parameters that have one
        self._device, self._dtype = device, dtype
        # By position, what is to be made, in order; or the gradient, where an op has written all of it.
        self._fills: dict[int, list[Fill]] = {}
        self._arrays: dict[int, Array] = {}

    def target(self, position: int) -> tuple[Array, bool]:
        """An array for the whole gradient of one parameter; whether to add to it."""
        there, before = position in self._arrays, self._fills.pop(position, [])
        if not there:
            shape = self.pieces.layout.entries[position].shape
            self._arrays[position] = self._device.empty(shape, self._dtype)
        array = self._arrays[position]
        for number, fill in enumerate(before):
            fill(0, len(array), array, number > 0)
        self.written.add(position)
        return array, there or bool(before)

    def put_rows(self, position: int, fill: Fill) -> None:
        """Leave `fill` until the pieces are made."""
        if position in self._arrays:
            fill(0, len(self._arrays[position]), self._arrays[position], True)
        else:
            self._fills.setdefault(position, []).append(fill)
        self.written.add(position)

    def write(self, start: int, stop: int, out: Array, compute: Stream) -> None:
        """Make elements [start, stop) of each shard, side by side in 1-D `out`; 0 where nothing is."""
        layout = self.pieces.layout
        for shard in range(layout.shards):
            row, low = (
                out[shard * (stop - start) : (shard + 1) * (stop - start)],
                layout.shard_range(shard)[0],
            )
            done, low, high = low + start, low + start, low + stop
            for position, entry in enumerate(layout.entries):
                first, last = max(entry.offset, low), min(entry.stop, high)
                if first < last and position in self.written:
                    row[done - low : first - low].fill(0)
                    place = row[first - low : last - low]
                    self._put(position, first - entry.offset, last - entry.offset, place, compute)
                    done = last
            row[done - low :].fill(0)

    def _put(self, position: int, start: int, stop: int, out: Array, compute: Stream) -> None:
        """Make elements [start, stop) of a parameter's gradient in 1-D `out`."""
        copy = self._device.copy
        if position in self._arrays:
            compute.submit(copy, out, self._arrays[position].reshape(-1)[start:stop])
            return
        entry = self.pieces.layout.entries[position]
        width = _width(entry.shape)
        first, last = start // width, -(-stop // width)
        whole = (first * width, last * width) == (start, stop)
        rows = out.reshape(-1, width) if whole else self._device.empty((last - first, width), out.dtype)
        for number, fill in enumerate(self._fills[position]):
            fill(first, last, rows, number > 0)
        if not whole:  # a shard begins or ends inside of a row
            compute.submit(copy, out, rows.reshape(-1)[start - first * width : stop - first * width])

    def move(self, target: Callable[[int], tuple[Array, bool]], compute: Stream) -> None:
        """Make all of it where `target` says for each position."""
        for position in sorted(self.written):
            array, _ = target(position)
            if position in self._arrays:
                compute.submit(self._device.copy, array, self._arrays[position])
            for number, fill in enumerate(self._fills.get(position, [])):
                fill(0, len(array), array, number > 0)


def _width_of_largest(layout: Layout) -> int:
    """Elements of a row of the largest parameter."""
    return _width(max(layout.entries, key=lambda entry: entry.size).shape)


def _width(shape: tuple[int, ...]) -> int:
    """Elements of a row."""
    return max(1, prod(shape[1:]))
