"""Host memory: the same bits whatever lives there, and copies that run beside everything else."""

import time

import pytest

from shardrt.comm import init_device_mesh
from shardrt.device import timeline
from shardrt.fsdp import CPUOffloadPolicy, units
from tests import lab
from tests.fsdp.slow import COMPUTE, sharded, step

COPY, BLOCKS = 0.015, 5


@pytest.mark.parametrize("make", [lab.Net, lab.CalledTwice, lab.Nested, lab.Frozen])
@pytest.mark.parametrize("ranks", [1, 3])
def test_offload_changes_no_bit(ranks, make):
    """In every strategy, of a part, with accumulation: test_pairs.py."""
    lab.assert_equal(lab.train_on(ranks, make, offload_policy=CPUOffloadPolicy()), lab.train_on(ranks, make))


@pytest.mark.parametrize("step", ["device", "host"])
def test_files_change_no_bit_and_are_gone_at_the_end(step, tmp_path):
    policy = CPUOffloadPolicy(step=step, directory=tmp_path / "spill")
    lab.assert_equal(lab.train_on(2, offload_policy=policy), lab.train_on(2))
    assert not list((tmp_path / "spill").iterdir())


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


test_a_host_update_of_what_is_elsewhere_is_refused = lab.refusals(
    (
        lambda: CPUOffloadPolicy(gradients=False, step="host"),
        ValueError,
        "step='host' needs parameters, gradients and optimizer_state",
    )
)
