"""Updates of what lives on the host: the same bits, copies beside computing, two slots, bounded memory."""

import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from shardrt import device, optim
from shardrt.device import timeline
from shardrt.device.cpu import CPUDevice
from shardrt.nn.storage import Offloaded
from shardrt.optim import offload
from tests.fsdp.slow import Hasty
from tests.optim.storages import SIZES, HostStorage, assert_same_bits, gradients, snapshot

STEPS = 5
PLACES = [Offloaded(*places) for places in product([False, True], repeat=3) if any(places)]
EVERYTHING = Offloaded(True, True, True)
ON_THE_HOST = Offloaded(True, True, True, step="host")
OPTIMIZERS = {
    "adamw": lambda groups: optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "sgd": lambda groups: optim.SGD(groups, lr=0.01, weight_decay=0.1),
    "momentum": lambda groups: optim.SGD(groups, lr=0.01, momentum=0.9, dampening=0.3),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """No multiple of a vector, and so small that parameters straddle several."""
    monkeypatch.setattr(offload, "CHUNK", 1000)


def train(storage, make, steps=STEPS):
    """What updates leave, with a learning rate that changes on the way."""
    optimizer = make(storage.groups())
    for step, gradient in enumerate(gradients(steps)):
        optimizer.zero_grad()
        storage.reduce(gradient)
        optimizer.param_groups[1]["lr"] = 0.01 / (1 + step)
        optimizer.step()
    return snapshot(storage, optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("placement", [*PLACES, ON_THE_HOST], ids=str)
def test_an_update_of_what_is_on_the_host_changes_no_bit(placement, make):
    storage = HostStorage()
    expected = train(storage, make)
    assert not np.array_equal(expected["shard"], HostStorage().shard)
    assert_same_bits(train(HostStorage(placement), make), expected)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("step", ["device", "host"])
def test_files_as_host_memory_change_no_bit(step, make, tmp_path):
    storage = HostStorage(Offloaded(True, True, True, step, tmp_path))
    found = train(storage, make)
    assert_same_bits(found, train(HostStorage(), make))
    for name, values in found.items():
        assert np.array_equal(np.fromfile(tmp_path / name, np.float32), values), name


def test_float64_is_staged_as_well():
    def run(placement):
        return train(HostStorage(placement, dtype=np.float64), OPTIMIZERS["adamw"])

    assert_same_bits(run(EVERYTHING), run(Offloaded()))


def test_what_no_group_owns_is_not_touched():
    storage = HostStorage(EVERYTHING)
    start, stop = storage.range_of(storage.parameters[3])
    before = storage.shard[start:stop].copy()
    train(storage, OPTIMIZERS["adamw"])
    assert np.array_equal(storage.shard[start:stop], before)


def test_a_step_tells_the_storage_that_it_was_modified():
    for placement in (Offloaded(), EVERYTHING, ON_THE_HOST):
        storage = HostStorage(placement)
        train(storage, OPTIMIZERS["sgd"], steps=3)
        assert storage.modifications == 3


class SlowCopies(CPUDevice):
    """Every copy takes `seconds` longer, except in the stream of the ops."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.buffers = []

    def copy(self, target, source):
        time.sleep(self.seconds)
        super().copy(target, source)

    def buffer(self, count, dtype):
        array = super().buffer(count, dtype)
        self.buffers.append(array)
        return array


class SlowAdamW(optim.AdamW):
    """Every call of its kernel takes UPDATE seconds longer."""

    UPDATE = 0.02

    def update(self, kernels, update):
        time.sleep(self.UPDATE)
        super().update(kernels, update)


@pytest.mark.serial
def test_uploads_and_downloads_run_beside_the_updates():
    copies = 0.0025  # seconds; a chunk has four on its way up and three on its way down
    chunks = -(-sum(SIZES) // 1000)
    with device.use(SlowCopies(copies)):
        storage = HostStorage(EVERYTHING)
        optimizer = SlowAdamW(storage.groups())
        storage.reduce(gradients(1)[0])
        with timeline.record() as spans:
            start = time.perf_counter()
            optimizer.step()
            seconds = time.perf_counter() - start
    one_by_one = chunks * (7 * copies + SlowAdamW.UPDATE)
    assert seconds < 0.8 * one_by_one
    updates = [span for span in spans if span.label.startswith("update")]
    assert len(updates) == chunks
    for direction in ("upload", "download"):
        moved = [span for span in spans if span.label.startswith(direction)]
        assert len(moved) == chunks
        beside = [m for m in moved if any(m.start < u.stop and u.start < m.stop for u in updates)]
        assert len(beside) == chunks - 1, direction  # all but the first up, all but the last down


def test_the_step_ends_when_the_last_copy_is_back():
    with device.use(SlowCopies(0.01)):
        found = train(HostStorage(EVERYTHING, delay=0.01), OPTIMIZERS["adamw"], steps=2)
    assert_same_bits(found, train(HostStorage(), OPTIMIZERS["adamw"], steps=2))


def poisoned(hasty=None):
    """As train, with NaN in every staging slot that is given back, and copies that come late."""

    def make(groups):
        optimizer = optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        optimizer.updates.staging.poison = True
        for slot in optimizer.updates.staging.slots:
            slot.array.fill(np.nan)
        if hasty == "optimizer":
            routes = optimizer.updates._routes
            for piece, route in routes.items():
                routes[piece] = replace(route, stream=Hasty(route.stream))
        elif hasty is not None:
            setattr(optimizer.updates, hasty, Hasty(getattr(optimizer.updates, hasty)))
        return optimizer

    with device.use(SlowCopies(0.001)):
        return train(HostStorage(EVERYTHING, delay=0.02), make, steps=3)


def test_nothing_reads_a_staging_slot_outside_its_turn():
    expected = train(HostStorage(), OPTIMIZERS["adamw"], steps=3)
    assert_same_bits(poisoned(), expected)


@pytest.mark.parametrize("stream", ["_upload", "optimizer", "_download"])
def test_poison_shows_a_stream_that_does_not_wait(stream):
    expected = train(HostStorage(), OPTIMIZERS["adamw"], steps=3)
    assert not np.array_equal(poisoned(hasty=stream)["shard"], expected["shard"])


@pytest.mark.parametrize("placement", [*PLACES, ON_THE_HOST], ids=str)
def test_staging_is_two_slots_for_the_largest_chunk(placement):
    with device.use(SlowCopies(0)) as here:
        storages = [HostStorage(placement), HostStorage(placement, sizes=(5, 3))]
        groups = [p for storage in storages for p in storage.parameters]
        here.buffers.clear()
        optimizer = optim.AdamW(groups)
        staged = placement.parameters + placement.gradients + 2 * placement.optimizer_state
        expected = [staged * 1008 * 4] * 2 if placement.step == "device" else []  # 1008: whole cache lines
        assert [array.nbytes for array in here.buffers] == expected
        assert optimizer.updates.staging_bytes == sum(expected)
        for gradient in gradients(3):
            storages[0].reduce(gradient)
            optimizer.step()
        assert len(here.buffers) == len(expected)


def test_staging_is_no_longer_than_the_longest_shard(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK", 1 << 20)
    optimizer = optim.AdamW(HostStorage(EVERYTHING, sizes=(100, 60)).parameters)
    assert optimizer.updates.staging_bytes == 2 * 4 * 160 * 4


def test_on_the_device_alone_nothing_is_staged():
    assert optim.AdamW(HostStorage().parameters).updates is None


def test_an_update_on_the_host_needs_everything_there():
    storage = HostStorage(Offloaded(True, False, False, step="host"))
    with pytest.raises(ValueError, match="'p0' has step='host'.*gradients and optimizer_state on the device"):
        optim.AdamW(storage.parameters)


ROOT = Path(__file__).parent.parent.parent
RESIDENT = """
import sys, threading, time
from pathlib import Path
import numpy as np
from shardrt import optim
from shardrt.nn.storage import Offloaded
from shardrt.optim import offload
from tests.optim.storages import HostStorage

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}

def watch():
    while watching:
        for kind, value in resident().items():
            peak[kind] = max(peak[kind], value)
        time.sleep(0.0005)

offload.CHUNK = 1 << 16
placement = Offloaded(True, True, True, sys.argv[1], Path(sys.argv[2]))
small = HostStorage(Offloaded(True, True, True, sys.argv[1]), sizes=(1000,))
large = HostStorage(placement, sizes=(1 << 22,))
optimizer = optim.AdamW(small.parameters + large.parameters)
small.reduce(np.ones(1000, np.float32))
optimizer.step()  # compiles
large._gradient[:] = 1
large._has_gradient = True
for array in (large._shard, large._gradient):
    array.flush()
    array._mmap.madvise(4)
before, peak, watching = resident(), resident(), True
thread = threading.Thread(target=watch)
thread.start()
for _ in range(2):
    optimizer.step()
watching = False
thread.join()
assert large.shard[-1] != 0 and (np.asarray(optimizer.slices[1].state["m"]) > 0).all()
print(*(peak[kind] - before[kind] for kind in ("RssAnon", "RssFile", "RssShmem")))
"""


@pytest.mark.parametrize("step", ["device", "host"])
def test_spilled_state_is_not_resident(step, tmp_path):
    command = [sys.executable, "-c", RESIDENT, step, str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    anonymous, file, shared = map(int, done.stdout.split())
    arrays = 4 * (4 << 22)  # bytes of shard, gradient and two states
    chunk = 4 * (4 << 16)
    assert anonymous < 3 * chunk  # two of them are the staging slots
    assert file + shared < 5 * chunk < arrays / 10  # two in flight, with pages that are faulted in ahead
