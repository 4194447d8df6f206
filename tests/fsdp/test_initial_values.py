"""A model starts with the same bits at every world size, and no rank makes more than its shard."""

import numpy as np
import pytest

from shardrt.checkpoint import full_state_dict
from tests import lab


def weights_and_size():
    model, _ = lab.build(seed=5)
    return full_state_dict(model), sum(group.shard.size for group in lab.groups_of(model))


@pytest.mark.parametrize("ranks", [1, 3, 8, 128])
def test_weights_are_equal_to_the_bit_at_every_world_size(ranks):
    weights, size = lab.first(ranks, weights_and_size)
    lab.assert_equal(weights, lab.seeded(seed=5).state_dict())
    # A rank holds its part of four units, each padded by less than a line.
    assert size <= lab.first(1, weights_and_size)[1] / ranks + 4 * 16


def test_weights_depend_on_the_seed_and_differ_between_parameters_of_one_shape():
    weights, others = (lab.seeded(seed=seed).state_dict() for seed in (5, 6))
    assert not np.array_equal(weights["embed.weight"], others["embed.weight"])
    assert not np.array_equal(weights["blocks.0.up.weight"], weights["blocks.1.up.weight"])
