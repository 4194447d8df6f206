"""A simulated device: it computes nothing and records the work of a program, for any model on any machine.

Its arrays have no elements (shapes.py). Its kernels report what they would read, write and compute
(shardrt.kernels.costs). Its streams behave like CUDA's. It records all work in `program`. `values` gives the
values that the host reads. The real device that it simulates determines dtypes, padding and pool sizes.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device import program as p
from shardrt.device.addresses import Addresses, Block, block_of, joined, ranges_of
from shardrt.device.cpu import CPUDevice
from shardrt.device.program import HOST, Program
from shardrt.device.protocol import Array, Device, Event, Stream
from shardrt.device.shapes import Shaped, kind_for

__all__ = ["SimulatedDevice", "computed_in", "site"]

Values = Callable[[str, np.dtype, str, Any], tuple[Any, str]]


def usual(site: str, dtype: np.dtype, what: str = "", value: Any = None) -> tuple[Any, str]:
    """The default for values that the host reads: the usual value; else False for booleans, 1 for numbers."""
    return (dtype.type(0 if dtype == np.bool_ else 1) if value is None else value), what


class SimulatedEvent(Event):
    """An event with a new mark for each record. The host can't ask whether a mark is reached."""

    __slots__ = ("mark", "number", "_device")

    def __init__(self, device: "SimulatedDevice") -> None:
        self.mark, self.number = 0, device.new_number()
        self._device = device

    def done(self) -> bool:
        raise RuntimeError(
            "Event.done: a simulated program must not depend on how far a stream is; wait for the event"
        )

    def synchronize(self) -> None:
        if self.mark:
            self._device.add(p.HostWait(self.mark, site()))


class SimulatedStream(Stream):
    """Submitted functions are called now, with this stream current."""

    def __init__(self, name: str, device: "SimulatedDevice") -> None:
        self.name = name
        self._device = device

    def submit(self, function: Callable, *args: Any, label: str = "") -> None:
        with self._device.running_in(self, label):
            function(*args)

    def record(self, event: SimulatedEvent) -> None:
        event.mark = self._device.new_mark()
        self._device.add(p.Record(self.name, event.mark, self._device.label, site(), event.number))

    def wait(self, event: SimulatedEvent) -> None:
        if event.mark:
            self._device.add(p.Wait(self.name, event.mark, site()))

    def synchronize(self) -> None:
        event = self._device.new_event()
        self.record(event)
        event.synchronize()


