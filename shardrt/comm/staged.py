"""Communicator of device arrays over pinned host memory and a host communicator. It works wherever MPI does.

Any number of ranks may share a GPU. A call copies to the host, communicates, and copies back, and waits after
each of the three, so nothing overlaps. It is for tests, control data and machines without NCCL. Host arrays
go directly to the host communicator. Results are bitwise identical to every other backend.
"""

from typing import Any

import numpy as np

from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction
from shardrt.device import Device, on_host

Array = Any


class StagedCommunicator(Communicator):
    """`host`: a communicator of host arrays over the same ranks.

    Args:
        device: the device of the arrays.
    """

    def __init__(self, host: Communicator, device: Device) -> None:
        self.rank = host.rank
        self.size = host.size
        self._host = host
        self._device = device
        self._memory = device.pinned(0, np.uint8)

    def register_names(self, names: Any) -> None:
        self._host.register_names(names)

    def split(self, color: int | None, key: int) -> "StagedCommunicator | None":
        host = self._host.split(color, key)
        return None if host is None else StagedCommunicator(host, self._device)

    def duplicate(self) -> "StagedCommunicator":
        return StagedCommunicator(self._host.duplicate(), self._device)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Array:
        return self._device.buffer(count, dtype)

    def scratch(self, call: str, nbytes: int, output: int = 0, *, allocated: bool = True) -> tuple[int, int]:
        return 0, _rounded(nbytes) + _rounded(output)

    def reserve(self, on_device: int, on_host: int) -> None:
        if on_host > self._memory.size:
            self._memory = None  # not both at once
            self._memory = self._device.pinned(on_host, np.uint8)

    def abandon(self) -> None:
        self._host.abandon()

    def close(self) -> None:
        self._host.close()

    def _stage(self, *arrays: Array) -> list[np.ndarray]:
        """Adjacent pinned arrays of the same types and sizes. A host array is returned itself."""
        sizes = [0 if on_host(array) else _rounded(array.nbytes) for array in arrays]
        self.reserve(0, sum(sizes))
        staged, start = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            piece = self._memory[start : start + array.nbytes].view(array.dtype)
            staged.append(array if on_host(array) else piece)
            start += size
        return staged

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._host._all_gather_bytes(data)

    def _copy(self, target: Array, source: Array) -> None:
        """Copy and wait: the host next reads the target, or reuses the source."""
        if target is not source:
            self._device.copy(target, source)
            self._device.wait_here()

    def _all_gather(self, buffer: Array, tag: str) -> None:
        (host,) = self._stage(buffer)
        n = buffer.size // self.size
        own = slice(self.rank * n, (self.rank + 1) * n)
        if host is not buffer:
            self._copy(host[own], buffer[own])
        self._host._all_gather(host, tag)
        self._copy(buffer, host)

    def _reduce_scatter(self, output: Array, buffer: Array, how: Reduction, tag: str) -> None:
        host_output, host_buffer = self._stage(output, buffer)
        self._copy(host_buffer, buffer)
        if how.accumulate:
            self._copy(host_output, output)
        self._host._reduce_scatter(host_output, host_buffer, how, tag)
        self._copy(output, host_output)

    def _all_reduce(self, buffer: Array, op: str, tag: str) -> None:
        (host,) = self._stage(buffer)
        self._copy(host, buffer)
        self._host._all_reduce(host, op, tag)
        self._copy(buffer, host)

    def _all_reduce_small(self, buffer: Array, op: str, tag: str) -> None:
        self._all_reduce(buffer, op, tag)

    def _broadcast(self, buffer: Array, root: int, tag: str) -> None:
        (host,) = self._stage(buffer)
        if self.rank == root:
            self._copy(host, buffer)
        self._host._broadcast(host, root, tag)
        self._copy(buffer, host)

    def _all_to_all(self, output: Array, buffer: Array, received: Any, sent: Any, tag: str) -> None:
        host_output, host_buffer = self._stage(output, buffer)
        self._copy(host_buffer, buffer)
        self._host._all_to_all(host_output, host_buffer, received, sent, tag)
        self._copy(output, host_output)

    def _send(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        (host,) = self._stage(buffer)
        self._copy(host, buffer)
        self._host._send(host, peer, tag, direct)

    def _recv(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        (host,) = self._stage(buffer)
        self._host._recv(host, peer, tag, direct)
        self._copy(buffer, host)

    def _exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        host_output, host_buffer = self._stage(output, buffer)
        self._copy(host_buffer, buffer)
        self._host._exchange(host_output, host_buffer, to, source)
        self._copy(output, host_output)

    def _barrier(self, tag: str) -> None:
        self._device.wait_here()
        self._host._barrier(tag)


def _rounded(nbytes: int) -> int:
    """`nbytes` rounded up to whole cache lines."""
    return -(-nbytes // 64) * 64
