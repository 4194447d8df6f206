"""Every strategy computes the same, to the bit, at one world size; what differs is what is kept and moved."""

import numpy as np
import pytest

import shardrt
from shardrt import nn
from shardrt.fsdp import units
from tests import lab
from tests.lab import Block, CalledTwice, Frozen, Nested, Net, TiedInside

FLAT = ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"]
HYBRID = ["HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"]
MESHES = {3: [(3, 1)], 4: [(2, 2)], 6: [(3, 2)], 8: [(2, 4), (4, 2)]}


def same_bits(ranks, make, *strategies):
    hybrids = [(name, shape) for name in HYBRID for shape in MESHES[ranks]]
    for strategy, shape in [(name, None) for name in FLAT] + hybrids:
        if strategy in strategies:
            found = lab.train_on(ranks, make, strategy=strategy, shape=shape)
            lab.assert_equal(found, lab.train_on(ranks, make), f"{strategy} {shape}")


@pytest.mark.parametrize("make", [Net, CalledTwice, Nested, Frozen, TiedInside])
@pytest.mark.parametrize("ranks", [3, 4])
def test_all_strategies_give_the_same_bits(ranks, make):
    """In three steps: what an update changes is gathered twice. bench.bits has 20."""
    same_bits(ranks, make, *FLAT[:3], *HYBRID)


@pytest.mark.parametrize("ranks", [6, 8])
def test_groups_of_a_power_of_two_give_the_same_bits_at_larger_world_sizes(ranks):
    """Of the strategies that add in different ways; from the others these differ in what they keep."""
    same_bits(ranks, Net, "NO_SHARD", "HYBRID_SHARD")


class Even(nn.Module):
    """Units whose sizes divide by everything: no padding, so that traffic is the formula exactly."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 64) for _ in range(3))
        for block in self.blocks:
            block.up = nn.Linear(32, 64, bias=False)
            block.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def traffic(strategy, shape=None):
    """Bytes received by rank 0 in the second step, by size of the group; bytes of all parameters."""
    counts = lab.Counts()
    model, _ = lab.build(Even, wrap=counts, strategy=strategy, shape=shape)
    x = shardrt.Tensor(np.ones((4, 32), np.float32))
    lab.count_step(counts, model, lambda: model(x).sum().backward())
    moved = {}
    for communicator in counts.communicators:
        moved.setdefault(communicator.communicator.size, []).append(sum(communicator.bytes.values()))
    return {size: sum(found) for size, found in moved.items()}, 4 * sum(p.size for p in model.parameters())


@pytest.mark.parametrize("strategy", FLAT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire_are_the_formula(strategy, ranks):
    moved, parameters = lab.first(ranks, traffic, strategy)
    volumes = 3 if strategy == "FULL_SHARD" else 2
    agreed = 2 * 3 * 8 * (ranks - 1) // ranks  # one number for each unit: whether any rank used it
    assert moved == {ranks: volumes * parameters * (ranks - 1) // ranks + agreed}


@pytest.mark.parametrize(("strategy", "volumes"), [("HYBRID_SHARD", 3), ("HYBRID_SHARD_GRAD_OP", 2)])
@pytest.mark.parametrize(("copies", "shards"), [(2, 4), (4, 2)])
def test_a_hybrid_moves_its_shard_alone_across_groups(strategy, volumes, copies, shards):
    moved, parameters = lab.first(copies * shards, traffic, strategy, (copies, shards))
    assert moved[shards] == volumes * parameters * (shards - 1) // shards
    assert moved[copies] == 2 * parameters // shards * (copies - 1) // copies


@lab.on_ranks(2)
@pytest.mark.parametrize(("strategy", "gathers"), [("SHARD_OPT", 4), ("SHARD_GRAD_OP", 3 * 4)])
def test_resident_parameters_are_gathered_once_for_all_micro_batches(strategy, gathers):
    counts = lab.Counts()
    model, _ = lab.build(wrap=counts, strategy=strategy)
    lab.count_step(counts, model, lambda: [lab.backward(model, None, batch) for batch in lab.batches(3)])
    assert counts.calls("all_gather") == [gathers]


@lab.on_ranks(4)
@pytest.mark.parametrize(("shape", "strategy"), [(None, "FULL_SHARD"), ((2, 2), "HYBRID_SHARD")])
def test_the_mesh_says_which_strategy_is_usual(shape, strategy):
    model, _ = lab.build(shape=shape)
    assert units(model)[0].settings.strategy.name == strategy
