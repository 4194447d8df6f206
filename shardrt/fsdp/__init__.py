"""Fully sharded data parallelism. Read in this order: strategy, layout, unit, ops, schedule, setup, api."""

from shardrt.fsdp.api import fully_shard, set_gradient_divide_factor, units
from shardrt.fsdp.strategy import ShardingStrategy

__all__ = ["ShardingStrategy", "fully_shard", "set_gradient_divide_factor", "units"]
