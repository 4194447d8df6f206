"""Ways of using forward and backward: evaluation in between, forwards without a backward, any output."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import shardrt
from shardrt import nn
from shardrt.comm import CollectiveDelay, init_device_mesh, thread
from shardrt.fsdp import fully_shard, units
from tests import lab

TOKENS, TARGETS = BATCH = lab.batches(1)[0]


def evaluation_between_forward_and_backward(model, batch):
    loss = lab.loss_of(model, *batch)
    with shardrt.no_grad():
        model(TOKENS[:1])
    loss.backward()


def a_forward_that_is_dropped(model, batch):
    lab.loss_of(model, *batch[::-1])
    lab.loss_of(model, *batch).backward()


def the_graph_used_twice(model, batch):
    loss = lab.loss_of(model, *batch) * 0.5
    loss.backward(retain_graph=True)
    loss.backward()


WAYS = [evaluation_between_forward_and_backward, a_forward_that_is_dropped, the_graph_used_twice]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_the_whole_batch(way, ranks):
    """With micro-batches: test_no_sync.py. With several losses: test_forwards_in_flight.py."""

    def rank():
        model, mesh = lab.build(lab.CalledTwice)
        way(model, lab.rows(mesh, *BATCH))
        return lab.gradients(model)

    plain = lab.seeded(lab.CalledTwice)
    lab.backward(plain, None, BATCH)
    for found in thread.run(ranks, rank):
        lab.assert_close(found, lab.gradients(plain), of_largest=2e-5)


@dataclass(frozen=True, slots=True)
class Output:
    y: shardrt.Tensor


class ByName(OrderedDict):
    """Its items are attributes, too."""

    y = property(lambda self: self["y"])


class Opaque:
    """A container whose tensors are not found."""

    def __init__(self, y):
        self.y = y


class Boxes(nn.Module):
    """Its parts return tensors, or `box` around them."""

    def __init__(self, box):
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.box = box

    def forward(self, x):
        return self.box(y=self.linear(x))


def gradients_in(box):
    """At once after backward, where reductions take long."""
    shardrt.manual_seed(3)
    mesh = init_device_mesh("auto", wrap=lambda communicator: CollectiveDelay(communicator, 0.02))
    model = nn.ModuleList([Boxes(box), Boxes(box)])
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    first = model[0](shardrt.Tensor(np.ones((2, 7), np.float32) + mesh.rank))
    second = model[1](first.y)
    second.y.sum().backward()
    assert type(first) is type(second) is type(box(y=0))
    return np.concatenate([parameter.grad for parameter in model.parameters()])


def test_gradients_are_there_after_backward_whatever_a_unit_returns():
    expected = thread.run(2, gradients_in, Output)
    assert all(np.abs(gradient).max() > 0 for gradient in expected)
    for box in (ByName, SimpleNamespace, Opaque):
        lab.assert_equal(thread.run(2, gradients_in, box), expected, box)


@lab.on_ranks(2)
def test_evaluation_keeps_nothing_gathered():
    (model, _), plain = lab.build(), lab.seeded()
    with shardrt.no_grad():
        lab.assert_close(np.array(model(TOKENS).data), plain(TOKENS).data, rtol=1e-5)
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}
