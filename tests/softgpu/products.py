"""cublasLt in software: tests/cuda/fake_cublaslt.c, whose products wait for their turn in a stream."""

import ctypes
from pathlib import Path

from tests.cuda.libraries import built
from tests.softgpu.cuda import CUDA, Work

SOURCE = Path(__file__).parent.parent / "cuda" / "fake_cublaslt.c"
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FAILED = 13  # CUBLAS_STATUS_EXECUTION_FAILED
_ENQUEUE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int)
_kept: list[object] = []


def cublaslt(folder: Path, cuda: CUDA) -> ctypes.CDLL:
    """libcublasLt of this GPU, the only one of the process whose products it can be given."""
    command = ["cc", "-O3", "-w", "-shared", "-fPIC"]
    found = ctypes.CDLL(str(built(folder, "cublaslt", SOURCE.read_text(), ".c", command, libraries=["-lm"])))
    _kept.append(enqueue(cuda))
    _kept.append(_DEVICE(cuda.getDevice))
    for name, function in zip(("fake_enqueue", "fake_device"), _kept[-2:], strict=True):
        ctypes.c_void_p.in_dll(found, name).value = ctypes.cast(function, ctypes.c_void_p).value
    return found


def enqueue(cuda: CUDA) -> "ctypes._CFuncPtr":
    """What the library calls with a stream, a function and its argument: done in that stream, later."""

    @_ENQUEUE
    def put(stream: int, run: int, job: int) -> int:
        """A status: an exception would be lost between here and the caller of cublasLt."""
        try:
            assert cuda.stream(stream).device == cuda.device, "a stream of another device"
            call = _RUN(run)
            cuda.issue("product", stream, Work(lambda: call(job)))
        except Exception:
            return _FAILED
        return 0

    return put
