"""What is whole on a rank is not copied: a gradient is its own sum, and AdamW writes the 16-bit weights."""

from functools import partial

import pytest

import shardrt
from shardrt import optim
from shardrt.checkpoint import full_state_dict, load, save
from shardrt.comm import CollectiveDelay
from shardrt.fsdp import (
    MixedPrecisionPolicy,
    full_parameters,
    no_sync,
    set_gradient_divide_factor,
)
from shardrt.fsdp.options import low_precision
from tests import lab

BF16 = MixedPrecisionPolicy("bfloat16", "float32")
KEPT = {"strategy": "NO_SHARD", "mp_policy": BF16}
BATCHES = lab.batches(3)


def accumulated(strategy):
    """The most slots for full gradients in use, and the gradients, after one, two and three backwards."""
    model, mesh = lab.build(strategy=strategy)
    set_gradient_divide_factor(model, 3.0)
    slots, found = [], []
    for batch in BATCHES:
        lab.backward(model, mesh, batch)
        slots.append(sum(peak for _, peak in lab.slots(model, "gradients")))
        found.append(lab.gradients(model))
    model.zero_grad()
    with no_sync(model):
        lab.backward(model, mesh, BATCHES[0])
    lab.backward(model, mesh, BATCHES[1])
    return slots, [*found, lab.gradients(model)]


# Where all of it is on each rank.
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "FULL_SHARD"), (1, "SHARD_OPT"), (2, "NO_SHARD")])
def test_the_first_gradient_of_a_step_takes_no_slot_and_later_ones_are_added_to_it(ranks, strategy):
    slots, found = lab.first(ranks, accumulated, strategy)
    assert [most > 0 for most in slots] == [False, True, True]
    if ranks > 1:
        lab.assert_equal(found, lab.first(ranks, accumulated, "FULL_SHARD")[1])


@lab.on_ranks(2)
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_reduction_that_is_late_when_backward_raises_does_not_reach_the_next_gradients(accumulates):
    """The first, or second, backward of a step raises while reductions are late."""
    expected, mesh = lab.build(strategy="NO_SHARD")
    set_gradient_divide_factor(expected, 1.0)
    lab.backward(expected, mesh, BATCHES[2])
    model, mesh = lab.build(wrap=lambda inner: CollectiveDelay(inner, 0.05), strategy="NO_SHARD")
    set_gradient_divide_factor(model, 1.0)  # a mean over the ranks would not show that it is made twice
    lab.backward(model, mesh, BATCHES[0])
    if not accumulates:
        model.zero_grad()
    with lab.backward_raises(model.blocks[0]):
        lab.backward(model, mesh, BATCHES[1])
    model.zero_grad()
    lab.backward(model, mesh, BATCHES[2])
    lab.assert_equal(lab.gradients(model), lab.gradients(expected))


class OwnUpdate(optim.AdamW):
    """Knows nothing of copies in 16 bits."""

    def update(self, kernels, update):
        update.arrays["shard"][...] -= 0.1 * update.arrays["gradient"]


@pytest.mark.parametrize(("kind", "rounds"), [(optim.AdamW, False), (optim.SGD, True), (OwnUpdate, True)])
def test_a_gather_rounds_nothing_after_adamw_and_all_after_other_updates(monkeypatch, kind, rounds):
    rounded, found = [], []
    cast = low_precision._cast
    monkeypatch.setattr(low_precision, "_cast", lambda *how: (rounded.append(None), cast(*how)))

    def rank():
        model, mesh = lab.build(**KEPT)
        optimizer = kind(model.parameters(), lr=0.1)
        for batch in BATCHES:
            rounded.clear()
            lab.backward(model, mesh, batch)
            found.append(len(rounded))
            lab.update(optimizer)

    lab.first(1, rank)
    assert found[0] > 2 and found[1:] == [found[0] * rounds] * 2


@lab.on_ranks(1)
@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_a_backward_after_an_update_reads_the_weights_of_its_forward(kind):
    """The copy in 16 bits is not written while a backward is to come that reads it."""
    found = []
    for updated in (False, True):
        model, _ = lab.build(**KEPT)
        optimizer = kind(model.parameters(), lr=0.1)
        first, second = (lab.loss_of(model, *batch) for batch in BATCHES[:2])
        first.backward()
        if updated:
            optimizer.step()
        model.zero_grad()
        second.backward()
        found.append(lab.gradients(model))
    lab.assert_equal(found[1], found[0])


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lion])
def test_no_bit_depends_on_who_rounds_after_an_update_in_backward(kind):
    def trained(strategy):
        model, mesh = lab.build(strategy=strategy, mp_policy=BF16)
        return lab.train(model, mesh, optimizer=partial(kind, lr=1e-2, in_backward=True))

    found, expected = (lab.first(2, trained, strategy) for strategy in ("NO_SHARD", "FULL_SHARD"))
    lab.assert_equal((found.losses, found.weights), (expected.losses, expected.weights))


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
    other, _ = lab.build(**KEPT)
    by_load(other, values, folder)
    save(folder, other)
    load(folder, model)


WAYS = [by_writing, by_load, by_full_parameters, by_state_dict, by_checkpoint]


@lab.on_ranks(1)
@pytest.mark.parametrize("change", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("in_use", [False, True])
def test_weights_that_are_changed_by_hand_between_steps_are_seen(change, in_use, tmp_path):
    """The loss is that of a model that began with them."""
    model, mesh = lab.build(**KEPT)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    values = {name: 0.5 * value for name, value in full_state_dict(model).items()}
    lab.backward(model, mesh, BATCHES[0])
    lab.update(optimizer)
    if in_use:  # the copy is, when the weights change
        with shardrt.no_grad():
            model(BATCHES[0][0])
    change(model, values, tmp_path)
    expected, _ = lab.build(**KEPT)
    by_load(expected, values, tmp_path)
    assert lab.backward(model, mesh, BATCHES[1]) == lab.backward(expected, mesh, BATCHES[1])
