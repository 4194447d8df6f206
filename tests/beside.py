"""A device beside the host, with arrays of a kind of NumPy's: it computes, but not with the host's."""

import importlib
from types import SimpleNamespace

import numpy as np

from shardrt.comm.reduction import Reduction
from shardrt.comm.transport import Transport
from shardrt.device import on_host
from shardrt.device.cpu import CPUDevice


def _arrays_in(items):
    for item in items:
        if isinstance(item, tuple | list):
            yield from _arrays_in(item)
        elif isinstance(item, np.ndarray):
            yield item


class _Strict(CPUDevice):
    """All that it makes is of its own kind. Its kernels are given nothing that lies elsewhere."""

    def __init__(self):
        super().__init__()
        self.kind = type("Kind", (np.ndarray,), {"shardrt_device": self})

    def _own(self, array):
        return np.asarray(array).view(self.kind)

    def empty(self, shape, dtype):
        return self._own(super().empty(shape, dtype))

    def zeros(self, shape, dtype):
        return self._own(super().zeros(shape, dtype))

    def buffer(self, count, dtype):
        return self._own(super().buffer(count, dtype))

    def asarray(self, values, dtype=None):
        if isinstance(values, self.kind):
            return values.astype(dtype or values.dtype, copy=False)
        return self._own(np.array(values, dtype))

    def upload(self, values):
        return self._own(values.copy())

    def to_numpy(self, array):
        return np.array(array) if isinstance(array, self.kind) else array

    @property
    def kernels(self):
        return _Kernels(self)


class _Kernels:
    """The CPU's."""

    def __init__(self, device):
        self._device = device

    def __getattr__(self, module):
        found = vars(importlib.import_module(f"shardrt.kernels.cpu.{module}"))
        checked = {name: self._checked(x) if callable(x) else x for name, x in found.items()}
        return SimpleNamespace(**checked)

    def _checked(self, kernel):
        def call(*args, **kwargs):
            lie = {on_host(array) for array in _arrays_in((args, tuple(kwargs.values())))}
            assert lie <= {self._device.in_host_memory}, f"{kernel.__name__}: memory of the other device"
            return kernel(*args, **kwargs)

        return call


class Beside(_Strict):
    """`host` has pinned arrays, of a kind of their own; what is updated on the host is updated there."""

    name = "beside"
    in_host_memory = False

    def __init__(self):
        super().__init__()
        self.host = _Strict()
        self.copied = set()  # (of what kind, to what kind)

    def pinned(self, count, dtype):
        return self.host.buffer(count, dtype)

    def copy(self, target, source):
        self.copied.add((type(source), type(target)))
        super().copy(target, source)


class OverHost(Transport):
    """Between devices beside their hosts, by a host communicator. Made of (host communicator, device)."""

    def __init__(self, host, device):
        self._host = host
        self.device = device
        self.calls = []

    def _seen(self, call, *arrays):
        """The arrays as they lie in memory, for the host."""
        assert {on_host(array) for array in arrays} == {False}
        self.calls.append(call)
        return [np.asarray(array) for array in arrays]

    def gather(self, buffer):
        self._host._all_gather(*self._seen("gather", buffer), "")

    def reduce_scatter(self, output, buffer, op, kind):
        assert kind == output.dtype.name
        output, buffer = self._seen("reduce_scatter", output, buffer)
        self._host._reduce_scatter(output, buffer, Reduction(op=op), "")

    def all_reduce(self, buffer, op):
        self._host._all_reduce(*self._seen("all_reduce", buffer), op, "")

    def broadcast(self, buffer, root):
        self._host._broadcast(*self._seen("broadcast", buffer), root, "")

    def send(self, buffer, peer):
        self._host._send(*self._seen("send", buffer), peer, "", False)

    def recv(self, buffer, peer):
        self._host._recv(*self._seen("recv", buffer), peer, "", False)

    def exchange(self, output, buffer, to, source):
        self._host._exchange(*self._seen("exchange", output, buffer), to, source)

    def swap(self, output, buffer, received, sent):
        received, sent = ([part.stop - part.start for part in parts] for parts in (received, sent))
        self._host._all_to_all(*self._seen("swap", output, buffer), tuple(received), tuple(sent), "")
