"""Grouped matmuls by cuBLAS: the binding against a stand-in in C, which refuses what cuBLAS refuses."""

import ctypes
import time
from collections import Counter

import numpy as np
import pytest

import shardrt
from shardrt import device
from shardrt import functional as F
from shardrt.comm import thread
from shardrt.kernels.cpu import grouped as cpu
from shardrt.kernels.cuda import grouped as cuda
from shardrt.kernels.cuda._cublas_grouped import CublasGrouped
from tests.cuda.numbers import assert_close, dtype_of, normal

HALF = ["float16", "bfloat16"]
COUNTS = (3, 0, 40, 6)  # of 52 rows, or more


class Record(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("calls", "groups", "stream", "workspace", "faults")]


@pytest.fixture
def cublas(gpu, gpu_kernels):
    """The stand-in, whose products run in the streams of the GPU emulator."""
    library = gpu_kernels._cublas_grouped._library
    gpu_kernels._cublas_grouped._refused.clear()
    yield library
    ctypes.c_int.in_dll(library, "fake_unsupported").value = 0
    gpu_kernels._cublas_grouped._refused.clear()
    assert not record(library).faults


def record(library):
    return Record.from_buffer_copy(Record.in_dll(library, "fake_record"))


def calls_of(library, work):
    before = record(library).calls
    work()
    return record(library).calls - before


class Layer:
    """Arrays of a layer of experts on the GPU, with `offset` elements before each; and on the host."""

    def __init__(self, element, inputs=16, outputs=24, gradient=None, counts=COUNTS, offset=0):
        here, rows = device.current(), sum(counts) + 3
        self.counts, kind = counts, dtype_of(element)

        def made(*shape, seed=0, dtype=kind):
            values = np.concatenate([np.zeros(offset), normal(*shape, seed=seed).ravel()])
            return here.asarray(values.astype(dtype))[offset:].reshape(shape)

        self.x, self.dy = made(rows, inputs), made(rows, outputs)
        self.weight = made(len(counts), outputs, inputs)
        self.y, self.dx = made(rows, outputs, seed=1), made(rows, inputs, seed=1)
        self.dweight = made(*self.weight.shape, seed=1, dtype=gradient or kind)
        self.before = here.to_numpy(self.dweight).astype(np.float64)

    def run(self, accumulate=False):
        cuda.forward(self.x, self.weight, self.counts, self.y)
        cuda.backward_input(self.dy, self.weight, self.counts, self.dx)
        cuda.backward_weight(self.x, self.dy, self.counts, self.dweight, accumulate)

    def check(self, accumulate=False):
        """Beside the CPU's in float64."""
        x, dy, weight = (array.get().astype(np.float64) for array in (self.x, self.dy, self.weight))
        y, dx = np.empty(dy.shape), np.empty(x.shape)
        cpu.forward(x, weight, self.counts, y)
        cpu.backward_input(dy, weight, self.counts, dx)
        cpu.backward_weight(x, dy, self.counts, self.before, accumulate)
        for found, expected in ((self.y, y), (self.dx, dx), (self.dweight, self.before)):
            assert_close(found.get(), expected)


@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 9, 0), (7,)], ids=["some", "one", "alone"])
@pytest.mark.parametrize("element", HALF)
def test_each_product_of_a_layer_is_one_call(cublas, element, counts, accumulate):
    layer = Layer(element, counts=counts)
    assert calls_of(cublas, lambda: layer.run(accumulate)) == 3
    assert record(cublas).groups == sum(count > 0 for count in counts)
    layer.check(accumulate)


def test_many_rows_have_no_call_of_their_own(cublas, monkeypatch):
    monkeypatch.setattr(cuda, "FEW", 0)
    layer = Layer("bfloat16")
    assert calls_of(cublas, layer.run) == 3
    layer.check()


@pytest.mark.parametrize(
    "how",
    [
        {"element": "float32"},
        {"element": "float64"},
        {"element": "bfloat16", "inputs": 12},
        {"element": "bfloat16", "outputs": 20},
        {"element": "float16", "offset": 1},
        {"element": "float16", "counts": (0, 0)},
        {"element": "bfloat16", "gradient": np.float32},
    ],
    ids=["float32", "float64", "inputs", "outputs", "not aligned", "no rows", "sums in float32"],
)
def test_the_other_kernels_take_what_cublas_does_not(cublas, how):
    layer = Layer(**how)
    assert calls_of(cublas, layer.run) == (2 if "gradient" in how else 0)  # cuBLAS has the other products
    layer.check()


