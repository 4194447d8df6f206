"""Fully sharded data parallelism (FSDP): the runtime. Options are in `options` and enter at its seams.

Reading order: strategy, policy, api (fully_shard), unit, layout, process_groups, group (what a unit is),
roles, buffers, setup (how a model is built). Then one step: boundary, schedule, plan, forward, gathers,
transfer, nodes, gradients, gradient_path, whole_gradient, collectives, sharded_gradient.
docs/learn/one_step.md shows one step next to the code.
"""

from shardrt.fsdp.api import fully_shard
from shardrt.fsdp.memory import MemoryPlan, explain, memory_plan
from shardrt.fsdp.options.accumulation import no_sync, set_gradient_divide_factor
from shardrt.fsdp.options.entries import register_forward_method
from shardrt.fsdp.options.fixed_tree import set_world_invariant
from shardrt.fsdp.options.full import full_gradients, full_parameters, reshard, unshard
from shardrt.fsdp.options.mixed_precision import MixedPrecisionPolicy
from shardrt.fsdp.options.offload import CPUOffloadPolicy
from shardrt.fsdp.options.packed_rows import set_find_unused_parameters
from shardrt.fsdp.policy import OffloadPolicy
from shardrt.fsdp.replicas import ReplicasDiffer, check_replicas
from shardrt.fsdp.setup import units
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.fsdp.wrap import by_class, by_predicate, by_size, wrap

__all__ = [
    "CPUOffloadPolicy",
    "MemoryPlan",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicasDiffer",
    "ShardingStrategy",
    "by_class",
    "by_predicate",
    "by_size",
    "check_replicas",
    "explain",
    "full_gradients",
    "full_parameters",
    "fully_shard",
    "memory_plan",
    "no_sync",
    "register_forward_method",
    "reshard",
    "set_find_unused_parameters",
    "set_gradient_divide_factor",
    "set_world_invariant",
    "units",
    "unshard",
    "wrap",
]
