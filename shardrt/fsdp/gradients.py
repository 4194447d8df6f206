"""The full gradients that backward fills, and their way into the sharded ones.

A gradient of which no rank has written anything is None, and optimizers leave it alone. A rank that has
written one knows that there is one. Only a rank that has not needs the others' word, and it waits for that no
sooner than it is asked. So ranks do not meet where backward ends: they tell each other by one small message
in a stream of the hosts.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from shardrt.comm.mesh import DeviceMesh
from shardrt.device import Event
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.sharded_gradient import Streams
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
            groups = [group for unit in self._units for group in unit.groups]
            opened = [(group, group.gradient_path) for group in groups if group.accumulates]
            self._make_slots(self._units, accumulates)
            self._accumulates = accumulates
            for group, before in opened:  # what was accumulated goes to the new memory
                group.gradient_path.open()
                before.move(group.gradient_path.target)

    def open(self, group: ParameterGroup) -> None:
        """Backward is about to write full gradients of `group`: have memory for them."""
        if self._accumulates is None or self._trained.changed:
            self.have_slots()  # an op outside every forward
        group.gradient_path.open()

    def reduce(self, group: ParameterGroup) -> None:
        """Hand the full gradients of `group` to the reduce stream."""
        path, own = group.gradient_path, group.sharded_gradient
        path.reduce()
        own.issued(group.trained)
        self._reduced.append(group)
        # Whether there is a gradient, this rank knows if it has written one now, or there was one before.
        # Only else are the others asked, at the end of backward.
        if group.finds_unused:
            own.wrote_gradient = True  # the reduction tells of each parameter
        elif group in self._wrote or not own.any_rank_wrote_gradient():
            own.wrote_gradient = self._wrote[group] = bool(path.written) or self._wrote.get(group, False)

    def left_out(self, unit: Unit) -> list[ParameterGroup]:
        """The groups of `unit` that are still to be reduced when backward ends."""
        if not unit.choices.reduces:
            return []
        # Accumulated before, and not used this time; or the sum is a tree, where zeros have their place too.
        return [
            group
            for group in unit.groups
            if group.accumulates
            or (group.trainable and group.sharded_gradient.fixed_tree and group not in self._reduced)
        ]

    def end_backward(self) -> None:
        """Backward has ended: the optimizer and clipping read the gradients from here on."""
        for group in self._ask():
            if group.on_gradient is not None and group.sharded_gradient.any_rank_wrote_gradient():
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
            group.sharded_gradient.others_wrote = partial(_told, anybody, told, place)
        return [group for group, own in wrote.items() if not own]

    def tell_optimizer(self, group: ParameterGroup) -> None:
        """Let an optimizer that updates in backward have the gradient of `group`, if it is complete."""
        if group.on_gradient is not None and group.sharded_gradient.complete:
            group.on_gradient()

    def reset(self) -> None:
        """Backward has raised: what is half written is discarded."""
        self._reduced, self._wrote = [], {}
        for unit in self._units:
            for group in unit.groups:
                if group.accumulates:
                    group.gradient_path.discard()


def _told(anybody: np.ndarray, told: Event, place: int) -> bool:
    told.synchronize()
    return bool(anybody[place])
