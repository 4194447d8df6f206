"""Records what the real CUDA path issues on the GPU emulator, as a program of the simulator.

    programs = recorded(function, 2, software, patch)

Kernels of shardrt/kernels/cuda, calls of NCCLTransport and copies of CUDADevice are recorded where they are
called, if CUDA gets work of them. Everything else is recorded where CuPy calls CUDA: records, waits, and the
kernels of CuPy's own operators. At the end no work that CUDA got may be missing.

Programs have the addresses of the emulator's memory. Arrays without elements stand for CuPy's arrays, with
their addresses, shapes and strides. So the checks of simulated programs check the real one.
"""

import ctypes
import sys
import threading
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import nccl, thread
from shardrt.comm import world as worlds
from shardrt.comm.simulated import Channel, SimulatedTransport
from shardrt.device import program as p
from shardrt.device import simulated
from shardrt.device.addresses import Block, block_of
from shardrt.device.cuda import CUDADevice, CUDAStream
from shardrt.device.program import Program
from shardrt.device.shapes import Shaped
from shardrt.device.simulated import SimulatedDevice, site
from shardrt.kernels import costs
from shardrt.simulate import follower, script, updates

__all__ = ["Recorder", "recorded"]

_CALLS = ("gather", "reduce_scatter", "all_reduce", "broadcast", "send", "recv", "exchange", "swap")
_WORK = ("launch", "product", "copy", "set", "nccl")  # in the emulator's log
_NEXT = -1  # of Recorder.dtypes: of the buffer that is made
_BY_SIZE = {
    size: np.dtype(name) for size, name in ((1, "bool"), (2, "float16"), (4, "float32"), (8, "int64"))
}
_here = threading.local()  # .recorder, of a rank's thread
_of_gpus: dict[int, "Recorder"] = {}  # the last of each, whose arrays may be looked at later


