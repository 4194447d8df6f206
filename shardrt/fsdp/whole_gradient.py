"""WholeGradient: the usual gradient path: one slot, one reduce-scatter."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shardrt.device.arena import Slot
from shardrt.fsdp import collectives
from shardrt.fsdp.gradient_path import PATHS, GradientPath
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout

Array = Any


class WholeGradient(GradientPath):
    """Full gradients in one slot, in the order of the flat buffer.

    In an unsharded group, the full gradient is as long as the sharded one. Backward then writes straight into
    the sharded gradient's slot, unless the slot already holds a gradient to add to.
    """

    def __init__(self, group: ParameterGroup, layout: Layout) -> None:
        super().__init__(group, layout)
        self.full = self.sent = layout.total
        self.kept = layout.shard_size
        self.slot: Slot | None = None  # only while the path is open

    def open(self) -> None:
        slot = self._its_own_sum()
        if slot is None:
            slot = self.acquire()
        else:
            # A reduction of a pass that raised may still write the slot.
            self.streams.compute.wait(self.group.gradient_ready)
        self.slot = slot
        super().open()  # after `acquire`, which raises if there is no memory

    def _its_own_sum(self) -> Slot | None:
        """The slot of the sharded gradient if backward can write the full gradient there, else None."""
        return self.group.sharded_gradient.slot

    def view(self, position: int) -> Array:
        """The array for a parameter's full gradient, in the parameter's shape."""
        return self.group.views_in(self.slot)[position]

    @property
    def positions(self) -> Iterable[int]:
        """Positions of the parameters whose gradients lie in the slot."""
        return range(len(self.layout.entries))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every sent range that belongs to no parameter."""
        return self.layout.padding

    def target(self, position: int) -> tuple[Array, bool]:
        accumulate = position in self.written
        self.written.add(position)
        return self.view(position), accumulate

    def move(self, target: Callable[[int], tuple[Array, bool]]) -> None:
        for position in self.written:
            self.streams.compute.submit(self.streams.device.copy, target(position)[0], self.view(position))

    def discard(self) -> None:
        slot = self._close()
        self.streams.compute.record(slot.free)  # behind compute's last write to the slot
        slot.give_back()

    def _close(self) -> Slot:
        slot, self.slot, self.is_open = self.slot, None, False
        return slot

    def reduce(self) -> None:
        self._clear_unwritten()
        group, slot = self.group, self._close()
        with self.handing_over(slot):
            in_place = slot is group.sharded_gradient.slot
            if in_place and group.ranks.replicate is None and group.choices.divide_factor == 1:
                self.streams.compute.record(group.gradient_ready)  # compute wrote the sum
            else:
                self.send_from(slot, partial(self.send, slot))

    def _clear_unwritten(self) -> None:
        """Set gaps and gradients that backward did not write to 0. The slot has values of its last group."""
        for start, stop in self.gaps:
            self.slot.array[start:stop].fill(0)
        for position in self.positions:
            if position not in self.written:
                self.view(position).fill(0)

    def send(self, slot: Slot, out: Array, accumulate: bool) -> None:
        """Set out = (out if `accumulate`) + scale * this rank's shard of the slots' sum over all ranks."""
        collectives.reduce_scatter(self.group, slot, slot.array[: self.full], out, accumulate, self.streams)


def path_of(group: ParameterGroup, layout: Layout, slot: int | None = None) -> GradientPath:
    """The gradient path for a group's trained parameters. slot: elements of the group's slot, if known."""
    chosen = (path.choose(group, layout, slot) for path in PATHS)
    return next((path for path in chosen if path is not None), None) or WholeGradient(group, layout)
