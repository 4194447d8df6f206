"""The GPU emulator for tests that share a process with others: they import `software` and `gpu`.

To import this puts it below CuPy, for that must come before CuPy's own import.
"""

import threading

import pytest

from shardrt import device
from shardrt.comm import ipc
from shardrt.kernels.cuda import _launch
from tests.softgpu.available import missing

if not missing():
    from tests.softgpu.start import plugged, show

    plugged(0)

    import cupy


@pytest.fixture(scope="session")
def without_cudnn():
    """The type of the backends, one for each GPU, which keep what tests have loaded for later ones."""
    from shardrt.kernels.cuda import _cupy

    yield type("WithoutCuDNN", (_cupy.CuPyBackend,), {"_cudnn": (None, None)})
    _launch._of_gpus.clear()  # else Python's end, which has no CUDA any more, would unload them


@pytest.fixture
def software(monkeypatch, request):
    """Software GPUs, which shardrt finds in this test. They have no cuDNN."""
    if missing():
        pytest.skip(missing())
    cuda = plugged(0)
    show(cuda, monkeypatch)
    cuda.choose("late")
    cuda.log.clear()
    cuda.rank.error = None  # of a test that failed
    cupy.cuda.get_current_stream().use()  # CuPy counts a thread's GPUs once: now, before a test hides some
    device._get.cache_clear()
    backend = request.getfixturevalue("without_cudnn")
    monkeypatch.setattr("shardrt.kernels.cuda._cupy.CuPyBackend", backend)
    before = _launch.use(None)
    yield cuda
    cuda.rank.error = None
    _launch.use(before)
    device._get.cache_clear()
    device.set_current(device.get("cpu"))  # the one that everybody gets from now on


@pytest.fixture
def processes(software, monkeypatch):
    """Every thread passes for a process, as the ipc communicator wants it, and each call is done at once."""
    software.choose("at once")
    software.freed_while_mapped.clear()
    monkeypatch.setattr(ipc, "_process", lambda: threading.get_ident().to_bytes(16, "big"))


@pytest.fixture
def gpu(software):
    """The device "cuda", current in this thread."""
    with device.use(device.get("cuda")) as here:
        yield here


@pytest.fixture
def gpu_kernels(gpu):
    """The backend of that device."""
    return _launch.backend()
