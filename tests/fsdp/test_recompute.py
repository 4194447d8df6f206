"""Recomputation and activation offload with sharded units: the same bits, and no further gather.

With dropout, and all else: test_pairs.py.
"""

import pytest

from shardrt import nn
from shardrt.activation_offload import offload_activations
from shardrt.fsdp import units
from shardrt.recompute import checkpoint
from tests import lab
from tests.fsdp.recorder import Recorder
from tests.lab import Block, CalledTwice, Frozen, Nested, Net, NeverCalled, PartlyUsed, TiedInside, Viewed

NETS = {  # by what is recomputed
    Block: [Net, CalledTwice, NeverCalled, PartlyUsed, TiedInside, Nested, Frozen, Viewed],  # units
    nn.Linear: [Net, TiedInside, Nested],  # parts of units
    nn.Sequential: [Nested],  # what contains units
    (nn.Sequential, Block): [Nested],
}


def selective(module):
    checkpoint(module, "matmul")


def offloaded_and_recomputed(module):
    offload_activations(checkpoint(module))


WAYS = [checkpoint, selective, offload_activations, offloaded_and_recomputed]


@pytest.mark.parametrize("attach", WAYS)
@pytest.mark.parametrize("kinds", NETS)
def test_training_is_the_same_to_the_bit(attach, kinds):
    for net in NETS[kinds]:
        lab.assert_equal(lab.train_on(2, net, attach=attach, kinds=kinds), lab.train_on(2, net), net)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("net", [Net, Nested, CalledTwice])
def test_recomputed_units_are_gathered_and_reduced_no_more_often(net, strategy):
    plain = lab.calls_of_a_step(net, strategy=strategy)
    for attach in (checkpoint, selective):
        assert lab.calls_of_a_step(net, strategy=strategy, attach=attach) == plain


@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_inside_a_recomputed_module_are_gathered_ahead_and_no_more_often(prefetch):
    """What recomputation gathers is kept for the backward that follows."""
    settings = {"prefetch": prefetch, "attach": checkpoint, "kinds": nn.Sequential}
    assert lab.calls_of_a_step(Nested, **settings) == lab.calls_of_a_step(Nested, prefetch=prefetch)
    events = []

    class Noted(Block):
        def forward(self, x):
            events.append(("forward", self.name))
            return super().forward(x)

    def make():
        model = Nested()
        for stage in model.stages:
            stage[0], stage[2] = Noted(), Noted()
        return model

    def rank():
        model, _ = lab.build(make, **settings)
        units(model)[0].schedule.observers.append(Recorder(events))
        loss = lab.loss_of(model, *lab.batches(1, size=4)[0])
        events.clear()
        loss.backward()

    lab.first(1, rank)
    gathered, ran = events.index(("gather", "stages.1.2")), events.index(("forward", "stages.1.0"))
    assert (gathered < ran) == bool(prefetch)
