"""Updates while backward runs: the bits of step() after it, beside it, and errors where that cannot be."""

import gc
import threading
import time
import weakref
from functools import cache

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.device import timeline
from shardrt.fsdp import CPUOffloadPolicy, no_sync
from shardrt.nn.storage import HostPlacement
from tests.fsdp.nets import CalledTwice, Frozen, Nested, Net, NeverCalled, batches, loss_of, shard, train_on
from tests.optim.storages import HostStorage, assert_same_bits, gradients, snapshot

STEPS = 5
UNITS = 4
PLACEMENTS = [HostPlacement(), HostPlacement(True, True, True), HostPlacement(True, True, True, step="host")]
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
        optimizer.step()
        optimizer.zero_grad()
    return {"shards": np.concatenate([s.shard for s in storages])} | snapshot(storages[0], optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_updates_in_backward_have_the_bits_of_step(placement, make, monkeypatch):
    monkeypatch.setattr(optim.offload, "CHUNK", 1000)
    assert_same_bits(train(make, placement, True), train(make, HostPlacement(), False))


class SlowAdamW(optim.AdamW):
    """Every call of its kernel takes UPDATE seconds longer."""

    UPDATE = 0.02

    def update(self, kernels, update):
        time.sleep(self.UPDATE)
        super().update(kernels, update)


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
    optimizer.step()
    optimizer.zero_grad()
    storage.reduce(third)
    optimizer.step()
    assert set(optimizer.slices[0].steps.tolist()) == {2}


def test_a_storage_says_whether_its_gradient_is_applied():
    storage = HostStorage()
    optimizer = optim.AdamW(storage.parameters, in_backward=True)
    storage.reduce(gradients(1)[0])
    assert storage.applied
    optimizer.step()
    assert not storage.applied


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


def adamw(in_backward):
    return lambda parameters: optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, in_backward=in_backward)


@cache
def trained(ranks, make):
    """By step()."""
    return train_on(ranks, make, steps=4, make_optimizer=adamw(False))


POLICIES = [CPUOffloadPolicy(False, False, False), CPUOffloadPolicy(), CPUOffloadPolicy(step="host")]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("ranks", "make"), [(1, Net), (3, Net), (3, CalledTwice), (3, NeverCalled), (3, Nested), (3, Frozen)]
)
def test_a_sharded_model_trains_to_the_same_bits(ranks, make, policy):
    history, expected = trained(ranks, make)
    losses, found = train_on(ranks, make, steps=4, make_optimizer=adamw(True), offload_policy=policy)
    assert [loss for loss, _ in losses] == [loss for loss, _ in history]
    assert_same_bits(found, expected)


def accumulated(in_backward):
    """Losses of three steps of three micro-batches each."""
    model = shard(Net(), init_device_mesh("auto"))
    optimizer = adamw(in_backward)(model.parameters())
    losses = []
    for tokens, targets in batches(3):
        with no_sync(model):
            loss_of(model, tokens[:4], targets[:4]).backward()
            loss_of(model, tokens[4:8], targets[4:8]).backward()
        loss = loss_of(model, tokens[8:], targets[8:])
        loss.backward()
        losses.append(float(loss.item()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_accumulation_with_no_sync_goes_with_it():
    assert thread.run(2, accumulated, True) == thread.run(2, accumulated, False)


def evaluated_before_step(in_backward):
    """The loss between backward and step, and after step."""
    model = shard(Net(), init_device_mesh("auto"))
    optimizer = adamw(in_backward)(model.parameters())
    ((tokens, targets),) = batches(1)
    loss_of(model, tokens, targets).backward()
    between = float(loss_of(model, tokens, targets).item())
    optimizer.step()
    return between, float(loss_of(model, tokens, targets).item())


def test_after_backward_all_parameters_are_new():
    between, after = thread.run(2, evaluated_before_step, True)[0]
    assert between == after == thread.run(2, evaluated_before_step, False)[0][1]


def after_a_backward_that_raised(forget):
    """Losses at once and when all is at rest, and how often each unit was updated, a step later."""
    model = shard(Net(), init_device_mesh("auto"))
    optimizer = SlowAdamW(model.parameters(), in_backward=True)
    first, second, other = batches(3)
    forward = model.blocks[1].forward

    def failing(x):
        y = forward(x)
        y.register_hook(lambda gradient: 1 / 0)
        return y

    model.blocks[1].forward = failing
    with pytest.raises(ZeroDivisionError):
        loss_of(model, *first).backward()
    model.blocks[1].forward = forward
    losses = [float(loss_of(model, *other).item())]
    forget(model, optimizer)
    time.sleep(2 * SlowAdamW.UPDATE)
    losses.append(float(loss_of(model, *other).item()))
    optimizer.zero_grad()
    loss_of(model, *second).backward()
    optimizer.step()
    return losses, {piece.name: set(piece.steps.tolist()) for piece in optimizer.slices}


@pytest.mark.parametrize(
    "forget",
    [
        lambda model, optimizer: optimizer.step(),
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: model.zero_grad(),
    ],
    ids=["step", "zero_grad of the optimizer", "zero_grad of the model"],
)
def test_a_backward_that_raises_leaves_the_updates_that_it_made_and_training_goes_on(forget):
    for losses, steps in thread.run(2, after_a_backward_that_raised, forget):
        assert losses[0] == losses[1]
        assert steps.pop("blocks.2.up.weight") == {2}  # backward came to it both times
        assert len(steps) == 3 and all(counts == {1} for counts in steps.values())


def changed_after_the_update(change):
    """A backward that applies its gradients, and then an attempt to change them."""
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto"))
    optimizer = optim.AdamW(model.parameters(), in_backward=True)
    tokens, targets = batches(1, size=4)[0]
    scaler = optim.GradScaler(init_scale=2.0)
    scaler.scale(loss_of(model, tokens, targets)).backward()
    change(model, optimizer, scaler)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer, scaler: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, optimizer, scaler: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, optimizer, scaler: scaler.unscale_(optimizer),
    ],
)
def test_gradients_that_were_applied_cannot_be_changed(change):
    with pytest.raises(RuntimeError, match="in_backward=True and has applied these gradients already"):
        thread.run(2, changed_after_the_update, change)
