"""NCCL of the GPU emulator, for cupy.cuda.nccl: a collective is done when all ranks' streams are at it.

Ranks are threads, or processes. A rank whose stream has come to a call posts what it gives (rooms.py), and
goes on when all have posted. As NCCL does, it matches the calls of a communicator by their number; ranks that
call different things are told, all of them (NCCL would hang, or exchange nonsense).
"""

import ctypes
import os
import sys
import threading
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.softgpu import ring, rooms
from tests.softgpu.cuda import CUDA, Work

UNHANDLED_CUDA_ERROR, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 1, 5, 6, 7
_STATUS = {  # CuPy's table
    UNHANDLED_CUDA_ERROR: "NCCL_ERROR_UNHANDLED_CUDA_ERROR",
    2: "NCCL_ERROR_SYSTEM_ERROR",
    3: "NCCL_ERROR_INTERNAL_ERROR",
    4: "NCCL_ERROR_INVALID_ARGUMENT",
    INVALID_USAGE: "NCCL_ERROR_INVALID_USAGE",
}
_SIZES = [kind.itemsize for kind in ring.TYPES]
_here = threading.local()
_library = SimpleNamespace(ncclGetLastError=lambda comm: b"")


def warn(text: str) -> None:
    """What NCCL's library says was its last warning."""
    _library.ncclGetLastError = lambda comm: text.encode()


class Group:
    """A rank's communicator, as streams know it: ranks of one room wait for each other."""

    def __init__(self, room) -> None:
        self._room = room

    def __hash__(self) -> int:
        return hash(self._room)

    def __eq__(self, other) -> bool:
        return self._room is other._room

    def awaited(self) -> bool:
        """Whether other processes have posted what this one has not."""
        return self._room.awaited()


class _Call(Work):
    """A rank's parts in collectives, which go together as by groupStart and groupEnd."""

    def __init__(self, cuda: CUDA, parts: list["_Part"]) -> None:
        self._cuda, self.parts = cuda, parts
        self.groups = [part.comm.group for part in parts]
        self._keys: list[tuple] | None = None  # known when its turn has come

    def fresh(self) -> "_Call":
        return _Call(self._cuda, self.parts)

    def ready(self) -> bool:
        if self._keys is None:
            self._keys = [part.arrive() for part in self.parts]
        return all(part.met(key) for part, key in zip(self.parts, self._keys, strict=True))

    def blockers(self) -> list:
        return [s for s in self._cuda.working() if any(group in s.groups for group in self.groups)]

    def step(self) -> bool:
        taken = [part.comm.room.take(key) for part, key in zip(self.parts, self._keys, strict=True)]
        for part, given in zip(self.parts, taken, strict=True):
            calls = {rank: call for rank, (call, _) in given.items()}
            if len(set(calls.values())) > 1:
                raise RuntimeError(f"NCCL: ranks call different things: {calls}")
            part.finish({rank: payload for rank, (_, payload) in given.items()})
        return True


class _Part:
    """What one rank gives to one collective: (address, bytes), and what it does with what all have given.

    key: those that meet have the same. name: of the rank, there. meets: how many do.
    """

    def __init__(self, comm, key: tuple, name: object, meets: int, call: tuple, send: tuple, finish) -> None:
        self.comm, self._key, self._name, self._meets, self._call = comm, key, name, meets, call
        self._send, self.finish = send, finish

    def arrive(self) -> tuple:
        counted = (self._key, self._name)
        number = self.comm.numbers[counted]
        self.comm.numbers[counted] += 1
        key = (*self._key, number)
        self.comm.room.post(key, self._name, self._meets, (self._call, ctypes.string_at(*self._send)))
        return key

    def met(self, key: tuple) -> bool:
        return self.comm.room.count(key) == self._meets


