"""Updates while backward runs: the bits of step() after it, beside it, and errors where that cannot be."""

import gc
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.device import timeline
from shardrt.nn.storage import Offloaded
from tests import lab
from tests.lab import CalledTwice, Frozen, Nested, Net, NeverCalled
from tests.optim.storages import HostStorage, SlowAdamW, assert_same_bits, gradients, snapshot

STEPS = 5
UNITS = 4
PLACEMENTS = [Offloaded(), Offloaded(True, True, True), Offloaded(True, True, True, step="host")]
OPTIMIZERS = {
    "adamw": lambda groups, **how: optim.AdamW(groups, lr=0.01, weight_decay=0.1, **how),
    "momentum": lambda groups, **how: optim.SGD(groups, lr=0.01, momentum=0.9, dampening=0.3, **how),
}


def backward(storages, gradient):
    """What a backward does at its end to each unit, the last one first."""
    for index, storage in reversed(list(enumerate(storages))):
        storage.reduce((1 + index) * gradient)


def train(make, placement, in_backward):
    """What the steps leave in each storage, with a learning rate that changes on the way."""
    storages = [HostStorage(placement, seed=seed) for seed in range(UNITS)]
    groups = [{**group, "params": list(group["params"])} for s in storages for group in s.groups()]
    optimizer = make(groups, in_backward=in_backward)
    for step, gradient in enumerate(gradients(STEPS)):
        optimizer.param_groups[1]["lr"] = 0.01 / (1 + step)
        backward(storages, gradient)
        lab.update(optimizer)
    return {"shards": np.concatenate([s.shard for s in storages])} | snapshot(storages[0], optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_updates_in_backward_have_the_bits_of_step(placement, make, monkeypatch):
    monkeypatch.setattr(optim.offload, "CHUNK", 1000)
    assert_same_bits(train(make, placement, True), train(make, Offloaded(), False))


class MeetingAdamW(optim.AdamW):
    """Each of its updates begins, then ends only while backward computes: both wait for that."""

    LIMIT = 30  # seconds, for a test that fails

    def update(self, kernels, update):
        self.begun.release()
        assert self.computing.acquire(timeout=self.LIMIT), (
            "backward does not go on before the update has ended"
        )
        super().update(kernels, update)


def test_the_update_of_a_unit_runs_beside_the_backward_of_the_next():
    storages = [HostStorage() for _ in range(UNITS)]
    optimizer = MeetingAdamW([p for s in storages for p in s.parameters], in_backward=True)
    optimizer.begun, optimizer.computing = threading.Semaphore(0), threading.Semaphore(0)
    (gradient,) = gradients(1)
    computing = []
    with timeline.record() as spans:
        for storage in storages:
            start = time.perf_counter()
            if computing:  # the unit before has its gradient
                assert optimizer.begun.acquire(timeout=optimizer.LIMIT), (
                    "the update waits for backward to end"
                )
                optimizer.computing.release()
            computing.append((start, time.perf_counter()))
            storage.reduce(gradient)
        optimizer.computing.release()
        optimizer.step()
    updates = [span for span in spans if span.label.startswith("update")]
    assert len(updates) == UNITS
    for span in updates[:-1]:
        assert any(span.start < end and start < span.stop for start, end in computing)


def test_step_waits_for_the_updates_and_makes_none():
    storage = HostStorage(delay=0.03)
    optimizer = optim.AdamW(storage.parameters, in_backward=True)
    before = storage.shard.copy()
    storage.reduce(gradients(1)[0])
    assert np.array_equal(storage.shard, before)  # the gradient is not there yet
    optimizer.step()
    after = storage.shard.copy()
    assert not np.array_equal(after, before)
    assert set(optimizer.slices[0].steps.tolist()) == {1}


def test_a_gradient_that_came_another_way_is_applied_by_step():
    plain = nn.Parameter((3,), nn.init.Zeros())
    storage = HostStorage()
    optimizer = optim.SGD([plain, *storage.parameters], lr=1.0, in_backward=True)
    plain.accumulate_gradient(np.ones(3, np.float32))
    storage.on_gradient, hook = None, storage.on_gradient
    storage.reduce(gradients(1)[0])
    before = storage.shard.copy()
    optimizer.step()
    assert hook is not None and np.array_equal(plain.data, [-1, -1, -1])
    assert not np.array_equal(storage.shard, before)


def test_a_second_backward_before_step_is_an_error_and_after_it_is_not():
    storage = HostStorage()
    optimizer = optim.AdamW(storage.parameters, in_backward=True)
    first, second, third = gradients(3)
    storage.reduce(first)
    with pytest.raises(RuntimeError, match="'p0' before step.*accumulate with no_sync for all but the last"):
        storage.reduce(second)
    lab.update(optimizer)
    storage.reduce(third)
    optimizer.step()
    assert set(optimizer.slices[0].steps.tolist()) == {2}


def test_the_settings_are_those_of_when_the_update_is_issued():
    storage = HostStorage(delay=0.02)
    optimizer = optim.SGD(storage.parameters, lr=0.0, weight_decay=0.0, in_backward=True)
    before = storage.shard.copy()
    storage.reduce(gradients(1)[0])
    optimizer.param_groups[0]["lr"] = 1.0  # too late
    optimizer.step()
    assert np.array_equal(storage.shard, before)


def test_a_storage_neither_keeps_nor_calls_an_optimizer_that_is_gone():
    storage = HostStorage()
    optimizer = optim.AdamW(storage.parameters, in_backward=True)
    state = weakref.ref(optimizer.slices[0].state["m"])
    enabled = gc.isenabled()
    gc.disable()
    try:
        del optimizer
        assert state() is None
    finally:
        if enabled:
            gc.enable()
    before = storage.shard.copy()
    storage.reduce(gradients(1)[0])
    storage._stream.synchronize()
    assert np.array_equal(storage.shard, before)


IN_BACKWARD = partial(lab.adamw, in_backward=True)


@pytest.mark.parametrize(
    ("ranks", "make"), [(1, Net), (3, CalledTwice), (3, NeverCalled), (3, Nested), (3, Frozen)]
)
def test_a_sharded_model_trains_to_the_same_bits(ranks, make):
    """What meets it, and what it refuses: tests/fsdp/test_pairs.py."""
    found = lab.train_on(ranks, make, optimizer=IN_BACKWARD)._replace(gradients=[])
    lab.assert_equal(found, lab.train_on(ranks, make)._replace(gradients=[]))


@lab.on_ranks(2)
def test_after_backward_all_parameters_are_new():
    """The loss between backward and step, and after step."""
    losses = {}
    for make in (lab.adamw, IN_BACKWARD):
        model, _ = lab.build()
        optimizer = make(model.parameters())
        lab.backward(model)
        between = lab.loss_of(model, *lab.batches(1)[0]).item()
        optimizer.step()
        losses[make] = between, lab.loss_of(model, *lab.batches(1)[0]).item()
    assert losses[IN_BACKWARD] == (losses[lab.adamw][1],) * 2


FORGET = {
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad of the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad of the model": lambda model, optimizer: model.zero_grad(),
}


@lab.on_ranks(2)
@pytest.mark.parametrize("forget", FORGET)
def test_a_backward_that_raises_leaves_the_updates_that_it_made_and_training_goes_on(forget):
    """Losses are the same at once and when all is at rest; units are updated once, or twice."""
    model, _ = lab.build()
    optimizer = SlowAdamW(model.parameters(), in_backward=True)
    first, second, other = lab.batches(3)
    with lab.backward_raises(model.blocks[1]):
        lab.backward(model, None, first)
    loss = lab.loss_of(model, *other).item()
    FORGET[forget](model, optimizer)
    time.sleep(2 * SlowAdamW.UPDATE)
    assert lab.loss_of(model, *other).item() == loss
    optimizer.zero_grad()
    lab.backward(model, None, second)
    optimizer.step()
    steps = {piece.name: set(piece.steps.tolist()) for piece in optimizer.slices}
    assert steps.pop("blocks.2.up.weight") == {2}  # backward came to it both times
    assert len(steps) == 3 and all(counts == {1} for counts in steps.values())
