"""The CPU as a device: NumPy arrays, streams that are threads, events that are locks.

Ops run in the calling thread itself, so a debugger can step through a training step. Every other stream is a
daemon thread with a queue. NumPy, BLAS, the Numba kernels and MPI release the interpreter lock, so streams
run at the same time.
"""

import importlib
import queue
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device import threads, timeline
from shardrt.device.protocol import Array, Device, Event, Stream, StreamError
from shardrt.kernels import onednn

__all__ = ["CPUDevice", "ThreadStream", "finish_streams", "memory", "set_threads"]

_open: "weakref.WeakSet[ThreadStream]" = weakref.WeakSet()


class _Mark:
    """One recorded point: a lock that is held until the point is reached."""

    __slots__ = ("lock", "error", "number")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.error: BaseException | None = None
        self.number = timeline.new_mark()

    def reach(self, stream: str, error: BaseException | None) -> None:
        self.error = error
        timeline.passed(stream, self.number, waited=False)
        self.lock.release()

    def wait(self, stream: str = "") -> None:
        with self.lock:
            pass
        if stream:
            timeline.passed(stream, self.number, waited=True)
        if self.error is not None:
            raise StreamError(f"work in a stream failed: {self.error!r}") from self.error


class CPUEvent(Event):
    """Refers to the mark of its latest record. Each record makes a new mark, so earlier waits stay valid."""

    __slots__ = ("mark",)

    def __init__(self) -> None:
        self.mark: _Mark | None = None

    def done(self) -> bool:
        return self.mark is None or not self.mark.lock.locked()

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.wait()

    def check(self) -> None:
        if self.done():
            self.synchronize()


class InlineStream(Stream):
    """The calling thread: work runs at once, so a recorded point is reached at once.

    Only traces need marks of these points.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, function: Callable, *args: Any, label: str = "") -> None:
        if timeline.recording():
            _run(self.name, label, function, args)
        else:
            function(*args)

    def record(self, event: CPUEvent) -> None:
        event.mark = None
        if timeline.recording():
            event.mark = _Mark()
            event.mark.reach(self.name, None)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CPUEvent):
            with timeline.span(self.name, "wait"):
                event.synchronize()
        elif event.mark is not None:
            with timeline.span(self.name, "wait"):
                event.mark.wait(self.name)

    def synchronize(self) -> None:
        pass


class ThreadStream(Stream):
    """A daemon thread that takes work from a queue. After an error it runs nothing more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue, name), name=name, daemon=True)
        self._thread.start()
        _open.add(self)

    def submit(self, function: Callable, *args: Any, label: str = "") -> None:
        self._queue.put((function, args, label))

    def record(self, event: CPUEvent) -> None:
        event.mark = _Mark()
        self._queue.put((None, event.mark, ""))

    def wait(self, event: Event) -> None:
        if not isinstance(event, CPUEvent):
            self._queue.put((event.synchronize, (), ""))
        elif event.mark is not None:
            self._queue.put((event.mark.wait, (self.name,), ""))  # this mark: the event may be recorded again

    def synchronize(self) -> None:
        event = CPUEvent()
        self.record(event)
        event.mark.wait()

    def close(self) -> None:
        _open.discard(self)  # finish_streams skips it
        self._queue.put(None)

    def __del__(self) -> None:
        self._queue.put(None)


def _work(work: queue.SimpleQueue, name: str) -> None:
    """The loop of a stream's thread. It knows the queue, not the stream, so that the stream can be freed."""
    error: BaseException | None = None
    while (item := work.get()) is not None:
        threads.enter()
        function, args, label = item
        if function is None:
            args.reach(name, error)
        elif error is None:
            try:
                _run(name, label, function, args)
            except BaseException as raised:  # waits raise it; the stream runs nothing more
                error = raised
        del item, function, args


def _run(stream: str, label: str, function: Callable, args: tuple) -> None:
    if timeline.recording() and label:
        start = timeline.now()
        function(*args)
        timeline.add(stream, label, start, timeline.now())
    else:
        function(*args)


