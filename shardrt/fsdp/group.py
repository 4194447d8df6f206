"""ParameterGroup: the parameters of a unit that lie in one flat buffer, and the memory behind them.

The parameters of a group share an element type. When they were sharded, all of them were trained or all were
frozen: a frozen group needs no gradient memory and is never reduced. A parameter that is frozen or unfrozen
later stays in its group (options/trained.py).

A group holds arrays and knows where each parameter lies. The schedule, which a group sees only as `Runtime`,
decides when the group is gathered or reduced. Its transfer and its gradient path move the data.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardrt import autograd, dtypes
from shardrt.autograd import WRITTEN, Edge, Fill, Function
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, Event
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.policy import Choices, Settings
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.roles import gradient_roles
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.transfer import transfer_of
from shardrt.nn.extents import Extents
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LowPrecisionCopy, Offloaded, Storage, read_only

__all__ = ["ParameterGroup"]

Array = Any


@dataclass(frozen=True)
class GroupKey:
    """The properties that all parameters of one flat buffer share."""

    trainable: bool  # as requires_grad was when the unit was sharded
    dtype: str  # of the shard, which the optimizer updates: float32, float64 or an integer type
    param: str  # type in which the parameters are gathered and computed with
    reduce: str  # type in which gradients are sent
    split_axes: MeshLayout = ()  # mesh axes along which modules were split before (tensor parallelism, say)
    partial: MeshLayout = ()  # mesh axes along which each rank's gradient is one term of a sum
    # The name of a parameter that two pipeline stages share, else "". It is alone in its buffer:
    # the stages list their parameters in different orders, but sum and copy this one from shard to shard.
    tied: str = ""

    def __str__(self) -> str:
        kinds = [self.param]
        if self.split_axes:
            kinds.append("cut")
        if self.partial:
            kinds.append("partial")
        if not self.trainable:
            kinds.append("frozen")
        if self.tied:
            kinds.append(f"tied {self.tied}")
        return ", ".join(kinds)


class Runtime(Protocol):
    """The part of the schedule that a group calls. A group has it once the model is built."""

    control: Communicator
    streams: Streams

    def post_backward_node(self, group: "ParameterGroup") -> Function: ...

    def ensure_readable(self, group: "ParameterGroup") -> bool: ...  # gathers it if backward needs it

    def open_gradient(self, group: "ParameterGroup") -> None: ...

    def readers_done(self, group: "ParameterGroup") -> None: ...  # no other rank reads this shard any more

    def shards_written(self, group: "ParameterGroup") -> None: ...  # by the optimizer or a load

    def awaits_backward(self, group: "ParameterGroup") -> bool: ...  # a forward has run, its backward has not


class _Group(Storage):
    """The state of a group that exists before it is built.

    unit: the Unit that owns the group.
    position: id of a parameter -> its index in `parameters`.
    trained: positions of the parameters that have gradients.
    finds_unused: choices.find_unused, as it was when the last forward began.
    """

    def __init__(
        self, unit: Any, key: GroupKey, parameters: list[Parameter], sharded_gradient: ShardedGradient
    ) -> None:
        self.unit = unit
        self.key = key
        self.parameters = parameters
        self.position = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.trained = frozenset(range(len(parameters)) if key.trainable else ())
        self.finds_unused = False
        self.sharded_gradient = sharded_gradient
        self.label = ""  # for messages and traces: the unit's name, with the key if it has several groups
        self.tag = ""  # tag of its collectives: the label, and which parameters train if that has changed

    @property
    def settings(self) -> Settings:
        """The settings of the unit."""
        return self.unit.settings

    @property
    def choices(self) -> Choices:
        """The choices of the unit."""
        return self.unit.choices

    @property
    def offloaded(self) -> Offloaded:
        return self.unit.settings.offloaded

    def take_parameters(self) -> None:
        """Become the storage of the parameters."""
        for parameter in self.parameters:
            parameter.storage = self

    @property
    def trainable(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self.trained)

    def to_train(self, on_tape: bool) -> frozenset[int]:
        """Positions of the parameters that have gradients in the forward that begins.

        A parameter may be frozen while it has a gradient, or while a recorded forward uses it (on_tape). It
        then keeps getting gradients until the gradient or the tape is gone.

        Raises TypeError for an integer parameter that requires a gradient.
        """
        wanted = frozenset(i for i, parameter in enumerate(self.parameters) if parameter.requires_grad)
        if wanted and not dtypes.floating(np.dtype(self.key.dtype)):
            name = self.parameters[min(wanted)].name
            raise TypeError(f"parameter {name!r} is {self.key.dtype}; only floats can require a gradient")
        return wanted | self.trained if on_tape or self.has_partial_gradient else wanted

    def train(self, positions: frozenset[int], finds_unused: bool) -> None:
        """Set which parameters have gradients from now on. Frees memory that is not needed."""
        self.trained, self.finds_unused = positions, finds_unused

    @property
    def has_unreduced_gradient(self) -> bool:
        """Whether the group holds full gradients that are not reduced yet."""
        return False

    @property
    def has_partial_gradient(self) -> bool:
        """Whether backward has added to a gradient since the last zero_grad, reduced or not."""
        return self.has_unreduced_gradient or self.sharded_gradient.reductions > 0

    @property
    def exact_norm(self) -> bool:
        return self.sharded_gradient.fixed_tree


class UnbuiltGroup(_Group):
    """A group of a model that is not built yet. An access that needs the shard builds it. Collective.

    initial: the LocalStorages that the parameters had before sharding, in order.
    """

    def __init__(self, unit: Any, key: GroupKey, parameters: list[Parameter]) -> None:
        super().__init__(unit, key, parameters, unit.settings.offload.sharded_gradient())
        self.initial: list[Any] = [parameter.storage for parameter in parameters]
        self.take_parameters()

    def _built(self, parameter: Parameter) -> "ParameterGroup":
        self.unit.built()
        return parameter.storage

    @property
    def shard(self) -> Array:
        name = self.parameters[0].name
        raise RuntimeError(f"parameter {name!r} has no shard yet; call shardrt.fsdp.units(model) to make it")

    @property
    def gradient(self) -> None:
        return None

    def zero_grad(self) -> None:
        """Do nothing: an unbuilt group has no gradient."""

    def range_of(self, parameter: Parameter) -> tuple[int, int]:
        return self._built(parameter).range_of(parameter)

    def extents_of(self, parameter: Parameter) -> Extents:
        return self._built(parameter).extents_of(parameter)

    def full(self, parameter: Parameter) -> Array:
        raise _not_gathered(parameter)

    def assign(self, parameter: Parameter, values: Any) -> None:
        raise _not_lent(parameter)

    def edge(self, parameter: Parameter) -> Edge:
        return self._built(parameter).edge(parameter)

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        return self._built(parameter).gradient_target(parameter)


@dataclass(frozen=True, eq=False)
class GroupMemory:
    """What setup.py has planned and allocated for one group.

    arenas: role (see roles.py) -> arena. Those of gradient_roles() come and go with the trained parameters.
    shard: this rank's part of the flat buffer, 1-D.
    shard_in_slot: the shard is a part of the gathered slot, so a gather copies nothing.
    slot_shared: other ranks of the node read the gathered slot, too.
    own_slot: no other group is gathered into the slot.
    """

    layout: Layout
    ranks: ProcessGroups
    device: Device
    arenas: dict[str, Arena]
    shard: Array
    shard_in_slot: bool
    slot_shared: bool
    own_slot: bool


class ParameterGroup(_Group):
    """One flat buffer of a unit, with its memory. The constructor fills the shard with the initial values."""

    def __init__(self, group: UnbuiltGroup, memory: GroupMemory) -> None:
        super().__init__(group.unit, group.key, group.parameters, group.sharded_gradient)
        self.trained, self.finds_unused = group.trained, group.finds_unused
        self.label, self.tag = group.label, group.tag
        self.sharded_gradient.label = self.label
        self.sharded_gradient.ready = memory.device.new_event()
        self.memory = memory
        self.gradient_path: GradientPath | None = None  # of the full gradients, if any are trained
        self.slot: Slot | None = None  # where the gathered parameters are, or will be
        self.views: tuple[Array, ...] = ()  # of the gathered parameters, while there is a slot
        self.full_views: tuple[Array, ...] | None = None  # whole float32 values, inside full_parameters
        self.transfer = transfer_of(self, memory.own_slot)
        self._in_shard = [memory.layout.in_shard(entry, memory.ranks.rank) for entry in memory.layout.entries]
        for storage, (start, stop, part) in zip(group.initial, self._in_shard, strict=True):
            storage.give(part, memory.shard[start:stop])
        self.settings.offload.filled(memory.shard)
        self.take_parameters()

    @property
    def layout(self) -> Layout:
        """Where each parameter lies in the flat buffer."""
        return self.memory.layout

    @property
    def ranks(self) -> ProcessGroups:
        """The ranks that the group is sharded over, and those that hold the same shard."""
        return self.memory.ranks

    @property
    def arenas(self) -> dict[str, Arena]:
        """Role -> arena."""
        return self.memory.arenas

    @property
    def runtime(self) -> Runtime:
        """The schedule."""
        return self.unit.schedule

    @property
    def communicator(self) -> Communicator | None:
        return self.ranks.whole_communicator

    @property
    def whole_mesh(self) -> Any:
        return self.ranks.whole_mesh

    @property
    def low_precision_copy(self) -> LowPrecisionCopy | None:
        return self.transfer.low_precision_copy

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
            for role in gradient_roles():
                self.arenas.pop(role, None)

    @property
    def has_unreduced_gradient(self) -> bool:
        return self.gradient_path is not None and self.gradient_path.is_open

    @property
    def reduced(self) -> bool:
        return self.choices.reduces and self.sharded_gradient.complete

    # -- gathered parameters

    def attach(self, slot: Slot) -> None:
        """Take this slot for the gathered parameters, before the gather fills it."""
        self.slot = slot
        self.views = self.views_in(slot)

    def detach(self) -> Slot:
        """Give up the slot of the gathered parameters, and return it."""
        slot, self.slot, self.views = self.slot, None, ()
        return slot

    def views_in(self, slot: Slot) -> tuple[Array, ...]:
        """views_of the slot's array, made once for each slot."""
        if self not in slot.views:
            slot.views[self] = self.views_of(slot.array)
        return slot.views[self]

    def views_of(self, array: Array) -> tuple[Array, ...]:
        """One view of a flat buffer for each parameter, in the parameter's shape."""
        return tuple(array[entry.offset : entry.stop].reshape(entry.shape) for entry in self.layout.entries)

    # -- the storage contract

    @property
    def shard(self) -> Array:
        return self.memory.shard

    @property
    def gradient(self) -> Array | None:
        self.refuse_incomplete(self.parameters)
        if self.has_unreduced_gradient and autograd.running() is None:
            raise RuntimeError(
                f"unit {self.label}: its gradients were accumulated under no_sync and not reduced yet; "
                "run the last backward of a step, and its deferred.flush(), outside no_sync"
            )
        self.sharded_gradient.refuse_incomplete()
        summed = self.sharded_gradient
        return summed.arrays[0] if summed.wait_whether_written() else None

    def has_gradient(self, parameter: Parameter) -> bool:
        if self.gradient is None:
            return False
        return self.sharded_gradient.has(self.position[id(parameter)], self.memory.device)

    def zero_grad(self) -> None:
        self.applied = False
        summed = self.sharded_gradient
        summed.forget()
        # Pages can be lent until the next reduction takes them back (ShardedGradient.receive). They can't
        # where backward writes the sum itself (slots): it would not take the pages back first.
        if summed.arrays and not summed.slots and not self.offloaded.gradients:
            self.memory.device.lend_pages(summed.arrays[0])
        if self.has_unreduced_gradient:
            self.gradient_path.discard()

    def new_state(self, name: str, dtype: Any = None) -> Array:
        count, dtype = self.layout.shard_size, self.shard.dtype if dtype is None else dtype
        if self.offloaded.optimizer_state:
            array = self.settings.offload.host_buffer(self.memory.device, count, dtype)
        else:
            array = self.memory.device.buffer(count, dtype)
        return self.memory.device.set_tag(array, "optimizer state", self.label)

    def before_write(self) -> None:
        if self.memory.slot_shared and (self.memory.shard_in_slot or self.low_precision_copy is not None):
            self.runtime.readers_done(self)

    def modified(self, copy_too: bool = False) -> None:
        super().modified(copy_too)
        self.transfer.shard_written(copy_too)
        self.runtime.shards_written(self)

    def may_write_copy(self) -> bool:
        return self.low_precision_copy is not None and not self.runtime.awaits_backward(self)

    def owner(self, first: bool) -> bool:
        return self.ranks.owner

    def range_of(self, parameter: Parameter) -> tuple[int, int]:
        return self._in_shard[self.position[id(parameter)]][:2]

    def extents_of(self, parameter: Parameter) -> Extents:
        return self._in_shard[self.position[id(parameter)]][2]

    def full(self, parameter: Parameter) -> Array:
        if self.full_views is not None:
            return self.full_views[self.position[id(parameter)]]
        # Read-only: other ranks may read the slot, and the unit is released after forward, so a write would
        # be lost or wrong.
        return read_only(self.lent(parameter))

    def lent(self, parameter: Parameter) -> Array:
        lent = self.lent_bits(parameter)
        if not self.gathers_bits:
            return lent
        numbers = self.memory.device.empty(lent.shape, self.memory.device.compute_dtype(self.key.param))
        self.memory.device.kernels.cast.unpack(lent.reshape(-1), numbers.reshape(-1), self.key.param)
        return numbers

    def lent_bits(self, parameter: Parameter) -> Array:
        position = self.position[id(parameter)]
        if self.full_views is not None:
            return self.full_views[position]
        if self.runtime.ensure_readable(self):
            return self.views[position]
        raise _not_gathered(parameter)

    def value_dtype(self, parameter: Parameter) -> np.dtype:
        there = self.full_views or self.views
        if there and self.gathers_bits:
            return self.memory.device.compute_dtype(self.key.param)
        return there[0].dtype if there else parameter.dtype

    @property
    def gathers_bits(self) -> bool:
        kind = self.key.param
        if kind not in dtypes.LOW or self.full_views is not None:
            return False
        return self.memory.device.gathered_dtype(kind) == dtypes.storage(kind)

    def assign(self, parameter: Parameter, values: Any) -> None:
        if self.full_views is None:
            raise _not_lent(parameter)
        self.full_views[self.position[id(parameter)]][...] = values

    def edge(self, parameter: Parameter) -> Edge:
        return Edge(self.runtime.post_backward_node(self), 0, parameter)

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        path, position = self._opened_for(parameter)
        return *path.target(position), WRITTEN

    def put_rows(self, parameter: Parameter, fill: Fill) -> Any:
        path, position = self._opened_for(parameter)
        path.put_rows(position, fill)
        return WRITTEN

    def _opened_for(self, parameter: Parameter) -> tuple[GradientPath, int]:
        """(the gradient path, opened if it was not, position of the parameter, which must be trained)."""
        position = self.position[id(parameter)]
        if position not in self.trained:
            raise RuntimeError(
                f"parameter {parameter.name!r} was unfrozen after the forward that used it had begun; set "
                "requires_grad before that forward"
            )
        if not self.has_unreduced_gradient:
            self.runtime.open_gradient(self)
        return self.gradient_path, position


def _not_gathered(parameter: Parameter) -> RuntimeError:
    return RuntimeError(
        f"parameter {parameter.name!r} is sharded: it can be neither read nor changed as a whole "
        "outside the forward of its unit. parameter.shard is this rank's part; "
        "`with shardrt.fsdp.full_parameters(module)` gathers the whole parameter, and "
        "shardrt.checkpoint.full_state_dict(model) gives rank 0 the weights of the model"
    )


def _not_lent(parameter: Parameter) -> RuntimeError:
    return RuntimeError(
        f"parameter {parameter.name!r} is sharded: change it inside "
        "`with shardrt.fsdp.full_parameters(module, writeback=True)`, or by load_state_dict"
    )