def test_what_a_gpu_does_not_support_is_asked_for_once(cublas):
    ctypes.c_int.in_dll(cublas, "fake_unsupported").value = 14
    layer = Layer("bfloat16")
    assert calls_of(cublas, layer.run) == 0
    layer.check()
    ctypes.c_int.in_dll(cublas, "fake_unsupported").value = 0
    assert calls_of(cublas, layer.run) == 0
    assert calls_of(cublas, Layer("float16").run) == 3


def test_an_older_cublas_has_no_such_call(cublas, gpu_kernels, monkeypatch):
    old = CublasGrouped(ctypes.CDLL(None), gpu_kernels)
    monkeypatch.setattr(gpu_kernels, "_cublas_grouped", old)
    layer = Layer("bfloat16")
    assert calls_of(cublas, layer.run) == 0
    layer.check()


def test_other_failures_are_raised(cublas, gpu_kernels, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "workspace", lambda stream: 8)
    layer = Layer("bfloat16")
    with pytest.raises(RuntimeError, match=r"cublasSetWorkspace: invalid value \(7\)"):
        layer.run()


def test_deterministic_algorithms_give_a_group_bits_of_its_own(cublas):
    shardrt.use_deterministic_algorithms(True)
    try:
        layer = Layer("bfloat16")
        assert calls_of(cublas, layer.run) == 0
        layer.check()
    finally:
        shardrt.use_deterministic_algorithms(False)


def test_parts_of_sums_stay_in_float32(cublas, gpu):
    """256 + 1 - 256: a part of the sum that bfloat16 rounded would lose the 1."""
    x, weight = np.zeros((8, 16), np.float32), np.ones((1, 8, 16), np.float32)
    x[:, [0, 1, 9]] = 256, 1, -256
    kind = dtype_of("bfloat16")
    y = gpu.asarray(np.zeros((8, 8), kind))
    call = gpu.asarray(x.astype(kind)), gpu.asarray(weight.astype(kind)), (8,), y
    assert calls_of(cublas, lambda: cuda.forward(*call)) == 1
    np.testing.assert_array_equal(gpu.to_numpy(y).astype(np.float32), 1)


def test_each_stream_has_a_workspace_of_its_own(cublas, gpu):
    layer, found = Layer("bfloat16"), []
    for stream in (gpu.current_stream, gpu.new_stream("side")):
        gpu.wait_here()
        stream.submit(layer.run)
        found.append(record(cublas))
        stream.synchronize()
    assert [each.stream for each in found] == [gpu.current_stream.handle.ptr, stream.handle.ptr]
    assert found[0].workspace != found[1].workspace and all(each.workspace for each in found)


def test_threads_that_share_the_handle_have_streams_of_their_own(cublas, software, gpu_kernels, monkeypatch):
    workspace = gpu_kernels.workspace

    def slowly(stream):
        time.sleep(0.05)  # in which the other thread could set its stream
        return workspace(stream)

    monkeypatch.setattr(gpu_kernels, "workspace", slowly)

    def rank():
        with device.use(device.get("cuda")) as here:
            layer = Layer("bfloat16")
            layer.run()
            layer.check()
            return here.current_stream.handle.ptr

    begun = len(software.log)
    streams = thread.run(2, rank)
    issued = Counter(handle for what, handle, _ in software.log[begun:] if what == "product")
    assert issued == {stream: 3 for stream in streams} and len(issued) == 2


@pytest.mark.parametrize("element, what", [("bfloat16", "product"), ("float32", "launch")])
def test_the_host_waits_for_nothing(cublas, software, gpu, monkeypatch, element, what):
    """Addresses are copied, and products made, when the stream comes to them; sizes were read in the call.

    So is the table of the launch of the other kernels.
    """
    layer = Layer(element)
    monkeypatch.setattr(software, "poll", lambda stream: None)  # CuPy asks whether pinned memory is free
    gpu.current_stream.synchronize()
    before = {stream: len(stream.queue) for stream in software.working()}
    begun = len(software.log)
    cuda.forward(layer.x, layer.weight, layer.counts, layer.y)
    issued = Counter(software.stream(handle) for _, handle, _ in software.log[begun:])
    assert what in [each for each, *_ in software.log[begun:]]
    assert {stream: len(stream.queue) - before.get(stream, 0) for stream in issued} == issued
    layer.run()
    layer.check()


def test_in_a_capture_the_upload_of_addresses_is_refused(gpu, cublas):
    """As that of the other kernels' table. The handle is as before: the layer then runs."""
    layer = Layer("bfloat16")
    x, weight = (shardrt.Tensor(array) for array in (layer.x, layer.weight))
    F.grouped_linear(x, weight, COUNTS)
    before = record(cublas).calls
    with pytest.raises(RuntimeError, match="captur"):
        gpu.capture(lambda: F.grouped_linear(x, weight, COUNTS))
    assert record(cublas).calls == before
    layer.run()
    layer.check()
