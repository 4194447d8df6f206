"""WholeGradient: the plain way of full gradients: one slot, one reduce-scatter."""

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

    Where nothing is sharded, a full gradient is as long as its sum: backward then writes the sum itself.
    """

    def __init__(self, group: ParameterGroup, layout: Layout) -> None:
        super().__init__(group, layout)
        self.full = self.sent = layout.total
        self.kept = layout.shard_size
        self.slot: Slot | None = None  # while it is open

    def open(self) -> None:
        super().open()
        self.slot = self._its_own_sum()
        if self.slot is None:
            self.slot = self.acquire()
            return
        self.streams.compute.wait(self.group.gradient_ready)  # a pass that raised may still reduce into it

    def _its_own_sum(self) -> Slot | None:
        """The slot of the sharded gradient, where the full one can be written there."""
        return self.group.sharded_gradient.slot

    def view(self, position: int) -> Array:
        """The place of a parameter's full gradient, in its shape."""
        return self.group.views_in(self.slot)[position]

    @property
    def positions(self) -> Iterable[int]:
        """Of the parameters that have a place in the slot."""
        return range(len(self.layout.entries))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of what is sent and belongs to no parameter."""
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
        self.streams.compute.record(slot.free)
        slot.give_back()

    def _close(self) -> Slot:
        slot, self.slot, self.is_open = self.slot, None, False
        return slot

    def reduce(self) -> None:
        self._clear_unwritten()
        group, slot = self.group, self._close()
        with self.handing_over(slot):
            in_place = slot is group.sharded_gradient.slot
            if in_place and group.ranks.copies is None and group.choices.divide_factor == 1:
                self.streams.compute.record(group.gradient_ready)  # compute has written the sum itself
            else:
                self.send_from(slot, partial(self.send, slot))

    def _clear_unwritten(self) -> None:
        """Slots are reused: clear the gaps, and the gradients of parameters that nothing used."""
        for start, stop in self.gaps:
            self.slot.array[start:stop].fill(0)
        for position in self.positions:
            if position not in self.written:
                self.view(position).fill(0)

    def send(self, slot: Slot, out: Array, accumulate: bool) -> None:
        """out = (out if `accumulate`) + scale * the sum over all ranks of what is in the slot."""
        collectives.reduce_scatter(self.group, slot, slot.array[: self.full], out, accumulate, self.streams)


def path_of(group: ParameterGroup, layout: Layout, slot: int | None = None) -> GradientPath:
    """The path of a group as it is trained now. slot: elements of its slot for full gradients, if known."""
    chosen = (path.choose(group, layout, slot) for path in PATHS)
    return next((path for path in chosen if path is not None), None) or WholeGradient(group, layout)
