"""Unit: the parameters that are gathered and reduced together, and the state they are in.

One call of fully_shard makes one unit. A unit has one module or several, and one group of parameters for each
GroupKey (element types, trained or frozen). The schedule decides when a unit is gathered or reduced.
"""

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

from shardrt.autograd import Function
from shardrt.fsdp import composition
from shardrt.fsdp.group import GroupKey, ParameterGroup, UnbuiltGroup
from shardrt.fsdp.policy import Choices, Settings
from shardrt.nn.module import Module, label_of
from shardrt.nn.parameter import Parameter


class State(Enum):
    """Whether a unit's parameters are gathered, and why."""

    SHARDED = "each rank holds its shard only"
    GATHERING = "the all-gather into a slot was issued; the compute stream has not waited for it"
    IN_USE = "gathered: forward or backward of the unit runs"
    WAITING = "gathered: forward may still call other modules of the unit; another unit may take the slot"
    KEPT = "gathered until backward, or as long as the strategy or the user wants"
    STALE = "gathered, but the shards were written since; never left for IN_USE"


_MOVES = {
    State.SHARDED: {State.GATHERING},
    State.GATHERING: {State.IN_USE, State.SHARDED},  # SHARDED: a prefetch that was not used
    State.IN_USE: {State.WAITING, State.KEPT, State.STALE, State.SHARDED},
    State.WAITING: {State.IN_USE, State.STALE, State.SHARDED},
    State.KEPT: {State.IN_USE, State.STALE, State.SHARDED},
    State.STALE: {State.SHARDED},
}


class Unit:
    """Modules whose parameters are gathered, reduced and released together.

    build: builds the schedule of the whole model. The unit calls build(unit) at the first access that needs
    the schedule.
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
        mine = [parameter for parameter, _ in parameters]
        self.data_ranks = composition.active.data_ranks(mine, settings.mesh)  # whose losses a gradient sums
        self.choices = choices or Choices(float(self.data_ranks))
        self.state = State.SHARDED
        self.gathered = False  # a slot has the parameters, and compute has waited for them
        # PostBackward nodes whose gradients are not complete yet.
        self.pending: weakref.WeakSet[Function] = weakref.WeakSet()
        self.schedule: Any = None  # the Schedule, once it is built (untyped: schedule.py imports this file)
        # Makers of observers. A schedule calls those of its outermost unit, make(schedule), when it is built.
        self.observers: list[Callable[[Any], Any]] = []
        self._build = build
        by_key: dict[GroupKey, list[Parameter]] = {}  # in order of first appearance
        for parameter, key in parameters:
            by_key.setdefault(key, []).append(parameter)
        self.groups: list[Any] = [UnbuiltGroup(self, key, members) for key, members in by_key.items()]
        # setup.py decides these when the outermost unit is known:
        self.reshard_after_forward = self.reshard_after_backward = True
        self.ancestors: frozenset[Unit] = frozenset()  # the units whose modules contain this one's

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters of the unit, group by group."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def trainable(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(group.trainable for group in self.groups)

    @property
    def partly_trained(self) -> bool:
        """Whether some parameters have gradients and others don't."""
        return 0 < sum(len(group.trained) for group in self.groups) < len(self.parameters)

    @property
    def needs_own_slots(self) -> bool:
        """Whether full gradients stay unreduced when backward ends, or are unreduced now."""
        return not self.choices.reduces or any(group.has_unreduced_gradient for group in self.groups)

    def built(self) -> Any:
        """The schedule. Builds the whole model's schedule and shards if there are none yet. Collective."""
        if self.schedule is None:
            self._build(self)
        return self.schedule

    def runs_under(self, schedule: Any, groups: list[ParameterGroup]) -> None:
        """Run under this schedule from now on. The built `groups` replace the unbuilt ones."""
        self.schedule, self.groups = schedule, groups

    @property
    def label(self) -> str:
        """The unit's name in messages: the path of its modules, "(root)" for the outermost."""
        return " + ".join(map(label_of, self.modules))

    def move(self, state: State) -> None:
        """Change the state. Raises RuntimeError for a transition that `_MOVES` does not allow."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(
                f"unit {self.label}: illegal move from {self.state.name} to {state.name}; this is a bug of "
                "shardrt, please report it"
            )
        self.state, self.gathered = state, state not in (State.SHARDED, State.GATHERING)

    def state_after(self, *, needed: bool, done: bool) -> State:
        """The state that the unit goes to when its forward or backward ends.

        needed: backward will use the gathered parameters again.
        done: the rest of this forward will not use them, as far as the plan knows.
        """
        if self.choices.kept_unsharded or not self.reshard_after_backward:
            return State.KEPT
        if needed and not self.reshard_after_forward:
            return State.KEPT
        return State.SHARDED if done else State.WAITING


def root_of(units: list[Unit]) -> Unit:
    """The outermost of the units that train together; a list of them has outer units first."""
    return units[0]
