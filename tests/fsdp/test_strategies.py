"""Every strategy computes the same, to the bit, at one world size; what differs is what is kept and moved."""

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.fsdp import ShardingStrategy, fully_shard, units
from tests.fsdp.nets import (
    Block,
    CalledTwice,
    Frozen,
    Nested,
    Net,
    TiedInside,
    assert_same_bits,
    batches,
    loss_of,
    outcome,
    plain,
    shard,
    train_on,
)
from tests.fsdp.test_equal_to_one_rank import assert_same_training

FLAT = ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"]
HYBRID = ["HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"]
MESHES = {
    1: [(1, 1)],
    2: [(1, 2), (2, 1)],
    3: [(1, 3), (3, 1)],
    4: [(2, 2), (4, 1)],
    6: [(3, 2)],
    8: [(2, 4), (4, 2)],
}


def all_strategies(ranks):
    """(strategy, mesh options) of everything that fits this many ranks."""
    flat = [(name, None) for name in FLAT]
    return flat + [(name, {"shape": shape}) for name in HYBRID for shape in MESHES[ranks]]


@pytest.mark.parametrize("make", [Net, CalledTwice, Nested, Frozen, TiedInside])
@pytest.mark.parametrize("ranks", [3, 4])
def test_all_strategies_give_the_same_bits(ranks, make):
    """In three steps: what an update changes is gathered twice. bench.bits has 20."""
    expected = None
    for strategy, mesh in all_strategies(ranks):
        found = outcome(ranks, make, strategy=strategy, mesh_options=mesh)
        expected = expected or found
        assert_same_bits(found, expected, f"{strategy} {mesh}")


@pytest.mark.parametrize("ranks", [6, 8])
def test_groups_of_a_power_of_two_give_the_same_bits_at_larger_world_sizes(ranks):
    """Of the strategies that add in different ways; from the others these differ in what they keep."""
    expected = outcome(ranks)
    for strategy, mesh in all_strategies(ranks):
        if strategy in ("NO_SHARD", "HYBRID_SHARD"):
            found = outcome(ranks, strategy=strategy, mesh_options=mesh)
            assert_same_bits(found, expected, f"{strategy} {mesh}")


@pytest.mark.parametrize("strategy", [*FLAT, *HYBRID])
def test_every_strategy_trains_like_the_plain_model(strategy):
    """Gradients, too; at other world sizes FULL_SHARD does, and the others have its bits."""
    mesh = {"shape": MESHES[4][0]} if strategy in HYBRID else None
    assert_same_training(train_on(4, Net, strategy=strategy, mesh_options=mesh), plain(0))


def mixed(strategies):
    """Weights after three steps with another strategy for each unit."""
    shardrt.manual_seed(3)
    model = Net()
    mesh = init_device_mesh("auto", (2, 2))
    for block, strategy in zip(model.blocks, strategies, strict=True):
        fully_shard(block, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy="SHARD_OPT")
    return trained(model, mesh, steps=3)


