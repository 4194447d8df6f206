"""cublasLt and cuBLAS of the GPU emulator (tests/cuda/fake_cublas*.c): matmuls wait in a stream."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from tests.cuda.libraries import stand_in
from tests.softgpu.cuda import CUDA, Work

_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FAILED = 13  # CUBLAS_STATUS_EXECUTION_FAILED
_ENQUEUE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int)
_IN_GPU = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_kept: list[object] = []


def library(folder: Path, cuda: CUDA, name: str = "cublasLt") -> ctypes.CDLL:
    """libcublasLt or libcublas of this GPU, the only one of the process whose products it can be given."""
    calls = {"fake_enqueue": enqueue(cuda), "fake_device": _DEVICE(cuda.getDevice)}
    if name == "cublas":
        calls["fake_in_gpu"] = _IN_GPU(in_gpu(cuda))
    found = ctypes.CDLL(str(stand_in(folder, name.lower())))
    for variable, function in calls.items():
        _kept.append(function)
        ctypes.c_void_p.in_dll(found, variable).value = ctypes.cast(function, ctypes.c_void_p).value
    return found


def in_gpu(cuda: CUDA) -> Callable[[int, int], int]:
    """Whether these bytes are the GPU's own memory."""

    def ask(address: int, nbytes: int) -> int:
        try:
            block = cuda.block(address, nbytes)
        except Exception:  # freed, or beyond its end
            return 0
        return block is not None and not block.pinned

    return ask


def enqueue(cuda: CUDA) -> "ctypes._CFuncPtr":
    """What a library calls with a stream, a function and its argument: done in that stream, later."""

    @_ENQUEUE
    def put(stream: int, run: int, job: int) -> int:
        """A status: an exception would be lost between here and its caller."""
        try:
            assert cuda.stream(stream).device == cuda.device, "a stream of another device"
            call = _RUN(run)
            cuda.issue("product", stream, Work(lambda: call(job)))
        except Exception:
            return _FAILED
        return 0

    return put
