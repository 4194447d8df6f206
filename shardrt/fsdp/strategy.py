"""ShardingStrategy: how parameters are cut over ranks, and how long they stay gathered.

All strategies run the same schedule and differ only in the rules below. At one world size their results are
bitwise identical if sums over ranks use the tree and the size of a hybrid's shard group is a power of two.
(Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, section 5;
Zhao et al., PyTorch FSDP, 2023, section 3.2.)
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["ShardingStrategy"]


@dataclass(frozen=True)
class Rules:
    """The rules of one strategy.

    shard_over: the ranks that a parameter is sharded over: all ranks of the "mesh", the ranks along the "last
    axis" of a mesh with two axes, or "none". Along other axes, ranks hold copies, and their gradients are
    summed.
    """

    shard_over: str
    keep_after_forward: bool  # the gathered parameters stay until backward
    keep_after_backward: bool  # the gathered parameters stay until the optimizer has changed them
    keep_gradient: bool = False  # each group has memory for full gradients of its own, not a shared slot


class ShardingStrategy(Enum):
    """How the parameters, gradients and optimizer state of a unit are sharded.

    P is the bytes of all parameters, N the number of ranks; traffic is per step and rank.

    Attributes:
        NO_SHARD: as DDP. Every rank has everything. Traffic 2 P.
        SHARD_OPT: as ZeRO-1. Optimizer state is sharded; every rank has whole parameters and gradients, and
            shards of both. That takes 2 P / N more memory than ZeRO-1 needs. Traffic 2 P.
        SHARD_GRAD_OP: as ZeRO-2 in FSDP's sense. All is sharded; parameters stay gathered from forward to
            backward. Traffic 2 P.
        FULL_SHARD: as ZeRO-3. All is sharded; parameters are gathered for forward and again for backward.
            Traffic 3 P.
        HYBRID_SHARD: FULL_SHARD along the last axis of a two-axis mesh, copies along the first.
        HYBRID_SHARD_GRAD_OP: SHARD_GRAD_OP along the last axis, copies along the first.
    """

    NO_SHARD = Rules("none", True, True)
    SHARD_OPT = Rules("mesh", True, True, keep_gradient=True)
    SHARD_GRAD_OP = Rules("mesh", True, False)
    FULL_SHARD = Rules("mesh", False, False)
    HYBRID_SHARD = Rules("last axis", False, False)
    HYBRID_SHARD_GRAD_OP = Rules("last axis", True, False)

    @property
    def rules(self) -> Rules:
        """The rules of the strategy."""
        return self.value

    @classmethod
    def parse(
        cls, name: "str | ShardingStrategy | None", axes: int, names: tuple[str, ...] | None = None
    ) -> "ShardingStrategy":
        """The strategy called `name`; for None, the default of a mesh.

        Args:
            name: a name, a ShardingStrategy, or None.
            axes: number of axes of the mesh.
            names: names of the axes, if they have any.

        Raises:
            ValueError: for an unknown name, and for a hybrid strategy on a mesh without two axes.
        """
        if name is None:
            if names == ("dp_replicate",):
                return cls.NO_SHARD
            return cls.FULL_SHARD if axes == 1 else cls.HYBRID_SHARD
        if isinstance(name, cls):
            strategy = name
        elif str(name) in cls.__members__:
            strategy = cls[str(name)]
        else:
            raise ValueError(f"strategy: unknown strategy {name!r}; known: {', '.join(cls.__members__)}")
        if strategy.rules.shard_over == "last axis" and axes != 2:
            raise ValueError(
                f"strategy: {strategy.name} needs a mesh with two axes, copies and shards, such as "
                f"init_device_mesh(shape=(2, 4)); this one has {axes}"
            )
        return strategy
