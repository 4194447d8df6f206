"""Puts the software GPU below CuPy, which must not have been imported yet, and shows it to shardrt.

SOFTGPU_DEVICES says how many GPUs this machine has (8), CUDA_VISIBLE_DEVICES which of them this process sees,
SOFTGPU_MODE and SOFTGPU_SEED in which order streams take turns (see scheduler.py).
"""

import os
import sys
import threading
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

from tests.cuda.libraries import library_folder
from tests.softgpu import compiler, nccl, products, sorting
from tests.softgpu.cuda import CUDA
from tests.softgpu.plug import plug

ROOT = Path(__file__).parents[2]
_MOST = 16  # GPUs of a machine


def start(processes: int = 0) -> CUDA:
    """The CUDA that CuPy and shardrt see from now on, without cuDNN. processes: ranks, or 0 for threads."""
    cuda = plugged(processes)
    cuda.choose(os.environ.get("SOFTGPU_MODE", "late"), int(os.environ.get("SOFTGPU_SEED", "0")))
    from shardrt.kernels.cuda._cupy import CuPyBackend

    show(cuda, pytest.MonkeyPatch())
    CuPyBackend._cudnn = None, None
    return cuda


@cache
def plugged(processes: int) -> CUDA:
    """The CUDA that CuPy has below it from now on. Shardrt goes on to find no GPU until it is shown one."""
    cuda = CUDA(processes=bool(processes))
    cuda.visible = tuple(range(_MOST))
    cupy = put_below_cupy(cuda)
    cupy.get_default_memory_pool().used_bytes()  # the first call makes a pool for each GPU that is visible
    cuda.visible = _visible(int(os.environ.get("SOFTGPU_DEVICES", "8")))
    _poison_pools(cupy, cuda)
    nccl.put(cuda)
    sorting.put(cuda)
    from shardrt.device import cuda as place

    place.count = lambda: 0  # were there another GPU, CuPy would not see it now
    return cuda


def _visible(devices: int) -> tuple[int, ...]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(range(devices)) if named is None else tuple(int(name) for name in named.split(",") if name)


def put_below_cupy(cuda: CUDA) -> ModuleType:
    """CuPy over `cuda`."""
    assert "cupy" not in sys.modules, "CuPy has met its CUDA already"
    plug(_kept(), cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_CACHE_DIR", str(_kept() / _key() / "cupy"))  # as the next, only read by the import
        patch.setenv("CUPY_ACCELERATORS", "")  # CUB's are compiled into CuPy
        import cupy
    return cupy


def show(cuda: CUDA, patch: pytest.MonkeyPatch) -> None:
    """Have shardrt find a GPU, and CuPy compile for it, until `patch` is undone."""
    from cupy_backends.cuda.libs import nvrtc

    from shardrt.device import cuda as place
    from shardrt.kernels.cuda import _cupy

    patch.setenv("XDG_CACHE_HOME", str(_kept() / _key()))
    made = _nvrtc()
    for name in (name for name in dir(made) if not name.startswith("_")):
        patch.setattr(nvrtc, name, getattr(made, name))
    patch.setattr(nccl.NcclCommunicator, "cuda", cuda, raising=False)  # other tests of it have their own
    patch.setattr(place, "count", cuda.getDeviceCount)
    patch.setattr(_cupy, "_library", partial(products.library, _kept(), cuda))
    patch.setattr(_cupy.CuPyBackend, "prepare", lambda backend, wanted: None)  # compiled at the first launch


def _key() -> str:
    """What the compiler makes is no machine code, and changes with the headers and with its options."""
    return sha256(repr((compiler.COMMAND, compiler.headers())).encode()).hexdigest()[:16]


@cache
def _nvrtc() -> compiler.NVRTC:
    from cupy_backends.cuda.libs import nvrtc

    made = compiler.NVRTC(_kept(), nvrtc.destroyProgram)
    nvrtc.destroyProgram = made.destroyProgram
    return made


def _kept() -> Path:
    """A folder for all that is compiled."""
    return library_folder(ROOT / "build" / "softgpu")


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
