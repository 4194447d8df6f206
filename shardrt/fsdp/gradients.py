"""The full gradients that backward fills, and their way into the sharded ones.

A gradient of which no rank has written anything is None, and optimizers leave it alone. A rank that has
written one knows that there is one. Only a rank that has not needs the others' word, and it waits for that no
sooner than it is asked. So ranks do not meet where backward ends: they tell each other by one small message
in a stream of the hosts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from shardrt.comm.mesh import DeviceMesh
from shardrt.device import Event
from shardrt.device.arena import Slot
from shardrt.fsdp import collectives
from shardrt.fsdp.group import OpenGradient, ParameterGroup, Streams
from shardrt.fsdp.pieces import InPieces
from shardrt.fsdp.trained import Trained
from shardrt.fsdp.unit import Unit


class Gradients:
    """Slots for full gradients of the units of one schedule, and what the present backward has reduced."""

    def __init__(
        self,
        mesh: DeviceMesh,
        units: list[Unit],
        streams: Streams,
        trained: Trained,
        make_slots: Callable[[list[Unit], bool], None],
    ) -> None:
        self._units = units
        self._streams = streams
        self._trained = trained
        self._make_slots = make_slots
        self._hosts = None if mesh.size == 1 else (mesh.communicator("used"), mesh.stream("used"))
        self._accumulates: bool | None = None  # what the slots were made for; None: not made
        self._reduced: list[ParameterGroup] = []  # in the present backward
        self._wrote: dict[ParameterGroup, bool] = {}  # of those that had no gradient before it: this rank

    @property
    def accumulates(self) -> bool:
        """Whether each group has slots of its own, since some backward does not reduce."""
        return bool(self._accumulates)

    def have_slots(self, of_their_own: bool = False) -> None:
        """Slots for full gradients: one for each group once some backward does not reduce, else shared.

        of_their_own: a backward puts its reductions off. Raises RuntimeError then with set_world_invariant.
        """
        if of_their_own and any(unit.choices.micro_batches is not None for unit in self._units):
            raise RuntimeError(
                "backward(late=...): with set_world_invariant the gradient of each micro-batch has its own "
                "place in the tree of sums; leave late out"
            )
        accumulates = of_their_own or any(unit.accumulates for unit in self._units)
        changed = self._trained.changed
        if changed:
            self._trained.agree(self._streams)
        if changed or self._accumulates is None or (accumulates and not self._accumulates):
            self._streams.reduce.synchronize()  # nothing reads the slots that go
            self._make_slots(self._units, accumulates)
            self._accumulates = accumulates
            for group in (group for unit in self._units for group in unit.groups):
                if group.open_gradient is not None:
                    self._move(group)

    def _move(self, group: ParameterGroup) -> None:
        """What was accumulated goes to the memory made anew, where other parameters may have a place too."""
        before, group.open_gradient = group.open_gradient, None
        opened = self.open(group)
        if isinstance(before, InPieces):
            before.move(opened.target, self._streams.compute)
            return
        for position in before.written:
            now, then = opened.target(position)[0], before.views[position]
            self._streams.compute.submit(self._streams.device.copy, now, then)

    def open(self, group: ParameterGroup) -> OpenGradient | InPieces:
        """Memory for the full gradients of `group`, which backward is about to write."""
        if self._accumulates is None or self._trained.changed:
            self.have_slots()  # an op outside every forward
        if group.pieces is not None:
            dtype = group.arenas["gradients"].slots[0].array.dtype
            group.open_gradient = InPieces(group.pieces, self._streams.device, dtype)
        else:
            group.open_gradient = group.opened(self._slot(group))
        return group.open_gradient

    def _slot(self, group: ParameterGroup) -> Slot:
        """One that nobody reads any more."""
        slot = None if group.rows is not None else group.sum.slot
        arena = group.arenas["gradients"]
        if slot is not None:  # a pass that has raised may still have a reduction under way to it
            self._streams.compute.wait(group.gradient_ready)
        else:
            slot = arena.acquire()
        if slot is None:  # more units are in backward at once than was planned
            arena.grow()
            slot = arena.acquire()
        self._streams.compute.wait(slot.free)  # the reduction of the group that had the slot has read it
        return slot

    def discard(self, group: ParameterGroup) -> None:
        """Give back the slot of gradients that are not wanted any more."""
        slot, group.open_gradient = group.open_gradient.slot, None
        if slot is None:
            return
        self._streams.compute.record(slot.free)
        slot.give_back()

    def reduce(self, group: ParameterGroup) -> None:
        """Hand the full gradients of `group` to the reduce stream; it has opened them."""
        opened, group.open_gradient = group.open_gradient, None
        wrote = bool(opened.written)
        if isinstance(opened, InPieces):
            self._reduce_pieces(group, opened)
        else:
            _zero_unwritten(group, opened)
            with self._handing_over(opened.slot):
                collectives.reduce(group, opened.slot, self._streams, opened.written)
        group.sum.issued(group.trained)
        self._reduced.append(group)
        # Whether there is a gradient, this rank knows if it has written one now, or there was one before.
        # Only else are the others asked, at the end of backward.
        if group.finds_unused:
            group.sum.touched = True  # the reduction tells of each parameter
        elif group in self._wrote or not group.sum.is_touched():
            group.sum.touched = self._wrote[group] = wrote or self._wrote.get(group, False)

    def _reduce_pieces(self, group: ParameterGroup, opened: InPieces) -> None:
        """Make the next piece while the one before is reduced, where there are two slots."""
        for start, stop in opened.pieces:
            slot = self._slot(group)
            full = slot.array[: group.layout.shards * (stop - start)]
            with self._handing_over(slot):
                opened.write(start, stop, full, self._streams.compute)
                collectives.reduce(group, slot, self._streams, opened.written, (start, stop))

    @contextmanager
    def _handing_over(self, slot: Slot) -> Iterator[None]:
        """Give the slot back behind what is issued in a with block, also if that raises."""
        try:
            yield
        except BaseException:
            self._streams.reduce.record(slot.free)  # what was issued so far may still read it
            raise
        finally:
            slot.give_back()

    def left_out(self, unit: Unit) -> list[ParameterGroup]:
        """The groups of `unit` that are still to be reduced when backward ends."""
        if not unit.choices.reduces:
            return []
        # Accumulated before, and not used this time; or the sum is a tree, where zeros have their place too.
        return [
            group
            for group in unit.groups
            if group.open_gradient is not None
            or (group.trainable and group.sum.exact and group not in self._reduced)
        ]

    def end_backward(self) -> None:
        """Backward has ended: the optimizer and clipping read the gradients from here on."""
        for group in self._ask():
            if group.on_gradient is not None and group.sum.is_touched():
                self.tell_optimizer(group)  # it updates now what only other ranks have used
        for group in self._reduced:
            self._streams.compute.wait(group.gradient_ready)  # the reduction has put the sum into its place
        self._reduced = []

    def _ask(self) -> list[ParameterGroup]:
        """Tell the other ranks what this one wrote; gives the groups that wait for their word. Collective."""
        wrote, self._wrote = self._wrote, {}
        if self._hosts is None or not wrote:
            return []
        anybody, told = np.array(list(wrote.values()), np.int64), self._streams.device.host.new_event()
        communicator, stream = self._hosts
        communicator.all_reduce(anybody, op="max", stream=stream)
        stream.record(told)
        for place, group in enumerate(wrote):
            group.sum.told_touched = partial(_told, anybody, told, place)
        return [group for group, own in wrote.items() if not own]

    def tell_optimizer(self, group: ParameterGroup) -> None:
        """Let an optimizer that updates in backward have the gradient of `group`, if it is complete."""
        if group.on_gradient is not None and group.sum.complete:
            group.on_gradient()

    def reset(self) -> None:
        """Backward has raised: what is half written is discarded."""
        self._reduced, self._wrote = [], {}
        for unit in self._units:
            for group in unit.groups:
                if group.open_gradient is not None:
                    self.discard(group)


def _zero_unwritten(group: ParameterGroup, opened: OpenGradient) -> None:
    """Slots are reused: clear the padding, and the gradients of parameters that nothing used."""
    for start, stop in group.layout.padding if group.rows is None else group.rows.gaps:
        opened.slot.array[start:stop].fill(0)
    for position, view in opened.views.items():
        if position not in opened.written:
            view.fill(0)


def _told(anybody: np.ndarray, told: Event, place: int) -> bool:
    told.synchronize()
    return bool(anybody[place])
