"""A stand-in for CuPy: arrays that are strict about where they are, and the calls that shardrt makes.

Its arrays hold NumPy ones and refuse what CuPy's refuse: to become a NumPy array without being asked, or to
be mixed with one. Results of reductions are arrays, not numbers. Work is done when it is issued, so the order
of streams is not tested here: that is done on the CPU device, whose streams are threads.
"""

import ctypes
import itertools
import operator
import threading
import weakref
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.cuda import fake_nccl

_BACK = (
    "reshape",
    "transpose",
    "swapaxes",
    "astype",
    "view",
    "copy",
    "sum",
    "max",
    "min",
    "any",
    "all",
    "ravel",
)
_JOINING = (np.concatenate, np.stack)
_JOINED = 8  # arrays; of more CuPy uploads a table
_PLAIN = ("shape", "dtype", "size", "strides", "ndim", "nbytes", "itemsize", "flags")


class ndarray:
    """cupy.ndarray."""

    def __init__(self, shape, dtype=float, memptr=None):
        if memptr is None:
            self._host = _kept(np.empty(shape, dtype))
        else:
            count = int(np.prod(shape))
            memory = memptr.mem.bytes[memptr.offset :]
            self._host = memory[: count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    @property
    def data(self):
        return SimpleNamespace(ptr=self._host.ctypes.data)

    @property
    def T(self):
        return on_device(self._host.T)

    @property
    def __cuda_array_interface__(self):
        return self._host.__array_interface__

    def get(self):
        not_captured()
        return self._host.copy()

    def fill(self, value):
        issue(lambda: self._host.fill(value))

    def item(self):
        not_captured()
        return self._host.item()

    def tolist(self):
        not_captured()
        return self._host.tolist()

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if any(isinstance(x, list | tuple) for x in inputs):
            return NotImplemented
        if method == "at":
            inputs = inputs[0], on_device(_index(inputs[1])), *inputs[2:]
        inputs, kwargs = list(map(_checked, inputs)), _inside(kwargs)
        call = getattr(ufunc, method)
        if "out" in kwargs:
            issue(lambda: call(*inputs, **kwargs))
            return on_device(kwargs["out"][0])
        return _computed(lambda: call(*inputs, **kwargs), inputs)

    def __array_function__(self, function, types, args, kwargs):
        if not all(issubclass(kind, ndarray) for kind in types):
            raise TypeError(f"{function.__name__}: arrays of the host and of the device are mixed")
        if function in _JOINING and len(args[0]) > _JOINED:
            not_captured("H2D")
        args, kwargs = _inside(args), _inside(kwargs)
        if function is np.copyto:
            issue(lambda: function(*args, **kwargs))
            return None
        return _computed(lambda: function(*args, **kwargs), _arrays_in(args))

    def __getitem__(self, index):
        index = _index(index)
        return _computed(lambda: self._host[index], [self._host])

    def __setitem__(self, index, value):
        index, value = _index(index), _checked(value)
        issue(lambda: operator.setitem(self._host, index, value))

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (on_device(item) for item in self._host)

    def __bool__(self):
        not_captured()
        return bool(self._host)

    def __int__(self):
        not_captured()
        return int(self._host)

    def __float__(self):
        not_captured()
        return float(self._host)

    def __index__(self):
        not_captured()
        return operator.index(self._host)

    def __repr__(self):
        not_captured()
        return f"device {self._host!r}"

    __hash__ = None


def _method(name):
    def call(self, *args, **kwargs):
        args, kwargs = _inside(args), _inside(kwargs)
        return _computed(lambda: getattr(self._host, name)(*args, **kwargs), [self._host])

    return call


def _operator(name):
    def apply(self, other):
        other = _checked(other)
        if name.startswith("__i"):
            issue(lambda: getattr(self._host, name)(other))
            return self
        return _computed(lambda: getattr(self._host, name)(other), [self._host, other])

    return apply


def _arrays_in(nest):
    """The NumPy arrays of a nest of arguments."""
    if isinstance(nest, tuple | list):
        return [array for item in nest for array in _arrays_in(item)]
    return [nest] if isinstance(nest, np.ndarray) else []


def _computed(compute, inputs):
    """What NumPy computes, on the device; in a captured graph again in every replay, unless it is a view."""
    if Stream.here.stream.captured is None:
        return on_device(compute())
    with np.errstate(all="ignore"):  # of numbers that are not there yet: only the shape counts
        result = compute()
    if not isinstance(result, np.ndarray | np.generic):
        return on_device(result)  # shapes, types
    array = np.asarray(result)
    if any(np.may_share_memory(array, x) for x in _arrays_in(inputs)):
        return on_device(result)
    issue(lambda: np.copyto(array, compute()))
    return on_device(array)


for _name in _BACK:
    setattr(ndarray, _name, _method(_name))
for _name in _PLAIN:
    setattr(ndarray, _name, property(lambda self, name=_name: getattr(self._host, name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(ndarray, f"__r{_name}__", _operator(f"__r{_name}__"))
    setattr(ndarray, f"__i{_name}__", _operator(f"__i{_name}__"))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("neg", "invert", "abs"):
    setattr(
        ndarray,
        f"__{_name}__",
        lambda self, name=_name: _computed(lambda: getattr(self._host, f"__{name}__")(), [self._host]),
    )


def on_device(host):
    """NumPy's answers as the device would give them: arrays, also of no dimension."""
    if isinstance(host, tuple | list):
        return type(host)(map(on_device, host))
    if isinstance(host, np.ndarray | np.generic):
        array = ndarray.__new__(ndarray)
        array._host = _kept(np.asarray(host))
        return array
    return host


def _kept(host):
    """Memory that is taken while a graph is captured stays the graph's, as in CuPy's pool for it."""
    graph = Stream.here.stream.captured
    if graph is not None:
        graph.memory.append(host)
    return host


def _inside(nest):
    """The NumPy arrays behind device arrays, in nests too."""
    if isinstance(nest, ndarray):
        return nest._host
    if isinstance(nest, tuple | list):
        return type(nest)(map(_inside, nest))
    if isinstance(nest, dict):
        return {key: _inside(value) for key, value in nest.items()}
    return nest


def _index(index):
    """What CuPy makes of an index: arrays and lists of the host are copied to the device."""
    if any(isinstance(part, list | np.ndarray) for part in (index if isinstance(index, tuple) else (index,))):
        not_captured("H2D")
    return _inside(index)


def _checked(value):
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}: arrays of the host and of the device are mixed")
    return _inside(value)


def not_captured(direction="D2H"):
    """What CuPy does where it would copy to the host, which waits for it, or pageable memory from there."""
    if Stream.here.stream.captured is not None:
        raise RuntimeError(f"the current stream is capturing, so {direction} transfers are disallowed")


def issue(work):
    """Do work of the current stream: now, or when the graph that it is captured in is launched."""
    stream = Stream.here.stream
    if stream.captured is None:
        work()
    else:
        stream.captured.work.append(work)
        stream.captured.loose.add(stream)


class Graph:
    """cupy.cuda.Graph: work in the order in which it was issued. `loose`: streams not joined yet."""

    def __init__(self, origin):
        self.origin, self.work, self.loose, self.streams = origin, [], set(), [origin]
        self.memory = []

    def launch(self, stream):
        assert stream.captured is None
        for work in self.work:
            work()


class _Here(threading.local):
    """A thread's current stream, and those to which the ends of its `with` blocks go back; see rules.py."""

    def __init__(self):
        self.stream, self.entered = Stream.null, [Stream.null]


class Stream:
    """cupy.cuda.Stream; work is done when it is issued, or captured, by CUDA's rules."""

    def __init__(self, non_blocking=False, priority=0):
        assert non_blocking, "a stream that waits for the null stream"
        self.ptr = id(self)
        self.captured = None

    def use(self):
        Stream.here.stream = self
        return self

    def __enter__(self):
        Stream.here.entered.append(self)
        return self.use()

    def __exit__(self, *error):
        Stream.here.entered.pop()
        Stream.here.entered[-1].use()

    def record(self, event):
        event.record(self)

    def wait_event(self, event):
        assert event.points, "a wait for an event that was never recorded"
        if self.captured is not None and event.captured is None:
            raise RuntimeError("cudaErrorStreamCaptureIsolation")
        if event.captured is None:
            return
        if event.captured.streams == []:
            raise RuntimeError("cudaErrorCapturedEvent")
        self.captured = event.captured
        self.captured.streams.append(self)
        self.captured.loose.add(self)
        self.captured.loose.discard(event.stream)

    def synchronize(self):
        if self.captured is not None:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    def is_capturing(self):
        return self.captured is not None

    def begin_capture(self):
        assert self.captured is None
        self.captured = Graph(self)

    def end_capture(self):
        graph = self.captured
        assert graph.origin is self
        for stream in graph.streams:
            stream.captured = None
        graph.streams = []
        if graph.loose - {self}:
            raise RuntimeError("cudaErrorStreamCaptureUnjoined")
        return graph


Stream.null = Stream(non_blocking=True)
Stream.null.ptr = 0
Stream.here = _Here()


class Event:
    """cupy.cuda.Event."""

    def __init__(self, disable_timing=False):
        self.points, self.captured = 0, None

    @property
    def done(self):
        assert self.captured is None, "cudaErrorCapturedEvent"
        return True

    def record(self, stream):
        assert isinstance(stream, Stream)
        self.points += 1
        self.captured, self.stream = stream.captured, stream

    def synchronize(self):
        assert self.points and self.captured is None


class MemoryPool:
    """cupy.cuda.MemoryPool: only who asks is known."""

    here = threading.local()

    def malloc(self, size):
        raise AssertionError("arrays here have no allocator")


@contextmanager
def using_allocator(allocator):
    """cupy.cuda.using_allocator."""
    MemoryPool.here.pool = allocator.__self__
    yield
    MemoryPool.here.pool = None


class Memory:
    """cupy.cuda.Memory: raw, and not cleared."""

    live = weakref.WeakValueDictionary()  # by address; what arrays keep alive is the memory behind `bytes`

    def __init__(self, size):
        memory = np.full(size + 256, 0xFF, np.uint8)
        self.bytes = memory[-memory.ctypes.data % 256 :][:size]
        Memory.live[self.bytes.ctypes.data] = memory


class UnownedMemory:
    """cupy.cuda.UnownedMemory."""

    def __init__(self, ptr, size, owner, device_id=-1):
        assert device_id == 0
        self.bytes = np.frombuffer((ctypes.c_ubyte * size).from_address(ptr), np.uint8)


class MemoryPointer:
    """cupy.cuda.MemoryPointer."""

    def __init__(self, mem, offset):
        self.mem, self.offset, self.ptr = mem, offset, mem.bytes.ctypes.data + offset

    def memset_async(self, value, size, stream):
        assert isinstance(stream, Stream)
        ctypes.memset(self.ptr, value, size)


class Runtime:
    """cupy.cuda.runtime."""

    hostAllocPortable, memcpyDefault = 1, 4

    def __init__(self):
        self.host = {}
        self.ipc = Sharing()

    def getDeviceCount(self):
        return 1

    def setDevice(self, index):
        assert index == 0

    def hostAlloc(self, size, flags):
        memory = np.full(size, 0xFF, np.uint8)
        self.host[memory.ctypes.data] = memory
        return memory.ctypes.data

    def freeHost(self, address):
        del self.host[address]

    def memcpyAsync(self, target, source, size, kind, stream):
        assert kind == self.memcpyDefault and stream == Stream.here.stream.ptr
        issue(lambda: ctypes.memmove(target, source, size))

    def memsetAsync(self, target, value, size, stream):
        issue(lambda: ctypes.memset(target, value, size))

    def getDeviceProperties(self, index):
        return {"name": b"a stand-in"}

    def ipcGetMemHandle(self, address):
        return self.ipc.export(address)

    def ipcOpenMemHandle(self, handle):
        return self.ipc.open(handle)

    def ipcCloseMemHandle(self, address):
        self.ipc.close(address)


class Sharing:
    """CUDA IPC: a handle stands for an address of this process, and threads for processes."""

    def __init__(self):
        self.exported = {}  # handle -> (memory's address, thread)
        self.opened = []  # (address, thread)
        self.errors = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def export(self, address):
        memory = Memory.live.get(address)
        assert memory is not None, "not the beginning of an allocation"
        assert (memory.size - 256) % (2 << 20) == 0, (
            "others share the driver's page, and would be exported too"
        )
        with self._lock:
            assert address not in [known for known, _ in self.exported.values() if known in Memory.live], (
                "exported twice"
            )
            handle = next(self._numbers).to_bytes(64, "big")
            self.exported[handle] = address, threading.get_ident()
            weakref.finalize(memory, self._freed, address, handle)
        return handle

    def open(self, handle):
        address, owner = self.exported[handle]
        if owner == threading.get_ident():
            raise RuntimeError("cudaErrorInvalidResourceHandle: opened in the exporting process")
        assert address in Memory.live
        with self._lock:
            assert (address, threading.get_ident()) not in self.opened, "mapped twice"
            self.opened.append((address, threading.get_ident()))
        return address

    def close(self, address):
        with self._lock:
            self.opened.remove((address, threading.get_ident()))

    def _freed(self, address, handle):
        if any(known == address for known, _ in self.opened):
            self.errors.append("freed while others have it mapped")
        self.exported.pop(handle, None)


class Device:
    """cupy.cuda.Device: an H200."""

    attributes = {"MultiProcessorCount": 132, "L2CacheSize": 1 << 16}  # noqa: RUF012
    compute_capability = "90"
    id = 0


class Driver:
    """cupy.cuda.driver."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self):
        self.limits = []

    def funcSetAttribute(self, function, attribute, value):
        assert attribute == 8
        self.limits.append((function, value))


class Module:
    """cupy.cuda.function.Module: keeps what would have been launched."""

    launched = []  # noqa: RUF012

    def load(self, code):
        assert code[:4] == b"\x7fELF", "machine code"
        self.code = code

    def get_function(self, name):
        assert name.encode() in self.code, "not in this module"

        def launch(grid, block, args, shared):
            Module.launched.append((name, grid, block, args, shared))

        return _Function(name, launch)


class _Function:
    def __init__(self, name, launch):
        self.ptr, self._launch = id(self), launch

    def __call__(self, *args):
        self._launch(*args)


class Pool:
    """The default memory pool."""

    def used_bytes(self):
        return 0


class MemoryHook:
    """cupy.cuda.MemoryHook, which nobody calls here."""

    def __enter__(self):
        return self


def module():
    """A module that passes for cupy."""
    cupy = ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.empty = lambda shape, dtype: ndarray(shape, dtype)

    def zeros(shape, dtype):
        array = ndarray(shape, dtype)
        array.fill(0)
        return array

    cupy.zeros = zeros

    def asarray(values, dtype=None):
        if isinstance(values, ndarray):
            return values if dtype in (None, values.dtype) else values.astype(dtype)
        if np.ndim(values):
            not_captured("H2D")
        return on_device(np.array(values, dtype))

    cupy.asarray = asarray

    def add_at(array, index, values):
        if any(
            isinstance(part, list | np.ndarray) for part in (index if isinstance(index, tuple) else (index,))
        ):
            not_captured("H2D")
        place, values = _inside(index), _checked(values)
        issue(lambda: np.add.at(array._host, place, values))

    cupy.add = SimpleNamespace(at=add_at)
    cupy.get_default_memory_pool = Pool
    cupy.cuda = ModuleType("cupy.cuda")
    vars(cupy.cuda).update(
        Stream=Stream,
        Event=Event,
        Memory=Memory,
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        MemoryHook=MemoryHook,
        MemoryPool=MemoryPool,
        using_allocator=using_allocator,
        Device=Device,
        runtime=Runtime(),
        driver=Driver(),
        function=SimpleNamespace(Module=Module),
        nccl=fake_nccl.module(),
        get_current_stream=lambda: Stream.here.stream,
        get_elapsed_time=lambda start, stop: 1.0,
    )
    return cupy
