"""Host memory: the same bits whatever lives there, and copies that run beside everything else."""

import time
from itertools import product

import numpy as np
import pytest

from shardrt.comm import init_device_mesh
from shardrt.device import timeline
from shardrt.fsdp import CPUOffloadPolicy, units
from tests import lab
from tests.fsdp.slow import COMPUTE, Hasty, sharded, step

PLACES = [places for places in product([False, True], repeat=3) if any(places)]
COPY, BLOCKS = 0.015, 5


@pytest.mark.parametrize(
    ("ranks", "places"), [(1, (True,) * 3), (3, (True,) * 3), *((2, places) for places in PLACES)], ids=str
)
def test_offload_changes_no_bit(ranks, places):
    found = lab.train_on(ranks, offload_policy=CPUOffloadPolicy(*places))
    lab.assert_equal(found, lab.train_on(ranks))


@pytest.mark.parametrize("make", [lab.CalledTwice, lab.Nested, lab.Frozen])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_offload_changes_no_bit_in_any_strategy(make, strategy):
    found = lab.train_on(2, make, strategy=strategy, offload_policy=CPUOffloadPolicy())
    lab.assert_equal(found, lab.train_on(2, make))


@pytest.mark.parametrize("step", [None, "host"])
@pytest.mark.parametrize("files", [False, True])
def test_updates_on_the_host_and_files_change_no_bit_and_leave_nothing(step, files, tmp_path):
    how = {"step": step} if step else {}
    policy = CPUOffloadPolicy(directory=tmp_path / "spill" if files else None, **how)
    lab.assert_equal(lab.train_on(2, offload_policy=policy), lab.train_on(2))
    assert not files or list((tmp_path / "spill").iterdir()) == []


@lab.on_ranks(2)
def test_gradients_accumulate_on_the_host_to_the_same_bits():
    models = [lab.build(offload_policy=policy)[0] for policy in (None, CPUOffloadPolicy())]
    for model in models:
        for batch in lab.batches(3):
            lab.backward(model, None, batch)
    lab.assert_equal(lab.gradients(models[1]), lab.gradients(models[0]))


def slow_copies(serial):
    """(seconds of a step, its spans) where every copy between host and device takes COPY seconds."""
    model = sharded(BLOCKS, init_device_mesh("auto"), offload_policy=CPUOffloadPolicy())
    streams = units(model)[0].schedule.streams
    streams.device = _SlowDevice(streams.device)
    if serial:
        streams.gather = streams.reduce = streams.upload = streams.download = streams.compute
    step(model)
    with timeline.record() as spans:
        return step(model), spans


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
    model, _ = lab.build(offload_policy=CPUOffloadPolicy())
    streams = units(model)[0].schedule.streams
    streams.device = _SlowDevice(streams.device)
    for arena in lab.arenas_of(model, "gathered", "download"):
        arena.poison = True
    if forget_to_wait:
        streams.gather = Hasty(streams.gather)
    return lab.train(model).losses


def test_the_gather_waits_for_the_host():
    good = lab.first(2, poisoned, False)
    assert np.isfinite(good).all()
    assert lab.first(2, poisoned, True) != good


test_a_host_update_of_what_is_elsewhere_is_refused = lab.refusals(
    (
        lambda: CPUOffloadPolicy(gradients=False, step="host"),
        ValueError,
        "step='host' needs parameters, gradients and optimizer_state",
    )
)
