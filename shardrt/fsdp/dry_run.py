"""dry_run: runs a step of a sharded model without computing, to find the memory that it takes.

The model's own code runs. Its units are replaced by clones with a schedule of their own, on a device whose
buffers are addresses without memory (device/simulated.py). Ranks do not communicate.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from shardrt import activation_offload, device, random
from shardrt.device.program import Free, Program, Take
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp.boundary import UnitBoundary
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.setup import build
from shardrt.fsdp.unit import Unit, root_of
from shardrt.nn.extents import Extents
from shardrt.nn.module import Module
from shardrt.nn.storage import LocalStorage

Array = Any


@dataclass(frozen=True)
class Taken:
    """The memory that a step took.

    Attributes:
        device_bytes, host_bytes: the peak of activations on the device, and of offloaded activations on the
            host.
        slots: (group, role) -> number of slots that the arena grew to.
        own_slots: units whose full gradients had slots of their own.
    """

    device_bytes: int
    host_bytes: int
    slots: dict[tuple[ParameterGroup, str], int]
    own_slots: frozenset[Unit]


def dry_run(model: Module, units: list[Unit], step: Callable[[], Any]) -> Taken:
    """Call `step()`, forward and backward of `model`, without computing; give the memory that it took.

    The model, its units and the random numbers stay as they were. memory.connect must have made the
    communicators that the units need.
    """
    here = SimulatedDevice(root_of(units).settings.mesh.device, dry_run=True)
    with ExitStack() as stack:
        stack.callback(activation_offload.forget, here)
        stack.enter_context(root_of(units).settings.mesh.on(here))
        stack.enter_context(device.use(here))
        stack.enter_context(random.at(random.state()))
        clones = stack.enter_context(_cloned(units))
        for parameter in model.parameters():
            if isinstance(parameter.storage, LocalStorage):
                stack.enter_context(_without_values(parameter, here))
        for module in model.modules():
            stack.enter_context(_with_other_buffers(module, here))
        step()
        return _taken(here, units, clones)


def _taken(here: SimulatedDevice, units: list[Unit], clones: list[Unit]) -> Taken:
    slots = {
        (group, role): len(arena.slots)
        for unit, clone in zip(units, clones, strict=True)
        for group, cloned in zip(unit.groups, clone.groups, strict=True)
        for role, arena in cloned.arenas.items()
    }
    waited = frozenset(
        unit
        for unit, clone in zip(units, clones, strict=True)
        if clone.schedule and clone.schedule.gradients.own_slots
    )
    return Taken(here.peak_bytes(), _most(here.program, "offloaded activations"), slots, waited)


def _most(program: Program, category: str) -> int:
    """The peak of bytes that were allocated for this category."""
    sizes: dict[int, int] = {}  # start address -> bytes
    present = peak = 0
    for item in program.items:
        if isinstance(item, Take) and item.category == category:
            sizes[item.memory.start] = item.memory.stop - item.memory.start
            present += sizes[item.memory.start]
            peak = max(peak, present)
        elif isinstance(item, Free):
            present -= sizes.pop(item.start, 0)
    return peak


class _NoValues:
    """Replaces the storage from before sharding: the shard needs no values."""

    materialised = False

    def give(self, part: Extents, out: Array) -> None:
        """Leave `out` as it is."""


def _clone(unit: Unit) -> Unit:
    """An unbuilt unit of the same modules with the same choices. It takes over the parameters."""
    keyed = [(parameter, group.key) for group in unit.groups for parameter in group.parameters]
    clone = Unit(unit.modules, keyed, unit.settings, build, unit.choices)
    clone.observers = unit.observers
    for group, copy in zip(unit.groups, clone.groups, strict=True):
        copy.sharded_gradient = group.sharded_gradient.like_new()
    return clone


@contextmanager
def _cloned(units: list[Unit]) -> Iterator[list[Unit]]:
    """Replace the units of a model by clones without values inside a with block."""
    boundaries = [unit.modules[0].around(UnitBoundary) for unit in units]
    clones = [_clone(unit) for unit in units]
    for boundary, clone in zip(boundaries, clones, strict=True):
        boundary.unit = clone
        for group in clone.groups:
            group.initial = [_NoValues()] * len(group.parameters)
    try:
        yield clones
    finally:
        for boundary, unit in zip(boundaries, units, strict=True):
            boundary.unit = unit
            for group in unit.groups:
                group.take_parameters()


@contextmanager
def _without_values(parameter: Any, here: SimulatedDevice) -> Iterator[None]:
    """Give a parameter that no unit has an array of the simulated device inside a with block."""
    array = here.buffer(parameter.size, parameter.dtype).reshape(parameter.shape)
    before, parameter.storage = parameter.storage, parameter.new_storage(array)
    try:
        yield
    finally:
        parameter.storage = before


@contextmanager
def _with_other_buffers(module: Module, here: SimulatedDevice) -> Iterator[None]:
    """Replace the module's buffers (running statistics, say) inside a with block: they must not change."""
    before = dict(module._buffers)
    for name, array in before.items():
        setattr(module, name, here.buffer(array.size, array.dtype).reshape(array.shape))
    try:
        yield
    finally:
        for name, array in before.items():
            setattr(module, name, array)
