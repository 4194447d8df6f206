"""What is whole on a rank is not copied: a gradient is its own sum, and AdamW writes the 16-bit weights."""

import numpy as np
import pytest

import shardrt
from shardrt import optim
from shardrt.checkpoint import full_state_dict, load, save
from shardrt.comm import DelayedCommunicator, init_device_mesh, thread
from shardrt.fsdp import (
    MixedPrecisionPolicy,
    collectives,
    full_parameters,
    no_sync,
    set_gradient_divide_factor,
    units,
)
from tests.fsdp.nets import Net, assert_same_bits, batches, gradients, loss_of, outcome, shard

BF16 = MixedPrecisionPolicy("bfloat16", "float32")
WHOLE = [(1, "FULL_SHARD"), (1, "SHARD_OPT"), (2, "NO_SHARD")]  # ranks, and what leaves all of it on each


def sharded(mesh_options=None, **settings):
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto", **(mesh_options or {})), **settings)
    return model


def backward(model, number):
    rank = units(model)[0].settings.mesh.rank
    tokens, targets = batches(3)[number]
    loss = loss_of(model, tokens[rank::2], targets[rank::2])
    loss.backward()
    return float(loss.item())


def accumulated(strategy, factor=3.0):
    """The most slots for full gradients in use, and the gradients, after one, two and three backwards."""
    model = sharded(strategy=strategy)
    set_gradient_divide_factor(model, factor)
    found = []
    for number in range(3):
        backward(model, number)
        arenas = {group.arenas["gradients"] for unit in units(model) for group in unit.groups}
        found.append((sum(arena.peak_in_use for arena in arenas), gradients(model)))
    model.zero_grad()
    with no_sync(model):
        backward(model, 0)
    backward(model, 1)
    return [*found, (0, gradients(model))]


@pytest.mark.parametrize(("ranks", "strategy"), WHOLE)
def test_the_first_gradient_of_a_step_takes_no_slot_and_later_ones_are_added_to_it(ranks, strategy):
    found = thread.run(ranks, accumulated, strategy)[0]
    assert [slots > 0 for slots, _ in found[:3]] == [False, True, True]
    if ranks > 1:
        for (_, own), (_, expected) in zip(
            found, thread.run(ranks, accumulated, "FULL_SHARD")[0], strict=True
        ):
            for name, gradient in expected.items():
                np.testing.assert_array_equal(own[name], gradient, err_msg=name)


def after_a_failure(accumulates):
    """Gradients of a step after one whose first, or second, backward raised while reductions were late."""
    late = {"wrap": lambda communicator: DelayedCommunicator(communicator, 0.05)}
    model = sharded(late, strategy="NO_SHARD")
    set_gradient_divide_factor(model, 1.0)  # a mean over the ranks would not show that it is made twice
    backward(model, 0)
    if not accumulates:
        model.zero_grad()
    block = model.blocks[0]
    forward = block.forward

    def failing(x):
        y = forward(x)
        y.register_hook(lambda gradient: 1 / 0)
        return y

    block.forward = failing
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    block.forward = forward
    model.zero_grad()
    backward(model, 2)
    return gradients(model)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_reduction_that_is_late_when_backward_raises_does_not_reach_the_next_gradients(accumulates):
    def alone():
        model = sharded(strategy="NO_SHARD")
        set_gradient_divide_factor(model, 1.0)
        backward(model, 2)
        return gradients(model)

    expected = thread.run(2, alone)[0]
    for name, gradient in thread.run(2, after_a_failure, accumulates)[0].items():
        np.testing.assert_array_equal(gradient, expected[name], err_msg=name)


