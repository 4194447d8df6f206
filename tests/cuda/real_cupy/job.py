"""What the tests ask of shardrt on the real CuPy, all of it in one process: prints JSON.

python -m tests.cuda.real_cupy.job FOLDER        FOLDER: private and empty
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cuda.real_cupy.plug import plug

CUDA = plug(sys.argv[1])

import cupy  # noqa: E402  after what is below it
import numpy as np  # noqa: E402
from cupy.cuda import compiler  # noqa: E402

from shardrt import device  # noqa: E402
from shardrt import functional as F  # noqa: E402
from shardrt.comm import thread  # noqa: E402
from shardrt.device.cuda import CUDAStream  # noqa: E402
from shardrt.kernels.cuda import _compile, _cupy  # noqa: E402
from shardrt.tensor import Tensor  # noqa: E402
from tests.cuda import test_captured_step, test_training  # noqa: E402
from tests.cuda.real_cupy import rules  # noqa: E402

CODE = b"\x7fELF"  # of every kernel
NAMES = {0: "null"}  # stream -> name


def compile_nothing(*args, **kwargs):
    """CuPy's own kernels are compiled no more than ours."""
    module = cupy.cuda.function.Module()
    module.load(CODE)
    return module


def products():
    """The stand-in for cublasLt: memory of this "GPU" is the host's."""
    library = Path(sys.argv[1], "libcublasLt.so")
    source = Path(__file__).parent.parent / "fake_cublaslt.c"
    subprocess.run(
        ["cc", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"], check=True
    )
    return ctypes.CDLL(str(library))


def tried(function, *args, **kwargs):
    """What it gives, or the error, which is to be seen beside all the rest."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def named(stream, name, handle):
    before(stream, name, handle)
    NAMES[handle.ptr] = name


def kernels_by_stream(ranks, function, *args, **kwargs):
    """Name of a stream -> the kernels, copies and fills that a job of threads has issued in it."""
    CUDA.log.clear()
    thread.run(ranks, function, *args, **kwargs)
    found = {}
    for what, stream, detail in CUDA.log:
        if what in ("launch", "copy", "set"):
            found.setdefault(NAMES.get(stream, "unknown"), set()).add(detail or what)
    return {name: sorted(issued) for name, issued in found.items()}


def captured(**settings):
    """Capture a step and replay it."""
    thread.run(1, test_captured_step.train, True, **settings)
    return "done"


def stream_after(call):
    """Which stream is current after a call on a new thread's device."""

    def rank():
        here = device.get("cuda")
        device.set_current(here)
        call(here, Tensor(here.zeros((4, 6), np.float32), requires_grad=True))
        return NAMES[cupy.cuda.get_current_stream().ptr]

    return thread.run(1, rank)[0]


def submit_in_a_submit(here, x):
    first, second = here.new_stream("first"), here.new_stream("second")
    inside = []
    first.submit(lambda: (second.submit(int), inside.append(NAMES[cupy.cuda.get_current_stream().ptr])))
    assert inside == ["first"]


AFTER = {
    "work in a side stream": lambda here, x: here.new_stream("side").submit(here.zeros, (3,), np.float32),
    "work in a side stream, by work in another": submit_in_a_submit,
    "a transposed array read by the host": lambda here, x: here.to_numpy(x.data.T),
    "the device chosen again": lambda here, x: (cupy.cuda.Stream.null.use(), device.set_current(here)),
    "rows by a list, and backward": lambda here, x: x[[0, 1]].sum().backward(),
    "12 joined": lambda here, x: here.capture(lambda: F.concatenate([x] * 12)).replay(),
    "12 stacked": lambda here, x: here.capture(lambda: F.stack([x] * 12, axis=1)).replay(),
}
VARIANTS = [(name, 1) for name in test_training.VARIANTS] + [(name, 2) for name in test_training.TRAVELLING]
STEPS = {**test_captured_step.VARIANTS, "12 layers, FULL_SHARD": {"layers": 12}}

if __name__ == "__main__":
    compiler._compile_module_with_cache = compile_nothing
    _compile.compile = lambda *what: CODE
    _cupy._library = products
    _cupy.CuPyBackend._cudnn = None, None
    before, CUDAStream.__init__ = CUDAStream.__init__, named
    found = {
        "outcomes": rules.outcomes(cupy),
        "streams": rules.current_streams(cupy),
        "after": {name: tried(stream_after, call) for name, call in AFTER.items()},
        "kernels": {
            f"{name}, {ranks} ranks": tried(
                kernels_by_stream, ranks, test_training.train, "cuda", **test_training.VARIANTS[name]
            )
            for name, ranks in VARIANTS
        },
        "captured": {name: tried(captured, **settings) for name, settings in STEPS.items()},
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # without CuPy's clean-up, which would call CUDA
