"""Compiles what later sections launch, so that their limits are for running it; it is kept on disk."""

import time
from collections.abc import Callable
from functools import partial

from shardrt import device
from shardrt.comm import thread
from shardrt.kernels.cuda import _compile, _launch

from ..workload import Workload
from . import first_step, needs
from .state import Run

REST = ("__half", "double")  # elements of the tests, beside those of training


def measure(run: Run, workload: Workload = first_step.SMALL) -> None:
    """A row for each compiler: the seconds that it took; few where the cache on disk had everything."""
    works: dict[str, Callable[[], None]] = {
        "NVRTC, kernels of training": lambda: device.get("cuda").warm_up(),
        "CuPy's kernels, by a first step": partial(_steps, workload),
        "Numba, kernels of the CPU": lambda: device.get("cpu").warm_up(),
        "NVRTC, the other kernels of the tests": _rest,
    }
    for name, work in works.items():
        if name.startswith("Numba") and not needs.there("numba"):
            run.add(name, check=needs.not_run("numba"))
            continue
        with run.guarded(name):
            start = time.perf_counter()
            work()
            run.add(name, time.perf_counter() - start, "s")


def _steps(workload: Workload) -> None:
    for dtype in first_step.CLOSE:
        thread.run(1, partial(first_step.step, "cuda", dtype, workload))


def _rest() -> None:
    wanted = [(file, macros) for file in _compile.files() for macros in _compile.variants(file, REST)]
    _launch.backend().prepare(wanted)
