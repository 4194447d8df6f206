"""Recomputation and activation offload with sharded units: the same bits, and no further gather."""

import numpy as np
import pytest

from shardrt import nn
from shardrt.activation_offload import offload_activations
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import units
from shardrt.recompute import checkpoint
from tests.fsdp.nets import (
    Block,
    CalledTwice,
    Frozen,
    Nested,
    Net,
    NeverCalled,
    PartlyUsed,
    TiedInside,
    Viewed,
    batches,
    loss_of,
    plain,
    shard,
    train_on,
)
from tests.fsdp.recorder import Recorder
from tests.fsdp.test_counts import counts_of_one_step

NETS = [Net, CalledTwice, NeverCalled, PartlyUsed, TiedInside, Nested, Frozen, Viewed]


class WithDropout(Net):
    """Drops a part of what each block makes."""

    def run_blocks(self, x):
        for block in self.blocks:
            x = self.dropout(block(x))
        return x

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout = nn.Dropout(0.3)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.2))


def made(net, kinds, attach):
    """A function that makes `net` with `attach` called on all its modules of these kinds."""

    def make():
        model = net()
        for module in list(model.modules()):
            if isinstance(module, kinds):
                attach(module)
        return model

    return make


def selective(module):
    checkpoint(module, "matmul")


def offloaded_and_recomputed(module):
    offload_activations(checkpoint(module))


def assert_same_training(expected, found):
    for (loss, gradients), (loss_again, gradients_again) in zip(expected[0], found[0], strict=True):
        assert loss == loss_again and gradients.keys() == gradients_again.keys()
        for name in gradients:
            np.testing.assert_array_equal(gradients[name], gradients_again[name], err_msg=name)
    for name in expected[1]:
        np.testing.assert_array_equal(expected[1][name], found[1][name], err_msg=name)


# Blocks are units, stages contain units, linear layers are parts of units.
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("attach", [checkpoint, selective, offload_activations, offloaded_and_recomputed])
@pytest.mark.parametrize("kinds", [Block, nn.Linear, nn.Sequential, (nn.Sequential, Block)])
def test_training_is_the_same_to_the_bit(ranks, attach, kinds):
    for net in NETS if kinds in (Block, nn.Linear) else [Nested]:
        assert_same_training(plain(ranks, net), train_on(ranks, made(net, kinds, attach)))


@pytest.mark.parametrize("attach", [checkpoint, selective, offloaded_and_recomputed])
def test_training_with_dropout_is_the_same_to_the_bit(attach):
    for ranks in (0, 3):
        assert_same_training(plain(ranks, WithDropout), train_on(ranks, made(WithDropout, Block, attach)))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("net", [Net, Nested, CalledTwice])
def test_recomputed_units_are_gathered_and_reduced_no_more_often(net, strategy):
    plain = thread.run(2, counts_of_one_step, net, strategy=strategy)
    for attach in (checkpoint, selective):
        found = thread.run(2, counts_of_one_step, made(net, Block, attach), strategy=strategy)
        assert found == plain


@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_inside_a_recomputed_module_are_gathered_and_reduced_no_more_often(prefetch):
    """What recomputation gathers is kept for the backward that follows."""
    plain = thread.run(2, counts_of_one_step, Nested, prefetch=prefetch)
    assert plain == thread.run(
        2, counts_of_one_step, made(Nested, nn.Sequential, checkpoint), prefetch=prefetch
    )


def order_of_events(prefetch):
    """What the schedule did in one backward, and when blocks ran again, on this rank."""
    events = []
    model = Nested()
    for stage in model.stages:
        checkpoint(stage)
    shard(model, init_device_mesh("auto"), prefetch=prefetch)
    schedule = units(model)[0].schedule
    schedule.observers.append(Recorder(events))
    original = Block.forward
    try:
        Block.forward = lambda block, x: events.append(("forward", block.name)) or original(block, x)
        (tokens, targets), *_ = batches(1, size=4)
        loss = loss_of(model, tokens, targets)
        del events[:]
        loss.backward()
    finally:
        Block.forward = original
    return events


@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_inside_a_recomputed_module_are_gathered_ahead(prefetch):
    (events,) = thread.run(1, order_of_events, prefetch)
    gathered = events.index(("gather", "stages.1.2"))
    ran = events.index(("forward", "stages.1.0"))
    assert (gathered < ran) == bool(prefetch)
