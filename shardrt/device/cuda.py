"""An NVIDIA GPU as a device, by CuPy: pooled arrays for ops, raw memory for arrays that cross streams.

When the last reference to a block dies, CuPy's pool lends it again to the stream that allocated it. The pool
does not know whether another stream still uses the block. So only the compute stream allocates from the pool.
Shards, arenas and other arrays that several streams use are raw allocations, which live while referenced.

Never run on a GPU yet (docs/reference/limits.md); tests run it on the real CuPy over a GPU emulator.
"""

import ctypes
import gc
import importlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device import threads
from shardrt.device.capture import WHY, Graph
from shardrt.device.protocol import Array, Device, Event, Stream, StreamError
from shardrt.device.upload import Uploads

__all__ = ["CUDADevice", "count"]

_ROW_ALIGNMENT = 64  # elements: rows of 16 bits then begin at lines of 128 bytes
_POOL_ALIGNMENT = 512  # bytes: what CuPy's pool rounds to
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
_COMPUTE_CAPABILITY = 75, 76  # cudaDevAttrComputeCapabilityMajor, ...Minor
_PAGEABLE_ACCESS = 88  # cudaDevAttrPageableMemoryAccess
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies this machine, the same in all its containers
_HIGH_PRIORITY = -5  # CUDA's highest: communication and copies get the next free processor


def count() -> int:
    """Number of GPUs that this process sees; 0 without CuPy or a driver."""
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver: asked for first, because CuPy takes a third of a second
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # CuPy raises its own errors if the driver is missing
        return 0


class CUDAEvent(Event):
    """A point in a stream. Each record uses the same CUDA event."""

    __slots__ = ("handle", "_recorded", "_graph")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._recorded = False
        self._graph: Graph | None = None  # the graph of the latest record

    def record_in(self, stream: "CUDAStream") -> None:
        """Record in a stream."""
        self.handle.record(stream.handle)
        self._recorded, self._graph = True, stream.graph

    def wait_in(self, stream: "CUDAStream") -> None:
        """Make a stream wait. A point of a captured graph is reached when the graph's replay ends."""
        if not self._recorded:
            return
        if self._graph is stream.graph:
            stream.handle.wait_event(self.handle)
        elif stream.graph is None:
            self._graph.ended().wait_in(stream)
        # Else a graph is being captured, and the point, from before the capture, is reached.

    def done(self) -> bool:
        if self._graph is not None:
            return self._graph.ended(by_host=True).done()
        threads.enter()
        return not self._recorded or bool(self.handle.done)

    def synchronize(self) -> None:
        if self._graph is not None:
            self._graph.ended(by_host=True).synchronize()
        elif self._recorded:
            threads.enter()
            self.handle.synchronize()