def trained(model, mesh, steps):
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for tokens, targets in batches(steps):
        mine = slice(mesh.rank * len(tokens) // mesh.size, (mesh.rank + 1) * len(tokens) // mesh.size)
        loss_of(model, tokens[mine], targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardrt.checkpoint.full_state_dict(model)


def test_units_of_one_model_may_have_different_strategies():
    expected = outcome(4)[1]
    for strategies in (
        ["NO_SHARD", "HYBRID_SHARD", "FULL_SHARD"],
        ["HYBRID_SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD"],
    ):
        found = thread.run(4, mixed, strategies)[0]
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


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


def traffic(shape, strategy):
    """Bytes received by rank 0 in the second step, by role of the communicator; bytes of all parameters."""
    made = {}

    def counted(communicator):
        made.setdefault(communicator.size, []).append(CountedCommunicator(communicator))
        return made[communicator.size][-1]

    model = Even()
    mesh = init_device_mesh("auto", shape, wrap=counted)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy=strategy)
    optimizer = optim.AdamW(model.parameters())
    x = shardrt.Tensor(np.ones((4, 32), np.float32))
    for step in range(2):
        if step == 1:
            for communicator in (c for found in made.values() for c in found):
                communicator.reset()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {size: sum(sum(c.bytes.values()) for c in found) for size, found in made.items()}
    return moved, 4 * sum(p.size for p in model.parameters())


@pytest.mark.parametrize(
    ("strategy", "volumes"), [("NO_SHARD", 2), ("SHARD_OPT", 2), ("SHARD_GRAD_OP", 2), ("FULL_SHARD", 3)]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire_are_the_formula(strategy, volumes, ranks):
    moved, parameters = thread.run(ranks, traffic, None, strategy)[0]
    agreed = 2 * 3 * 8 * (ranks - 1) // ranks  # one number for each unit: whether any rank used it
    assert moved == {ranks: volumes * parameters * (ranks - 1) // ranks + agreed}


@pytest.mark.parametrize(("strategy", "volumes"), [("HYBRID_SHARD", 3), ("HYBRID_SHARD_GRAD_OP", 2)])
@pytest.mark.parametrize(("copies", "shards"), [(2, 4), (4, 2)])
def test_a_hybrid_moves_its_shard_alone_across_groups(strategy, volumes, copies, shards):
    moved, parameters = thread.run(copies * shards, traffic, (copies, shards), strategy)[0]
    within, across = moved[shards], moved[copies]
    assert within == volumes * parameters * (shards - 1) // shards
    assert across == 2 * parameters // shards * (copies - 1) // copies


def kept(strategy):
    """States of the units after forward and after backward."""
    model = Net()
    mesh = init_device_mesh("auto")
    shard(model, mesh, strategy=strategy)
    (tokens, targets), *_ = batches(1, size=4)
    loss = loss_of(model, tokens, targets)
    after_forward = [unit.gathered for unit in units(model)[1:]]
    loss.backward()
    return after_forward, [unit.gathered for unit in units(model)[1:]]


@pytest.mark.parametrize("strategy", FLAT)
def test_what_stays_gathered_is_as_the_table_says(strategy):
    row = ShardingStrategy[strategy].rules
    after_forward, after_backward = thread.run(2, kept, strategy)[0]
    assert set(after_forward) == {row.keep_after_forward}
    assert set(after_backward) == {row.keep_after_backward}


def gathers_per_step(strategy, micro_batches):
    made = []

    def counted(communicator):
        made.append(CountedCommunicator(communicator))
        return made[-1]

    model = Net()
    shard(model, init_device_mesh("auto", wrap=counted), strategy=strategy)
    optimizer = optim.AdamW(model.parameters())
    for _ in range(2):
        before = sum(c.calls["all_gather"] for c in made)
        for tokens, targets in batches(micro_batches, size=4):
            loss_of(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(c.calls["all_gather"] for c in made) - before


def test_resident_parameters_are_gathered_once_for_all_micro_batches():
    assert thread.run(2, gathers_per_step, "SHARD_OPT", 3)[0] == 4
    assert thread.run(2, gathers_per_step, "SHARD_GRAD_OP", 3)[0] == 3 * 4


def test_a_hybrid_needs_two_axes():
    with pytest.raises(ValueError, match="HYBRID_SHARD needs a mesh with two axes"):
        fully_shard(Net(), strategy="HYBRID_SHARD")


def default_strategy(shape):
    model = fully_shard(Net(), mesh=init_device_mesh("auto", shape))
    return units(model)[0].settings.strategy.name


def test_the_mesh_says_which_strategy_is_usual():
    assert thread.run(2, default_strategy, None)[0] == "FULL_SHARD"
    assert thread.run(4, default_strategy, (2, 2))[0] == "HYBRID_SHARD"