class NcclError(RuntimeError):
    """CuPy's, which has no names for the newer errors of NCCL: those are a KeyError."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"{_STATUS[status]}: planted")


class NcclCommunicator:
    """The calls that shardrt makes, with CuPy's arguments.

    fault: a status of NCCL that its own threads have met, as where a cable or a peer is lost.
    takes: bytes of the device that it takes when it is made, and at its first call.
    """

    cuda: CUDA
    takes = 0, 0

    def __init__(self, size, key, rank):
        assert isinstance(key, bytes) and len(key) == 128
        gpu = os.environ.get("NCCL_HOSTID", ""), self.cuda.visible[self.cuda.device]
        self.room, gpus = rooms.enter(key, size, rank, gpu)
        if len(set(gpus.values())) < size:
            raise NcclError(INVALID_USAGE)  # "Duplicate GPU detected"
        self.group = Group(self.room)
        self.numbers: Counter = Counter()
        self._size, self._rank, self.alive = size, rank, True
        self.device, self.fault = self.cuda.device, 0
        self._last: tuple | None = None  # (stream, how much was issued there) of the last call
        self._taken = 0
        self._take(self.takes[0])

    def _take(self, nbytes):
        """What the last warning says is all that tells a GPU that is full from other failures of CUDA."""
        if self.cuda.used[self.device] + nbytes > self.cuda.capacity:
            warn(f"Failed to CUDA calloc {nbytes} bytes")
            raise NcclError(UNHANDLED_CUDA_ERROR)
        self.cuda.used[self.device] += nbytes
        self._taken += nbytes

    def allGather(self, send, recv, count, kind, stream):
        nbytes = count * _SIZES[kind]

        def finish(given):
            for rank, payload in given.items():
                ctypes.memmove(recv + rank * nbytes, payload, nbytes)

        _check_overlap(send, nbytes, recv, self._size, self._rank)
        self._touches((send, nbytes), (recv, nbytes * self._size))
        self._collective(stream, ("allGather", count, kind), (send, nbytes), finish)

    def allReduce(self, send, recv, count, kind, op, stream):
        def finish(given):
            parts = [
                np.array_split(np.frombuffer(given[r], ring.TYPES[kind]), self._size) for r in sorted(given)
            ]
            total = [ring.reduced([own[s] for own in parts], op, s) for s in range(self._size)]
            ring.view(recv, count, kind)[:] = np.concatenate(total)

        nbytes = count * _SIZES[kind]
        _check_overlap(recv, nbytes, send, 1, 0)
        self._touches((send, nbytes), (recv, nbytes))
        self._collective(stream, ("allReduce", count, kind, op), (send, nbytes), finish)

    def reduceScatter(self, send, recv, count, kind, op, stream):
        """`count`: of what each rank is given."""

        def finish(given):
            own = slice(self._rank * count, (self._rank + 1) * count)
            parts = [np.frombuffer(given[rank], ring.TYPES[kind])[own] for rank in sorted(given)]
            ring.view(recv, count, kind)[:] = ring.reduced(parts, op, self._rank)

        nbytes = count * _SIZES[kind]
        _check_overlap(recv, nbytes, send, self._size, self._rank)
        self._touches((send, nbytes * self._size), (recv, nbytes))
        self._collective(stream, ("reduceScatter", count, kind, op), (send, nbytes * self._size), finish)

    def reduce(self, send, recv, count, kind, op, root, stream):
        def finish(given):
            if self._rank == root:
                parts = [np.frombuffer(given[rank], ring.TYPES[kind]) for rank in sorted(given)]
                ring.view(recv, count, kind)[:] = ring.reduced(parts, op, root)

        nbytes = count * _SIZES[kind]
        self._touches((send, nbytes), (recv, nbytes if self._rank == root else 0))
        self._collective(stream, ("reduce", count, kind, op, root), (send, nbytes), finish)

    def broadcast(self, send, recv, count, kind, root, stream):
        nbytes = count * _SIZES[kind]

        def finish(given):
            ctypes.memmove(recv, given[root], nbytes)

        gives = nbytes if self._rank == root else 0
        self._touches((send, gives), (recv, nbytes))
        self._collective(stream, ("broadcast", count, kind, root), (send, gives), finish)

    def send(self, buffer, count, kind, peer, stream):
        nbytes = count * _SIZES[kind]
        self._touches((buffer, nbytes))
        call, key = ("message", nbytes), ("from", self._rank, peer)
        part = _Part(self, key, "source", 2, call, (buffer, nbytes), lambda given: None)
        self._issue(stream, part, peer == self._rank)

    def recv(self, buffer, count, kind, peer, stream):
        nbytes = count * _SIZES[kind]
        self._touches((buffer, nbytes))
        call, key = ("message", nbytes), ("from", peer, self._rank)

        def finish(given):
            ctypes.memmove(buffer, given["source"], nbytes)

        self._issue(stream, _Part(self, key, "target", 2, call, (0, 0), finish), peer == self._rank)

    def _touches(self, *spans):
        for address, nbytes in spans:
            if nbytes:
                assert self.cuda.block(address, nbytes) is not None, "NCCL: memory of the host"

    def _collective(self, stream, call, send, finish):
        self._issue(stream, _Part(self, ("all",), self._rank, self._size, call, send, finish))

    def _issue(self, stream, part, to_itself=False):
        assert self.alive, "NCCL: a communicator that is destroyed"
        if self.cuda.stream(stream).device != self.device:
            raise NcclError(INVALID_USAGE)
        if self._last is None:
            self._take(self.takes[1])
        grouped = getattr(_here, "parts", None)
        assert grouped is not None or not to_itself, "NCCL: a rank sends to itself in a group only"
        if grouped is None:
            _enqueue(self.cuda, stream, [part])
        else:
            grouped.append((part, stream))

    def follows(self, stream):
        """The call now made there must come after the last one: else their order is anyone's guess."""
        with self.cuda.lock:
            found = self.cuda.stream(stream)
            if self._last is not None and not found.comes_after(*self._last):
                raise RuntimeError("NCCL: one communicator in two streams, and no event between the calls")
            self._last = found, found.issued + 1

    def check_async_error(self):
        """Raises NcclError; gives nothing."""
        assert self.alive, "NCCL: a communicator that is destroyed"
        if self.fault:
            raise NcclError(self.fault)

    def abort(self):
        """Waits for graphs as destroy does."""
        if self.alive:
            self._refuse_while_captured()
        self.alive = False

    def _refuse_while_captured(self):
        for work in self.cuda.captured():
            if any(part.comm is self for part in getattr(work, "parts", ())):
                raise RuntimeError("NCCL would wait for ever: a graph that is not destroyed has its calls")

    def destroy(self):
        """What is in streams still runs: destroy waits for it, and for the end of graphs with its calls."""
        if not self.alive:
            return
        self._refuse_while_captured()
        with self.cuda.lock:
            streams = [s for s in self.cuda.working() if self.group in s.groups and s.rank is self.cuda.rank]
        for stream in streams:
            self.cuda.streamSynchronize(stream.handle)
        self.alive = False
        self.cuda.used[self.device] -= self._taken
        self.room.leave(self._rank)


