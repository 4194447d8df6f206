"""The switch for deterministic algorithms. What it changes is tested where the algorithms are chosen."""

import shardrt
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, set_world_invariant


def test_world_invariant_training_switches_it_on():
    model = shardrt.nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu"))
    set_world_invariant(model, 2)
    assert shardrt.are_deterministic_algorithms_enabled()
