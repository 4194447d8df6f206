"""device: whose an array is, and a device that is neither the CPU nor CUDA under all that is above it."""

import importlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from shardrt import device
from shardrt.comm import init_device_mesh
from shardrt.comm.single import SingleCommunicator
from shardrt.comm.staged import StagedCommunicator
from shardrt.device import StreamError, host, on_host, timeline
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import CPUOffloadPolicy, units
from tests import lab


def arrays_in(items):
    for item in items:
        if isinstance(item, tuple | list):
            yield from arrays_in(item)
        elif isinstance(item, np.ndarray):
            yield item


class Strict(CPUDevice):
    """All that it makes is of its own kind of array. Its kernels are given nothing that lies elsewhere."""

    def __init__(self):
        super().__init__()
        self.kind = type("Kind", (np.ndarray,), {"shardrt_device": self})

    def _own(self, array):
        return np.asarray(array).view(self.kind)

    def empty(self, shape, dtype):
        return self._own(super().empty(shape, dtype))

    def zeros(self, shape, dtype):
        return self._own(super().zeros(shape, dtype))

    def buffer(self, count, dtype):
        return self._own(super().buffer(count, dtype))

    def asarray(self, values, dtype=None):
        if isinstance(values, self.kind):
            return values.astype(dtype or values.dtype, copy=False)
        return self._own(np.array(values, dtype))

    def upload(self, values):
        return self._own(values.copy())

    def to_numpy(self, array):
        return np.array(array) if isinstance(array, self.kind) else array

    @property
    def kernels(self):
        return Kernels(self)


class Kernels:
    """The CPU's."""

    def __init__(self, device):
        self._device = device

    def __getattr__(self, module):
        found = vars(importlib.import_module(f"shardrt.kernels.cpu.{module}"))
        checked = {name: self._checked(x) if callable(x) else x for name, x in found.items()}
        return SimpleNamespace(**checked)

    def _checked(self, kernel):
        def call(*args, **kwargs):
            lie = {on_host(array) for array in arrays_in((args, tuple(kwargs.values())))}
            assert lie <= {self._device.in_host_memory}, f"{kernel.__name__}: memory of the other device"
            return kernel(*args, **kwargs)

        return call


class Beside(Strict):
    """A device beside the host: it computes, but not with the host's arrays.

    `host` has pinned arrays, of a kind of their own; what is updated on the host is updated there.
    """

    name = "beside"
    in_host_memory = False

    def __init__(self):
        super().__init__()
        self.host = Strict()
        self.copied = set()  # (of what kind, to what kind)

    def pinned(self, count, dtype):
        return self.host.buffer(count, dtype)

    def copy(self, target, source):
        self.copied.add((type(source), type(target)))
        super().copy(target, source)


def test_an_array_is_of_the_device_that_its_kind_names_and_else_of_the_cpu():
    here, cpu = Beside(), device.get("cpu")
    array = here.buffer(4, np.float32)
    assert device.of(array) is device.of(array[1:].reshape(1, 3)) is here
    assert not on_host(array)
    assert device.of(here.pinned(4, np.float32)) is here.host
    assert on_host(here.pinned(4, np.float32))
    assert device.of(np.zeros(4)) is cpu is cpu.host
    assert on_host(np.zeros(4))


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
        options = {"device": here()}
        with device.use(device.current()):  # a mesh makes its own the current one
            model, mesh = lab.build(of_mesh=options, offload_policy=OFFLOADS[offload])
            return lab.train(model, mesh), options["device"]

    found, there = lab.first(2, body, Beside)
    lab.assert_equal(found[::2], lab.first(2, body, lambda: "cpu")[0][::2])
    assert {(there.host.kind, there.kind), (there.kind, there.host.kind)} <= there.copied


def test_what_is_offloaded_lies_in_what_the_device_has_pinned():
    here = Beside()
    with device.use(device.current()):
        mesh = init_device_mesh(here)
        assert mesh.device is device.current() is here
        model = lab.shard(lab.Net(), mesh, offload_policy=CPUOffloadPolicy())
        units(model)
        storages = {parameter.storage for parameter in model.parameters()}
        arrays = [array for each in storages for array in (each.shard, each.new_state("first moment"))]
    assert {type(array) for array in arrays} == {here.host.kind}


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
    class Ticking(CPUDevice):
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