class CUDAStream(Stream):
    """A CUDA stream. Submitted functions are called at once with this stream current; they launch work."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.graph: Graph | None = None  # the graph that captures this stream now

    def submit(self, function: Callable, *args: Any, label: str = "") -> None:
        with self.handle:
            function(*args)

    def record(self, event: Event) -> None:
        event.record_in(self)

    def wait(self, event: Event) -> None:
        if isinstance(event, CUDAEvent):
            event.wait_in(self)
        else:
            event.synchronize()  # an event of the host: launch nothing before its point is reached

    def synchronize(self) -> None:
        if self.graph is not None:
            raise RuntimeError(f"the host can't wait for stream {self.name!r}: {WHY}")
        try:
            self.handle.synchronize()
        except RuntimeError as error:  # CUDARuntimeError: a kernel failed
            raise StreamError(f"work in stream {self.name!r} failed: {error}") from error


class CUDADevice(Device):
    """One GPU.

    Raises:
        RuntimeError: which names what is missing, if it can't be used.
    """

    name = "cuda"
    pools_results = True

    def __init__(self, index: int, host: Device) -> None:
        self.index = index
        self.host = host
        self._cupy = _cupy(index)
        self._here = threading.local()
        self._kernels: ModuleType | None = None
        self._usage: _Usage | None = None
        self._ended: list[int] = []  # handles of the compute streams of ended threads
        self.enter()

    def enter(self) -> None:
        threads.choose(self._cupy.cuda.runtime, self.index)
        if not hasattr(self._here, "stream"):
            # Not the null stream, which can't be captured and waits implicitly for other streams.
            handle = self._cupy.cuda.Stream(non_blocking=True)
            # As by a `with` that never ends, because `use` is forgotten: at the end of each `with stream` (in
            # `submit`, in CuPy's own get()) CuPy goes back to that of the `with` around it, or to null.
            handle.__enter__()
            self._here.stream = CUDAStream("compute", handle)
            self._free_what_others_left()
            weakref.finalize(self._here.stream, self._ended.append, handle.ptr)
            self._here.sides = weakref.WeakSet()
        elif self._cupy.cuda.get_current_stream().ptr != self._here.stream.handle.ptr:
            self._here.stream.handle.use()

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """Inside a with block, this GPU is the current GPU of the thread."""
        threads.enter()  # now, not in a garbage collection inside the block, which would change the GPU
        runtime = self._cupy.cuda.runtime
        before = runtime.getDevice()
        if before != self.index:
            self.enter()
        try:
            yield
        finally:
            if before != self.index:
                runtime.setDevice(before)

    def _free_what_others_left(self) -> None:
        """Free blocks that CuPy's pool keeps for streams of ended threads: no other stream would get them.

        The next thread calls this, since an array or thread may end in the middle of a capture.
        """
        pool, handles = self._cupy.get_default_memory_pool(), []
        with suppress(IndexError):  # other threads take from it, too
            while True:
                handles.append(self._ended.pop())
        for handle in handles:
            if self._kernels is not None:
                self._kernels.forget_stream(handle)
            pool.free_all_blocks(SimpleNamespace(ptr=handle))

    @property
    def current_stream(self) -> CUDAStream:
        """This thread's compute stream."""
        if not hasattr(self._here, "stream"):
            with self._chosen():
                self.enter()
        return self._here.stream

    @property
    def capturing(self) -> Graph | None:
        return self.current_stream.graph

    @property
    def kernels(self) -> ModuleType:
        if self._kernels is None:
            self._kernels = importlib.import_module("shardrt.kernels.cuda")
        return self._kernels

    @staticmethod
    def compute_dtype(name: str) -> np.dtype:
        if name == dtypes.bfloat16:
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)

    def lacks_float8(self) -> str:
        ask = self._cupy.cuda.runtime.deviceGetAttribute
        major, minor = (ask(attribute, self.index) for attribute in _COMPUTE_CAPABILITY)
        message = (
            f"GPU {self.index} has compute capability {major}.{minor}; float8 needs 9.0 (Hopper) or later"
        )
        return "" if major >= 9 else message

    def warm_up(self) -> None:
        self.kernels.warm_up()

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.ndarray(shape, dtype)

    @staticmethod
    def row_elements(columns: int) -> int:
        return -(-columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    @staticmethod
    def pooled(nbytes: int) -> int:
        return -(-nbytes // _POOL_ALIGNMENT) * _POOL_ALIGNMENT

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.zeros(shape, dtype)

    def buffer(self, count: int, dtype: Any) -> Array:
        self._refuse("a buffer can't be made")
        nbytes = count * np.dtype(dtype).itemsize
        with self._chosen():
            memory = self._raw(nbytes)
            memory.memset_async(0, nbytes, self.current_stream.handle)
            self.current_stream.synchronize()  # other streams may use it at once
        return self._cupy.ndarray((count,), dtype, memory)

    def _raw(self, nbytes: int) -> Any:
        """Memory from the driver, not from CuPy's pool. Raises MemoryError if the GPU is full."""
        memory = self._memory(nbytes)
        if memory is None and self.capturing is None:
            self.empty_cache()
            memory = self._memory(nbytes)
        if memory is None:
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            raise MemoryError(f"GPU {self.index} has no room for {nbytes} bytes; {free} bytes are free")
        return self._cupy.cuda.MemoryPointer(memory, 0)

    def _memory(self, nbytes: int) -> Any | None:
        """Memory from the driver; None if the GPU is full."""
        try:
            return self._cupy.cuda.Memory(max(nbytes, 1))
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != _MEMORY_ALLOCATION:
                raise
            return None

    def empty_cache(self) -> None:
        """Give the unused blocks of CuPy's pool back to the driver."""
        gc.collect()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        """Page-locked memory of exactly this size; CuPy's own pool rounds up to a power of two.

        Raises:
            MemoryError: if the host is full, or does not let this process lock more memory.
        """
        runtime, nbytes = self._cupy.cuda.runtime, count * np.dtype(dtype).itemsize
        try:
            address = runtime.hostAlloc(max(nbytes, 1), runtime.hostAllocPortable)
        except runtime.CUDARuntimeError as error:
            if error.status != _MEMORY_ALLOCATION:
                raise
            raise MemoryError(f"no room for {nbytes} bytes of pinned memory (see `ulimit -l`)") from error
        memory = (ctypes.c_ubyte * max(nbytes, 1)).from_address(address)
        weakref.finalize(memory, self._free_pinned, address).atexit = False
        array = np.frombuffer(memory, np.uint8)[:nbytes].view(dtype)
        array.fill(0)
        return array

    def _free_pinned(self, address: int) -> None:
        """Free pinned memory, but not at the process's end: streams of the host may still write it."""
        if sys.is_finalizing():
            return
        threads.enter()
        self._cupy.cuda.runtime.freeHost(address)

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        if not isinstance(values, self._cupy.ndarray):
            self._refuse("values of the host can't be copied, but into an array that is there beforehand")
        elif dtype is None:
            return values
        return self._cupy.asarray(values, dtype)

    def upload(self, values: np.ndarray) -> Array:
        self._refuse("numbers of the host can't be copied")
        target = self._cupy.empty(values.shape, values.dtype)
        self._uploads.send(target, values)
        return target

    def numbers(self, make: Callable[[], np.ndarray]) -> Array:
        graph = self.capturing
        if graph is None:
            return self.upload(make())
        values = make()
        # Not from the graph's pool: earlier work of the graph could overwrite the numbers.
        memory = self._raw(values.nbytes)
        target = self._cupy.ndarray(values.shape, values.dtype, memory)
        graph.before_replay(lambda: self._uploads.send(target, make()))
        return target

    @property
    def _uploads(self) -> Uploads:
        if not hasattr(self._here, "uploads"):
            self._here.uploads = Uploads(self._cupy, lambda size: self.pinned(size, np.uint8), self.copy)
        return self._here.uploads

    def copy(self, target: Array, source: Array) -> None:
        """Copy in CuPy's current stream. Both arrays are contiguous, of one dtype, on the host or this GPU.

        If host memory is not pinned, the copy is done when this returns.
        """
        if target.dtype != source.dtype or target.size != source.size:
            raise ValueError(
                f"copy: target has {target.size} elements of {target.dtype}, source {source.size} of "
                f"{source.dtype}"
            )
        runtime, stream = self._cupy.cuda.runtime, self._cupy.cuda.get_current_stream()
        kind = runtime.memcpyDefault  # the addresses say where they are
        runtime.memcpyAsync(_address(target), _address(source), target.nbytes, kind, stream.ptr)
        if self._reads_pageable and any(map(self._pageable, (target, source))):
            stream.synchronize()

    @cached_property
    def _reads_pageable(self) -> bool:
        """Whether copies of unpinned memory may still run after memcpyAsync returns (HMM, Grace)."""
        return bool(self._cupy.cuda.runtime.deviceGetAttribute(_PAGEABLE_ACCESS, self.index))

    def _pageable(self, array: Array) -> bool:
        """Whether the array is in unpinned host memory."""
        runtime = self._cupy.cuda.runtime
        on_host = isinstance(array, np.ndarray)
        return on_host and runtime.pointerGetMemoryType(_address(array)) == runtime.memoryTypeUnregistered

    def add_at(self, target: Array, index: Any, values: Any) -> None:
        self._cupy.add.at(target, index, values)  # np.add.at hands an index with several parts to NumPy

    def stream_here(self) -> int:
        """The handle of the caller's stream, for libraries that take one."""
        return self._cupy.cuda.get_current_stream().ptr

    @cached_property
    def identity(self) -> bytes:
        """Machine and PCI bus, by which NCCL identifies GPUs; the same in all processes.

        Not the UUID: CuPy cuts it at the first zero byte.
        """
        machine = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        return f"{machine} {self._cupy.cuda.runtime.deviceGetPCIBusId(self.index)}".encode()

    # Memory of other processes on this machine, for comm/ipc.py.

    def export_memory(self, array: Array) -> bytes:
        """A handle with which another process opens the whole of `array`, which `buffer` made."""
        return self._cupy.cuda.runtime.ipcGetMemHandle(array.data.ptr)

    def open_memory(self, handle: bytes) -> int:
        """Map memory that another process has exported.

        Returns:
            Its address in this process.
        """
        return self._cupy.cuda.runtime.ipcOpenMemHandle(handle)

    def close_memory(self, address: int) -> None:
        """Undo open_memory, before the exporting process frees the memory."""
        self._cupy.cuda.runtime.ipcCloseMemHandle(address)

    def memory_at(self, address: int, nbytes: int) -> Array:
        """Bytes at an address that the caller keeps valid. They may be on a peer GPU."""
        # Declare this GPU, even for memory of another GPU: otherwise CuPy enables its own peer access.
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, None, self.index)
        return self._cupy.ndarray((nbytes,), np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))

    def wait_here(self) -> None:
        self._refuse("a stream can't be waited for")
        self._cupy.cuda.get_current_stream().synchronize()

    def to_numpy(self, array: Array) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        self._refuse("an array can't be read by the host")
        return array.get()

    def new_stream(self, name: str) -> Stream:
        self._refuse(f"stream {name!r} can't be made")
        with self._chosen():
            stream = CUDAStream(name, self._cupy.cuda.Stream(non_blocking=True, priority=_HIGH_PRIORITY))
        self._here.sides.add(stream)
        return stream

    def new_event(self) -> Event:
        with self._chosen():
            return CUDAEvent(self._cupy.cuda.Event(disable_timing=True))

    def capture(self, function: Callable[[], Any]) -> Graph:
        """The work that `function()` launches, as a CUDA graph that can be replayed.

        Nothing runs now.

        Call the function once before, so that its kernels are compiled and its streams exist. Each replay
        repeats addresses, branches and numbers of the host as they are now, except numbers of optimizers and
        dropout. Work on the host happens once, now. See docs/explanation/gpu.md.

        Raises:
            RuntimeError: if the function reads from the GPU, or waits for it.
        """
        compute = self.current_stream
        if compute.graph is not None:
            raise RuntimeError("capture: another capture is active in this thread; end it first")
        if self._cupy.cuda.get_current_stream().ptr != compute.handle.ptr:
            raise RuntimeError(
                "capture: the current stream must be the compute stream; leave `with stream` blocks first"
            )
        graph = Graph(self._cupy, compute, self._here.sides, self.new_event)
        graph.capture(function)
        return graph

    def _refuse(self, what: str) -> None:
        """Raise RuntimeError if this thread captures a graph."""
        if self.current_stream.graph is not None:
            raise RuntimeError(f"{what}: {WHY}")

    def peak_bytes(self) -> int:
        return self._measured().peak

    def reset_peak(self) -> None:
        self._measured().reset()

    def _measured(self) -> "_Usage":
        if self._usage is None:
            self._usage = _Usage(self._cupy)
        self._usage.watch()
        return self._usage


