"""Puts the software GPU below CuPy, which must not have been imported yet."""

import os
import sys
import threading
from hashlib import sha256
from pathlib import Path

from tests.cuda.libraries import library_folder
from tests.softgpu import compiler
from tests.softgpu.cuda import CUDA
from tests.softgpu.plug import plug

ROOT = Path(__file__).parents[2]


def start(mode: str = "late", seed: int = 0, processes: int = 0) -> CUDA:
    """The CUDA that CuPy sees from now on, and shardrt. processes: ranks, if threads are none."""
    assert "cupy" not in sys.modules, "CuPy has met its CUDA already"
    kept = library_folder(ROOT / "build" / "softgpu")
    # Two caches of machine code that is none, and changes with the headers here.
    key = sha256(compiler.headers().encode()).hexdigest()[:16]
    os.environ |= {
        "CUPY_CACHE_DIR": str(kept / key / "cupy"),
        "XDG_CACHE_HOME": str(kept / key),
        "CUPY_ACCELERATORS": "",  # CUB's are compiled into CuPy
    }
    cuda = CUDA(mode, seed, bool(processes))
    cuda.devices = max(1, processes)
    plug(kept, cuda)
    from cupy_backends.cuda.libs import nvrtc

    made = compiler.NVRTC(kept)
    for name in (name for name in dir(made) if not name.startswith("_")):
        setattr(nvrtc, name, getattr(made, name))
    import cupy

    _poison_pools(cupy, cuda)
    from shardrt.device import cuda as place
    from shardrt.kernels.cuda import _cupy
    from tests.softgpu import nccl, products

    place.count = cuda.getDeviceCount
    _cupy._library = lambda: products.cublaslt(kept, cuda)
    _cupy.CuPyBackend._cudnn = None, None
    _cupy.CuPyBackend.prepare = lambda backend, wanted: None  # each is compiled when it is first launched
    nccl.put(cuda)
    return cuda


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
