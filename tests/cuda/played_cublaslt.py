"""What tests of cublasLt's binding share: the stand-in in C, and who says how long products take."""

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardrt.kernels.cuda._cublaslt import CublasLt
from tests.cuda.libraries import stand_in


class Record(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("products", "algorithm", "workspace", "stream", "beta_is_one", "fast")
    ]


class Stage:
    """Says that one algorithm is the fastest. took: what something else, when measured, says that it took."""

    gpu = "none"

    def __init__(self, library, fastest=102):
        self.fastest, self.fake = fastest, library
        self.measured = 0

    def stream(self):
        return 77

    def workspace(self, stream):
        assert stream == 77
        return 1 << 20

    def empty(self, shape, dtype):
        memory = np.empty(np.prod(shape) * np.dtype(dtype).itemsize + 256, np.uint8)  # aligned, as on a GPU
        start = -memory.ctypes.data % 256
        return memory[start : len(memory) - 256 + start].view(dtype).reshape(shape)

    def seconds(self, work, rounds):
        self.measured += 1
        self.took = None
        work()
        if self.took is not None:
            return self.took
        return 1.0 if record(self.fake).algorithm == self.fastest else 2.0


class Capturing(Stage):
    """Where nothing can be measured."""

    def seconds(self, work, rounds):
        return None


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no cc")
    return ctypes.CDLL(str(stand_in(tmp_path_factory.mktemp("fake"), "cublaslt")))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Where choices are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardrt" / "cuda" / "products"


@pytest.fixture
def lt(library):
    return CublasLt(library, Stage(library))


def slow(out):
    """The same by other products and kernels, which nobody takes."""


def record(library):
    return Record.in_dll(library, "fake_record")


def in_threads(function):
    """function(0) and function(1), as two ranks."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))
