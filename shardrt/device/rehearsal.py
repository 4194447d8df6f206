"""A device that reserves every array and computes nothing: to learn what a step takes before it is run.

Its kernels and its streams do nothing, and its arrays are memory that nobody has touched yet, so a step that
will hold many GB costs address space only. What NumPy itself computes (few ops, none that a transformer
spends its time in) it does compute, on what happens to be there.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from shardrt.device.cpu import InlineStream
from shardrt.device.memory import Pool
from shardrt.device.protocol import Array, Device, Event, Stream


class RehearsalDevice(Device):
    """Stands for `real`: the same shapes, types and bytes, with NumPy arrays whatever `real` has."""

    def __init__(self, real: Device) -> None:
        self.name, self.host, self.in_host_memory = real.name, real.host, real.in_host_memory
        self.current_stream = _IdleStream("compute")
        self.host_bytes = 0  # of pinned arrays
        self._real = real
        self._pool = Pool()
        self._kernels = _Idle(real)

    @property
    def kernels(self) -> ModuleType:
        return self._kernels

    def compute_dtype(self, name: str) -> np.dtype:
        return self._real.compute_dtype(name)

    def warm_up(self) -> None:
        pass

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self._pool.empty(shape, np.dtype(dtype))

    zeros = empty

    def row_elements(self, columns: int) -> int:
        return self._real.row_elements(columns)

    def buffer(self, count: int, dtype: Any) -> Array:
        return np.zeros(count, dtype)  # not touched: the system maps a page when it is first written

    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        array = np.zeros(count, dtype)
        self.host_bytes += array.nbytes
        return array

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        if hasattr(values, "__cuda_array_interface__"):  # made before, by the device that this one stands for
            return np.empty(values.shape, dtype or values.dtype)
        return np.asarray(values, dtype)

    def upload(self, values: np.ndarray) -> Array:
        return values

    def copy(self, target: Array, source: Array) -> None:
        pass

    def add_at(self, target: Array, index: Any, values: Any) -> None:
        pass

    def wait_here(self) -> None:
        pass

    def to_numpy(self, array: Array) -> np.ndarray:
        return array

    def read(self, array: Array, planned: np.ndarray) -> np.ndarray:
        return planned

    def new_stream(self, name: str) -> Stream:
        return _IdleStream(name)

    def new_event(self) -> Event:
        return self._real.new_event()

    def peak_bytes(self) -> int:
        return self._pool.peak_bytes

    def reset_peak(self) -> None:
        self._pool.reset_peak()


class _IdleStream(InlineStream):
    """No copy, and no collective, which NCCL could not make of arrays of the host."""

    def submit(self, function: Callable, *args: Any, label: str = "") -> None:
        pass


class _Idle:
    """A package of kernels, each of which does nothing and finds 0; with the constants of those of `real`."""

    def __init__(self, real: Device) -> None:
        self._real = real

    def __getattr__(self, module: str) -> "_IdleModule":
        return _IdleModule(self._real, module)


class _IdleModule:
    def __init__(self, real: Device, module: str) -> None:
        self._real, self._module = real, module

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._real.kernels, self._module), name) if name.isupper() else _nothing


def _nothing(*args: Any, **kwargs: Any) -> float:
    return 0.0
