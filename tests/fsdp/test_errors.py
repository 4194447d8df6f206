"""What fully_shard refuses, and what it says."""

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard
from tests.fsdp.nets import Net, batches, loss_of, shard


def sharded():
    model = Net()
    shard(model, init_device_mesh("auto"))
    return model


def read_while_sharded():
    model = sharded()
    optim.AdamW(model.parameters())
    _ = model.blocks[1].up.weight.data


def write_while_sharded():
    model = sharded()
    with shardrt.no_grad():
        model.blocks[1].up.weight.data = np.zeros((13, 7))


def add_while_sharded():
    model = sharded()
    with shardrt.no_grad():
        model.blocks[1].up.weight += 1


@pytest.mark.parametrize("touch", [read_while_sharded, write_while_sharded, add_while_sharded])
def test_a_parameter_touched_while_sharded_is_named(touch):
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.weight' is sharded"):
        thread.run(2, touch)


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(ValueError, match="'FULL'; known: NO_SHARD, SHARD_OPT, SHARD_GRAD_OP, FULL_SHARD"):
        fully_shard(Net(), strategy="FULL")


def test_sharding_twice_is_refused():
    model = fully_shard(Net())
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(model)


def test_only_modules_are_sharded():
    with pytest.raises(TypeError, match="must be a shardrt.nn.Module"):
        fully_shard(1)


def too_many_ranks():
    model = nn.LayerNorm(1)
    fully_shard(model, mesh=init_device_mesh("auto"))
    optim.AdamW(model.parameters())


def test_more_ranks_than_elements_is_refused():
    with pytest.raises(ValueError, match="2 parameter elements, too few for 3 ranks"):
        thread.run(3, too_many_ranks)


def different_seeds():
    shardrt.manual_seed(shardrt.comm.init_device_mesh("auto").rank)
    optim.AdamW(sharded().parameters())


def test_ranks_with_different_seeds_are_told():
    with pytest.raises(ValueError, match=r"ranks \[1\] have another model, seed or sharding"):
        thread.run(2, different_seeds)


class Leaky(Net):
    """The head is tied to a weight inside a block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 13)
        self.head.weight = self.blocks[0].up.weight


def leaky():
    model = Leaky()
    shard(model, init_device_mesh("auto"))
    optim.AdamW(model.parameters())


def test_a_parameter_tied_across_units_is_named_with_both_places():
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.up\.weight' of unit blocks\.0 is tied to 'head\.weight'"
    ):
        thread.run(2, leaky)


def late_root():
    model = Net()
    mesh = init_device_mesh("auto")
    fully_shard(model.blocks[0], mesh=mesh)
    model.blocks[0](shardrt.Tensor(np.ones((2, 7), np.float32)))
    fully_shard(model, mesh=mesh)
    optim.AdamW(model.parameters())


def test_sharding_the_whole_after_a_part_was_used_is_refused():
    with pytest.raises(RuntimeError, match="unit blocks.0 was used before the model around it"):
        thread.run(2, late_root)


class Raises(Net):
    def run_blocks(self, x):
        x = self.blocks[0](x)
        if self.failing:
            raise ArithmeticError("a user's error")
        return self.blocks[1](x)


def fail_once():
    """A forward that raises, is caught, and is followed by a good step; the loss of that."""
    model = Raises()
    shard(model, init_device_mesh("auto"))
    (tokens, targets), *_ = batches(1, size=4)
    losses = []
    for model.failing in (False, True, False):
        try:
            loss = loss_of(model, tokens, targets)
            loss.backward()
            losses.append(float(loss.item()))
        except ArithmeticError:
            losses.append(None)
    return losses


def test_a_forward_that_raised_leaves_the_model_usable():
    losses = thread.run(2, fail_once)[0]
    assert losses[1] is None
    assert losses[0] == losses[2]
