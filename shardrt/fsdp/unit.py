"""Unit: the parameters that are gathered and reduced together, and the one state that they are in.

A unit owns its shard, its sharded gradient and, for a while, a slot of gathered parameters and a slot of
full gradients. It does not decide when anything happens; that is the schedule's.
"""

import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrt import autograd, random
from shardrt.autograd import WRITTEN, Edge
from shardrt.comm.mesh import DeviceMesh
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.ops import Unshard
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage, Storage

if TYPE_CHECKING:
    from shardrt.fsdp.schedule import Schedule

Array = Any


class State(Enum):
    """Where a unit's full parameters are."""

    SHARDED = "each rank holds its shard, nobody the whole"
    GATHERING = "an all-gather into a slot was issued; compute has not waited for it"
    GATHERED = "the slot holds the whole parameters, and ops may read them"


_LEGAL = {
    (State.SHARDED, State.GATHERING),
    (State.GATHERING, State.GATHERED),
    (State.GATHERING, State.SHARDED),  # a prefetch that nobody used
    (State.GATHERED, State.SHARDED),
}


@dataclass(frozen=True)
class Settings:
    """What the user chose for one unit; the arguments of fully_shard."""

    mesh: DeviceMesh
    strategy: ShardingStrategy
    reshard_after_forward: bool | None
    prefetch: int


@dataclass
class OpenGradient:
    """Full gradients of a unit while backward is filling them."""

    slot: Slot
    views: tuple[Array, ...]
    written: set[int] = field(default_factory=set)  # positions of the parameters written so far


class Unit(Storage):
    """One fully sharded group of parameters: the storage behind them."""

    def __init__(self, module: Module, parameters: list[Parameter], settings: Settings) -> None:
        self.module = module
        self.parameters = parameters
        self.settings = settings
        self.state = State.SHARDED
        self.position = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._initial = [parameter.storage for parameter in parameters]  # until `build` has taken them over
        for parameter in parameters:
            parameter.storage = self
        self.trainable = any(parameter.requires_grad for parameter in parameters)
        self.has_gradient = False
        self.slot: Slot | None = None
        self.views: tuple[Array, ...] = ()
        self.open_gradient: OpenGradient | None = None
        self.entered = 0  # calls of its module that run now, one inside the other
        self._unshard: weakref.ref[Unshard] | None = None
        self._schedule: Schedule | None = None
        # Set by setup.build, once the outermost unit is known:
        self.layout: Layout
        self.reshard_after_forward: bool
        self.parameter_arena: Arena
        self.gradient_arena: Arena
        self.shard_in_slot: bool  # the shard is this rank's part of the slot: nothing to copy in
        self.divide_factor = float(settings.mesh.size)

    def build(self, schedule: "Schedule", layout: Layout, shard: Array, reduced: Array | None) -> None:
        """Take over the parameters: fill `shard` with this rank's piece of them.

        reduced: memory for the sharded gradient, as long as the shard; None if nothing is trainable.
        """
        self._schedule = schedule
        self.layout = layout
        self.communicator = schedule.control
        self._shard = shard
        self._reduced = reduced
        self._ranges = [layout.local(entry, schedule.rank) for entry in layout.entries]
        for parameter, storage, held in zip(self.parameters, self._initial, self._ranges, strict=True):
            start, stop, first = held
            _fill(parameter, storage, shard[start:stop], first)
        self._initial = []

    @property
    def built(self) -> bool:
        """Whether the unit has its shard yet."""
        return self._schedule is not None

    @property
    def dtype(self) -> Any:
        """The element type of its parameters."""
        return self.parameters[0].dtype if self.parameters else np.dtype(np.float32)

    @property
    def schedule(self) -> "Schedule":
        """The schedule of the outermost unit; built, for all its units, when it is first asked for."""
        if self._schedule is None:
            from shardrt.fsdp.setup import build

            build(self)
        return self._schedule

    @property
    def label(self) -> str:
        """The unit's name for messages: the path of its module, "(root)" for the outermost."""
        return self.module.name or "(root)"

    # -- state

    def move(self, state: State) -> None:
        """Change the state. Raises RuntimeError for a change that the schedule must never make."""
        if (self.state, state) not in _LEGAL:
            raise RuntimeError(f"unit {self.label}: illegal move from {self.state.name} to {state.name}")
        self.state = state

    def attach(self, slot: Slot) -> None:
        """The parameters are, or will be, in this slot."""
        self.slot = slot
        self.views = self.views_of(slot)

    def detach(self) -> Slot:
        """The parameters are in no slot any more; gives the slot."""
        slot, self.slot, self.views = self.slot, None, ()
        return slot

    def views_of(self, slot: Slot) -> tuple[Array, ...]:
        """Each parameter's part of a slot, in its shape."""
        array = slot.array
        return tuple(array[entry.offset : entry.stop].reshape(entry.shape) for entry in self.layout.entries)

    # -- the tape

    def unshard_node(self) -> Unshard:
        """The unit's one node on the tape that is being recorded, made at the first call."""
        node = self._unshard() if self._unshard is not None else None
        if node is None:
            node = Unshard(self)
            self._unshard = weakref.ref(node)
        return node

    def forget_node(self) -> None:
        """Its backward has run: the next forward starts another tape."""
        self._unshard = None

    # -- the storage contract

    @property
    def shard(self) -> Array:
        self.schedule  # noqa: B018  builds it
        return self._shard

    @property
    def gradient(self) -> Array | None:
        return self._reduced if self.has_gradient else None

    def zero_grad(self) -> None:
        self.has_gradient = False

    def range_of(self, parameter: Parameter) -> tuple[int, int, int]:
        self.schedule  # noqa: B018  builds it
        return self._ranges[self.position[id(parameter)]]

    def full(self, parameter: Parameter) -> Array:
        if self.state is not State.GATHERED:
            if autograd.running() is None:
                raise RuntimeError(
                    f"parameter {parameter.name!r} is sharded: it can be neither read nor changed as a whole "
                    "outside the forward of its unit. This rank's piece is parameter.shard; "
                    "shardrt.checkpoint.full_state_dict(model) gathers all of it"
                )
            self.schedule.ensure(self)  # an op of backward needs it although no Exit of the unit ran
        return self.views[self.position[id(parameter)]]

    def edge(self, parameter: Parameter) -> Edge:
        return Edge(self.unshard_node(), 0, parameter)

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        opened = self.open_gradient or self.schedule.open_gradient(self)
        position = self.position[id(parameter)]
        accumulate = position in opened.written
        opened.written.add(position)
        return opened.views[position], accumulate, WRITTEN


def _fill(parameter: Parameter, storage: Storage, piece: Array, first: int) -> None:
    """Put elements [first, first + piece.size) of the parameter's values into `piece`."""
    if isinstance(storage, LocalStorage) and storage.materialised:  # loaded before it was sharded
        piece[...] = storage.shard[first : first + piece.size]
    else:
        parameter.init.fill(piece, parameter.seed, random.name_key(parameter.name), first)