def finish_streams() -> None:
    """Return when every stream of this process has run what was submitted to it, or has failed."""
    for stream in list(_open):
        try:
            stream.synchronize()
        except StreamError:  # no wait of the program needed that work
            pass


class HostMemory:
    """Memory for host arrays, directly from NumPy. `memory` is the class that the CPU uses."""

    peak_bytes = 0  # most bytes that arrays from `empty` have held at once

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised C-contiguous array."""
        return np.empty(shape, dtype)

    def buffer(self, count: int, dtype: Any) -> np.ndarray:
        """A 1-D array of zeros for a long time, as Device.buffer."""
        return np.zeros(count, dtype)

    def lend(self, array: np.ndarray) -> None:
        """As Device.lend_pages."""

    def take(self, array: np.ndarray) -> None:
        """As Device.take_pages."""

    def reset_peak(self) -> None:
        """Reset `peak_bytes` to the bytes that are held now."""

    @staticmethod
    def pooled(nbytes: int) -> int:
        """As Device.pooled."""
        return 0


memory: type[HostMemory] = HostMemory  # shardrt/_backends.py sets a pool (memory.py)


def set_threads(count: int) -> None:
    """Let BLAS and the kernels of this process use `count` threads from now on.

    Matmuls with another number of threads may differ in their last bits.

    Raises:
        ValueError: for less than one.
    """
    from threadpoolctl import threadpool_limits

    from shardrt.kernels import cpu

    cpu.set_threads(count)
    threadpool_limits(count, user_api="blas")


class CPUDevice(Device):
    """NumPy arrays on the host."""

    name = "cpu"
    timed = True
    in_host_memory = True

    def __init__(self) -> None:
        self.host = self
        self.current_stream = InlineStream("compute")
        self._pool = memory()
        self._kernels: ModuleType | None = None

    @property
    def kernels(self) -> ModuleType:
        if self._kernels is None:  # imports Numba: not before the first op
            self._kernels = importlib.import_module("shardrt.kernels.cpu")
        return self._kernels

    @staticmethod
    def compute_dtype(name: str) -> np.dtype:
        return np.dtype(dtypes.float32 if name in dtypes.LOW else name)  # no arithmetic in 16 bits

    @classmethod
    def gathered_dtype(cls, name: str) -> np.dtype:
        computed = cls.compute_dtype(name)
        in_bits = name == dtypes.bfloat16 and computed == np.float32 and onednn.computes_bf16()
        return dtypes.storage(name) if in_bits else computed

    @staticmethod
    def matmul_ignores_place() -> bool:
        return importlib.import_module("shardrt.kernels.cpu").matmul.ignores_place()

    def warm_up(self) -> None:
        self.kernels.warm_up()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self._pool.empty(shape, np.dtype(dtype))

    @staticmethod
    def pooled(nbytes: int) -> int:
        return memory.pooled(nbytes)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        array = self._pool.empty(shape, np.dtype(dtype))
        array.fill(0)
        return array

    def buffer(self, count: int, dtype: Any) -> Array:
        return self._pool.buffer(count, dtype)

    def lend_pages(self, array: Array) -> None:
        self._pool.lend(array)

    def take_pages(self, array: Array) -> None:
        self._pool.take(array)

    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        return np.zeros(count, dtype)

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        return np.asarray(values, dtype)

    def upload(self, values: np.ndarray) -> Array:
        return values

    def copy(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def add_at(self, target: Array, index: Any, values: Any) -> None:
        np.add.at(target, index, values)

    def wait_here(self) -> None:
        pass

    def to_numpy(self, array: Array) -> np.ndarray:
        return array

    def new_stream(self, name: str) -> Stream:
        return ThreadStream(name)

    def new_event(self) -> Event:
        return CPUEvent()

    def peak_bytes(self) -> int:
        return self._pool.peak_bytes

    def reset_peak(self) -> None:
        self._pool.reset_peak()