class Recorder:
    """Records one rank. `shadow` has the program."""

    def __init__(self, rank: int, ranks: int, log: list[tuple]) -> None:
        self.shadow = SimulatedDevice(like=CUDADevice)
        self.shadow.whose = script._module_now
        self.shadow.program.rank, self.shadow.program.world_size = rank, ranks
        self.shadow.program.alike = [rank]
        self._items = self.shadow.program.items
        self.kernels = _Kernels(self)
        self.streams: dict[int, Any] = {}  # by handle
        self.marks: dict[int, int] = {}  # by handle of an event
        self.groups: Counter[tuple] = Counter()
        self.quiet = False  # inside of what is recorded as a whole
        self.counted: Counter[int] = Counter()  # work in each stream that is recorded
        self._log, self._begin = log, len(log)
        self.dtypes: dict[int, Any] = {}  # of the last array in the memory that begins there
        self._starts: list[int] = []
        self._blocks: list[np.ndarray] = []  # by address; the base of each is its Block

    # -- memory

    def take(self, start: int, nbytes: int, category: str, place: str = "device") -> None:
        """Memory is allocated."""
        block = Block(start, nbytes, lambda block: None)
        taken = p.Take(p.Range(start, start + nbytes), place, category, self.shadow.label, site())
        block.item = self.shadow.add(taken)
        self.shadow.program.items[block.item] = taken
        at = bisect(self._starts, start)
        self._starts.insert(at, start)
        self._blocks.insert(at, np.asarray(block))

    def free(self, start: int, stream: str) -> None:
        """Memory is freed; operations of a stream may get it at once."""
        at = bisect(self._starts, start) - 1
        if at >= 0 and self._starts[at] == start:
            del self._starts[at], self._blocks[at]
            self.dtypes.pop(start, None)
            self.shadow.add(p.Free(start, site(), stream))

    def array(self, x: Any) -> Any:
        """The array without elements that stands for CuPy's, or for pinned memory; else x itself."""
        if isinstance(x, list | tuple) and type(x) in (list, tuple):
            return type(x)(map(self.array, x))
        if hasattr(x, "__cuda_array_interface__"):
            return self.view(x.data.ptr, x.shape, x.dtype, x.strides)
        if type(x) is np.ndarray:
            found = self.view(x.ctypes.data, x.shape, x.dtype, x.strides)
            return x if found is None else found
        return x

    def view(self, address: int, shape: tuple, dtype: Any, strides: tuple | None) -> Any:
        """None where the address is in no memory that is recorded."""
        at = bisect(self._starts, address) - 1
        if at < 0 or address >= self._starts[at] + max(1, block_of(self._blocks[at]).nbytes):
            return None
        base = self._blocks[at]
        taken = self._items[base.base.item]
        if dtype is None:  # bytes, of a memset or memcpy
            dtype = self.dtypes.get(self._starts[at], np.dtype(np.uint8))
            shape = (shape[0] // dtype.itemsize,)
        self.dtypes[self._starts[at]] = dtype
        kind = self.shadow._kind if taken.place == "device" else self.shadow.host._kind
        return np.ndarray.__new__(kind, shape, dtype, base, address - self._starts[at], strides)

    def size(self, start: int) -> int:
        """The bytes of the memory that begins there."""
        return block_of(self._blocks[bisect(self._starts, start) - 1]).nbytes

    # -- operations

    def stream(self, handle: int) -> str:
        """The name of a stream, in which operations are recorded from now on."""
        self.shadow._running = self.streams[handle]
        return self.shadow._running.name

    @contextmanager
    def as_one(self) -> Iterator[Callable[[], int]]:
        """Inside, only allocations are recorded. Gives how much work CUDA got, all in the caller's stream."""
        stream, before, self.quiet = _current(), len(self._log), True
        self.stream(stream)
        try:
            yield lambda: self._issued(before)[stream]
        finally:
            self.quiet = False
            issued = self._issued(before)
            assert set(issued) <= {stream}, "work in another stream than the caller's"
            self.counted += issued

    def _issued(self, begin: int) -> Counter[int]:
        """Work in each stream of this rank since a place of the log."""
        log = self._log[begin:]
        return Counter(stream for what, stream, _ in log if what in _WORK and stream in self.streams)

    def check_all_recorded(self) -> None:
        """No work that CUDA got is missing."""
        all_of_it = self._issued(self._begin)
        assert all_of_it == self.counted, (all_of_it, self.counted)

    def kernel(self, name: str, real: Callable, cost_of: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a kernel of the package, and record it."""
        if self.quiet:
            return real(*args, **kwargs)
        given, named = self.array(args), {key: self.array(value) for key, value in kwargs.items()}
        cost = cost_of(*given, **named)
        with self.as_one() as issued:
            value = real(*args, **kwargs)
        if not issued():
            return value
        writes = cost.writes
        if hasattr(cost.value, "shape") and not isinstance(cost.value, np.ndarray):
            writes = (*writes, self.array(value))
        how = {"flops": cost.flops, "nbytes": cost.nbytes, "launches": cost.launches, "sizes": cost.sizes}
        self.shadow.work(name, cost.reads, writes, args=(*given, *named.values()), **how)
        if hasattr(cost.value, "usual"):
            self.shadow.answer(cost.reads, cost.value)
        return value

    def of_cupy(self, stream: int, name: str, arguments: list) -> None:
        """CuPy launches a kernel of its own: arrays that are read, then the one that is written."""
        self.counted[stream] += 1
        self.stream(stream)
        arrays = [array for array in arguments if isinstance(array, Shaped)]
        numbers = [each for each in arguments if not isinstance(each, Shaped)]
        self.shadow.work(name, arrays[:-1], arrays[-1:], args=(*arrays[:-1], *numbers))


class _Kernels:
    """The kernel package of a rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, module: str) -> Any:
        if module.startswith("_"):
            raise AttributeError(module)
        real = getattr(_package(), module)
        if not hasattr(real, "__file__"):
            return real
        found = _Module(self._recorder, module, real)
        self.__dict__[module] = found
        return found


class _Module:
    def __init__(self, recorder: Recorder, name: str, real: Any) -> None:
        self._recorder, self._name, self._real = recorder, name, real

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not callable(real) or name.startswith("_"):
            return real
        cost_of = getattr(getattr(costs.ON_GPU, self._name), name)
        whole = f"{self._name}.{name}"
        return lambda *args, **kwargs: self._recorder.kernel(whole, real, cost_of, args, kwargs)


def _package() -> Any:
    from shardrt.kernels import cuda

    return cuda


def _current() -> int:
    import cupy

    return cupy.cuda.get_current_stream().ptr


def _loud() -> Recorder | None:
    """The recorder of this thread, if it records operations now."""
    recorder = getattr(_here, "recorder", None)
    return recorder if recorder is not None and not recorder.quiet else None


def watch(software: Any, patch: Any) -> None:
    """From now on, threads with a recorder record what they issue. patch: pytest's."""

    def around(owner: Any, name: str, record: Callable) -> None:
        """`record(recorder, real, *args)` in place of a method, where a recorder is loud."""
        real = getattr(owner, name)
        bound = not isinstance(owner, type)

        def method(*args: Any, **kwargs: Any) -> Any:
            recorder = _loud()
            return record(recorder, real, *args, **kwargs) if recorder is not None else real(*args, **kwargs)

        patch.setattr(owner, name, method if bound else lambda *args, **kwargs: method(*args, **kwargs))

    # -- CUDA's calls, by CuPy and by shardrt

    def event_record(recorder, real, event, stream):
        real(event, stream)
        name = recorder.stream(stream)
        mark = recorder.marks[event] = recorder.shadow.new_mark()
        recorder.shadow.add(p.Record(name, mark, recorder.shadow.label, site(), event))

    def stream_wait(recorder, real, stream, event):
        real(stream, event)
        if event in recorder.marks:
            recorder.shadow.add(p.Wait(recorder.stream(stream), recorder.marks[event], site()))

    def event_wait(recorder, real, event):
        real(event)
        if event in recorder.marks:
            recorder.shadow.add(p.HostWait(recorder.marks[event], site()))

    def stream_synchronize(recorder, real, stream):
        real(stream)
        name, mark = recorder.stream(stream), recorder.shadow.new_mark()
        recorder.shadow.add(p.Record(name, mark, recorder.shadow.label, site()))
        recorder.shadow.add(p.HostWait(mark, site()))

    def launch(recorder, real, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
        kernel = software._kernels[function]
        recorder.of_cupy(stream, kernel.name, list(_arguments(recorder, kernel, parameters)))

    def memset(recorder, real, target, value, size, stream):
        real(target, value, size, stream)
        recorder.of_cupy(stream, "memset", [value, recorder.view(target, (size,), None, None)])

    def memcpy(recorder, real, target, source, size, kind, stream):
        real(target, source, size, kind, stream)
        ends = [recorder.view(each, (size,), None, None) for each in (source, target)]
        recorder.of_cupy(stream, "memcpy", ends)

    def free(recorder, real, address):
        real(address)
        recorder.free(address, "")

    cuda = {
        "eventRecord": event_record,
        "streamWaitEvent": stream_wait,
        "eventSynchronize": event_wait,
        "streamSynchronize": stream_synchronize,
        "launchKernel": launch,
        "memsetAsync": memset,
        "memcpyAsync": memcpy,
        "free": free,
        "freeHost": free,
    }
    for name, record in cuda.items():
        around(software, name, record)

    # -- the device's

    def buffer(recorder, real, gpu, count, dtype):
        recorder.dtypes[_NEXT] = np.dtype(dtype)
        return real(gpu, count, dtype)

    def raw(recorder, real, gpu, nbytes):
        pointer = real(gpu, nbytes)
        recorder.take(pointer.ptr, nbytes, "buffers")
        recorder.dtypes[pointer.ptr] = recorder.dtypes.pop(_NEXT)
        return pointer

    def pinned(recorder, real, gpu, count, dtype):
        array = real(gpu, count, dtype)
        recorder.take(array.ctypes.data, array.nbytes, "buffers", "host")
        recorder.shadow.host.work("numpy.fill", (), (recorder.array(array),), args=(0,))
        return array

    def copy(recorder, real, gpu, target, source):
        with recorder.as_one() as issued:
            real(gpu, target, source)
        if issued():
            recorder.shadow.copy(recorder.array(target), recorder.array(source))

    def asarray(recorder, real, gpu, values, dtype=None):
        if hasattr(values, "__cuda_array_interface__"):
            return real(gpu, values, dtype)
        with recorder.as_one():
            target = real(gpu, values, dtype)
        recorder.shadow.work("copy", (values,), (recorder.array(target),), nbytes=2 * target.nbytes)
        return target

    def upload(recorder, real, gpu, values):
        with recorder.as_one():
            target = real(gpu, values)
        recorder.shadow.work("upload", (), (recorder.array(target),), nbytes=2 * target.nbytes)
        return target

    def to_numpy(recorder, real, gpu, array):
        with recorder.as_one():
            values = real(gpu, array)
        recorder.shadow.to_numpy(recorder.array(array))
        return values

    def tag(recorder, real, gpu, array, category, owner=None):
        recorder.shadow.set_tag(recorder.array(array), category, owner)
        return array

    def passed_on(name):
        def tell(recorder, real, gpu, *args):
            getattr(recorder.shadow, name)(*args)

        return tell

    methods = {
        "buffer": buffer,
        "_raw": raw,
        "pinned": pinned,
        "copy": copy,
        "asarray": asarray,
        "upload": upload,
        "to_numpy": to_numpy,
        "set_tag": tag,
        **{name: passed_on(name) for name in ("set_phase", "step_done", "allow_divergence")},
    }
    for name, record in methods.items():
        around(CUDADevice, name, record)
    kernels = CUDADevice.kernels
    patch.setattr(
        CUDADevice,
        "kernels",
        property(lambda gpu: found.kernels if (found := _loud()) else kernels.fget(gpu)),
    )

    # -- streams

    def made(recorder, real, stream, name, handle):
        real(stream, name, handle)
        own = recorder.shadow.current_stream if name == "compute" else recorder.shadow.new_stream(name)
        recorder.streams[handle.ptr] = own

    def submit(recorder, real, stream, function, *args, label=""):
        with recorder.shadow.running_in(recorder.streams[stream.handle.ptr], label):
            real(stream, function, *args, label=label)

    around(CUDAStream, "__init__", made)
    around(CUDAStream, "submit", submit)

    # -- NCCL

    def connected(recorder, real, transport, host, gpu):
        real(transport, host, gpu)
        own = worlds.current().rank
        ranks = tuple(int(each) for each in host.all_gather_bytes(str(own).encode()))
        recorder.groups[host.role, ranks] += 1
        name = f"{host.role} {ranks}, {recorder.groups[host.role, ranks]}"
        shadow = transport.shadow = SimulatedTransport.__new__(SimulatedTransport)
        shadow._rank, shadow._size, shadow._device = host.rank, host.size, recorder.shadow
        shadow._channel, shadow._host = Channel(recorder.shadow, name, ranks), host

    def call(name):
        def record(recorder, real, transport, *args):
            with recorder.as_one() as issued:
                real(transport, *args)
            if issued():
                getattr(transport.shadow, name)(*map(recorder.array, args))

        return record

    around(nccl.NCCLTransport, "__init__", connected)
    for name in _CALLS:
        around(nccl.NCCLTransport, name, call(name))

    # -- what looks at arrays of the runtime: they stand for arrays without elements, too

    def standing(function):
        def of(array):
            gpu = getattr(getattr(array, "device", None), "id", None)
            recorder = _of_gpus.get(gpu) or getattr(_here, "recorder", None)
            return function(array if recorder is None else recorder.array(array))

        return of

    patch.setattr(sys.modules[__name__], "_of_gpus", {})  # ends with the test, and so do its arrays
    patch.setattr(simulated, "_INSIDE", (*simulated._INSIDE, __file__, str(_folder_of_cupy())))
    for module in (follower, updates):
        patch.setattr(module, "block_of", standing(module.block_of))
        patch.setattr(module, "range_of", standing(module.range_of))


def _folder_of_cupy() -> str:
    import cupy

    return cupy.__path__[0]


def _arguments(recorder: Recorder, kernel: Any, parameters: int) -> Any:
    """Of a kernel of CuPy: its arrays (the struct CArray), and numbers."""
    pointers = (ctypes.c_void_p * len(kernel._sizes)).from_address(parameters)
    types = kernel.name.partition("__")[2].split("_")
    types = [""] * 2 if types == [""] else types  # a reduction, of one array to another
    for pointer, size, kind in zip(pointers, kernel._sizes, types, strict=False):
        if size < 16:
            dtype = np.dtype({2: np.float16, 4: np.float32, 8: np.int64}[size])
            yield np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype)[0].item()
            continue
        words = (ctypes.c_int64 * (size // 8)).from_address(pointer)
        n = (size - 16) // 16
        shape, strides = tuple(words[2 : 2 + n]), tuple(words[2 + n : 2 + 2 * n])
        dtype = (
            CUDADevice.compute_dtype(kind)
            if kind
            else _BY_SIZE[strides[-1] if n else recorder.size(words[0])]
        )
        yield recorder.view(words[0], shape, dtype, strides)


def recorded(
    function: Callable[[], Any], ranks: int, software: Any, patch: Any, follow: Callable | None = None
) -> list[Program]:
    """What each rank issues in `function()`, each a thread with a GPU of its own.

    follow: called with the shadow of each rank, before.
    """
    import cupy

    watch(software, patch)

    def rank() -> Program:
        number = worlds.current().rank
        recorder = Recorder(number, ranks, software.log)
        owners: dict[int, str] = {}

        class Pool(cupy.cuda.MemoryHook):
            name = "recorder"

            def malloc_postprocess(self, **info: Any) -> None:
                owners[info["mem_ptr"]] = recorder.streams[_current()].name
                recorder.take(info["mem_ptr"], info["size"], "activations")

            def free_preprocess(self, **info: Any) -> None:
                recorder.free(info["mem_ptr"], owners.pop(info["mem_ptr"], ""))

        _here.recorder = _of_gpus[number] = recorder
        try:
            gpu = recorder.shadow.like = device.get(f"cuda:{number}")
            gpu.enter()
            if follow is not None:
                follow(recorder.shadow)
                gpu.follower = recorder.shadow.follower
            with Pool():
                kept = function()  # it stays alive, as a simulated recording's
                recorder.check_all_recorded()
                program, recorder.shadow.program = recorder.shadow.program, Program()
        finally:
            del _here.recorder
        gpu.wait_here()
        del kept
        return program

    return thread.run(ranks, rank)
