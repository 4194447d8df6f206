"""Updates of what lives on the host: the same bits, copies beside computing, two slots, bounded memory."""

import time
from itertools import product

import numpy as np
import pytest

from shardrt import device, optim
from shardrt.device import timeline
from shardrt.device.cpu import CPUDevice
from shardrt.nn.storage import Offloaded
from shardrt.optim import offload
from tests.optim.storages import SIZES, HostStorage, SlowAdamW, assert_same_bits, gradients, snapshot
from tests.ranks import python

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


def test_nothing_reads_a_staging_slot_outside_its_turn():
    """Slots that are given back are NaN, and copies come late. (tests/races has each wait of it.)"""

    def poisoned(groups):
        optimizer = OPTIMIZERS["adamw"](groups)
        optimizer.updates.staging.poison = True
        for slot in optimizer.updates.staging.slots:
            slot.array.fill(np.nan)
        return optimizer

    with device.use(SlowCopies(0.001)):
        found = train(HostStorage(EVERYTHING, delay=0.02), poisoned, steps=3)
    assert_same_bits(found, train(HostStorage(), OPTIMIZERS["adamw"], steps=3))


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


def test_an_update_on_the_host_needs_everything_there():
    storage = HostStorage(Offloaded(True, False, False, step="host"))
    with pytest.raises(ValueError, match="'p0' has step='host'.*gradients and optimizer_state on the device"):
        optim.AdamW(storage.parameters)


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
placement = Offloaded(True, True, True, "host", Path(sys.argv[1]))
small = HostStorage(Offloaded(True, True, True, "host"), sizes=(1000,))
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


def test_spilled_state_is_not_resident(tmp_path):
    """On the host; test_beyond_memory.py has what is updated on the device."""
    done = python("-c", RESIDENT, tmp_path)
    assert done.returncode == 0, done.stderr
    anonymous, file, shared = map(int, done.stdout.split())
    arrays = 4 * (4 << 22)  # bytes of shard, gradient and two states
    chunk = 4 * (4 << 16)
    assert anonymous < 3 * chunk  # two of them are the staging slots
    assert file + shared < 5 * chunk < arrays / 10  # two in flight, with pages that are faulted in ahead
