"""A model starts with the same bits at every world size, and no rank makes more than its shard."""

import numpy as np
import pytest

import shardrt
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp.api import units
from tests.fsdp.nets import Net, shard


def initial_weights(seed):
    shardrt.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("auto")
    shard(model, mesh)
    held = sum(group.shard.size for unit in units(model) for group in unit.groups)
    return full_state_dict(model), held


def unsharded(seed=5):
    shardrt.manual_seed(seed)
    return Net().state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 128])
def test_weights_are_equal_to_the_bit_at_every_world_size(ranks):
    weights, _ = thread.run(ranks, initial_weights, 5)[0]
    expected = unsharded()
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


def test_weights_depend_on_the_seed():
    assert not np.array_equal(unsharded(5)["embed.weight"], unsharded(6)["embed.weight"])


def test_parameters_of_one_shape_get_different_values():
    weights = unsharded()
    assert not np.array_equal(weights["blocks.0.up.weight"], weights["blocks.1.up.weight"])


def test_a_rank_holds_its_share():
    one = thread.run(1, initial_weights, 5)[0][1]
    four = thread.run(4, initial_weights, 5)[0][1]
    assert four <= one / 4 + 4 * 16  # four units, each padded by less than a line
