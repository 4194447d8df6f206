"""Unit: the parameters that are gathered and reduced together, and the one state that they are in.

A unit is what one call of fully_shard made: one module or several, with one group of parameters for each
key (types, and whether they are trained). It does not decide when anything happens; that is the schedule's.
"""

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp.group import Group, GroupKey, groups_of
from shardrt.fsdp.nodes import Unshard
from shardrt.fsdp.policy import MixedPrecisionPolicy
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import Placement

if TYPE_CHECKING:
    from shardrt.fsdp.schedule import Schedule


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


Cut = tuple[DeviceMesh, str]


@dataclass(frozen=True)
class Settings:
    """What the user chose for one unit; the arguments of fully_shard."""

    mesh: DeviceMesh
    strategy: ShardingStrategy
    reshard_after_forward: bool | None
    prefetch: int | None  # None: as the outermost unit says
    precision: MixedPrecisionPolicy
    placement: Placement
    by_rank: bool = False  # never struck from the plan

    @property
    def cut(self) -> Cut:
        """What says which ranks have which part."""
        return self.mesh, self.strategy.row.cut


class Unit:
    """Modules whose parameters are gathered together, reduced together, released together."""

    def __init__(
        self, modules: list[Module], parameters: list[tuple[Parameter, GroupKey]], settings: Settings
    ) -> None:
        self.modules = modules
        self.settings = settings
        self.groups: list[Group] = groups_of(self, parameters)
        self.state = State.SHARDED
        self.modules_done: set[int] = set()  # its modules whose forward has ended in this forward
        self.held = False  # gathered until the user says reshard
        self.stale = False  # the shards have changed since the last gather
        self.peers_may_read = False  # this rank's shard: it was gathered for use since the last reduction
        self.reduces = True  # gradients are reduced at the end of backward; False under no_sync
        # Whether the last forward that was recorded left it work; None: there was none as it is trained now
        self.needed_in_backward: bool | None = None
        self.kept = False  # gathered from the last forward to backward
        self.find_unused = False  # ranks tell each other which parameters they have used
        self.divide_factor = float(settings.mesh.size)
        self.micro_batches: int | None = None  # of a step, over all ranks; None: sums depend on the ranks
        self.to_come: weakref.WeakSet[Unshard] = weakref.WeakSet()  # nodes whose backward has not run
        self._schedule: Schedule | None = None
        # Set by setup.build:
        self.reshard_after_forward: bool
        self.reshard_after_backward: bool
        self.ancestors: frozenset[Unit]  # the units whose modules contain this one's

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
    def turns(self) -> int | None:
        """Backwards per step, each of one micro-batch per rank; None without set_world_invariant."""
        return None if self.micro_batches is None else self.micro_batches // self.settings.mesh.size

    @property
    def built(self) -> bool:
        """Whether the unit has its shards yet."""
        return self._schedule is not None

    @property
    def gathered(self) -> bool:
        """Whether ops may read the parameters now."""
        return self.state is State.GATHERED

    @property
    def schedule(self) -> "Schedule":
        """The schedule of the outermost unit; built, for all its units, when it is first asked for."""
        self.ensure_built()
        return self._schedule

    def ensure_built(self) -> None:
        """Build the schedule, and this rank's shards, if that has not been done. Collective."""
        if self._schedule is None:
            from shardrt.fsdp.setup import build

            build(self)

    def belongs_to(self, schedule: "Schedule") -> None:
        """Setup is done: this schedule decides from now on."""
        self._schedule = schedule

    @property
    def label(self) -> str:
        """The unit's name for messages: the path of its modules, "(root)" for the outermost."""
        return " + ".join(module.name or "(root)" for module in self.modules)

    def move(self, state: State) -> None:
        """Change the state. Raises RuntimeError for a change that the schedule must never make."""
        if (self.state, state) not in _LEGAL:
            raise RuntimeError(f"unit {self.label}: illegal move from {self.state.name} to {state.name}")
        self.state = state

    def unshard_node(self) -> Unshard:
        """The unit's one node on the tape that is being recorded, or run, made at the first call."""
        return self.schedule.tape.unshard(self)
