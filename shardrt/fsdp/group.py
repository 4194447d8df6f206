"""ParameterGroup: the parameters of a unit that lie in one flat buffer, and the storage behind them.

They have one element type, and when they were sharded they were all trained or all frozen: a group of frozen
parameters costs no gradient memory and is never reduced. What is frozen or unfrozen later stays in its group
(trained.py). A group holds arrays and knows where things are. The schedule decides when anything happens
to it, and collectives.py moves it. A group knows of them only what `Runtime` says.

Until the outermost unit is known and the model is built (setup.py), an UnbuiltGroup is in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardrt import autograd, dtypes
from shardrt.autograd import WRITTEN, Edge, Fill, Function
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, Event, host
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.policy import Choices, Settings
from shardrt.fsdp.process_groups import Axes, ProcessGroups
from shardrt.fsdp.sharded_gradient import Streams
from shardrt.nn.parameter import Parameter
from shardrt.nn.runs import Part
from shardrt.nn.storage import HostPlacement, LocalStorage, LowPrecisionCopy, Storage, read_only

Array = Any


@dataclass(frozen=True)
class GroupKey:
    """What parameters must share to lie in one buffer."""

    trainable: bool  # when they were sharded
    dtype: str  # of the shard: float32 or float64, which the optimizer updates, or an integer type
    param: str  # gathered and computed in
    reduce: str  # gradients are sent in
    cut: Axes = ()  # the axes of the mesh along which modules, and these with them, are cut besides
    partial: Axes = ()  # those along which each rank's gradient is a part of a sum
    # The name of a parameter that two stages of a pipeline have: alone in its buffer, since stages name what
    # they have in another order, and sums and copies of the two go from shard to shard.
    tied: str = ""

    def __str__(self) -> str:
        kinds = [self.param]
        if self.cut:
            kinds.append("cut")
        if self.partial:
            kinds.append("partial")
        if not self.trainable:
            kinds.append("frozen")
        if self.tied:
            kinds.append(f"tied {self.tied}")
        return ", ".join(kinds)


GRADIENT_ROLES = ("gradients", "packed", "reduce_wire", "download")  # arenas without which nothing is reduced


class Runtime(Protocol):
    """What a group asks of the schedule, which is handed over when the model is built."""

    control: Communicator
    streams: Streams

    def unshard_node(self, group: "ParameterGroup") -> Function: ...

    def readable(self, group: "ParameterGroup") -> bool: ...

    def open_gradient(self, group: "ParameterGroup") -> None: ...

    def readers_done(self, group: "ParameterGroup") -> None: ...

    def shards_written(self, group: "ParameterGroup") -> None: ...

    def awaits_backward(self, group: "ParameterGroup") -> bool: ...


class _Group(Storage):
    """What is known of a group before it is built.

    unit: the Unit that it belongs to. position: of each parameter among them, by id.
    trained: positions of those that have gradients. finds_unused: as choices.find_unused, since the last
    forward began.
    """

    def __init__(self, unit: Any, key: GroupKey, parameters: list[Parameter]) -> None:
        self.unit = unit
        self.key = key
        self.parameters = parameters
        self.position = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.trained = frozenset(range(len(parameters)) if key.trainable else ())
        self.finds_unused = False
        self.sharded_gradient = unit.settings.offload.sharded_gradient()
        self.label = ""  # for messages and traces: the unit, and what distinguishes this group in it
        self.called = ""  # its name in collectives: the label, and what is trained if that has changed

    @property
    def settings(self) -> Settings:
        """Of the unit."""
        return self.unit.settings

    @property
    def choices(self) -> Choices:
        """Of the unit."""
        return self.unit.choices

    @property
    def placement(self) -> HostPlacement:
        return self.unit.settings.placement

    def take_parameters(self) -> None:
        """Be the storage of its parameters."""
        for parameter in self.parameters:
            parameter.storage = self

    @property
    def trainable(self) -> bool:
        """Whether it has gradients."""
        return bool(self.trained)

    def to_train(self, on_tape: bool) -> frozenset[int]:
        """Positions of the parameters that should have gradients in the forward that begins.

        What was frozen while a gradient was there, or a tape led to it (on_tape), has gradients until that is
        gone. Raises TypeError, naming it, for a parameter of integers.
        """
        wanted = frozenset(i for i, parameter in enumerate(self.parameters) if parameter.requires_grad)
        if wanted and not dtypes.floating(np.dtype(self.key.dtype)):
            name = self.parameters[min(wanted)].name
            raise TypeError(f"parameter {name!r} is {self.key.dtype} and can't require a gradient")
        return wanted | self.trained if on_tape or self.has_partial_gradient else wanted

    def train(self, positions: frozenset[int], finds_unused: bool) -> None:
        """Have gradients for the parameters at these positions from now on. Frees memory, but makes none."""
        self.trained, self.finds_unused = positions, finds_unused

    @property
    def accumulates(self) -> bool:
        """Whether full gradients are there that are not reduced yet."""
        return False

    @property
    def has_partial_gradient(self) -> bool:
        """Whether anything of a gradient is there since the last zero_grad."""
        return self.accumulates or self.sharded_gradient.reductions > 0

    @property
    def exact_norm(self) -> bool:
        return self.sharded_gradient.fixed_tree


class _NoValues:
    """In place of the storage that a parameter had before it was sharded."""

    materialised = False

    def give(self, part: Part, out: Array) -> None:
        """There are none."""


class UnbuiltGroup(_Group):
    """A group of a model that is not built yet. What needs its shard builds the model, collectively.

    initial: the storages that the parameters had before.
    """

    def __init__(self, unit: Any, key: GroupKey, parameters: list[Parameter]) -> None:
        super().__init__(unit, key, parameters)
        self.initial: list[LocalStorage | _NoValues] = [parameter.storage for parameter in parameters]
        self.take_parameters()

    def starts_without_values(self) -> None:
        """Leave the shard as it is when the model is built."""
        self.initial = [_NoValues()] * len(self.parameters)

    def _built(self, parameter: Parameter) -> "ParameterGroup":
        self.unit.built()
        return parameter.storage

    @property
    def shard(self) -> Array:
        name = self.parameters[0].name
        raise RuntimeError(f"parameter {name!r} has no shard yet: shardrt.fsdp.units(model) makes them")

    @property
    def gradient(self) -> None:
        return None

    def zero_grad(self) -> None:
        """There is no gradient."""

    def range_of(self, parameter: Parameter) -> tuple[int, int]:
        return self._built(parameter).range_of(parameter)

    def part_of(self, parameter: Parameter) -> Part:
        return self._built(parameter).part_of(parameter)

    def full(self, parameter: Parameter) -> Array:
        raise _not_gathered(parameter)

    def assign(self, parameter: Parameter, values: Any) -> None:
        raise _not_lent(parameter)

    def edge(self, parameter: Parameter) -> Edge:
        return self._built(parameter).edge(parameter)

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        return self._built(parameter).gradient_target(parameter)


class ParameterGroup(_Group):
    """One flat buffer of a unit, built.

    arenas: by role, see buffers.py.
    shard: where this rank's piece of the parameters goes; it is filled here.
    shard_in_slot: it is a part of the gathered slot, so that gathering copies nothing.
    slot_shared: other ranks read the gathered slot, too.
    low_precision_copy: what it keeps of the shard in 16 bits, in a gathered slot that is its own.
    transfer: gathers the group.
    """

    def __init__(
        self,
        group: UnbuiltGroup,
        layout: Layout,
        ranks: ProcessGroups,
        device: Device,
        arenas: dict[str, Arena],
        shard: Array,
        *,
        shard_in_slot: bool,
        slot_shared: bool,
        low_precision_copy: LowPrecisionCopy | None,
        transfer: "Callable[[ParameterGroup, Slot, Streams], None]",
    ) -> None:
        super().__init__(group.unit, group.key, group.parameters)
        self.trained, self.finds_unused = group.trained, group.finds_unused
        self.label, self.called = group.label, group.called
        self.sharded_gradient = group.sharded_gradient
        self.sharded_gradient.label = self.label
        self.sharded_gradient.ready = device.new_event()
        self.layout = layout
        self.ranks = ranks
        self.arenas = arenas
        self.shard_in_slot = shard_in_slot
        self.slot_shared = slot_shared
        self.low_precision_copy = low_precision_copy
        self.copy_is_fresh = False  # what is in there is the shard as it is
        self.transfer = transfer
        self.gradient_path: GradientPath | None = None  # of its full gradients, once there is memory for them
        self.uploaded = device.new_event()  # the shard has come from the host
        self.slot: Slot | None = None  # where the gathered parameters are, or will be
        self.views: tuple[Array, ...] = ()
        self.full_views: tuple[Array, ...] | None = None  # full float32 values, lent by full_parameters
        self._device = device
        self._shard = shard
        self._held = [layout.held(entry, ranks.rank) for entry in layout.entries]
        for storage, (start, stop, part) in zip(group.initial, self._held, strict=True):
            storage.give(part, shard[start:stop])
        host.drop(shard)  # where it is a mapped file
        self.take_parameters()

    @property
    def runtime(self) -> Runtime:
        """The schedule."""
        return self.unit.schedule

    @property
    def communicator(self) -> Communicator | None:
        return self.ranks.holders

    @property
    def holders(self) -> Any:
        return self.ranks.holding

    @property
    def gradient_ready(self) -> Event:
        return self.sharded_gradient.ready

    @property
    def everyone(self) -> Communicator:
        return self.runtime.control

    def train(self, positions: frozenset[int], finds_unused: bool) -> None:
        super().train(positions, finds_unused)
        if not (finds_unused and positions):
            self.sharded_gradient.forget_uses()
        if not positions:
            self.sharded_gradient.release()
            self.gradient_path = None
            for role in GRADIENT_ROLES:
                self.arenas.pop(role, None)

    @property
    def accumulates(self) -> bool:
        return self.gradient_path is not None and self.gradient_path.is_open

    @property
    def reduced(self) -> bool:
        return self.choices.reduces and self.sharded_gradient.complete

    # -- gathered parameters

    def attach(self, slot: Slot) -> None:
        """The parameters are, or will be, in this slot."""
        self.slot = slot
        self.views = self.views_in(slot)

    def detach(self) -> Slot:
        """The parameters are in no slot any more; gives the slot."""
        slot, self.slot, self.views = self.slot, None, ()
        return slot

    def views_in(self, slot: Slot) -> tuple[Array, ...]:
        """As views_of, made once for each slot."""
        if self not in slot.views:
            slot.views[self] = self.views_of(slot.array)
        return slot.views[self]

    def views_of(self, array: Array) -> tuple[Array, ...]:
        """Each parameter's part of a flat buffer, in its shape."""
        return tuple(array[entry.offset : entry.stop].reshape(entry.shape) for entry in self.layout.entries)

    # -- the storage contract

    @property
    def shard(self) -> Array:
        return self._shard

    @property
    def gradient(self) -> Array | None:
        self.refuse_incomplete(self.parameters)
        if self.accumulates and autograd.running() is None:
            raise RuntimeError(
                f"unit {self.label}: its gradients were accumulated under no_sync and not reduced yet; "
                "run the last backward of a step, and its late.run(), outside no_sync"
            )
        self.sharded_gradient.refuse_incomplete()
        own = self.sharded_gradient
        return own.arrays[0] if own.any_rank_wrote_gradient() else None

    def has_gradient(self, parameter: Parameter) -> bool:
        if self.gradient is None:
            return False
        return self.sharded_gradient.has(self.position[id(parameter)], self._device)

    def zero_grad(self) -> None:
        self.applied = False
        own = self.sharded_gradient
        own.forget()
        # Not where backward writes there itself: it says nothing before.
        if own.arrays and not own.slots and not self.placement.gradients:
            self._device.lend_pages(own.arrays[0])
        if self.accumulates:
            self.gradient_path.discard()

    def new_state(self, name: str, dtype: Any = None) -> Array:
        count, dtype = self.layout.shard_size, self._shard.dtype if dtype is None else dtype
        if self.placement.optimizer_state:
            array = host.buffer(self._device, count, dtype, self.placement.directory)
        else:
            array = self._device.buffer(count, dtype)
        return self._device.called(array, "optimizer state", self.label)

    def before_write(self) -> None:
        if self.slot_shared and (self.shard_in_slot or self.low_precision_copy is not None):
            self.runtime.readers_done(self)

    def modified(self, copy_too: bool = False) -> None:
        super().modified(copy_too)
        self.copy_is_fresh = self.copy_is_fresh and copy_too
        self.runtime.shards_written(self)

    def may_write_copy(self) -> bool:
        return self.low_precision_copy is not None and not self.runtime.awaits_backward(self)

    def owner(self, first: bool) -> bool:
        return self.ranks.owner

    def range_of(self, parameter: Parameter) -> tuple[int, int]:
        return self._held[self.position[id(parameter)]][:2]

    def part_of(self, parameter: Parameter) -> Part:
        return self._held[self.position[id(parameter)]][2]

    def full(self, parameter: Parameter) -> Array:
        if self.full_views is not None:
            return self.full_views[self.position[id(parameter)]]
        # Other ranks may read it, or it is forgotten after the forward: a write would be lost or wrong.
        return read_only(self.lent(parameter))

    def lent(self, parameter: Parameter) -> Array:
        lent = self.lent_bits(parameter)
        if not self.gathers_bits:
            return lent
        numbers = self._device.empty(lent.shape, self._device.compute_dtype(self.key.param))
        self._device.kernels.cast.unpack(lent.reshape(-1), numbers.reshape(-1), self.key.param)
        return numbers

    def lent_bits(self, parameter: Parameter) -> Array:
        position = self.position[id(parameter)]
        if self.full_views is not None:
            return self.full_views[position]
        if self.runtime.readable(self):
            return self.views[position]
        raise _not_gathered(parameter)

    def value_dtype(self, parameter: Parameter) -> np.dtype:
        there = self.full_views or self.views
        if there and self.gathers_bits:
            return self._device.compute_dtype(self.key.param)
        return there[0].dtype if there else parameter.dtype

    @property
    def gathers_bits(self) -> bool:
        kind = self.key.param
        if kind not in dtypes.LOW or self.full_views is not None:
            return False
        return self._device.gathered_dtype(kind) == dtypes.storage(kind)

    def assign(self, parameter: Parameter, values: Any) -> None:
        if self.full_views is None:
            raise _not_lent(parameter)
        self.full_views[self.position[id(parameter)]][...] = values

    def edge(self, parameter: Parameter) -> Edge:
        return Edge(self.runtime.unshard_node(self), 0, parameter)

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        path, position = self._opened_for(parameter)
        return *path.target(position), WRITTEN

    def put_rows(self, parameter: Parameter, fill: Fill) -> Any:
        path, position = self._opened_for(parameter)
        path.put_rows(position, fill)
        return WRITTEN

    def _opened_for(self, parameter: Parameter) -> tuple[GradientPath, int]:
        """The path of full gradients, open, and the position of a parameter of which there is to be one."""
        position = self.position[id(parameter)]
        if position not in self.trained:
            raise RuntimeError(
                f"parameter {parameter.name!r} was unfrozen after the forward had begun that used it; set "
                "requires_grad before"
            )
        if not self.accumulates:
            self.runtime.open_gradient(self)
        return self.gradient_path, position


def _not_gathered(parameter: Parameter) -> RuntimeError:
    return RuntimeError(
        f"parameter {parameter.name!r} is sharded: it can be neither read nor changed as a whole "
        "outside the forward of its unit. This rank's piece is parameter.shard; "
        "`with shardrt.fsdp.full_parameters(module)` lends all of it, and "
        "shardrt.checkpoint.full_state_dict(model) gives rank 0 the weights of the model"
    )


def _not_lent(parameter: Parameter) -> RuntimeError:
    return RuntimeError(
        f"parameter {parameter.name!r} is sharded: change it inside "
        "`with shardrt.fsdp.full_parameters(module, writeback=True)`, or by load_state_dict"
    )
