"""Ways of using forward and backward: micro-batches, several losses, evaluation in between."""

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import shardrt
from shardrt import nn
from shardrt.comm import DelayedCommunicator, init_device_mesh, thread
from shardrt.fsdp import fully_shard, set_gradient_divide_factor, units
from tests.fsdp.nets import CalledTwice, Net, batches, gradients, loss_of, shard

(TOKENS, TARGETS), *_ = batches(1)


def model_and_part(sharded=True):
    """(a model, this rank's rows of the batch)."""
    shardrt.manual_seed(3)
    model = CalledTwice()
    if not sharded:
        return model, slice(None)
    mesh = init_device_mesh("auto")
    shard(model, mesh)
    rows = len(TOKENS) // mesh.size
    return model, slice(mesh.rank * rows, (mesh.rank + 1) * rows)


def whole_batch(sharded=True):
    model, part = model_and_part(sharded)
    loss_of(model, TOKENS[part], TARGETS[part]).backward()
    return gradients(model)


def micro_batches():
    """Two halves, each forward and backward, without zero_grad between."""
    model, part = model_and_part()
    for tokens, targets in zip(np.split(TOKENS[part], 2), np.split(TARGETS[part], 2), strict=True):
        (loss_of(model, tokens, targets) * 0.5).backward()
    return gradients(model)


def two_losses_one_backward():
    model, part = model_and_part()
    halves = zip(np.split(TOKENS[part], 2), np.split(TARGETS[part], 2), strict=True)
    first, second = (loss_of(model, tokens, targets) for tokens, targets in halves)
    ((first + second) * 0.5).backward()
    return gradients(model)


def two_losses_two_backwards():
    model, part = model_and_part()
    halves = zip(np.split(TOKENS[part], 2), np.split(TARGETS[part], 2), strict=True)
    losses = [loss_of(model, tokens, targets) * 0.5 for tokens, targets in halves]
    for loss in losses:
        loss.backward()
    return gradients(model)


def evaluation_between_forward_and_backward():
    model, part = model_and_part()
    loss = loss_of(model, TOKENS[part], TARGETS[part])
    with shardrt.no_grad():
        model(TOKENS[:1])
    loss.backward()
    return gradients(model)


def a_forward_that_is_dropped():
    model, part = model_and_part()
    loss_of(model, TARGETS[part], TOKENS[part])
    loss_of(model, TOKENS[part], TARGETS[part]).backward()
    return gradients(model)


def the_graph_used_twice():
    model, part = model_and_part()
    loss = loss_of(model, TOKENS[part], TARGETS[part]) * 0.5
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def summed_by_the_loss():
    """Divide factor 1: the loss of each rank is weighted by its share of the whole batch."""
    model, part = model_and_part()
    set_gradient_divide_factor(model, 1)
    share = TOKENS[part].size / TOKENS.size
    (loss_of(model, TOKENS[part], TARGETS[part]) * share).backward()
    return gradients(model)


@pytest.mark.parametrize(
    "way",
    [
        whole_batch,
        micro_batches,
        two_losses_one_backward,
        two_losses_two_backwards,
        evaluation_between_forward_and_backward,
        a_forward_that_is_dropped,
        the_graph_used_twice,
        summed_by_the_loss,
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_of_the_whole_batch(way, ranks):
    expected = whole_batch(sharded=False)
    for found in thread.run(ranks, way):
        for name, gradient in expected.items():
            np.testing.assert_allclose(
                found[name], gradient, rtol=0, atol=2e-5 * np.abs(gradient).max(), err_msg=name
            )


@dataclass(frozen=True, slots=True)
class Output:
    y: shardrt.Tensor


class ByName(OrderedDict):
    """Its items are attributes, too."""

    y = property(lambda self: self["y"])


class Opaque:
    """Tensors in it are found by nobody."""

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
    mesh = init_device_mesh("auto", wrap=lambda communicator: DelayedCommunicator(communicator, 0.02))
    model = nn.ModuleList([Boxes(box), Boxes(box)])
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    outputs = [model[0](shardrt.Tensor(np.ones((2, 7), np.float32) + mesh.rank))]
    outputs.append(model[1](outputs[0].y))
    outputs[1].y.sum().backward()
    assert all(type(output) is type(box(y=0)) for output in outputs)
    return np.concatenate([parameter.grad for parameter in model.parameters()])


def test_gradients_are_there_after_backward_whatever_a_unit_returns():
    expected = thread.run(2, gradients_in, Output)
    for box in (ByName, SimpleNamespace, Opaque):
        for rank, found in enumerate(thread.run(2, gradients_in, box)):
            assert np.array_equal(found, expected[rank]) and np.abs(found).max() > 0, box


def evaluated():
    """Logits without recording, and the states of the units after it."""
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto"))
    with shardrt.no_grad():
        logits = np.array(model(TOKENS).data)
    return logits, [unit.state.name for unit in units(model)]


def test_evaluation_keeps_nothing_gathered():
    shardrt.manual_seed(3)
    with shardrt.no_grad():
        expected = Net()(TOKENS).data
    for logits, states in thread.run(2, evaluated):
        np.testing.assert_allclose(logits, expected, rtol=1e-5)
        assert set(states) == {"SHARDED"}
