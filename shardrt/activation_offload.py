"""Activation offload: the arrays that a module saves for backward wait in pinned host memory.

One stream copies them to the host while the next module computes. In backward, another stream copies them
back while the module before them in backward computes. (Rhu et al., vDNN, 2016.) This file works on saved
arrays and knows no op.
With shardrt.recompute on the same module only the kept inputs travel. docs/howto/fit_in_memory.md has the
costs.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np

from shardrt import autograd, device, pytree, stand_ins, tape
from shardrt.autograd import Function, Variable, contiguous
from shardrt.device import Device, StreamError
from shardrt.functional._arrays import broadcast
from shardrt.nn.module import WrapperOrder
from shardrt.nn.public import Module, Parameter
from shardrt.nn.storage import LocalStorage

__all__ = [
    "ALIGNMENT",
    "HostBuffer",
    "HostPool",
    "Loan",
    "Marker",
    "Offload",
    "Offloaded",
    "SavedArray",
    "SavedSlot",
    "SavedTensors",
    "State",
    "Streams",
    "forget",
    "offload_activations",
]

Array = Any
ALIGNMENT = 64  # bytes, of each array in its host buffer


def offload_activations(module: Module) -> Module:
    """Keep the arrays that `module` saves in host memory until its backward; gives `module` back.

    It is for modules that run one after the other, such as the blocks of a transformer: the copies of one
    overlap the computing of the next. Parameters stay where they are. Gradients are bitwise identical.

    Raises:
        TypeError: if `module` is no Module; later, if a forward returns no tensor.
        ValueError: if the module is offloaded already.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.activation_offload import offload_activations
        >>> block = offload_activations(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    """
    if not isinstance(module, Module):
        raise TypeError(
            f"offload_activations: module must be a shardrt.nn.Module, got {type(module).__name__}"
        )
    if module.around(Offload) is not None:
        raise ValueError(
            f"offload_activations: it was called on {module.name or type(module).__name__} before; call it "
            "once"
        )
    module.wrap_forward(Offload())
    return module


class Offload:
    """The wrapper that `offload_activations` attaches to a module."""

    layer, every_entry = WrapperOrder.ACTIVATION_OFFLOAD, False

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Run forward, then send away the arrays that its ops have saved."""
        since = tape.now()
        output = forward(*args, **kwargs)
        if not tape.recorded_since(since):
            return output
        found = stand_ins.returned(output, "offload_activations", module.name or type(module).__name__)
        results = [tensor for tensor in found if tensor.node is not None]
        saved_tensors = SavedTensors(_streams(), module)
        for node in autograd.reachable({tensor.node for tensor in results}, since):
            if node.saved and not isinstance(node.saved, Offloaded):
                node.saved = saved_tensors.pack(node.saved)
        if not saved_tensors.arrays:
            return output
        saved_tensors.depart()
        return Marker.mark(output, results, saved_tensors)


class Marker(Function):
    """Passes on the outputs of an offloaded module. Its backward brings the saved arrays back."""

    __slots__ = ("saved_tensors",)
    strided = True

    @classmethod
    def mark(cls, output: Any, results: list[Variable], saved_tensors: "SavedTensors") -> Any:
        """The same output with a Marker as node of its tensors, newer than all nodes of the module."""
        node = cls()
        node.saved, node.saved_tensors = (), saved_tensors
        node.needs = (True,) * len(results)
        node.edges = tuple(tensor.edge() for tensor in results)
        node.enter_tape()
        return pytree.exchanged(output, results, node.wrap(tuple(t.data for t in results), True))

    def backward(self, *dy: Array) -> tuple:
        self.saved_tensors.arrive()
        following = next(autograd.running().upcoming(Marker), None)
        if following is not None:
            following.saved_tensors.fetch()
            # If backward raises it frees the arrays. The copies must end before compute reuses their memory.
            autograd.running().in_any_case(following.saved_tensors.arrive)
        return dy


class State(Enum):
    """Where the saved tensors of a call are."""

    LOADING = "on the device"
    LEAVING = "on the device, and being copied to the host"
    AWAY = "on the host"
    COMING = "on the host, and being copied to the device"
    HOME = "on the device again"


class SavedTensors:
    """The arrays that one call of a module has saved, each once. They travel together."""

    def __init__(self, streams: "Streams", module: Module) -> None:
        self.label = module.name or type(module).__name__
        self.state = State.LOADING
        self.arrays: list[SavedArray] = []
        self._streams = streams
        self._known: dict[tuple, SavedArray] = {}
        self._stay = _addresses_of_parameters(module)
        self._loan: Loan | None = None

    def pack(self, saved: tuple) -> "Offloaded | tuple":
        """A stand-in for the saved tuple of a node; the tuple itself if no array of it is offloaded."""
        template = self._pack(saved)
        return saved if template is saved else Offloaded(self, template)

    def _pack(self, item: Any) -> Any:
        if isinstance(item, tuple):
            packed = tuple(self._pack(inner) for inner in item)
            return item if all(a is b for a, b in zip(packed, item, strict=True)) else packed
        if isinstance(item, Variable):
            if isinstance(item, Parameter) or (item.is_leaf and item.requires_grad):
                return item
            place = self._pack(item.data)
            if place is not item.data:
                place.tensor = stand_ins.hollow(item)
                return place
        elif _is_array(item) and _address(item) not in self._stay:
            return self._place(item)
        return item

    def _place(self, array: Array) -> "SavedSlot":
        """The slot of `array`. Dense views of the same memory share one saved array."""
        dense, axes = _dense(array)
        if dense.flags.c_contiguous:
            key = (_address(dense), dense.nbytes, dense.dtype)
        else:
            key = (_address(dense), dense.shape, dense.strides, dense.dtype)
        saved_array = self._known.get(key)
        if saved_array is None:
            saved_array = self._known[key] = SavedArray(contiguous(dense).reshape(-1))
            self.arrays.append(saved_array)
        return SavedSlot(saved_array, dense.shape, axes, array.shape)

    def depart(self) -> None:
        """Issue the copies to the host. The next call's `depart` drops the device arrays."""
        streams = self._streams
        streams.free_last()
        self._known.clear()
        starts, total = _lay_out([saved_array.array.nbytes for saved_array in self.arrays])
        self._loan = streams.pool.lend(total)
        host = self._loan.buffer
        for saved_array, start in zip(self.arrays, starts, strict=True):
            saved_array.host = host.array[start : start + saved_array.array.nbytes].view(
                saved_array.array.dtype
            )
        streams.compute.record(host.ready)
        streams.offload.wait(host.ready)  # the ops have computed the copied arrays
        streams.offload.wait(host.read)  # the earlier arrays in this buffer have been copied from it
        pairs = [(saved_array.host, saved_array.array) for saved_array in self.arrays]
        streams.offload.submit(_copy, streams.device, pairs, label=f"offload {self.label}")
        streams.offload.record(host.written)
        self.state = State.LEAVING
        streams.last = weakref.ref(self)

    def free(self) -> None:
        """Drop the arrays on the device after their copies to the host."""
        if self.state is State.LEAVING:
            self._streams.compute.wait(self._loan.buffer.written)  # the copy reads the arrays until then
            for saved_array in self.arrays:
                saved_array.array = None
            self.state = State.AWAY

    def fetch(self) -> None:
        """Issue the copies to the device, unless the arrays have not left it yet."""
        if self.state is State.LEAVING:
            # No op needs the copy now, but it reads arrays that backward is about to free. Usually the copy
            # has ended: later modules have run meanwhile.
            self._streams.compute.wait(self._loan.buffer.written)
            self._settle()
        elif self.state is State.AWAY:
            streams, host = self._streams, self._loan.buffer
            for saved_array in self.arrays:
                saved_array.array = streams.device.empty((saved_array.host.size,), saved_array.host.dtype)
            streams.compute.record(host.ready)
            streams.fetch.wait(host.ready)  # ops may use the memory until here; and the copy out has ended
            pairs = [(saved_array.array, saved_array.host) for saved_array in self.arrays]
            streams.fetch.submit(_copy, streams.device, pairs, label=f"fetch {self.label}")
            streams.fetch.record(host.read)
            self.state = State.COMING

    def arrive(self) -> None:
        """Bring the arrays to the device: later work of the compute stream may read them."""
        self.fetch()
        if self.state is State.COMING:
            self._streams.compute.wait(self._loan.buffer.read)  # the copies have filled the arrays
            self._settle()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """For a call without backward: compute reuses the memory of its arrays only after the copies."""
        copied = {State.LEAVING: "written", State.COMING: "read"}.get(self.state)
        if copied and not ending():
            with suppress(StreamError):  # the next wait for that stream raises it
                self._streams.compute.wait(getattr(self._loan.buffer, copied))

    def _settle(self) -> None:
        """Leave the arrays to the nodes, which free them as backward runs."""
        self.state = State.HOME
        self.arrays, self._loan = [], None


class SavedArray:
    """One array: 1-D and on the device, or None while it is on the host alone."""

    __slots__ = ("array", "host")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.host: np.ndarray | None = None


class SavedSlot:
    """Replaces an array in a saved tuple: the saved array with its elements, and their layout in it."""

    __slots__ = ("saved_array", "dense", "axes", "shape", "tensor")

    def __init__(self, saved_array: SavedArray, dense: tuple, axes: tuple | None, shape: tuple) -> None:
        self.saved_array = saved_array
        self.dense = dense  # shape in memory order, repetitions left out
        self.axes = axes  # axes in memory order; None if they are in order
        self.shape = shape
        self.tensor: Variable | None = None  # a tensor without array, if the op has saved a tensor

    def value(self) -> Any:
        """The array, or tensor, with the strides that it had."""
        array = self.saved_array.array.reshape(self.dense)
        if self.axes is not None:
            array = array.transpose(sorted(range(len(self.axes)), key=self.axes.__getitem__))
        if array.shape != self.shape:
            array = broadcast(array, self.shape)
        return array if self.tensor is None else stand_ins.filled(self.tensor, array)


class Offloaded:
    """Replaces a saved tuple. Unpacking it waits for the arrays."""

    __slots__ = ("_saved_tensors", "_template")

    def __init__(self, saved_tensors: SavedTensors, template: tuple) -> None:
        self._saved_tensors = saved_tensors
        self._template = template

    def __iter__(self) -> Iterator:
        self._saved_tensors.arrive()
        return iter(_unpacked(self._template))


def _unpacked(item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(map(_unpacked, item))
    return item.value() if isinstance(item, SavedSlot) else item


class Streams:
    """The streams and host buffers of one thread on one device."""

    def __init__(self, here: Device) -> None:
        self.device = here
        self.compute = here.current_stream
        self.offload = here.new_stream("offload")
        self.fetch = here.new_stream("fetch")
        self.pool = HostPool(here)
        self.last: weakref.ref[SavedTensors] | None = None  # the last that departed

    def free_last(self) -> None:
        """Free the device arrays of the last call: only one call's arrays are under way at a time."""
        saved_tensors = self.last() if self.last is not None else None
        if saved_tensors is not None:
            saved_tensors.free()


class HostBuffer:
    """Pinned memory and the events of its loan: ready (source), written (buffer), read (buffer)."""

    __slots__ = ("array", "ready", "written", "read")

    def __init__(self, here: Device, nbytes: int) -> None:
        self.array = here.set_tag(here.pinned(nbytes, np.uint8), "offloaded activations")
        self.ready, self.written, self.read = here.new_event(), here.new_event(), here.new_event()


class HostPool:
    """Host buffers, lent by size and reused. Their bytes never exceed the most bytes lent at once."""

    def __init__(self, here: Device) -> None:
        self._device = here
        self._free: list[HostBuffer] = []  # the last returned at the end
        self._lock = threading.RLock()  # a loan may end inside lend(), in the same thread
        self.lent_bytes = self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, lent or not."""
        return self.lent_bytes + sum(buffer.array.nbytes for buffer in self._free)

    def lend(self, nbytes: int) -> "Loan":
        """Lend a buffer of that size until the loan dies. Wait for its `read` before writing to it."""
        with self._lock:
            self.lent_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
            for position in reversed(range(len(self._free))):
                if self._free[position].array.nbytes == nbytes:
                    return Loan(self, self._free.pop(position))
            while self._free and self.held_bytes > self.peak_bytes:
                self._free.pop(0)
        return Loan(self, HostBuffer(self._device, nbytes))

    def take_back(self, buffer: HostBuffer) -> None:
        """Get the buffer of an ended loan back."""
        with self._lock:
            self.lent_bytes -= buffer.array.nbytes
            self._free.append(buffer)


class Loan:
    """A buffer lent by the pool. It goes back when this object dies."""

    __slots__ = ("buffer", "_pool")

    def __init__(self, pool: HostPool, buffer: HostBuffer) -> None:
        self.buffer = buffer
        self._pool = pool

    def __del__(self) -> None:
        self._pool.take_back(self.buffer)


_state = threading.local()  # ranks that are threads of one process have their own streams


def _streams() -> Streams:
    here = device.current()
    streams = _state.__dict__.setdefault("streams", {})
    if here not in streams:
        streams[here] = Streams(here)
    return streams[here]


def forget(here: Device) -> None:
    """Drop this thread's streams and host buffers of a device that is not used any more."""
    _state.__dict__.get("streams", {}).pop(here, None)


def _copy(here: Device, pairs: list[tuple[Array, Array]]) -> None:
    for target, source in pairs:
        here.copy(target, source)


def _lay_out(sizes: list[int]) -> tuple[list[int], int]:
    """(start of each piece, total) in bytes of adjacent, aligned pieces of these sizes."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, total


def _dense(array: Array) -> tuple[Array, tuple[int, ...] | None]:
    """(view without repetitions and with its axes in memory order, that order; None: unchanged)."""
    if array.flags.c_contiguous:
        return array, None
    once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    axes = tuple(sorted(range(once.ndim), key=lambda axis: -abs(once.strides[axis])))
    return once.transpose(axes), axes


def _is_array(item: Any) -> bool:
    return isinstance(item, np.ndarray) or hasattr(item, "__cuda_array_interface__")


def _address(array: Array) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return interface["data"][0]


def _addresses_of_parameters(module: Module) -> set[int]:
    """Addresses of whole parameters. An op may save one as an array, but it is no activation."""
    storages = {p.storage for p in module.parameters() if isinstance(p.storage, LocalStorage)}
    return {_address(storage.array()) for storage in storages if storage.materialised}
