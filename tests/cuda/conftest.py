"""What tests of the CUDA device share: kernels on arrays of NumPy, and the GPU emulator."""

import shutil

import pytest

from shardrt.kernels.cuda import _launch
from tests.cuda.played_cublaslt import kept, library, lt
from tests.cuda.races import Checker
from tests.softgpu.fixtures import gpu, gpu_kernels, processes, software, without_cudnn

__all__ = ["gpu", "gpu_kernels", "kept", "library", "lt", "processes", "software", "without_cudnn"]


@pytest.fixture
def emulated():
    """kernels/cuda launched on the CPU, where a race fails the test."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    emulator = Checker()
    before = _launch.use(emulator)
    yield emulator
    _launch.use(before)
