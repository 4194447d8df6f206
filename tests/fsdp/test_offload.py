"""Host memory: the same bits whatever lives there, and copies that run beside everything else."""

import time
from itertools import product

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.device import timeline
from shardrt.fsdp import CPUOffloadPolicy, fully_shard, units
from tests.fsdp.nets import (
    CalledTwice,
    Frozen,
    Nested,
    Net,
    assert_same_bits,
    batches,
    loss_of,
    outcome,
    shard,
)
from tests.fsdp.slow import COMPUTE, Slow

PLACES = [places for places in product([False, True], repeat=3) if any(places)]


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_offload_changes_no_bit(ranks, places):
    policy = CPUOffloadPolicy(*places)
    assert_same_bits(outcome(ranks, offload_policy=policy), outcome(ranks))


@pytest.mark.parametrize("make", [CalledTwice, Nested, Frozen])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_offload_changes_no_bit_in_any_strategy(make, strategy):
    policy = CPUOffloadPolicy()
    found = outcome(2, make, strategy=strategy, offload_policy=policy)
    assert_same_bits(found, outcome(2, make))


def test_the_update_on_the_host_changes_no_bit(tmp_path):
    for policy in (CPUOffloadPolicy(step="host"), CPUOffloadPolicy(step="host", directory=tmp_path)):
        assert_same_bits(outcome(2, offload_policy=policy), outcome(2))


def test_files_as_host_memory_change_no_bit_and_leave_nothing(tmp_path):
    policy = CPUOffloadPolicy(directory=tmp_path / "spill")
    assert_same_bits(outcome(2, offload_policy=policy), outcome(2))
    assert list((tmp_path / "spill").iterdir()) == []


def micro_batches(policy):
    """Sharded gradients after three backwards."""
    shardrt.manual_seed(3)
    model = Net()
    mesh = init_device_mesh("auto")
    shard(model, mesh, offload_policy=policy)
    for tokens, targets in batches(3):
        loss_of(model, tokens, targets).backward()
    return [p.grad.copy() for p in model.parameters()]


def test_gradients_accumulate_on_the_host_to_the_same_bits():
    expected = thread.run(2, micro_batches, None)[1]
    found = thread.run(2, micro_batches, CPUOffloadPolicy())[1]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


COPY, BLOCKS = 0.015, 5


class SlowBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x):
        return Slow.apply(self.layer(x))


class SlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def slow_copies(serial):
    """(seconds of a step, its spans) where every copy between host and device takes COPY seconds."""
    model = SlowNet()
    mesh = init_device_mesh("auto")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh)
    streams = units(model)[0].schedule.streams
    streams.device = _SlowDevice(streams.device)
    if serial:
        streams.gather = streams.reduce = streams.upload = streams.download = streams.compute
    x = shardrt.Tensor(np.ones((4, 7), np.float32))
    model(x).sum().backward()
    with timeline.record() as spans:
        start = time.perf_counter()
        model(x).sum().backward()
        seconds = time.perf_counter() - start
    return seconds, spans


class _SlowDevice:
    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        return getattr(self._device, name)

    def copy(self, target, source):
        time.sleep(COPY)
        self._device.copy(target, source)


@pytest.mark.serial
def test_copies_in_both_directions_run_beside_compute():
    serial, _ = slow_copies(serial=True)
    overlapped, spans = slow_copies(serial=False)
    copies = 4 * BLOCKS * COPY  # up for forward and for backward; gradients up, to be added to, and down
    assert serial > 2 * BLOCKS * COMPUTE + 0.9 * copies
    assert overlapped < 0.65 * serial
    compute = [span for span in spans if span.label.startswith(("forward", "backward"))]
    for direction in ("upload blocks", "upload gradient", "download"):
        beside = [s for s in spans if s.label.startswith(direction) and any(_overlap(s, c) for c in compute)]
        assert len(beside) >= BLOCKS - 1, direction


def _overlap(first, second):
    return first.start < second.stop and second.start < first.stop


def poisoned(forget_to_wait):
    """Losses of three steps; slots are poisoned when they are released and copies come late."""
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto"), offload_policy=CPUOffloadPolicy())
    streams = units(model)[0].schedule.streams
    streams.device = _SlowDevice(streams.device)
    for unit in units(model):
        for role in ("gathered", "download"):
            unit.groups[0].arenas[role].poison = True
    if forget_to_wait:
        streams.gather = _Hasty(streams.gather)
    optimizer = optim.AdamW(model.parameters())
    losses = []
    for tokens, targets in batches(3, size=4):
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
    return losses


class _Hasty:
    """A stream that waits for nothing."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def wait(self, event):
        pass


def test_the_gather_waits_for_the_host():
    good = thread.run(2, poisoned, False)[0]
    assert np.isfinite(good).all()
    assert thread.run(2, poisoned, True)[0] != good


def test_a_host_update_needs_everything_on_the_host():
    with pytest.raises(ValueError, match="step='host' needs parameters, gradients and optimizer_state"):
        CPUOffloadPolicy(gradients=False, step="host")
