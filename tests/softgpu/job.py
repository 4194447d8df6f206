"""What tests ask of shardrt on the GPU in software, all in one process: prints JSON.

python -m tests.softgpu.job
"""

import json
import os
import sys
import warnings

from tests.softgpu.start import start

CUDA = start()

import cupy  # noqa: E402  after what is below it
import numpy as np  # noqa: E402

from shardrt import device  # noqa: E402
from shardrt import functional as F  # noqa: E402
from shardrt.comm import thread  # noqa: E402
from shardrt.device.cuda import CUDAStream  # noqa: E402
from shardrt.tensor import Tensor  # noqa: E402
from tests.cuda import test_captured_step, test_training  # noqa: E402
from tests.softgpu import rules  # noqa: E402
from tests.softgpu.cuda import MODES  # noqa: E402

NAMES = {0: "null"}  # stream -> name
RANKS = {  # variant -> [(ranks, communicator)], where that is not one rank alone
    "float32": [(1, "auto"), (2, "nccl"), (4, "staged")],
    "bfloat16": [(2, "nccl")],
    "bfloat16 on the wire": [(2, "staged")],
    "all on the host": [(2, "nccl")],
    "frozen late": [(2, "nccl")],
    "updates in backward": [(2, "staged")],
}


def tried(function, *args, **kwargs):
    """What it gives, or the error, which is to be seen beside all the rest."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def named(stream, name, handle):
    before(stream, name, handle)
    NAMES[handle.ptr] = name


def trained(variant, ranks, communicator):
    """By mode, what the GPU has against the numbers of the CPU, and of the first mode; kernels by stream."""
    settings = test_training.VARIANTS[variant] | {"layers": 2}
    expected = thread.run(ranks, test_training.train, "cpu", **settings)
    told, first = {}, None
    CUDA.log.clear()
    for mode in modes:
        CUDA.choose(mode, seed=1)
        found = thread.run(ranks, test_training.train, "cuda", communicator=communicator, **settings)
        first = first or found
        told[mode] = [
            tried(test_training.agree, found, expected, 6e-2 if "16" in variant else 2e-5),
            tried(test_training.same_bits, found, first),
        ]
    return told, kernels_by_stream()


def kernels_by_stream():
    """Name of a stream -> the kernels, copies and fills that were issued in it."""
    found = {}
    for what, stream, detail in CUDA.log:
        if what in ("launch", "copy", "set"):
            found.setdefault(NAMES.get(stream, "unknown"), set()).add(detail or what)
    return {name: sorted(issued) for name, issued in found.items()}


def captured(ranks, **settings):
    """Capture a step and replay it: whether it trains as steps that are not captured, in every mode."""
    plain = thread.run(ranks, test_captured_step.train, False, **settings)
    told = {}
    for mode in modes:
        CUDA.choose(mode, seed=2)
        found = thread.run(ranks, test_captured_step.train, True, **settings)
        told[mode] = [tried(test_captured_step.assert_same, *pair) for pair in zip(found, plain, strict=True)]
    return told


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
CAPTURED = [
    *((1, settings) for settings in test_captured_step.VARIANTS.values()),
    (1, {"layers": 12}),  # more pieces of gradients than CuPy joins without an upload
    (2, {"communicator": "nccl", "dropout": 0.2, "clip": False}),
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    modes = MODES if "--all" in sys.argv else ("late", "side first", "compute first")
    before, CUDAStream.__init__ = CUDAStream.__init__, named
    jobs = [(name, *how) for name in test_training.VARIANTS for how in RANKS.get(name, [(1, "auto")])]
    found = {
        "outcomes": rules.outcomes(cupy),
        "streams": rules.current_streams(cupy),
        "after": {name: tried(stream_after, call) for name, call in AFTER.items()},
        "trained": {", ".join(map(str, job)): trained(*job) for job in jobs},
        "captured": [captured(ranks, **settings) for ranks, settings in CAPTURED],
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # without CuPy's clean-up, which would call CUDA
