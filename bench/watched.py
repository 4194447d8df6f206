"""What each kernel took that a program called, while it runs as it is.

    with watched(device.current()) as watch:
        training.step(inputs, targets)
    watch.samples, watch.spent

What a kernel does is what kernels/costs.py says. On the CPU it is timed by the clock, on a GPU by
events in the stream that it runs in.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from shardrt.device import Device
from shardrt.device.simulated import computed_in
from shardrt.kernels import costs

from .gpu.clock import Events


@dataclass(frozen=True)
class Sample:
    """One call of a kernel. flops, nbytes, sizes: of a Cost; dtype: that it computes in."""

    name: str
    flops: int
    nbytes: int
    sizes: tuple[int, ...]
    dtype: str
    seconds: float


@dataclass
class Watch:
    """Of the thread that watches; other threads' kernels are called and not kept.

    launches: of all samples, as kernels/costs.py counts them. spent: seconds that watching took, besides
    what is in the samples. Filled when the block ends.
    """

    samples: list[Sample] = field(default_factory=list)
    launches: int = 0
    spent: float = 0.0


@contextmanager
def watched(device: Device) -> Iterator[Watch]:
    """Time the kernels of `device` inside a with block."""
    watch, before = Watch(), device.kernels
    package = _Package(before, watch, Events() if device.name == "cuda" else time.perf_counter)
    device._kernels = package
    try:
        yield watch
    finally:
        device._kernels = before
        seconds = getattr(package.now, "seconds", float.__sub__)
        watch.samples += [Sample(*facts, seconds(stop, start)) for facts, start, stop in package.kept]


class _Package:
    """In place of the kernels of a device."""

    def __init__(self, package: ModuleType, watch: Watch, now: Callable[[], Any]) -> None:
        self.package, self.watch, self.now = package, watch, now
        self.kept: list[tuple[tuple, Any, Any]] = []
        self.thread = threading.current_thread()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.package, name)
        if isinstance(found, ModuleType) and not name.startswith("_"):
            found = self.__dict__[name] = _Module(self, found, name)
        return found


class _Module:
    def __init__(self, package: _Package, module: ModuleType, name: str) -> None:
        self._package, self._module, self._name = package, module, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if callable(found):
            on_cpu = self._package.package.__name__.endswith(".cpu")
            cost_of = getattr(getattr(costs.ON_CPU if on_cpu else costs.ON_GPU, self._name), name)
            found = self.__dict__[name] = _timed(self._package, found, cost_of, f"{self._name}.{name}")
        return found


def _timed(package: _Package, kernel: Callable, cost_of: Callable, name: str) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not package.thread:
            return kernel(*args, **kwargs)
        begin = time.perf_counter()
        cost = cost_of(*args, **kwargs)
        start, began = package.now(), time.perf_counter()
        result = kernel(*args, **kwargs)
        ended, stop = time.perf_counter(), package.now()
        if hasattr(cost, "launches"):  # else a question
            facts = name, cost.flops, cost.nbytes, cost.sizes, computed_in(cost.reads or cost.writes)
            package.kept.append((facts, start, stop))
            package.watch.launches += cost.launches
        package.watch.spent += began - begin + time.perf_counter() - ended
        return result

    return call
