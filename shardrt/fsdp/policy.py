"""The settings of a unit, which are fixed, and its choices, which may change between steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardrt.comm.ranks import Mesh
from shardrt.device import Device
from shardrt.fsdp.sharded_gradient import ShardedGradient
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.nn.module import Module
from shardrt.nn.storage import Offloaded


class Precision:
    """Keeps all element types. MixedPrecisionPolicy changes some of them."""

    def types_of(self, module: Module, dtype: str) -> tuple[str, str]:
        """(param, reduce) types for parameters of type `dtype` that `module` itself holds."""
        return dtype, dtype

    def input_cast(self, types: set[str]) -> Callable[[Any], Any] | None:
        """What casts an input of a unit's forward, if anything. types: those of the unit's shards."""
        return None

    def output_cast(self) -> Callable[[Any], Any] | None:
        """What casts an output of a unit's forward, if anything."""
        return None


default_precision: type[Precision] = Precision  # of units without mp_policy; an option names another


class OffloadPolicy:
    """Keeps all parts of a unit on the device. CPUOffloadPolicy keeps some in host memory between uses."""

    offloaded = Offloaded()

    def sharded_gradient(self) -> ShardedGradient:
        """A new ShardedGradient for a group."""
        return ShardedGradient()

    def host_buffer(self, device: Device, count: int, dtype: Any) -> Any:
        """Zeros in host memory, for a part that is offloaded."""
        raise NotImplementedError

    def filled(self, shard: Any) -> None:
        """The shard has its initial values."""


@dataclass(frozen=True)
class Settings:
    """The arguments of fully_shard for one unit."""

    mesh: Mesh
    strategy: ShardingStrategy
    reshard_after_forward: bool | None
    prefetch: int | None  # None: the outermost unit's
    precision: Precision
    offload: OffloadPolicy
    by_rank: bool = False  # stays in the plan even if no rank used the unit in the first forward

    @property
    def offloaded(self) -> Offloaded:
        """Which arrays of the unit live on the host between uses."""
        return self.offload.offloaded

    @property
    def shard_spec(self) -> tuple[Mesh, str]:
        """(mesh, strategy.Rules.shard_over): they determine which rank holds which shard."""
        return self.mesh, self.strategy.rules.shard_over

    def shards_on_node(self, node_ranks: int) -> int:
        """Number of ranks on this rank's node that shard a unit together. A node has `node_ranks` ranks."""
        ranks, here = self.mesh.ranks, self.mesh.ranks[self.mesh.coordinate]
        if self.strategy.rules.shard_over == "last axis":
            ranks = ranks[self.mesh.coordinate[0]]
        return int((ranks // node_ranks == here // node_ranks).sum())


@dataclass
class Choices:
    """The properties of a unit that the user may change later. The unit and its groups share the object."""

    divide_factor: float
    reduces: bool = True  # gradients are reduced at the end of backward; False under no_sync
    find_unused: bool = False  # ranks exchange which parameters they have used
    micro_batches: int | None = None  # in a step, on each rank; None: sums depend on the number of ranks
    kept_unsharded: bool = False  # by `unshard`, until `reshard`
