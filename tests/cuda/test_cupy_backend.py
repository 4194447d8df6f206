"""How kernels are launched through CuPy, on the GPU emulator. That they compute, tests/gpu says."""

import ctypes

import pytest

cupy = pytest.importorskip("cupy")

from shardrt.kernels import cuda  # noqa: E402
from shardrt.kernels.cuda import _compile, _launch  # noqa: E402
from shardrt.kernels.cuda._cupy import CuPyBackend  # noqa: E402

PREPARE = CuPyBackend.prepare


@pytest.fixture
def backend(gpu):
    """One that has launched nothing."""
    made = CuPyBackend()
    made._cudnn = None, None
    before = _launch.use(made)
    yield made
    _launch.use(before)


def test_everything_is_compiled_beforehand_for_this_gpu(backend, monkeypatch):
    compiled = []
    monkeypatch.setattr(_compile, "compile", lambda *what: compiled.append(what))
    monkeypatch.setattr(CuPyBackend, "prepare", PREPARE)
    cuda.warm_up()
    assert {file for file, _, _ in compiled} == set(_compile.files())
    assert {arch for _, _, arch in compiled} == {"sm_90"}
    elements = {dict(defines)["ELEMENT"] for _, defines, _ in compiled}
    assert elements == {"float", "__nv_bfloat16"}


def test_products_are_timed_by_events(gpu, backend):
    runs = []
    assert backend.seconds(lambda: runs.append(1), 3) == 1e-3
    assert len(runs) == 4, "three, and one that is not counted"
    stream = backend.stream()
    ctypes.memset(backend.workspace(stream), 1, 1 << 16)
    backend.seconds(lambda: runs.append(1), 1)
    cache = ctypes.string_at(backend.workspace(stream), 1 << 16)
    assert not any(cache), "before each round as much is written as the L2 cache holds"
    assert stream == gpu.current_stream.handle.ptr
    assert backend.workspace(stream) == backend.workspace(stream) != 0
