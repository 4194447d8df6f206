"""What tests of the CUDA device share."""

import shutil
import sys

import pytest

from shardrt import device
from shardrt.kernels.cuda import _launch
from tests.cuda import fake_cupy
from tests.cuda.emulator import FakeDeviceEmulator
from tests.cuda.races import Checker


@pytest.fixture
def emulated():
    """kernels/cuda launched on the CPU, where a race fails the test."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    emulator = Checker()
    before = _launch.use(emulator)
    yield emulator
    _launch.use(before)


@pytest.fixture
def fake_cuda(monkeypatch):
    """A device "cuda" made of the real sources, a stand-in for CuPy, and the emulator of kernels."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    cupy = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    device.get.cache_clear()
    before = _launch.use(FakeDeviceEmulator())
    yield device.get("cuda")
    _launch.use(before)
    device.get.cache_clear()
    device.set_current(device.get("cpu"))  # the one that everybody gets from now on
