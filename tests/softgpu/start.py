"""Puts the software GPU below CuPy, which must not have been imported yet."""

import os
import sys
import threading
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from tests.cuda.libraries import library_folder
from tests.softgpu import compiler, nccl
from tests.softgpu.cuda import CUDA
from tests.softgpu.plug import plug

ROOT = Path(__file__).parents[2]


def start(mode: str = "late", seed: int = 0, processes: int = 0) -> CUDA:
    """The CUDA that CuPy sees from now on, and shardrt. processes: ranks, if threads are none."""
    cuda = CUDA(mode, seed, bool(processes))
    cuda.devices = max(1, processes)
    # Machine code that is none changes with the headers here.
    cupy = plugged(cuda, compiler.NVRTC, sha256(compiler.headers().encode()).hexdigest()[:16])
    _poison_pools(cupy, cuda)
    nccl.put(cuda)
    return cuda


def plugged(cuda: CUDA, nvrtc_type: type, key: str) -> ModuleType:
    """CuPy over `cuda`, and a compiler. key: of the two caches of what that makes."""
    assert "cupy" not in sys.modules, "CuPy has met its CUDA already"
    kept = library_folder(ROOT / "build" / "softgpu")
    os.environ |= {
        "CUPY_CACHE_DIR": str(kept / key / "cupy"),
        "XDG_CACHE_HOME": str(kept / key),
        "CUPY_ACCELERATORS": "",  # CUB's are compiled into CuPy
    }
    plug(kept, cuda)
    from cupy_backends.cuda.libs import nvrtc

    made = nvrtc_type(kept)
    for name in (name for name in dir(made) if not name.startswith("_")):
        setattr(nvrtc, name, getattr(made, name))
    import cupy

    from shardrt.device import cuda as place
    from shardrt.kernels.cuda import _cupy
    from tests.softgpu import products

    place.count = cuda.getDeviceCount
    _cupy._library = lambda: products.cublaslt(kept, cuda)
    _cupy.CuPyBackend._cudnn = None, None
    _cupy.CuPyBackend.prepare = lambda backend, wanted: None  # each is compiled when it is first launched
    return cupy


def _poison_pools(cupy, cuda: CUDA) -> None:
    """What goes back to a pool of CuPy is filled with NaN, in the stream that it was taken in."""
    taken: dict[int, tuple] = {}  # address -> the stream that it was taken in, and the capture
    here = threading.local()

    class Watch(cupy.cuda.MemoryHook):
        name = "poison"

        def malloc_postprocess(self, **info):
            stream = cupy.cuda.get_current_stream().ptr
            taken[info["mem_ptr"]] = stream, cuda.capture_of(stream)

        def free_preprocess(self, **info):
            if info["mem_ptr"] in taken:
                cuda.poison(info["mem_ptr"], info["mem_size"], *taken.pop(info["mem_ptr"]))

    before = cuda.setDevice

    def set_device(index):  # the first call of each thread, to which hooks belong
        before(index)
        if not hasattr(here, "watch"):
            here.watch = Watch()
            here.watch.__enter__()

    cupy.cuda.runtime.setDevice = cuda.setDevice = set_device
