"""Unit: the parameters that are gathered and reduced together, and the one state that they are in.

A unit is what one call of fully_shard made: one module or several, with one group of parameters for each
key (types, and whether they are trained). It does not decide when anything happens; that is the schedule's.
"""

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from shardrt.autograd import Function
from shardrt.comm.digits import Digits, size_of, union, without
from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp.group import GroupKey, ParameterGroup, UnbuiltGroup
from shardrt.fsdp.policy import Choices, Settings
from shardrt.nn.module import Module, label_of
from shardrt.nn.parameter import Parameter
from shardrt.nn.share import Share


class State(Enum):
    """Where a unit's whole parameters are, and what for."""

    SHARDED = "each rank holds its shard, nobody the whole"
    GATHERING = "an all-gather into a slot was issued; compute has not waited for it"
    IN_USE = "gathered: its forward or backward runs"
    WAITING = "gathered: others of its modules may be called in this forward, but its slot can be taken away"
    KEPT = "gathered until backward, or as long as the strategy or the user wants"
    STALE = "gathered, but its shards have been written since: it goes when the next forward begins"


_MOVES = {
    State.SHARDED: {State.GATHERING},
    State.GATHERING: {State.IN_USE, State.SHARDED},  # the latter: a prefetch that nobody used
    State.IN_USE: {State.WAITING, State.KEPT, State.STALE, State.SHARDED},
    State.WAITING: {State.IN_USE, State.STALE, State.SHARDED},
    State.KEPT: {State.IN_USE, State.STALE, State.SHARDED},
    State.STALE: {State.SHARDED},
}


class Unit:
    """Modules whose parameters are gathered together, reduced together, released together.

    build: builds the model that the unit is a part of; called with the unit when something first needs it.
    """

    def __init__(
        self,
        modules: list[Module],
        parameters: list[tuple[Parameter, GroupKey]],
        settings: Settings,
        build: Callable[["Unit"], None],
        choices: Choices | None = None,
    ) -> None:
        self.modules = modules
        self.settings = settings
        shares = [p.share for p, _ in parameters if p.share is not None]
        self.data_ranks = settings.mesh.size  # how many losses gradients are of
        if shares:
            self.data_ranks = size_of(union(*(data_of(share, settings.mesh) for share in shares)))
        self.choices = choices or Choices(float(self.data_ranks))
        self.state = State.SHARDED
        self.gathered = False  # ops may read the parameters now
        self.pending: weakref.WeakSet[Function] = weakref.WeakSet()  # its nodes that are not complete yet
        self.schedule: Any = None  # the Schedule, once it is built: that knows units, not they it
        # What makes observers of a schedule whose outermost unit this is; called with it when it is built.
        self.observers: list[Callable[[Any], Any]] = []
        self._build = build
        by_key: dict[GroupKey, list[Parameter]] = {}  # in the order in which keys appear
        for parameter, key in parameters:
            by_key.setdefault(key, []).append(parameter)
        self.groups: list[Any] = [UnbuiltGroup(self, key, own) for key, own in by_key.items()]
        # Set by setup.py:
        self.reshard_after_forward: bool
        self.reshard_after_backward: bool
        self.ancestors: frozenset[Unit]  # the units whose modules contain this one's

    def clone(self) -> "Unit":
        """A unit of the same modules with the same choices. It takes over the parameters; it is not built."""
        keyed = [(parameter, group.key) for group in self.groups for parameter in group.parameters]
        other = Unit(self.modules, keyed, self.settings, self._build, self.choices)
        other.observers = self.observers
        for own, new in zip(self.groups, other.groups, strict=True):
            new.sharded_gradient = own.sharded_gradient.like_new()
        return other

    @property
    def parameters(self) -> list[Parameter]:
        """All of them, group by group."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def trainable(self) -> bool:
        """Whether any of them has a gradient."""
        return any(group.trainable for group in self.groups)

    @property
    def partly_trained(self) -> bool:
        """Whether some of them have gradients and others have not."""
        return 0 < sum(len(group.trained) for group in self.groups) < len(self.parameters)

    @property
    def accumulates(self) -> bool:
        """Whether full gradients stay when backward ends, or have stayed."""
        return not self.choices.reduces or any(group.accumulates for group in self.groups)

    @property
    def micro_batches(self) -> int | None:
        """Of a step, over all ranks; None without set_world_invariant."""
        own = self.choices.micro_batches
        return None if own is None else own * self.data_ranks

    def built(self) -> Any:
        """The schedule. Builds that of the whole model, and the shards, if there is none yet: collective."""
        if self.schedule is None:
            self._build(self)
        return self.schedule

    def runs_under(self, schedule: Any, groups: list[ParameterGroup]) -> None:
        """The unit is built: this schedule decides from now on; `groups` take the place of unbuilt ones."""
        self.schedule, self.groups = schedule, groups

    @property
    def label(self) -> str:
        """The unit's name for messages: the path of its modules, "(root)" for the outermost."""
        return " + ".join(map(label_of, self.modules))

    def move(self, state: State) -> None:
        """Change the state. Raises RuntimeError for a change that the schedule must never make."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"unit {self.label}: illegal move from {self.state.name} to {state.name}")
        self.state, self.gathered = state, state not in (State.SHARDED, State.GATHERING)

    def state_after(self, *, needed: bool, done: bool) -> State:
        """What to do with the whole parameters when a forward or backward of the unit ends.

        needed: backward will need them again. done: nothing else in this forward will, as far as is known.
        """
        if self.choices.held or not self.reshard_after_backward:
            return State.KEPT
        if needed and not self.reshard_after_forward:
            return State.KEPT
        return State.SHARDED if done else State.WAITING


def data_of(share: Share, mesh: DeviceMesh) -> Digits:
    """Axes along which ranks have losses of their own whose gradients a parameter gets, sharded over mesh."""
    return without(union(mesh.axes, share.axes) if share.own_data else mesh.axes, share.one_loss)
