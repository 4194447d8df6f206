"""What a device must do: arrays, streams, events. The docstrings are the contract.

A device is one file of this folder. Code above shardrt/device/ and kernels/ does not ask which device it has.
Streams and events mean what they mean in CUDA. Work submitted to one stream runs in order. An event marks
the point of a stream where it was last recorded. A stream that waits for an event runs nothing more until
that point is reached. Where streams are threads, the same program runs in the same order.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["Device", "Event"]

Array = Any  # numpy.ndarray or cupy.ndarray


class StreamError(RuntimeError):
    """Work submitted to a stream has failed. A wait for the stream raises it, from the first error."""


class Event(ABC):
    """A point in a stream. An event may be recorded again: a wait refers to the latest record before it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the stream has reached the recorded point (True if the event was never recorded)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when the stream has reached the recorded point (at once if never recorded)."""

    def check(self) -> None:  # noqa: B027 (by default only a wait reports failures)
        """Raise StreamError if the point is reached and work before it has failed. Does not wait."""


class Stream(ABC):
    """A queue of work that runs in order."""

    name: str

    @abstractmethod
    def submit(self, function: Callable, *args: Any, label: str = "") -> None:
        """Run `function(*args)` in this stream. On CUDA: call it now, with this stream current."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Mark this point of the stream in `event`."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Run nothing submitted from now on before the point marked in `event` is reached.

        The event may be from another device: an update on the host waits for a gradient from a GPU.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Return when everything submitted so far has run. Raises StreamError if any of it failed."""

    def close(self) -> None:  # noqa: B027 (only streams that are threads need it)
        """End the stream's thread after the submitted work. The caller submits nothing more."""


class Device(ABC):
    """Arrays and streams of one kind of processor.

    current_stream: where ops run. On the CPU it is the calling thread itself, on CUDA CuPy's current stream.
    host: the device of arrays in host memory, for updates on the host. On the CPU it is the device itself.

    "The caller's stream" below: the stream that runs the calling function, by default `current_stream`.
    """

    name: str
    host: "Device"
    current_stream: Stream
    in_host_memory = False  # whether its arrays are in host memory, so that host communicators carry them
    writes_files = True  # whether host buffers may be mapped files
    timed = False  # whether its streams report to the timeline what ran when
    identity = b""  # different for each GPU; b"" on a device that NCCL does not know
    pools_results = False  # whether results of the array library come from the pool, too

    @property
    def capturing(self) -> Any | None:
        """The graph (capture.py) that captures this thread's work; None if the work runs."""
        return None

    def clock(self) -> float:
        """Seconds since some moment. Measurements and traces of this device use this clock."""
        return time.perf_counter()

    def enter(self) -> None:  # noqa: B027 (the CPU has nothing to do)
        """Make this thread use the device from now on."""

    @property
    @abstractmethod
    def kernels(self) -> ModuleType:
        """The kernel package: one module per op (shardrt.kernels.<name>)."""

    @staticmethod
    @abstractmethod
    def compute_dtype(name: str) -> np.dtype:
        """The dtype in which this device computes with arrays of type `name` (see shardrt.dtypes)."""

    @classmethod
    def gathered_dtype(cls, name: str) -> np.dtype:
        """The dtype of gathered parameters of type `name`; uint16 holds the bits of a 16-bit type.

        If it is not the compute dtype, matmuls read the parameters directly. Other ops read a widened copy.
        """
        return cls.compute_dtype(name)

    def lacks_float8(self) -> str:
        """Why this device has no float8 matmul; "" if it has one."""
        return f"device {self.name!r} has no matmul in float8; NVIDIA GPUs have, from Hopper on"

    @staticmethod
    def matmul_ignores_place() -> bool:
        """Whether the bits of a matmul depend neither on the addresses nor on the strides of its operands."""
        return False

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the kernels that training needs, and keep them on disk."""

    @abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised C-contiguous array, from a pool that reuses memory without a system call."""

    def empty_rows(self, rows: int, columns: int, dtype: Any) -> Array:
        """An uninitialised (rows, columns) array for fast matmuls. It is a view if the device pads rows."""
        return self.empty((rows, self.row_elements(columns)), dtype)[:, :columns]

    @staticmethod
    def row_elements(columns: int) -> int:
        """Elements from the start of one row of `empty_rows` to the start of the next."""
        return columns

    @staticmethod
    def pooled(nbytes: int) -> int:
        """Bytes of the pool that an array of `nbytes` from `empty` takes; 0 if it does not use the pool."""
        return nbytes

    @abstractmethod
    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """As `empty`, filled with zeros."""

    @abstractmethod
    def buffer(self, count: int, dtype: Any) -> Array:
        """A 1-D array outside the pool, for arenas and shards. It lives as long as references to it."""

    def lend_pages(self, array: Array) -> None:  # noqa: B027 (by default arrays keep their pages)
        """Lend the pages of `array`, which `buffer` made. Its values are lost."""

    def take_pages(self, array: Array) -> None:  # noqa: B027
        """Get pages for `array`, all or a part of a lent array, before the caller writes to it."""

    @abstractmethod
    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        """A 1-D host array to and from which this device copies asynchronously."""

    @abstractmethod
    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """`values` as an array on this device. No copy if they already are such an array of that dtype."""

    @abstractmethod
    def upload(self, values: np.ndarray) -> Array:
        """A few numbers as an array for kernels in the caller's stream. `values` may change at once."""

    def numbers(self, make: Callable[[], np.ndarray]) -> Array:
        """The result of `make()`, uploaded. A graph that captures this calls `make` before each replay."""
        return self.upload(make())

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Copy `source` into `target`, of the same length, in the caller's stream."""

    @abstractmethod
    def add_at(self, target: Array, index: Any, values: Any) -> None:
        """Add `values` to target[index], also where an element is named more than once.

        `index` is as in NumPy. Arrays in it are on this device.
        """

    @abstractmethod
    def wait_here(self) -> None:
        """Return when the earlier work of the caller's stream is done."""

    @abstractmethod
    def to_numpy(self, array: Array) -> np.ndarray:
        """`array` on the host. No copy if it already is there."""

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """A stream next to `current_stream`."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event, not recorded yet."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Largest number of bytes that arrays from `empty` and `zeros` have held at once."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset peak_bytes to the bytes that are held now."""

    # Hooks of the simulator (simulated.py). The runtime calls them on each device, so that a dry run follows
    # the same code; real devices do nothing in them.

    dry_run = False  # True on a dry run: communicators skip every call

    def read(self, array: Array, planned: np.ndarray) -> np.ndarray:
        """Copy a small `array`, on which shapes depend, to the host. A dry run returns `planned`."""
        return self.to_numpy(array)

    def set_tag(self, array: Array, category: str, owner: str | None = None) -> Array:
        """Note the category of an array's memory for a memory plan. Returns the array.

        Args:
            owner: label of the unit that owns it; "": no unit. None: the module that runs.
        """
        return array

    def set_phase(self, phase: str) -> None:  # noqa: B027
        """Note that a phase of the step begins ("forward blocks.0")."""

    def step_done(self) -> None:  # noqa: B027
        """Note that an optimizer has issued all of a step."""

    def allow_divergence(self, layout: tuple[tuple[int, int], ...]) -> None:  # noqa: B027
        """Note that ranks which differ along `layout` (comm/mesh_layout.py) may make different calls."""