def rounded_in_gathers(monkeypatch, make_optimizer, steps=3):
    """How often a gather of each of some steps rounded the weights of a unit."""
    model = sharded(strategy="NO_SHARD", mp_policy=BF16)
    optimizer, counts = make_optimizer(model.parameters()), []
    cast = collectives._cast
    monkeypatch.setattr(collectives, "_cast", lambda *how: (counts.append(None), cast(*how)))
    found = []
    for number in range(steps):
        counts.clear()
        backward(model, number)
        found.append(len(counts))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_after_adamw_a_gather_rounds_nothing(monkeypatch):
    rounded = thread.run(
        1, rounded_in_gathers, monkeypatch, lambda parameters: optim.AdamW(parameters, lr=0.1)
    )
    groups = rounded[0][0]
    assert groups > 2 and rounded[0] == [groups, 0, 0]


def test_after_another_optimizer_each_gather_rounds(monkeypatch):
    rounded = thread.run(1, rounded_in_gathers, monkeypatch, lambda parameters: optim.SGD(parameters, lr=0.1))
    assert rounded[0] == rounded[0][:1] * 3


class OwnUpdate(optim.AdamW):
    """Knows nothing of copies in 16 bits."""

    def update(self, kernels, update):
        update.arrays["shard"][...] -= 0.1 * update.arrays["gradient"]


def test_after_an_adamw_with_an_update_of_its_own_each_gather_rounds(monkeypatch):
    rounded = thread.run(1, rounded_in_gathers, monkeypatch, OwnUpdate)
    assert rounded[0] == rounded[0][:1] * 3


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
def test_a_backward_after_an_update_reads_the_weights_of_its_forward(make):
    """Whoever updates: the copy in 16 bits is not written while a backward is to come that reads it."""

    def of_the_second(updated):
        model = sharded(strategy="NO_SHARD", mp_policy=BF16)
        optimizer = make(model.parameters(), lr=0.1)
        first, second = (loss_of(model, *batch) for batch in batches(2))
        first.backward()
        if updated:
            optimizer.step()
        model.zero_grad()
        second.backward()
        return gradients(model)

    expected, found = (thread.run(1, of_the_second, updated)[0] for updated in (False, True))
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD, optim.Lion])
@pytest.mark.parametrize("in_backward", [False, True])
def test_no_bit_depends_on_who_rounds(make, in_backward):
    settings = {"mp_policy": BF16, "make_optimizer": lambda p: make(p, lr=1e-2, in_backward=in_backward)}
    expected = outcome(2, **settings)
    assert_same_bits(outcome(2, strategy="NO_SHARD", **settings), expected)


def by_writing(model, values, folder):
    for name, parameter in model.named_parameters():
        with parameter.writing() as piece:
            piece[...] = values[name].reshape(-1)


def by_load(model, values, folder):
    for name, parameter in model.named_parameters():
        parameter.load(values[name])


def by_full_parameters(model, values, folder):
    with full_parameters(model, writeback=True):
        for name, parameter in model.named_parameters():
            parameter.data[...] = values[name]


def by_state_dict(model, values, folder):
    model.load_state_dict(values)


def by_checkpoint(model, values, folder):
    other = sharded(strategy="NO_SHARD", mp_policy=BF16)
    by_load(other, values, folder)
    save(folder, other)
    load(folder, model)


@pytest.mark.parametrize(
    "change",
    [by_writing, by_load, by_full_parameters, by_state_dict, by_checkpoint],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("prepared", ["kept", "held"])
def test_weights_that_are_changed_by_hand_between_steps_are_seen(change, prepared, tmp_path):
    """The loss is that of a model that began with them; and so are the weights after a step more."""

    def losses():
        model = sharded(strategy="NO_SHARD", mp_policy=BF16)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        values = {name: 0.5 * value for name, value in full_state_dict(model).items()}
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        if prepared == "held":  # the copy is in use when the weights change
            with shardrt.no_grad():
                model(batches(1)[0][0])
        change(model, values, tmp_path)
        fresh = sharded(strategy="NO_SHARD", mp_policy=BF16)
        by_load(fresh, values, tmp_path)
        return backward(model, 1), backward(fresh, 1)

    found, expected = thread.run(1, losses)[0]
    assert found == expected
