"""Ranks of one node that map each other's GPU memory (CUDA IPC): gathers by copy engines, sums by one kernel.

Every rank maps each array that `allocate` makes. An all-gather copies the slices of peers from their memory
by copy engines, so it takes no processor from kernels. A reduce-scatter is one kernel: it reads this rank's
slice of every peer's buffer and sums them by the tree, bitwise identical to every other backend. Ranks may
share a GPU. Other arrays, small arrays and messages go through pinned host memory (staged.py).

The host orders the ranks: it waits for a stream, then the ranks meet through the host communicator. So a call
blocks the host until it is done, and nothing overlaps.

Never run on a GPU yet (docs/reference/limits.md); tests run it on the real CuPy over a GPU emulator.
"""

import os
from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardrt.comm import counts
from shardrt.comm.calls import WORDS, Names, encode, mismatch
from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction, combine
from shardrt.comm.staged import StagedCommunicator
from shardrt.device import on_host
from shardrt.device.cuda import CUDADevice

Array = Any

_PROCESS = os.urandom(16)  # a process in another container may have the same process id
# The message of a rank about its allocation.
_EXPORT = np.dtype([("process", "u1", 16), ("handle", "u1", 64), ("address", "u8")])
_WHOLE = 2 << 20  # bytes of a driver page: a handle exports whole pages, each only once
_MEMORY = 3  # index of the word of a call for the place of its buffer