def _check_overlap(shorter, nbytes, longer, ranks, place):
    """The shorter of two buffers may be inside the longer one in the place of a rank, nowhere else."""
    apart = shorter + nbytes <= longer or longer + ranks * nbytes <= shorter
    assert apart or shorter == longer + place * nbytes, "what is sent and what is received overlap"


def group_start():
    _here.depth = getattr(_here, "depth", 0) + 1
    if _here.depth == 1:
        _here.parts = []


def group_end():
    _here.depth -= 1
    if _here.depth:
        return
    parts, _here.parts = _here.parts, None
    streams = {stream for _, stream in parts}
    assert len(streams) < 2, "NCCL: a group in several streams is not played here"
    for stream in streams:
        _enqueue(NcclCommunicator.cuda, stream, [part for part, _ in parts])


def _enqueue(cuda: CUDA, stream: int, parts: list[_Part]) -> None:
    for comm in {part.comm for part in parts}:
        comm.follows(stream)
    cuda.issue("nccl", stream, _Call(cuda, parts))


def put(cuda: CUDA) -> None:
    """In the place of CuPy's module, which needs NVIDIA's library."""
    import cupy

    from shardrt.comm import nccl as ours

    NcclCommunicator.cuda = cuda
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.available = True
    nccl.NcclCommunicator, nccl.NcclError = NcclCommunicator, NcclError
    nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN = range(4)
    for number, kind in enumerate(ring.TYPES):
        setattr(nccl, f"NCCL_{kind.name.upper()}", number)
    nccl.get_version = lambda: 22809
    nccl.get_unique_id = lambda: rooms.new_key(cuda.processes)
    nccl.groupStart, nccl.groupEnd = group_start, group_end
    sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = nccl
    ours._library = lambda: _library