class _Usage:
    """Most bytes that CuPy's pool has lent at once since `reset`, to threads that called `watch`."""

    def __init__(self, cupy: ModuleType) -> None:
        self._pool = cupy.get_default_memory_pool()
        self._here = threading.local()
        self.reset()
        usage = self

        class Watch(cupy.cuda.MemoryHook):
            """Called by CuPy after each allocation from the pool."""

            name = "shardrt peak"

            def malloc_postprocess(self, **info: Any) -> None:
                usage.peak = max(usage.peak, usage._pool.used_bytes())

        self._hook = Watch

    def watch(self) -> None:
        """Count allocations of this thread from now on: a hook of CuPy belongs to one thread."""
        if not hasattr(self._here, "hook"):
            self._here.hook = self._hook()
            self._here.hook.__enter__()

    def reset(self) -> None:
        self.peak = self._pool.used_bytes()


def _address(array: Array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _cupy(index: int) -> ModuleType:
    """Import CuPy, if it can use GPU `index`. Raises RuntimeError, which names what is missing."""
    # Streams that share one of the GPU's queues wait for each other, and by default there are 8 queues.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read when the first context is made
    try:
        import cupy
        import ml_dtypes  # noqa: F401  before CuPy, which otherwise has no bfloat16
    except ImportError as error:
        raise RuntimeError(
            f"device 'cuda' needs CuPy and ml_dtypes ({error}): pip install 'shardrt[cuda]', or use 'cpu'"
        ) from error
    try:
        gpus = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own kinds, or an ImportError where the driver is missing
        raise RuntimeError(f"device 'cuda' needs a GPU, and finds none ({error}); use 'cpu'") from error
    if index >= gpus:
        raise RuntimeError(f"device 'cuda:{index}' does not exist: this machine has {gpus} GPU(s)")
    return cupy
