"""What a device must do: arrays, streams, events. The docstrings are the contract.

A device is one file beside this one. Nothing above shardrt/device/ and kernels/ asks which one it runs on.
The meaning of streams and events is CUDA's: work submitted to one stream runs in order; an event marks
the point in a stream where it was last recorded; a stream that waits for an event runs nothing more until
that point is reached. On a device whose streams are threads the same program runs with the same order.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


class StreamError(RuntimeError):
    """Work submitted to a stream has failed; raised where the stream is waited for, from the first error."""


class Event(ABC):
    """A point in a stream. May be recorded again; a wait refers to the latest record before it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the recorded point has been reached (True if never recorded)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when the recorded point has been reached (at once if never recorded)."""

    def check(self) -> None:  # noqa: B027 (elsewhere nothing is known before it is waited for)
        """Raise StreamError if the point has been reached and work before it has failed; wait for nothing."""


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

        The event may be another device's: an update on the host waits for a gradient to come from a GPU.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Return when everything submitted so far has run. Raises StreamError if any of it failed."""

    def close(self) -> None:  # noqa: B027 (only threads have an end)
        """Let a thread that this stream is end when it has run what was submitted; nothing more is."""


class Device(ABC):
    """Arrays and streams of one kind of processor.

    `current_stream` is where ops run: on the CPU the calling thread itself, on CUDA CuPy's current stream.
    `host` is the device of arrays in the host's memory, where updates on the host run: on the CPU itself.
    """

    name: str
    host: "Device"
    current_stream: Stream
    in_host_memory = False  # whether its arrays are the host's, which host communicators carry as they are
    writes_files = True  # whether arrays of the host may be mapped files
    timed = False  # whether its streams tell the timeline what ran when
    # Whether nothing of this device goes to other ranks: communicators leave out what is asked.
    dry_run = False
    identity = b""  # of a GPU, and of no other one; b"" of a device that NCCL does not know
    pools_results = False  # whether what the array library makes itself is of the pool as well

    @property
    def capturing(self) -> Any | None:
        """The graph (capture.py) that this thread's work is captured in, None if it runs."""
        return None

    def clock(self) -> float:
        """Seconds since some moment: the time by which this device's work is measured and traced."""
        return time.perf_counter()

    def enter(self) -> None:  # noqa: B027 (the CPU has nothing to do)
        """This thread uses the device from now on."""

    @property
    @abstractmethod
    def kernels(self) -> ModuleType:
        """The kernel package: one module per op (shardrt.kernels.<name>)."""

    @staticmethod
    @abstractmethod
    def compute_dtype(name: str) -> np.dtype:
        """What arrays of the type `name` (see shardrt.dtypes) are computed in on this device."""

    @classmethod
    def gathered_dtype(cls, name: str) -> np.dtype:
        """What parameters of the type `name` are kept in while they are gathered; uint16: the bits of it.

        Where that is not what they are computed in, products read it as it is, and other ops a widened copy.
        """
        return cls.compute_dtype(name)

    def lacks_float8(self) -> str:
        """Why no matmul can be in float8 on this device; "" if it can."""
        return f"device {self.name!r} has no matmul in float8; NVIDIA GPUs have, from Hopper on"

    @staticmethod
    def matmul_ignores_place() -> bool:
        """Whether a matmul has the same bits wherever its operands lie: at any address, with any strides."""
        return False

    @abstractmethod
    def warm_up(self) -> None:
        """Have the kernels that training needs compiled, on disk."""

    @abstractmethod
    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised C-contiguous array, from a pool that gives memory back without a system call."""

    def empty_rows(self, rows: int, columns: int, dtype: Any) -> Array:
        """An uninitialised (rows, columns) for fast products: a view, where rows are padded."""
        return self.empty((rows, self.row_elements(columns)), dtype)[:, :columns]

    @staticmethod
    def row_elements(columns: int) -> int:
        """How far apart the rows of `empty_rows` begin."""
        return columns

    @staticmethod
    def pooled(nbytes: int) -> int:
        """Bytes of the pool that an array of `nbytes` from `empty` takes; 0 where it is not of the pool."""
        return nbytes

    @abstractmethod
    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """As `empty`, filled with zeros."""

    @abstractmethod
    def buffer(self, count: int, dtype: Any) -> Array:
        """A 1-D array that lives as long as it is referred to, outside the pool: for arenas and shards."""

    def lend_pages(self, array: Array) -> None:  # noqa: B027 (who has no pages)
        """Nobody reads `array`, of `buffer`, until it is written anew: others may have its memory."""

    def take_pages(self, array: Array) -> None:  # noqa: B027
        """`array`, all or a part of what was lent, is about to be written anew."""

    def set_tag(self, array: Array, category: str, owner: str | None = None) -> Array:
        """The array. Says what its memory is for, as a memory plan does, to a device that keeps books.

        owner: whose it is, a unit's label; "" for nobody's own. None: that of the module that runs.
        """
        return array

    def step_done(self) -> None:  # noqa: B027 (nobody keeps books)
        """An optimizer has issued all of a step: to a device that keeps books."""

    def allow_divergence(self, layout: tuple[tuple[int, int], ...]) -> None:  # noqa: B027
        """Ranks that differ in these digits (comm/mesh_layout.py) do not do the same from now on."""

    def set_phase(self, phase: str) -> None:  # noqa: B027
        """Ops are of this part of the step from now on ("forward blocks.0"): to a device that keeps books."""

    @abstractmethod
    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        """A 1-D host array to and from which this device copies asynchronously."""

    @abstractmethod
    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """`values` as an array on this device; no copy where it already is one of that dtype."""

    @abstractmethod
    def upload(self, values: np.ndarray) -> Array:
        """A few numbers, which may change at once, as an array for kernels in the stream that runs this."""

    def numbers(self, make: Callable[[], np.ndarray]) -> Array:
        """What `make()` gives, as by `upload`; where a graph is captured, as it is before each replay."""
        return self.upload(make())

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Copy `source` into `target`, equally long, in the stream that runs this."""

    @abstractmethod
    def add_at(self, target: Array, index: Any, values: Any) -> None:
        """Add `values` to target[index], where an element may be named more than once; index: as NumPy's.

        Arrays in `index` are on this device.
        """

    @abstractmethod
    def wait_here(self) -> None:
        """Return when what came before in the stream that runs this has been done."""

    @abstractmethod
    def to_numpy(self, array: Array) -> np.ndarray:
        """`array` on the host; no copy where it already is there."""

    def read(self, array: Array, planned: np.ndarray) -> np.ndarray:
        """`array`, a few numbers that shapes depend on, on the host; `planned` where nothing is computed."""
        return self.to_numpy(array)

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """A stream beside `current_stream`."""

    @abstractmethod
    def new_event(self) -> Event:
        """An event, not recorded yet."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Largest number of bytes that arrays from `empty` and `zeros` have held at once."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Count peak_bytes anew, from what is held now."""
