"""A step of a sharded model without memory for its units: what its activations take, before the first step.

The modules run as they are, on a device that computes nothing (device/rehearsal.py). The units have their
whole parameters at hand, as addresses that nobody reads; nothing is gathered, reduced or built.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt import autograd, device, random, recompute
from shardrt.autograd import Function
from shardrt.device.rehearsal import RehearsalDevice
from shardrt.fsdp.group import OpenGradient, ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.nodes import Regather, Tape, mark, recorded
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module
from shardrt.nn.storage import LocalStorage

Array = Any


@dataclass(frozen=True)
class Rehearsed:
    """What a step took. waiting: units whose gradients waited to be reduced. held: by `unshard`."""

    device_bytes: int
    host_bytes: int
    waiting: frozenset[Unit]
    held: frozenset[Unit]


def rehearse(
    model: Module, units: list[Unit], layouts: dict[ParameterGroup, Layout], step: Callable
) -> Rehearsed:
    """Call `step()`, forward and backward of `model`, without computing; count the most it held at once.

    Beside the units' own buffers, that is: activations, gradients on their way, and on the host what is
    offloaded. Leaves the model, its units and the random numbers as they were.
    """
    here = RehearsalDevice(units[0].settings.mesh.device)
    stage = Stage(here, units)
    with ExitStack() as stack:
        stack.enter_context(device.use(here))
        stack.enter_context(random.at(random.state()))
        stack.enter_context(np.errstate(all="ignore"))  # what is found in untouched memory means nothing
        for unit in units:
            stack.enter_context(_on(stage, unit, layouts))
        for parameter in model.parameters():
            if isinstance(parameter.storage, LocalStorage):
                stack.enter_context(_untouched(parameter))
        stack.enter_context(buffers_as_they_are(model))
        step()
        return Rehearsed(here.peak_bytes(), here.host_bytes, frozenset(stage.waiting), frozenset(stage.held))


class Stage:
    """In place of a schedule: says yes to everything."""

    def __init__(self, here: RehearsalDevice, units: list[Unit]) -> None:
        self._device = here
        self.forward = self  # as enter, leave and abandon are concerned
        self.tape = self._new_tape()
        self._entered: list[Function | None] = []  # the nodes of units entered, which nothing else may hold
        self.waiting: set[Unit] = set()
        self.held: set[Unit] = set()
        self._unit_of = {group: unit for unit in units for group in unit.groups}

    @property
    def depth(self) -> int:
        """How many units are entered now, one inside the other."""
        return len(self._entered)

    def _new_tape(self) -> Tape:
        return Tape(lambda unit, tape: setattr(self, "tape", tape), lambda unit: None, self.complete)

    def enter(self, unit: Unit) -> None:
        """The parameters are there. A forward has a tape of its own: several may be in flight."""
        if self.depth == 0 and recompute.again() is None:
            self.tape = self._new_tape()
        self._entered.append(self.tape.unshard(unit) if autograd.is_grad_enabled() else None)

    def leave(self, unit: Unit, module: Module, outputs: list) -> list:
        """Nothing to release. Backward comes to the unit's node also where all in it is recomputed."""
        outputs = mark(unit, outputs, [Regather(unit, self.tape)] if recorded(unit, outputs) else [])
        self._entered.pop()
        return outputs

    def abandon(self, unit: Unit, depth: int) -> None:
        """Something raised in `unit`: go back to the depth that was before."""
        del self._entered[depth:]

    def hold(self, unit: Unit) -> None:
        """It has a slot of its own for a while."""
        self.held.add(unit)

    def let_go(self, unit: Unit) -> None:
        """Nothing to release."""

    def unshard_node(self, group: ParameterGroup) -> Function:
        """The one node of the group's unit."""
        return self.tape.unshard(self._unit_of[group])

    def open_gradient(self, group: ParameterGroup) -> OpenGradient:
        """Gradients that are written nowhere."""
        run = autograd.running()
        put_off = run is not None and (run.outermost.late is not None or run.outermost.second_half)
        if put_off or not group.choices.reduces:
            self.waiting.add(self._unit_of[group])
        group.open_gradient = OpenGradient(None, dict(enumerate(group.full_views)))
        return group.open_gradient

    def discard_gradient(self, group: ParameterGroup) -> None:
        """They are not wanted any more."""
        group.open_gradient = None

    def complete(self, unit: Unit) -> None:
        """All gradients of `unit` would be complete."""
        for group in unit.groups if unit.choices.reduces else ():
            group.open_gradient = None


@contextmanager
def _on(stage: Stage, unit: Unit, layouts: dict[ParameterGroup, Layout]) -> Iterator[None]:
    """Put `unit` on the stage inside a with block."""
    before = [(group, dict(vars(group))) for group in unit.groups]
    state = dict(vars(unit))
    unit.runs_under(stage)
    for group in unit.groups:
        group.layout, group.open_gradient = layouts[group], None
        group.trained = group.to_train(bool(unit.pending))
        whole = stage._device.buffer(layouts[group].total, stage._device.compute_dtype(group.key.param))
        group.full_views = group.views_of(whole)
    try:
        yield
    finally:
        vars(unit).clear()
        vars(unit).update(state)
        for group, attributes in before:
            vars(group).clear()
            vars(group).update(attributes)


@contextmanager
def buffers_as_they_are(model: Module) -> Iterator[None]:
    """What a with block writes to the model's buffers, running statistics say, is undone."""
    before = [(array, array.copy()) for _, array in model.named_buffers()]
    try:
        yield
    finally:
        for array, values in before:
            array[...] = values


@contextmanager
def _untouched(parameter: Any) -> Iterator[None]:
    """A parameter that no unit has gets values that nobody has made, inside a with block."""
    before, parameter.storage = parameter.storage, LocalStorage(parameter)
    parameter.storage._array = (
        device.current().buffer(parameter.size, parameter.dtype).reshape(parameter.shape)
    )
    try:
        yield
    finally:
        parameter.storage = before
