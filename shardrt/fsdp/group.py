"""Group: the parameters of a unit that lie in one flat buffer, and the storage behind them.

They have one element type, and when they were sharded they were all trained or all frozen: a group of frozen
parameters costs no gradient memory and is never reduced. What is frozen or unfrozen later stays in its group
(trained.py). A group holds arrays and knows where things are. The schedule decides when anything happens
to it, and collectives.py moves it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrt import autograd, dtypes, random
from shardrt.autograd import WRITTEN, Edge
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, host
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.rows import Rows
from shardrt.fsdp.team import Team
from shardrt.fsdp.tree import Place, place
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage, Placement, Storage, read_only

if TYPE_CHECKING:
    from shardrt.fsdp.unit import Unit

Array = Any


@dataclass(frozen=True)
class GroupKey:
    """What parameters must share to lie in one buffer."""

    trainable: bool  # when they were sharded
    dtype: str  # of the shard: float32 or float64, which the optimizer updates, or an integer type
    param: str  # gathered and computed in
    reduce: str  # gradients are sent in


GRADIENT_ROLES = ("gradients", "packed", "reduce_wire", "download")  # arenas without which nothing is reduced


@dataclass
class OpenGradient:
    """Full gradients of a group while backward is filling them."""

    slot: Slot
    views: dict[int, Array]  # by position of the parameter
    written: set[int] = field(default_factory=set)  # positions of the parameters written so far


class Group(Storage):
    """One flat buffer of a unit."""

    def __init__(self, unit: "Unit", key: GroupKey, parameters: list[Parameter]) -> None:
        self.unit = unit
        self.key = key
        self.parameters = parameters
        self.placement: Placement = unit.settings.placement
        self.position = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._initial = [parameter.storage for parameter in parameters]  # until `build` has taken them over
        for parameter in parameters:
            parameter.storage = self
        # Positions of the parameters that have gradients:
        self.trained = frozenset(range(len(parameters)) if key.trainable else ())
        self.finds_unused = False  # as unit.find_unused, since the last forward began
        self.called = ""  # its name in collectives
        self.rows: Rows | None = None  # how gradients are sent; None: the flat buffer as it is
        self.sums: list[Array] = []  # the sharded gradient, then its partial sums
        self.uses: Array | None = None  # how many ranks have used each parameter, if they tell each other
        self._uses_read: Array | None = None
        self.reductions = 0  # how many have gone into the sharded gradient
        self.covered: set[int] = set()  # positions of the parameters of which something was in them
        self._used = False  # whether any of them was more than zeros, as far as this rank knows
        self.told_used: Callable[[], bool] | None = None  # waits for what the other ranks know
        self.slot: Slot | None = None
        self.views: tuple[Array, ...] = ()
        self.full_views: tuple[Array, ...] | None = None  # full float32 values, lent by full_parameters
        self.open_gradient: OpenGradient | None = None
        self.arenas: dict[str, Arena] = {}  # by role, see buffers.py
        # Set by setup.build, once the outermost unit is known:
        self.layout: Layout
        self.team: Team
        self.shard_in_slot: bool  # the shard is this rank's part of the gathered slot: nothing to copy in

    def build(self, device: Device, shard: Array) -> None:
        """Take over the parameters: fill `shard` with this rank's piece of them."""
        self._device = device
        self.communicator = self.team.control
        self.gradient_ready = device.new_event()
        self.uploaded = device.new_event()  # the shard has come from the host
        self._shard = shard
        self._ranges = [self.layout.local(entry, self.team.rank) for entry in self.layout.entries]
        for parameter, storage, held in zip(self.parameters, self._initial, self._ranges, strict=True):
            start, stop, first = held
            _fill(parameter, storage, shard[start:stop], first)
        host.drop(shard)  # where it is a mapped file
        self._initial = []

    @property
    def label(self) -> str:
        """For messages and traces: the unit, and what distinguishes this group from its others."""
        if len(self.unit.groups) == 1:
            return self.unit.label
        return f"{self.unit.label} ({self.key.param}{'' if self.key.trainable else ', frozen'})"

    @property
    def trainable(self) -> bool:
        """Whether it has gradients."""
        return bool(self.trained)

    def to_train(self) -> frozenset[int]:
        """Positions of the parameters that should have gradients in the forward that begins.

        What was frozen while a gradient was there, or a tape that leads to it, has gradients until that is
        gone. Raises TypeError, naming it, for a parameter of integers.
        """
        wanted = frozenset(i for i, parameter in enumerate(self.parameters) if parameter.requires_grad)
        if wanted and not dtypes.floating(np.dtype(self.key.dtype)):
            name = self.parameters[min(wanted)].name
            raise TypeError(f"parameter {name!r} is {self.key.dtype} and can't require a gradient")
        in_use = self.reductions or self.open_gradient is not None or self.unit.to_come
        return wanted | self.trained if in_use else wanted

    def train(self, positions: frozenset[int], finds_unused: bool) -> None:
        """Have gradients for the parameters at these positions from now on. Frees memory, but makes none."""
        self.trained, self.finds_unused = positions, finds_unused
        if not finds_unused:
            self.uses = self._uses_read = None
        if not positions:
            self.sums, self.uses, self.rows = [], None, None
            for role in GRADIENT_ROLES:
                self.arenas.pop(role, None)

    @property
    def next_sum(self) -> Place:
        """Where the next reduction goes among `sums`."""
        if self.unit.turns is None:
            return Place(0, self.reductions > 0, 0)
        return place(self.reductions)

    @property
    def complete(self) -> bool:
        """Whether all reductions of a step are in the gradient, as far as their number is known."""
        return self.unit.turns in (None, self.reductions)

    @property
    def reduced(self) -> bool:
        return self.unit.reduces and self.complete

    @property
    def everyone(self) -> Communicator:
        return self.unit.schedule.control

    @property
    def exact_norm(self) -> bool:
        return self.unit.turns is not None

    # -- gathered parameters

    def attach(self, slot: Slot) -> None:
        """The parameters are, or will be, in this slot."""
        self.slot = slot
        self.views = self.views_of(slot.array)

    def detach(self) -> Slot:
        """The parameters are in no slot any more; gives the slot."""
        slot, self.slot, self.views = self.slot, None, ()
        return slot

    def views_of(self, array: Array) -> tuple[Array, ...]:
        """Each parameter's part of a flat buffer, in its shape."""
        return tuple(array[entry.offset : entry.stop].reshape(entry.shape) for entry in self.layout.entries)

    def opened(self, slot: Slot) -> OpenGradient:
        """Its full gradients in this slot."""
        if self.rows is None:
            return OpenGradient(slot, dict(enumerate(self.views_of(slot.array))))
        return OpenGradient(slot, self.rows.views(slot.array, self.layout))

    # -- the storage contract

    @property
    def shard(self) -> Array:
        self.unit.ensure_built()
        return self._shard

    @property
    def gradient(self) -> Array | None:
        if self.open_gradient is not None and autograd.running() is None:
            raise RuntimeError(
                f"unit {self.unit.label}: its gradients were accumulated under no_sync and not reduced yet; "
                "run the last backward of a step outside no_sync"
            )
        if self.reductions and not self.complete:
            raise RuntimeError(
                f"unit {self.unit.label}: with set_world_invariant its gradients are complete after "
                f"{self.unit.turns} backwards; so far there were {self.reductions}"
            )
        return self.sums[0] if self.used else None

    @property
    def used(self) -> bool:
        """Whether any rank has put more than zeros into the gradient. Waits where only others can know."""
        if not self._used and self.told_used is not None:
            self._used = self.told_used()
        return self._used

    @used.setter
    def used(self, used: bool) -> None:
        self._used = used

    def has_gradient(self, parameter: Parameter) -> bool:
        position = self.position[id(parameter)]
        if self.gradient is None or position not in self.covered:
            return False
        return self.uses is None or bool(self._all_uses()[position] > 0)

    def _all_uses(self) -> Array:
        """The numbers in `uses`, on the host: waits for the reduction that wrote them last."""
        if self._uses_read is None:
            self.gradient_ready.synchronize()
            self._uses_read = np.array(self._device.to_numpy(self.uses))
        return self._uses_read

    def reduction_issued(self) -> None:
        """One more reduction will go into the gradient."""
        self.reductions += 1
        self.covered |= self.trained
        self._uses_read = None

    def initial(self) -> Iterator[tuple[Parameter, LocalStorage]]:
        """Each parameter with the storage that it had before it was sharded, until `build` has emptied it."""
        return zip(self.parameters, self._initial, strict=True)

    def zero_grad(self) -> None:
        self.reductions, self._used, self.told_used, self._uses_read = 0, False, None, None
        self.covered.clear()
        if self.open_gradient is not None:
            self.unit.schedule.discard_gradient(self)

    def new_state(self, name: str) -> Array:
        self.unit.ensure_built()
        if self.placement.optimizer_state:
            count, folder = self.layout.shard_size, self.placement.directory
            return host.buffer(self._device, count, self._shard.dtype, folder)
        return self._device.buffer(self.layout.shard_size, self._shard.dtype)

    def before_write(self) -> None:
        if self.shard_in_slot and self.team.size > 1:
            self.unit.schedule.readers_done(self.unit)

    def modified(self) -> None:
        self.unit.stale = True

    def range_of(self, parameter: Parameter) -> tuple[int, int, int]:
        self.unit.ensure_built()
        return self._ranges[self.position[id(parameter)]]

    def full(self, parameter: Parameter) -> Array:
        if self.full_views is not None:
            return self.full_views[self.position[id(parameter)]]
        return read_only(
            self.lent(parameter)
        )  # other ranks may read it, or it is forgotten after the forward

    def lent(self, parameter: Parameter) -> Array:
        position = self.position[id(parameter)]
        if self.full_views is not None:
            return self.full_views[position]
        running = autograd.running() is not None
        if running and not self.unit.gathered:
            self.unit.schedule.ensure(self.unit)  # an op of backward needs it although no Regather ran
        if running or (self.unit.gathered and self.unit.schedule.depth > 0):
            return self.views[position]
        if self.unit.held and self.unit.gathered and not self.unit.stale:
            return self.views[position]
        raise RuntimeError(
            f"parameter {parameter.name!r} is sharded: it can be neither read nor changed as a whole "
            "outside the forward of its unit. This rank's piece is parameter.shard; "
            "`with shardrt.fsdp.full_parameters(module)` lends all of it, and "
            "shardrt.checkpoint.full_state_dict(model) gives rank 0 the weights of the model"
        )

    def value_dtype(self, parameter: Parameter) -> np.dtype:
        return parameter.dtype if not self.views else self.views[0].dtype

    def assign(self, parameter: Parameter, values: Any) -> None:
        if self.full_views is None:
            raise RuntimeError(
                f"parameter {parameter.name!r} is sharded: change it inside "
                "`with shardrt.fsdp.full_parameters(module, writeback=True)`, or by load_state_dict"
            )
        self.full_views[self.position[id(parameter)]][...] = values

    def edge(self, parameter: Parameter) -> Edge:
        return Edge(self.unit.unshard_node(), 0, parameter)

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        position = self.position[id(parameter)]
        if position not in self.trained:
            raise RuntimeError(
                f"parameter {parameter.name!r} was unfrozen after the forward had begun that used it; set "
                "requires_grad before"
            )
        opened = self.open_gradient or self.unit.schedule.open_gradient(self)
        accumulate = position in opened.written
        opened.written.add(position)
        return opened.views[position], accumulate, WRITTEN


def groups_of(unit: "Unit", parameters: list[tuple[Parameter, GroupKey]]) -> list[Group]:
    """Parameters of one unit, sorted into groups by key, in the order in which keys appear."""
    by_key: dict[GroupKey, list[Parameter]] = {}
    for parameter, key in parameters:
        by_key.setdefault(key, []).append(parameter)
    return [Group(unit, key, members) for key, members in by_key.items()]


def _fill(parameter: Parameter, storage: Storage, piece: Array, first: int) -> None:
    """Put elements [first, first + piece.size) of the parameter's values into `piece`."""
    if isinstance(storage, LocalStorage) and storage.materialised:  # loaded before it was sharded
        piece[...] = storage.shard[first : first + piece.size]
    else:
        parameter.init.fill(piece, parameter.seed, random.name_key(parameter.name), first)
