"""A stand-in for cupy.cuda.nccl: ranks are threads that copy out of each other's memory."""

import ctypes
import itertools
import queue
import threading
from types import ModuleType

import numpy as np

from tests.softgpu import ring

_SIZES = dict(enumerate((1, 1, 4, 4, 8, 8, 2, 4, 8)))  # bytes of an element by NCCL's number for its type
_ids = itertools.count(1)
_groups = {}
_lock = threading.Lock()
_here = threading.local()


class _Group:
    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=60)
        self.pointers = [0] * size
        self.mail = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}


class NcclCommunicator:
    """The calls that shardrt makes, with CuPy's arguments."""

    def __init__(self, size, key, rank):
        assert isinstance(key, bytes) and len(key) == 128
        with _lock:
            self._group = _groups.setdefault(key, _Group(size))
        self._size, self._rank, self.alive = size, rank, True
        self._group.barrier.wait()

    def allGather(self, *arguments):
        _issue(self._all_gather, *arguments)

    def allReduce(self, *arguments):
        _issue(self._all_reduce, *arguments)

    def reduceScatter(self, *arguments):
        _issue(self._reduce_scatter, *arguments)

    def broadcast(self, *arguments):
        _issue(self._broadcast, *arguments)

    def send(self, *arguments):
        _issue(self._send, *arguments)

    def recv(self, *arguments):
        grouped = getattr(_here, "grouped", None)
        if grouped is None:
            _issue(self._recv, *arguments)
        else:  # a receive before its send would wait for ever: only the end of the group waits
            grouped.append((self._recv, *arguments))

    def _all_gather(self, send, recv, count, kind, stream):
        nbytes = count * _SIZES[kind]
        self._meet(send)
        for rank, pointer in enumerate(self._group.pointers):
            if recv + rank * nbytes != pointer:
                ctypes.memmove(recv + rank * nbytes, pointer, nbytes)
        self._group.barrier.wait()

    def _all_reduce(self, send, recv, count, kind, op, stream):
        self._meet(send)
        parts = [np.array_split(ring.view(p, count, kind), self._size) for p in self._group.pointers]
        total = [ring.reduced([part[s] for part in parts], op, s) for s in range(self._size)]
        self._group.barrier.wait()
        ring.view(recv, count, kind)[:] = np.concatenate(total)

    def _reduce_scatter(self, send, recv, count, kind, op, stream):
        self._meet(send)
        parts = [np.split(ring.view(p, count * self._size, kind), self._size) for p in self._group.pointers]
        total = ring.reduced([part[self._rank] for part in parts], op, self._rank)
        self._group.barrier.wait()
        ring.view(recv, count, kind)[:] = total

    def _broadcast(self, send, recv, count, kind, root, stream):
        self._meet(send)
        if self._rank != root:
            ctypes.memmove(recv, self._group.pointers[root], count * _SIZES[kind])
        self._group.barrier.wait()

    def _send(self, buffer, count, kind, peer, stream):
        data = ctypes.string_at(buffer, count * _SIZES[kind])
        self._group.mail[self._rank, peer].put(data)

    def _recv(self, buffer, count, kind, peer, stream):
        data = self._group.mail[peer, self._rank].get(timeout=60)
        assert len(data) == count * _SIZES[kind]
        ctypes.memmove(buffer, data, len(data))

    def check_async_error(self):
        return 0

    def destroy(self):
        self.alive = False

    def _meet(self, pointer):
        assert self.alive
        self._group.pointers[self._rank] = pointer
        self._group.barrier.wait()


def _issue(function, *arguments):
    """Now, or in every replay of the graph that is captured."""
    from tests.cuda import fake_cupy  # which imports this

    fake_cupy.issue(lambda: function(*arguments))


def module():
    """A module that passes for cupy.cuda.nccl."""
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.NcclCommunicator = NcclCommunicator
    nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN = range(4)
    nccl.get_unique_id = lambda: next(_ids).to_bytes(128, "little")
    nccl.groupStart = lambda: setattr(_here, "grouped", [])

    def end():
        grouped, _here.grouped = _here.grouped, None
        for receive in grouped:
            _issue(*receive)

    nccl.groupEnd = end
    return nccl
