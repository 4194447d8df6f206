"""Gradients: opens and reduces the full gradients of all groups, and finds out which gradients exist.

A gradient that no rank has written is None, and optimizers skip it. A rank knows the gradients that it has
written itself. For others it needs the other ranks' answer, and waits only when such a gradient is asked for.
So ranks don't wait for each other where backward ends: one small all-reduce in a host stream carries the
answers.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from shardrt.comm.ranks import Mesh
from shardrt.device import Event
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.trainable import TrainableSet
from shardrt.fsdp.unit import Unit


class Gradients:
    """The full gradients of one schedule's units, and the groups that the present backward has reduced."""

    def __init__(
        self,
        mesh: Mesh,
        units: list[Unit],
        streams: Streams,
        trained: TrainableSet,
        make_slots: Callable[[list[Unit], bool], None],
    ) -> None:
        self._units = units
        self._streams = streams
        self._trained = trained
        self._make_slots = make_slots
        self._hosts = None if mesh.size == 1 else (mesh.communicator("used"), mesh.stream("used"))
        self._own_slots: bool | None = None  # the slots were made to accumulate; None: no slots yet
        self._reduced: list[ParameterGroup] = []  # in the present backward
        # Reduced groups without a gradient before this backward -> whether this rank has written one.
        self._wrote: dict[ParameterGroup, bool] = {}

    @property
    def own_slots(self) -> bool:
        """Whether each group has a slot of its own, since some backward does not reduce."""
        return bool(self._own_slots)

    def have_slots(self, own_slots: bool = False) -> None:
        """Make slots for full gradients if they are missing or no longer fit.

        Groups share slots until some backward does not reduce; then each group gets a slot of its own.

        own_slots: a backward defers its reductions (DeferredGradients).

        Raises RuntimeError with set_world_invariant.
        """
        if own_slots and any(unit.choices.micro_batches is not None for unit in self._units):
            raise RuntimeError(
                "backward(deferred=...): with set_world_invariant the gradient of each micro-batch has its "
                "own place in the tree of sums; leave `deferred` out"
            )
        own_slots = own_slots or any(unit.needs_own_slots for unit in self._units)
        changed = self._trained.changed
        if changed:
            self._trained.agree(self._streams)
        if changed or self._own_slots is None or (own_slots and not self._own_slots):
            self._streams.reduce.synchronize()  # reductions no longer read the slots that are replaced
            groups = [group for unit in self._units for group in unit.groups]
            opened = [(group, group.gradient_path) for group in groups if group.has_unreduced_gradient]
            self._make_slots(self._units, own_slots)
            self._own_slots = own_slots
            for group, before in opened:  # copy accumulated gradients to the new memory
                group.gradient_path.open()
                before.move(group.gradient_path.target)

    def open(self, group: ParameterGroup) -> None:
        """Take memory for full gradients of `group` before backward writes them."""
        if self._own_slots is None or self._trained.changed:
            self.have_slots()  # an op outside of every forward uses a parameter
        group.gradient_path.open()

    def reduce(self, group: ParameterGroup) -> None:
        """Hand the full gradients of `group` to the reduce stream."""
        path, summed = group.gradient_path, group.sharded_gradient
        path.reduce()
        summed.issued(group.trained)
        self._reduced.append(group)
        # This rank knows that the gradient exists if this backward has written it, or it existed before.
        # Otherwise `_ask` asks the other ranks at the end of backward; this waits for what it asked before.
        if group.finds_unused:
            summed.known_written = True  # the reduction itself carries the answer for each parameter
        elif group in self._wrote or not summed.wait_whether_written():
            summed.known_written = self._wrote[group] = bool(path.written) or self._wrote.get(group, False)

    def left_out(self, unit: Unit) -> list[ParameterGroup]:
        """The groups of `unit` that are still to be reduced when backward ends.

        They have gradients of an earlier backward under no_sync and were not used in this one. Or they add by
        a fixed tree: it has a leaf for every micro-batch, even if the gradient is zero.
        """
        if not unit.choices.reduces:
            return []
        return [
            group
            for group in unit.groups
            if group.has_unreduced_gradient
            or (group.trainable and group.sharded_gradient.fixed_tree and group not in self._reduced)
        ]

    def end_backward(self) -> None:
        """End a backward: the optimizer and clipping may read the gradients from here on."""
        for group in self._ask():
            if group.on_gradient is not None and group.sharded_gradient.wait_whether_written():
                self.notify_optimizer(group)  # an optimizer in backward: only other ranks wrote this gradient
        for group in self._reduced:
            self._streams.compute.wait(group.gradient_ready)  # the reduction has put the sum into its place
        self._reduced = []

    def _ask(self) -> list[ParameterGroup]:
        """Exchange which groups' gradients were written; gives those that this rank has not. Collective."""
        wrote, self._wrote = self._wrote, {}
        if self._hosts is None or not wrote:
            return []
        answers, answered = np.array(list(wrote.values()), np.int64), self._streams.device.host.new_event()
        communicator, stream = self._hosts
        communicator.all_reduce(answers, op="max", stream=stream)
        stream.record(answered)
        for place, group in enumerate(wrote):
            group.sharded_gradient.ask_others = partial(_answer, answers, answered, place)
        return [group for group, here in wrote.items() if not here]

    def notify_optimizer(self, group: ParameterGroup) -> None:
        """Pass the gradient of `group`, if complete, to an optimizer that updates during backward."""
        if group.on_gradient is not None and group.sharded_gradient.complete:
            group.on_gradient()

    def reset(self) -> None:
        """After a backward has raised: discard unreduced gradients, of earlier backwards, too. Keep sums."""
        # Ranks did not exchange who wrote these gradients, and all must give the same answer.
        for summed in (group.sharded_gradient for group in self._wrote):
            summed.known_written |= summed.reductions > 0  # zero_grad may have dropped the sum
        self._reduced, self._wrote = [], {}
        for unit in self._units:
            for group in unit.groups:
                if group.has_unreduced_gradient:
                    group.gradient_path.discard()


def _answer(answers: np.ndarray, answered: Event, place: int) -> bool:
    answered.synchronize()  # the all-reduce has filled `answers`
    return bool(answers[place])
