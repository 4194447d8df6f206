"""What stays gathered when: one row per sharding strategy.

All strategies run the same schedule; they differ in the answers to the questions below.
(Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, section 5.)
"""

from enum import Enum


class ShardingStrategy(Enum):
    """How the parameters of a unit are held between uses.

    FULL_SHARD (ZeRO-3): released after forward and after backward; gathered twice a step.
    SHARD_GRAD_OP (ZeRO-2 in FSDP's sense): kept from forward to backward; gathered once a step.
    """

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"

    @property
    def reshard_after_forward(self) -> bool:
        """Whether the gathered parameters are released between forward and backward."""
        return self is ShardingStrategy.FULL_SHARD

    @classmethod
    def parse(cls, name: "str | ShardingStrategy") -> "ShardingStrategy":
        """The strategy called `name`. Raises ValueError that lists the known ones."""
        if isinstance(name, cls):
            return name
        try:
            return cls[str(name)]
        except KeyError:
            known = ", ".join(strategy.name for strategy in cls)
            raise ValueError(f"strategy: unknown strategy {name!r}; known: {known}") from None