class HostStream(SimulatedStream):
    """The thread that issues work. Its waits block the host itself."""

    def wait(self, event: SimulatedEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        pass


class SimulatedDevice(Device):
    """Records work in `program`.

    Callers may replace `program` at any time; marks and addresses go on.

    Args:
        like: the device that it simulates, or its class.
        values: gives the values that the host reads: (site, dtype, name from the kernel, usual value) ->
            (value of each element, name).
        dry_run: communicators skip every call.

    Attributes:
        kernels: replaces shardrt.kernels.costs.
    """

    name = "simulated"
    writes_files = False
    place = "device"

    def __init__(
        self,
        like: Device | type[Device] = CPUDevice,
        values: Values = usual,
        kernels: Any = None,
        program: Program | None = None,
        *,
        dry_run: bool = False,
    ) -> None:
        self.like = like.like if isinstance(like, SimulatedDevice) else like
        self.values = values
        self.program = Program() if program is None else program
        self.dry_run = dry_run
        self.label = self._phase = ""
        self.on_step: Callable[[int], None] | None = None  # called with each optimizer step, from 0
        # Called behind each: with the name, the arrays read and written, and the arguments; with
        # the call, its world ranks, the arrays, and the Reduction.
        self.on_work: Callable[[str, list[Any], list[Any], tuple], None] | None = None
        self.on_collective: Callable[[str, Any, Any, Any, Any], None] | None = None
        # Called by `allow_divergence`.
        self.on_divergence: Callable[[tuple[tuple[int, int], ...]], None] | None = None
        self.whose: Callable[[], str] = str  # gives the module that runs now, the owner of new memory
        self._steps = count()
        self._marks, self._events = count(1), count(1)
        self._names: dict[str, int] = {}
        self.addresses = Addresses()
        self._kernels = None if kernels is None else Kernels(self, kernels)
        self._given = kernels
        self._kind = kind_for(self)
        self._pooled: dict[int, int] = {}  # bytes lent by the pool, by address
        self._held = self._peak = 0
        self.current_stream = self._running = self.new_stream("compute")
        if self.like.in_host_memory:
            self.program.by_host = (self.current_stream.name,)
        self.host = SimulatedHost(self)

    # -- recording

    def add(self, item: p.Item) -> int:
        """Record an item and return its index."""
        self.program.items.append(item)
        return len(self.program.items) - 1

    def work(
        self,
        name: str,
        reads: Iterable[Any],
        writes: Iterable[Any],
        *,
        flops: int = 0,
        nbytes: int | None = None,
        launches: int = 1,
        sizes: tuple[int, ...] = (),
        args: tuple = (),
    ) -> None:
        """Record a kernel in the caller's stream. Arrays with elements have no addresses."""
        reads, writes = ([x for x in given if isinstance(x, Shaped)] for given in (reads, writes))
        if nbytes is None:
            nbytes = sum(x.nbytes for x in (*reads, *writes))
        ranges, dtype = (_ranges(reads), _ranges(writes)), computed_in(reads or writes)
        label = self.label or (self._phase if self._running is self.current_stream else "")
        what = flops, nbytes, launches, label, site(), sizes, dtype
        self.add(p.Work(self._running.name, name, *ranges, *what))
        if self.on_work is not None:
            self.on_work(name, reads, writes, args)

    def set_phase(self, phase: str) -> None:
        self._phase = phase

    def allow_divergence(self, layout: tuple[tuple[int, int], ...]) -> None:
        if self.on_divergence is not None:
            self.on_divergence(layout)

    def step_done(self) -> None:
        number = next(self._steps)
        self.add(p.Step(number))
        if self.on_step is not None:
            self.on_step(number)

    def new_mark(self) -> int:
        return next(self._marks)

    def new_number(self) -> int:
        """A number for an event."""
        return next(self._events)

    def stream_here(self) -> str:
        """The name of the caller's stream."""
        return self._running.name

    @contextmanager
    def running_in(self, stream: SimulatedStream, label: str) -> Iterator[None]:
        before = self._running, self.label
        self._running, self.label = stream, label
        try:
            yield
        finally:
            self._running, self.label = before

    # -- what stands for a real device

    @property
    def kernels(self) -> Any:
        if self._kernels is None:
            costs = importlib.import_module("shardrt.kernels.costs")
            self._kernels = Kernels(self, costs.ON_CPU if self.like.in_host_memory else costs.ON_GPU)
        return self._kernels

    def compute_dtype(self, name: str) -> np.dtype:
        return self.like.compute_dtype(name)

    def gathered_dtype(self, name: str) -> np.dtype:
        return self.like.gathered_dtype(name)

    def lacks_float8(self) -> str:
        """A dry run of a real device answers as the device does."""
        message = "the simulator has no speeds of matmuls in float8"
        return self.like.lacks_float8() if isinstance(self.like, Device) else message

    def matmul_ignores_place(self) -> bool:
        return self.like.matmul_ignores_place()

    def row_elements(self, columns: int) -> int:
        return self.like.row_elements(columns)

    def pooled(self, nbytes: int) -> int:
        return self.like.pooled(nbytes)

    def warm_up(self) -> None:
        pass

    # -- arrays

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        array = self._array(shape, dtype, "activations", pool=not self.like.in_host_memory)
        block = block_of(array)
        size = self._pooled[block.start] = self.pooled(array.nbytes)
        self._held += size
        self._peak = max(self._peak, self._held)
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def result(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """A result of NumPy's or CuPy's own functions: NumPy uses malloc, CuPy its pool."""
        return self.empty(shape, dtype) if self.like.pools_results else self._array(shape, dtype, "results")

    def buffer(self, count: int, dtype: Any) -> Array:
        array = self._array(count, dtype, "buffers")
        if self.host is not self:  # as CUDA's: zeros, and other streams may use it at once
            with self.running_in(self.current_stream, self.label):
                if count:
                    self.work("memset", (), (array,))
            self.current_stream.synchronize()
        return array

    def its_own(self, array: Array) -> Array:
        """A view of an array of another simulated device, as an array of this device."""
        return np.ndarray.view(array, self._kind)

    def pinned(self, count: int, dtype: Any) -> Array:
        return self.host.buffer(count, dtype)

    def _array(self, shape: int | tuple[int, ...], dtype: Any, category: str, *, pool: bool = False) -> Array:
        """An array. pool: from the pool of the caller's stream, as CuPy: its later work may reuse it.

        Other memory is never reused here. A CPU stream's queue refers to the arrays of its pending work, and
        CUDA's driver frees memory when all work is done: so no next owner comes too early.
        """
        shape, dtype = (shape,) if isinstance(shape, int | np.integer) else tuple(shape), np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        owner = self._running.name if pool else None
        block = Block(self.addresses.take(nbytes, owner), nbytes, self._give_back, owner)
        memory = p.Range(block.start, block.start + nbytes)
        block.item = self.add(p.Take(memory, self.place, category, self.label, site(), self.whose()))
        return block.array(self._kind, shape, dtype)

    def _give_back(self, block: Block) -> None:
        self._held -= self._pooled.pop(block.start, 0)
        self.add(p.Free(block.start, site(), block.owner or ""))
        self.addresses.give_back(block.start, block.nbytes, block.owner)

    def set_tag(self, array: Array, category: str, owner: str | None = None) -> Array:
        block = block_of(array)
        items = self.program.items
        taken = items[block.item] if block is not None and block.item < len(items) else None
        if isinstance(taken, p.Take) and taken.memory.start == block.start:
            owner = taken.owner if owner is None else owner
            items[block.item] = replace(taken, category=category, owner=owner)
        return array

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        if isinstance(values, self._kind):
            return values.astype(values.dtype if dtype is None else dtype, copy=False)
        if hasattr(values, "__cuda_array_interface__"):  # it is on the GPU already, for which this stands
            return self.asarray(self._array(values.shape, values.dtype, "buffers"), dtype)
        if not isinstance(values, Shaped):
            values = np.asarray(values, dtype)
        target = self.result(values.shape, values.dtype if dtype is None else np.dtype(dtype))
        self.work("copy", (values,), (target,), nbytes=2 * target.nbytes)
        return target

    def upload(self, values: np.ndarray) -> Array:
        target = self.result(values.shape, values.dtype)
        self.work("upload", (), (target,), nbytes=2 * target.nbytes)
        return target

    def copy(self, target: Array, source: Array) -> None:
        if target.dtype != source.dtype or target.size != source.size:
            raise ValueError(
                f"copy: target has {target.size} elements of {target.dtype}, source {source.size} of "
                f"{source.dtype}"
            )
        self.work("copy", (source,), (target,), nbytes=2 * target.nbytes)

    def add_at(self, target: Array, index: Any, values: Any) -> None:
        np.add.at(target, index, values)

    def wait_here(self) -> None:
        if self._running is self.current_stream or not self.like.in_host_memory:
            self._running.synchronize()  # a CPU's stream is itself the thread that asks

    def to_numpy(self, array: Array) -> np.ndarray:
        """Values from `values`. The host waits for the caller's stream, as with CuPy."""
        if not isinstance(array, Shaped):
            return array
        if array.shardrt_device is not self:
            return array.shardrt_device.to_numpy(array)
        self.work("copy to host", (array,), ())
        self.wait_here()
        return self._value(array)

    def answer(self, reads: Iterable[Array], asked: Any) -> Any:
        """A kernel's value for the host, which waits.

        Args:
            asked: its name `what` and `usual` value.
        """
        self.wait_here()
        return self._answered((), np.dtype(type(asked.usual)), asked.what, asked.usual)

    def _answered(
        self, ranges: tuple[p.Range, ...], dtype: np.dtype, what: str = "", usual: Any = None
    ) -> Any:
        place = site()
        value, why = self.values(place, dtype, what, usual)
        self.add(p.HostRead(ranges, why, place))
        return value

    def _value(self, array: Array) -> np.ndarray:
        value = self._answered(ranges_of(array), array.dtype)
        found = np.zeros(array.shape, array.dtype)  # pages of zeros take no memory
        if value:
            found[...] = value
        return found

    def read(self, array: Array, planned: np.ndarray) -> np.ndarray:
        found = self.to_numpy(array)
        return found if self.program.exact and not isinstance(array, Shaped) else planned

    # -- streams

    def new_stream(self, name: str) -> Stream:
        return SimulatedStream(self.unique(name), self)

    def unique(self, name: str) -> str:
        """The name, with a number if another stream has it."""
        number = self._names[name] = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name} {number}"

    def new_event(self) -> Event:
        return SimulatedEvent(self)

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool has lent now."""
        return self._held

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._held


class SimulatedHost(SimulatedDevice):
    """The host of a simulated device, with the same program: pinned arrays, and updates on the host."""

    name = "host of simulated"
    place = "host"
    in_host_memory = True

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.like, self.values, self.label = CPUDevice, device.values, ""
        self._phase = ""
        self.addresses = device.addresses
        self._kernels, self._given = None, device._given
        if self._given is not None:
            self._kernels = Kernels(self, self._given)
        self._kind = kind_for(self)
        self._pooled, self._held, self._peak = {}, 0, 0
        self.whose = lambda: device.whose()
        self.current_stream = self._running = HostStream(HOST, self)
        self.host = self

    @property
    def program(self) -> Program:
        return self.device.program

    @property
    def on_work(self) -> Callable | None:
        return self.device.on_work

    def add(self, item: p.Item) -> int:
        return self.device.add(item)

    def new_mark(self) -> int:
        return self.device.new_mark()

    def new_number(self) -> int:
        return self.device.new_number()

    def unique(self, name: str) -> str:
        return self.device.unique(name)

    def to_numpy(self, array: Array) -> np.ndarray:
        return self._value(array) if isinstance(array, Shaped) else array


class Kernels:
    """A kernel package: records each call of a kernel that reports its costs."""

    def __init__(self, device: SimulatedDevice, package: Any) -> None:
        self._device, self._package = device, package

    def __getattr__(self, module: str) -> "_Module":
        if module.startswith("_"):
            raise AttributeError(module)
        found = self.__dict__[module] = _Module(self._device, getattr(self._package, module), module)
        return found


class _Module:
    def __init__(self, device: SimulatedDevice, module: Any, name: str) -> None:
        self._device, self._module, self._name = device, module, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._module, name)
        if callable(value):
            value = _Kernel(self._device, value, f"{self._name}.{name}")
        self.__dict__[name] = value
        return value


class _Kernel:
    def __init__(self, device: SimulatedDevice, cost_of: Callable, name: str) -> None:
        self._device, self._cost_of, self._name = device, cost_of, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cost = self._cost_of(*args, **kwargs)
        if not hasattr(cost, "launches"):
            return cost  # a function that is no kernel
        value, writes = cost.value, cost.writes
        if hasattr(value, "shape") and not isinstance(value, np.ndarray):  # an array that the kernel makes
            value = self._device.result(value.shape, np.dtype(value.dtype))
            writes = (*writes, value)
        if cost.launches or writes:
            how = {"flops": cost.flops, "nbytes": cost.nbytes, "launches": cost.launches, "sizes": cost.sizes}
            self._device.work(self._name, cost.reads, writes, args=(*args, *kwargs.values()), **how)
        return self._device.answer(cost.reads, value) if hasattr(value, "usual") else value


def _ranges(arrays: list[Array]) -> tuple[p.Range, ...]:
    """The ranges of all arrays, joined."""
    if len(arrays) == 1:
        return ranges_of(arrays[0])
    return joined((r.start, r.stop) for array in arrays for r in ranges_of(array))


# -- where in the program

_ROOT = Path(__file__).parent.parent  # shardrt/
_WITHIN = (str(Path(__file__).parent), str(Path(np.__file__).parent), "<")  # passed over, also contextlib
_INSIDE = (
    str(_ROOT / "kernels"),
    str(_ROOT.parent / "kernels"),
    str(_ROOT / "functional" / "_arrays.py"),  # no op of its own
    str(_ROOT / "tensor.py"),
    # Files between a caller and a transport. (Links between ranks are sites themselves.)
    *(str(_ROOT / "comm" / name) for name in ("protocol.py", "nccl.py", "staged.py", "simulated.py")),
    *(str(_ROOT / "comm" / name) for name in ("reduction.py", "interceptors.py")),
    str(_ROOT / "faults" / "flight.py"),
)
_files: dict[CodeType, str] = {}
_sites: dict[tuple[CodeType, int], str] = {}


def site() -> str:
    """The nearest "file:line" outside of shardrt/device and kernels, from where this is called."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = _files.get(code)
        if file is None:
            file = _files[code] = _file_of(code.co_filename)
        if file:
            key = code, frame.f_lineno
            if key not in _sites:
                _sites[key] = f"{file}:{frame.f_lineno}"
            return _sites[key]
        frame = frame.f_back
    return ""


def _file_of(path: str) -> str:
    """The name of a file in a site; "" if sites pass over it."""
    if path.startswith((*_WITHIN, *_INSIDE)) or path.endswith(("contextlib.py", "functools.py")):
        return ""
    file = Path(path)
    near = file.relative_to(_ROOT.parent) if file.is_relative_to(_ROOT.parent) else Path(*file.parts[-2:])
    return near.as_posix()


def computed_in(arrays: Iterable[Any]) -> str:
    """The element type in which a kernel computes that reads these arrays; "" without floating-point numbers.

    If an array has a 16-bit type, or uint16 (bits of bfloat16), the kernel computes in that type: the other
    arrays are what matmuls are added to. Otherwise the largest array of floating-point numbers decides.
    """
    largest, found = -1, ""
    for array in arrays:
        if array.dtype == np.uint16:
            return dtypes.bfloat16
        if dtypes.low(array.dtype):
            return dtypes.name_of(array.dtype)
        if array.nbytes > largest and dtypes.floating(array.dtype):
            largest, found = array.nbytes, dtypes.name_of(array.dtype)
    return found
