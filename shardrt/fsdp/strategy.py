"""How each sharding strategy cuts parameters over ranks, and how long it keeps them gathered: one line each.

All strategies run the same schedule; they differ in the rules below, and give the same bits at one world
size. (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, section
5; Zhao et al., PyTorch FSDP, 2023, section 3.2.)
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Rules:
    """What one strategy does.

    cut: the ranks that a parameter is cut over: all of the "mesh", those along the "last axis" of a mesh of
    two, or "none". Ranks beyond that hold copies, whose gradients are summed.
    """

    cut: str
    keep_after_forward: bool  # the gathered parameters stay until backward
    keep_after_backward: bool  # and until the optimizer has changed them
    keep_gradient: bool = False  # each rank has full gradients of its own, not a slot that units share


class ShardingStrategy(Enum):
    """How the parameters, gradients and optimizer state of a unit are held. P: bytes of all parameters.

    NO_SHARD (DDP): every rank has everything; gradients are reduced. Traffic per step and rank 2P.
    SHARD_OPT (ZeRO-1): optimizer state cut; parameters and gradients whole on every rank, beside shards of
        both: 2P / N more memory than ZeRO-1 needs on N ranks; 2P.
    SHARD_GRAD_OP (ZeRO-2 in FSDP's sense): all cut; gathered from forward to backward; 2P.
    FULL_SHARD (ZeRO-3): all cut; gathered for forward and again for backward; 3P.
    HYBRID_SHARD: FULL_SHARD within the last axis of a two-axis mesh, copies along the first.
    HYBRID_SHARD_GRAD_OP: SHARD_GRAD_OP likewise.
    """

    NO_SHARD = Rules("none", True, True)
    SHARD_OPT = Rules("mesh", True, True, keep_gradient=True)
    SHARD_GRAD_OP = Rules("mesh", True, False)
    FULL_SHARD = Rules("mesh", False, False)
    HYBRID_SHARD = Rules("last axis", False, False)
    HYBRID_SHARD_GRAD_OP = Rules("last axis", True, False)

    @property
    def rules(self) -> Rules:
        """What it does."""
        return self.value

    @classmethod
    def parse(
        cls, name: "str | ShardingStrategy | None", axes: int, names: tuple[str, ...] | None = None
    ) -> "ShardingStrategy":
        """The strategy called `name`, or for None the default of a mesh with `axes` axes, called `names`.

        Raises ValueError, which lists the known strategies, or says which mesh a hybrid strategy needs.
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
        if strategy.rules.cut == "last axis" and axes != 2:
            raise ValueError(
                f"strategy: {strategy.name} needs a mesh with two axes, copies and shards, such as "
                f"init_device_mesh(shape=(2, 4)); this one has {axes}"
            )
        return strategy
