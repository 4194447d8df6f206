"""device: whose an array is, and a device that is neither the CPU nor CUDA under all that is above it."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from shardrt import device
from shardrt.comm import world as worlds
from shardrt.comm.single import SingleCommunicator
from shardrt.comm.staged import StagedCommunicator
from shardrt.device import StreamError, host, timeline
from shardrt.fsdp import CPUOffloadPolicy
from tests import lab
from tests.beside import Beside, OverHost


def test_an_array_is_of_the_device_that_its_kind_names_and_else_of_the_cpu():
    here, cpu = Beside(), device.get("cpu")
    array = here.buffer(4, np.float32)
    assert device.of(array) is device.of(array[1:].reshape(1, 3)) is here
    assert not device.on_host(array)
    assert device.of(here.pinned(4, np.float32)) is here.host
    assert device.on_host(here.pinned(4, np.float32))
    assert device.of(np.zeros(4)) is cpu is cpu.host
    assert device.on_host(np.zeros(4))


def test_what_is_staged_are_the_arrays_that_are_not_on_the_host():
    here, carried = Beside(), []

    class Host(SingleCommunicator):
        def _all_gather(self, buffer, what):
            carried.append(buffer)

    staged, stream = StagedCommunicator(Host(), here), here.current_stream
    arrays = here.buffer(4, np.float32), here.pinned(4, np.float32), np.zeros(4, np.float32)
    for array in arrays:
        staged.all_gather(array, stream=stream)
    assert [device.of(array) for array in carried] == [here.host, here.host, device.get("cpu")]
    assert [a is b for a, b in zip(arrays, carried, strict=True)] == [False, True, True]


def test_a_file_in_place_of_pinned_memory_is_an_array_like_any_other(tmp_path):
    assert type(host.buffer(device.get("cpu"), 4, np.float32, tmp_path)) is np.ndarray


OFFLOADS = {
    "on the device": None,
    "offload": CPUOffloadPolicy(),
    "step on host": CPUOffloadPolicy(step="host"),
}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_device_of_any_kind_trains_as_the_cpu_does(offload):
    """It is given, not named; its arrays and the host's meet in copies alone."""

    def body(here):
        before = device.current()
        try:
            options = {"device": here()}
            model, mesh = lab.build(of_mesh=options, offload_policy=OFFLOADS[offload])
            return lab.train(model, mesh), options["device"]
        finally:
            device.set_current(before)

    found, there = lab.first(2, body, Beside)
    lab.assert_equal(found[::2], lab.first(2, body, lambda: "cpu")[0][::2])
    assert {(there.host.kind, there.kind), (there.kind, there.host.kind)} <= there.copied


@pytest.mark.parametrize("reduction", ["tree", "nccl"])
def test_a_world_may_have_a_device_and_a_transport_of_its_own(reduction):
    """Then nothing asks for CUDA, or NCCL: communicators for GPUs work on whatever is below them."""

    def body():
        made = []

        def transport(*ends):
            made.append(OverHost(*ends))
            return made[-1]

        here, before, plain = Beside(), device.current(), worlds.current()
        with worlds.use(replace(plain, device=here, transport=transport)):
            try:
                result = lab.train(*lab.build(of_mesh={"reduction": reduction}))
            finally:
                device.set_current(before)
        return result, {transport.device for transport in made} == {here}, {c for t in made for c in t.calls}

    found, own, calls = lab.first(3, body)
    assert own
    assert calls == {"gather", {"tree": "swap", "nccl": "reduce_scatter"}[reduction]}
    lab.assert_equal(found.weights, lab.train_on(3).weights)


def test_a_stream_that_has_failed_is_told_by_its_events_which_wait_for_nothing():
    stream, going_on = device.get("cpu").new_stream("beside"), threading.Event()
    before, failed = device.get("cpu").new_event(), device.get("cpu").new_event()
    stream.record(before)
    stream.submit(going_on.wait)
    stream.submit(int, "no number")
    stream.record(failed)
    failed.check()
    going_on.set()
    with pytest.raises(StreamError, match="no number"):
        stream.synchronize()
    before.check()
    with pytest.raises(StreamError, match="no number"):
        failed.check()


def test_all_times_of_a_recording_are_of_the_clock_that_it_is_given():
    class Ticking(device.cpu.CPUDevice):
        ticks = 0.0

        def clock(self):
            self.ticks += 1.0
            return self.ticks

    here = Ticking()
    stream, event = here.new_stream("beside"), here.new_event()
    with timeline.record_all(here.clock) as kept:
        stream.submit(int, label="work")
        stream.record(event)
        stream.synchronize()
        here.current_stream.wait(event)
        timeline.count_of("slots", here, 1)
    times = [time for span in kept.spans for time in (span.start, span.stop)]
    times += [item.time for item in (*kept.passed, *kept.counts)]
    assert sorted(times) == list(range(1, len(times) + 1))