class IPCCommunicator(Communicator):
    """Takes ownership of `host`, a communicator over the same ranks.

    Collective.

    Raises:
        ValueError: if the ranks are on several nodes.
    """

    def __init__(
        self,
        host: Communicator,
        device: CUDADevice,
        memory: "_Memory | None" = None,
        names: Names | None = None,
    ) -> None:
        """`memory`: from another communicator over the same ranks.

        Args:
            names: from the parent communicator.
        """
        self.rank = host.rank
        self.size = host.size
        self._host = host
        self._device = device
        self._staged = StagedCommunicator(host, device)
        self._names = names or Names()
        self._sequence = 0  # number of the latest collective of this communicator
        if memory is None:
            _check_one_node(host)
        self._memory = memory or _Memory(device)
        self._memory.users += 1

    def register_names(self, names: Iterable[str]) -> None:
        self._names.register(names)

    def split(self, color: int | None, key: int) -> "IPCCommunicator | None":
        host = self._host.split(color, key)
        return None if host is None else IPCCommunicator(host, self._device, None, self._names)

    def duplicate(self) -> "IPCCommunicator":
        return IPCCommunicator(self._host.duplicate(), self._device, self._memory, self._names)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Array:
        return self._memory.allocate(self._host, count, dtype)

    def allocated(self, nbytes: int) -> int:
        return _whole(nbytes)

    def scratch(self, call: str, nbytes: int, output: int = 0, *, allocated: bool = True) -> tuple[int, int]:
        return (0, 0) if allocated else self._staged.scratch(call, nbytes, output)

    def reserve(self, on_device: int, on_host: int) -> None:
        self._staged.reserve(on_device, on_host)

    def abandon(self) -> None:
        self._host.abandon()

    def close(self) -> None:
        """Collective. All ranks unmap peers' memory before a rank may free it."""
        self._memory.users -= 1
        if not self._memory.users:
            self._memory.unmap()
        self._host._barrier("")
        if not self._memory.users:
            self._memory.forget()
        self._host.close()

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._host._all_gather_bytes(data)

    def _meet(self, collective: str, buffer: Array, detail: int | str, tag: str, kind: str = "") -> list:
        """Every rank's `buffer` for this call, as arrays of this process; [] if a rank can't share it."""
        places = self._places(collective, buffer, buffer, detail, tag, kind)
        return [self._memory.at(rank, place, buffer.size, buffer.dtype) for rank, place in enumerate(places)]

    def _places(self, collective: str, buffer: Array, *facts: Any) -> list[int]:
        """The place of every rank's `buffer`, for `_Memory.at`; [] if a rank can't share it.

        Returns when the streams of all ranks have come to this call. Raises CollectiveMismatch, on all ranks,
        if their calls or `facts` (see calls.encode) differ.
        """
        self._device.wait_here()  # peers read earlier writes of this stream
        self._sequence += 1
        calls = np.zeros((self.size, WORDS), np.int64)
        calls[self.rank] = encode(self._names, collective, *facts)
        calls[self.rank, _MEMORY] = self._memory.place(buffer)
        self._host._all_gather(calls.reshape(-1), "")
        places = calls[:, _MEMORY].tolist()
        calls[:, _MEMORY] = 0  # not compared: ranks' buffers may have different places
        said = [tuple(call) for call in calls.tolist()]
        if said.count(said[0]) < self.size:
            raise mismatch(self._sequence, said, self._names, self.rank)
        return places if all(places) else []

    def _part(self) -> None:
        """Return when all ranks have finished reading other ranks' memory in this call."""
        self._device.wait_here()
        self._host._barrier("")

    def _from_each(self) -> Iterable[int]:
        """The other ranks, starting with the next, so that ranks read from different peers."""
        return ((self.rank + step) % self.size for step in range(1, self.size))

    def _all_gather(self, buffer: Array, tag: str) -> None:
        buffers = self._meet("all_gather", buffer, 0, tag)
        if not buffers:
            return self._staged._all_gather(buffer, tag)
        n = buffer.size // self.size
        for peer in self._from_each():
            theirs = slice(peer * n, (peer + 1) * n)
            self._device.copy(buffer[theirs], buffers[peer][theirs])
        return self._part()

    def _reduce_scatter(self, output: Array, buffer: Array, how: Reduction, tag: str) -> None:
        buffers = self._meet("reduce_scatter", buffer, how.op, tag, how.kind)
        if not buffers:
            return self._staged._reduce_scatter(output, buffer, how, tag)
        own = slice(self.rank * output.size, (self.rank + 1) * output.size)
        combine(output, [theirs[own] for theirs in buffers], *how)
        return self._part()

    def _all_reduce_small(self, buffer: Array, op: str, tag: str) -> None:
        self._staged._all_reduce_small(buffer, op, tag)

    def _broadcast(self, buffer: Array, root: int, tag: str) -> None:
        buffers = self._meet("broadcast", buffer, root, tag)
        if not buffers:
            return self._staged._broadcast(buffer, root, tag)
        if self.rank != root:
            self._device.copy(buffer, buffers[root])
        return self._part()

    def _all_to_all(self, output: Array, buffer: Array, received: Any, sent: Any, tag: str) -> None:
        facts = (buffer, 0) if sent is None else (buffer[:0], 1)
        places = self._places("all_to_all", buffer, *facts, tag)
        if not places:
            return self._staged._all_to_all(output, buffer, received, sent, tag)
        if sent is None:
            received = counts.equal(buffer.size, self.size)
            table = [received] * self.size
        else:
            table = self._exchange_counts(received, sent, tag)
        mine = counts.slices(received)
        for peer in (*self._from_each(), self.rank):
            if received[peer]:
                theirs = self._memory.at(peer, places[peer], sum(table[peer]), buffer.dtype)
                self._device.copy(output[mine[peer]], theirs[counts.slices(table[peer])[self.rank]])
        return self._part()

    def _exchange_counts(self, received: Any, sent: Any, tag: str) -> list[list[int]]:
        """Every rank's counts per peer (see counts.compared)."""
        rows = np.zeros((self.size, 2 * self.size + 1), np.int64)
        rows[self.rank] = counts.row(received, sent)
        self._host._all_gather(rows.reshape(-1), "")
        return counts.compared(rows, self._sequence, tag, self.rank)

    def _send(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        self._staged._send(buffer, peer, tag, direct)

    def _recv(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        self._staged._recv(buffer, peer, tag, direct)

    def _exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        self._staged._exchange(output, buffer, to, source)

    def _barrier(self, tag: str) -> None:
        self._staged._barrier(tag)


class _Memory:
    """The allocations of the ranks of one group, kept until `forget`."""

    def __init__(self, device: CUDADevice) -> None:
        self.users = 0  # communicators that use it: one and its duplicates
        self._device = device
        self._parts: list[list[Array]] = []  # by allocation, then by rank: uint8
        self._starts: list[tuple[int, int]] = []  # (address of this rank's part, allocation), sorted
        self._opened: list[int] = []

    def allocate(self, host: Communicator, count: int, dtype: Any) -> Array:
        """A 1-D array of zeros that every rank has mapped. Collective."""
        nbytes = count * np.dtype(dtype).itemsize
        own = self._device.buffer(_whole(nbytes), np.uint8)
        mine = np.zeros(1, _EXPORT)
        mine["process"], mine["address"] = np.frombuffer(_process(), np.uint8), own.data.ptr
        with _together(host):
            mine["handle"] = np.frombuffer(self._device.export_memory(own), np.uint8)
        exports = np.frombuffer(b"".join(host.all_gather_bytes(mine.tobytes())), _EXPORT)
        with _together(host):
            parts = [own if r == host.rank else self._map(exports[r], own.size) for r in range(host.size)]
        self._starts.insert(bisect(self._starts, (own.data.ptr, 0)), (own.data.ptr, len(self._parts)))
        self._parts.append(parts)
        return own[:nbytes].view(dtype)

    def place(self, array: Array) -> int:
        """The place of an array, as a number for `at`; 0 for other memory or an empty array."""
        if on_host(array) or not array.nbytes:
            return 0
        address = array.data.ptr
        index = bisect(self._starts, (address, len(self._parts))) - 1
        if index < 0:
            return 0
        start, allocation = self._starts[index]
        offset = address - start
        inside = offset + array.nbytes <= self._parts[allocation][0].size
        return (allocation + 1) << 44 | offset if inside else 0

    def at(self, rank: int, place: int, size: int, dtype: Any) -> Array:
        """The array of `size` elements at a place in a rank's memory."""
        allocation, offset = (place >> 44) - 1, place & (1 << 44) - 1
        return self._parts[allocation][rank][offset : offset + size * dtype.itemsize].view(dtype)

    def unmap(self) -> None:
        """Unmap peers' memory. Own memory stays, since peers may still map it."""
        while self._opened:
            self._device.close_memory(self._opened.pop())

    def forget(self) -> None:
        """Drop the references to own memory. Call it when every rank has unmapped it."""
        self._parts.clear()
        self._starts.clear()

    def _map(self, export: np.void, nbytes: int) -> Array:
        """Map another rank's memory. Ranks that are threads of this process share its address."""
        address = int(export["address"])
        if export["process"].tobytes() != _process():
            address = self._device.open_memory(export["handle"].tobytes())
            self._opened.append(address)
        return self._device.memory_at(address, nbytes)


def _whole(nbytes: int) -> int:
    """`nbytes` rounded up to whole driver pages, at least one."""
    return -(-max(nbytes, 1) // _WHOLE) * _WHOLE


@contextmanager
def _together(host: Communicator) -> Iterator[None]:
    """An error of one rank inside the with block raises on every rank after the block."""
    error = None
    try:
        yield
    except RuntimeError as raised:
        error = raised
    if any(host.all_gather_bytes(b"" if error is None else b"failed")):
        message = error or "another rank says why"
        raise RuntimeError(
            f"communicator: 'ipc' can't share GPU memory between these ranks ({message}); use 'nccl' or "
            "'staged'"
        ) from error


def _check_one_node(host: Communicator) -> None:
    if len(set(host.all_gather_bytes(_node()))) > 1:
        raise ValueError("communicator: 'ipc' needs all ranks on one node; use 'nccl' or 'staged'")


def _node() -> bytes:
    """An identifier of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _process() -> bytes:
    """16 bytes that identify this process."""
    return _PROCESS
