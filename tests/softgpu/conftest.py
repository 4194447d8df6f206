"""The GPU emulator, for tests of training on it."""

from collections import Counter, defaultdict
from threading import get_ident

import pytest

from shardrt.device.cuda import CUDADevice
from tests.softgpu.fixtures import gpu, gpu_kernels, processes, software, without_cudnn

__all__ = ["allocated", "gpu", "gpu_kernels", "processes", "software", "without_cudnn", "waits"]


@pytest.fixture
def waits(software, monkeypatch):
    """By thread: what the host has waited for, and copies to it, by name."""
    seen = defaultdict(list)

    def watch(name, counts=lambda *args: True):
        before = getattr(software, name)

        def watched(*args):
            if counts(*args):
                seen[get_ident()].append(name)
            before(*args)

        monkeypatch.setattr(software, name, watched)

    def to_the_host(target, source, size, *how):
        block = software.block(target, size)
        return block is None or block.pinned

    for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize"):
        watch(name)
    watch("memcpyAsync", to_the_host)
    return seen


@pytest.fixture
def allocated(software, monkeypatch):
    """By thread and kind: bytes asked for of the device, outside of CuPy's pool, and pinned on the host."""
    found = defaultdict(Counter)

    def count(name):
        original = getattr(CUDADevice, name)

        def counted(this, *args):
            array = original(this, *args)
            found[get_ident()][name] += array.nbytes
            return array

        monkeypatch.setattr(CUDADevice, name, counted)

    count("buffer")
    count("pinned")
    return found
