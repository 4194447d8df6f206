"""How kernels are launched through CuPy: what it is given, with compiled machine code that nobody runs."""

import ctypes
import importlib
import sys

import numpy as np
import pytest

pytest.importorskip("cuda.pathfinder")
nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
nvrtc.getVersion()  # loads the library, which asks the real CuPy where it is

from shardrt.kernels.cuda import _compile, _launch, attention, elementwise, layer_norm  # noqa: E402
from tests.cuda import fake_cupy  # noqa: E402


@pytest.fixture
def backend(fake_cuda, monkeypatch):
    """The real backend, on the stand-in for CuPy."""
    monkeypatch.delitem(sys.modules, "shardrt.kernels.cuda._cupy", raising=False)
    module = importlib.import_module("shardrt.kernels.cuda._cupy")
    made = module.CuPyBackend()
    monkeypatch.setattr(fake_cupy.Module, "launched", [])
    before = _launch.use(made)
    yield made
    _launch.use(before)
    sys.modules.pop("shardrt.kernels.cuda._cupy", None)


def device_array(*shape, dtype=np.float32):
    return fake_cupy.on_device(np.zeros(shape, dtype))


def test_a_kernel_gets_arrays_and_numbers_of_its_types(backend):
    x = device_array(1000)
    elementwise.scale_(x, 2.0)
    ((name, grid, block, args, shared),) = fake_cupy.Module.launched
    assert (name, grid, block, shared) == ("scale", (1, 1, 1), (256, 1, 1), 0)
    assert args[0] is x
    assert [type(arg) for arg in args[1:]] == [
        np.float32,
        int,
        bool,
    ]  # tests/softgpu has what CuPy makes of it


def test_what_is_missing_is_a_null_pointer(backend):
    x, weight, y = device_array(4, 8), device_array(8), device_array(4, 8)
    statistics = device_array(4), device_array(4)
    layer_norm.forward(x, weight, None, y, *statistics, 1e-5)
    (_, _, _, args, _), *_ = fake_cupy.Module.launched
    assert [arg for arg in args if type(arg) is int and not arg] == [0, 0, 0]  # added, total and bias
    assert not any(arg is None for arg in args)


def test_large_shared_memory_is_asked_for_once(backend):
    heads = [device_array(1, 1, 40, 128) for _ in range(4)]
    for _ in range(2):
        attention.forward(*heads, device_array(1, 1, 40), causal=True, scale=1.0)
    limits = sys.modules["cupy"].cuda.driver.limits
    assert len(limits) == 1 and limits[0][1] == fake_cupy.Module.launched[0][4] > 48 << 10


def test_everything_is_compiled_beforehand_for_this_gpu(backend, monkeypatch):
    compiled = []
    monkeypatch.setattr(_compile, "compile", lambda *what: compiled.append(what))
    from shardrt.kernels import cuda

    cuda.warm_up()
    assert {file for file, _, _ in compiled} == set(_compile.files())
    assert {arch for _, _, arch in compiled} == {"sm_90"}
    elements = {dict(defines)["ELEMENT"] for _, defines, _ in compiled}
    assert elements == {"float", "__nv_bfloat16"}


def test_products_are_timed_by_events(backend):
    runs = []
    assert backend.seconds(lambda: runs.append(1), 3) == 1e-3
    assert len(runs) == 4, "three, and one that is not counted"
    stream = backend.stream()
    ctypes.memset(backend.workspace(stream), 1, 1 << 16)
    backend.seconds(lambda: runs.append(1), 1)
    cache = ctypes.string_at(backend.workspace(stream), 1 << 16)
    assert not any(cache), "before each round as much is written as the L2 cache holds"
    assert stream == fake_cupy.Stream.here.stream.ptr
    assert backend.workspace(stream) == backend.workspace(stream) != 0
