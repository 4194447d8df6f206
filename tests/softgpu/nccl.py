"""NCCL in software, for cupy.cuda.nccl: a collective is done when all ranks' streams are at it.

Ranks are threads of this process. As NCCL does, it matches the calls of a communicator by their number, so
ranks that call different things are told (NCCL would hang, or exchange nonsense).
"""

import ctypes
import itertools
import sys
import threading
from types import ModuleType

import numpy as np

from tests.softgpu import ring
from tests.softgpu.cuda import CUDA, Work

_SIZES = [kind.itemsize for kind in ring.TYPES]
_ids = itertools.count(1)
_groups: dict[bytes, "_Group"] = {}
_lock = threading.Lock()
_here = threading.local()


class _Group:
    """The ranks of one communicator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.made = threading.Barrier(size, timeout=60)
        self.meetings: dict[tuple, Meeting] = {}
        self.streams: dict[int, int] = {}  # rank -> the stream of its last call


class Meeting:
    """One call of all ranks that take part: what each has given."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.given: dict[int, tuple] = {}
        self.done = False


class _Call(Work):
    """A rank's part in collectives, which go together as by groupStart and groupEnd."""

    def __init__(self, cuda: CUDA, parts: list) -> None:
        self._cuda, self._parts = cuda, parts
        self._meetings: list[Meeting] | None = None  # known when its turn has come

    def ready(self) -> bool:
        if self._meetings is None:
            self._meetings = [part.arrive() for part in self._parts]
        return all(len(meeting.given) == meeting.ranks for meeting in self._meetings)

    def blockers(self) -> list:
        groups = {part.comm._group for part in self._parts}
        return [self._cuda._streams[stream] for group in groups for stream in group.streams.values()]

    def step(self) -> bool:
        for meeting, part in zip(self._meetings, self._parts, strict=True):
            if not meeting.done:
                meeting.done = True
                part.move(meeting.given)
        self._meetings = None
        return True


class _Part:
    """What one rank gives to one collective. key: those that meet have the same."""

    def __init__(self, comm, key: tuple, ranks: int, move, *given) -> None:
        self.comm, self._key, self._ranks, self.move, self._given = comm, key, ranks, move, given

    def arrive(self) -> Meeting:
        comm, group = self.comm, self.comm._group
        number = comm._numbers[self._key] = comm._numbers.get(self._key, -1) + 1
        known = (*self._key, number)
        meeting = group.meetings.setdefault(known, Meeting(self._ranks))
        kinds = {given[0] for given in meeting.given.values()} | {self._given[0]}
        if len(kinds) > 1:
            raise RuntimeError(f"NCCL: ranks call different things: {kinds}")
        meeting.given[comm._rank] = self._given
        if len(meeting.given) == self._ranks:
            del group.meetings[known]
        return meeting


class NcclCommunicator:
    """The calls that shardrt makes, with CuPy's arguments."""

    cuda: CUDA

    def __init__(self, size, key, rank):
        assert isinstance(key, bytes) and len(key) == 128
        with _lock:
            self._group = _groups.setdefault(key, _Group(size))
        self._size, self._rank, self.alive = size, rank, True
        self._numbers: dict[tuple, int] = {}
        self._group.made.wait()

    def allGather(self, send, recv, count, kind, stream):
        nbytes = count * _SIZES[kind]

        def move(given):
            for _, target, _ in given.values():
                for rank, (_, _, source) in given.items():
                    ctypes.memmove(target + rank * nbytes, source, nbytes)

        _check_overlap(send, nbytes, recv, self._size, self._rank)
        self._issue(stream, ("all",), self._size, move, ("allGather", count, kind), recv, send)

    def allReduce(self, send, recv, count, kind, op, stream):
        def move(given):
            sources, targets = (
                [ring.view(given[rank][end], count, kind) for rank in range(self._size)] for end in (1, 2)
            )
            slices = [np.array_split(source, self._size) for source in sources]
            total = [ring.reduced([own[s] for own in slices], op, s) for s in range(self._size)]
            for target in targets:
                target[:] = np.concatenate(total)

        _check_overlap(recv, count * _SIZES[kind], send, 1, 0)
        self._issue(stream, ("all",), self._size, move, ("allReduce", count, kind, op), send, recv)

    def reduceScatter(self, send, recv, count, kind, op, stream):
        """`count`: of what each rank is given."""

        def move(given):
            sources = [ring.view(given[rank][1], count * self._size, kind) for rank in range(self._size)]
            slices = [np.split(source, self._size) for source in sources]
            total = [ring.reduced([own[r] for own in slices], op, r) for r in range(self._size)]
            for rank, numbers in enumerate(total):
                ring.view(given[rank][2], count, kind)[:] = numbers

        _check_overlap(recv, count * _SIZES[kind], send, self._size, self._rank)
        self._issue(stream, ("all",), self._size, move, ("reduceScatter", count, kind, op), send, recv)

    def broadcast(self, send, recv, count, kind, root, stream):
        nbytes = count * _SIZES[kind]

        def move(given):
            source = given[root][2]
            for rank, (_, target, _) in given.items():
                if rank != root or target != source:
                    ctypes.memmove(target, source, nbytes)

        self._issue(stream, ("all",), self._size, move, ("broadcast", count, kind, root), recv, send)

    def send(self, buffer, count, kind, peer, stream):
        self._pair(stream, self._rank, peer, "source", buffer, count * _SIZES[kind])

    def recv(self, buffer, count, kind, peer, stream):
        self._pair(stream, peer, self._rank, "target", buffer, count * _SIZES[kind])

    def _pair(self, stream, source, target, end, buffer, nbytes):
        """One end of a message. A rank that sends to itself is both ends."""

        def move(given):
            places = {end: place for _, ends in given.values() for end, place in ends.items()}
            ctypes.memmove(places["target"], places["source"], nbytes)

        if source == target:
            grouped = _here.parts  # NCCL wants both in one group
            for index, (waiting, where) in enumerate(grouped):
                if waiting._key == ("self", nbytes) and where == stream:
                    del grouped[index]
                    both = waiting._given[1] | {end: buffer}
                    self._issue(stream, ("to itself",), 1, move, nbytes, both)
                    return
            grouped.append((_Part(self, ("self", nbytes), 1, move, nbytes, {end: buffer}), stream))
            return
        self._issue(stream, (source, target), 2, move, nbytes, {end: buffer})

    def _issue(self, stream, key, ranks, move, *given):
        assert self.alive
        self._group.streams[self._rank] = stream
        part = _Part(self, key, ranks, move, *given)
        grouped = getattr(_here, "parts", None)
        if grouped is not None:
            grouped.append((part, stream))
        else:
            self.cuda.issue("nccl", stream, _Call(self.cuda, [part]))

    def check_async_error(self):
        return 0

    def abort(self):
        self.alive = False

    destroy = abort


def _check_overlap(shorter, nbytes, longer, ranks, place):
    """The shorter of two buffers may be inside the longer one in the place of a rank, nowhere else."""
    apart = shorter + nbytes <= longer or longer + ranks * nbytes <= shorter
    assert apart or shorter == longer + place * nbytes, "what is sent and what is received overlap"


def group_start():
    assert getattr(_here, "parts", None) is None
    _here.parts = []


def group_end():
    parts, _here.parts = _here.parts, None
    streams = {stream for _, stream in parts}
    for stream in streams:
        own = [part for part, where in parts if where == stream]
        NcclCommunicator.cuda.issue("nccl", stream, _Call(NcclCommunicator.cuda, own))


def put(cuda: CUDA) -> None:
    """In the place of CuPy's module, which needs NVIDIA's library."""
    import cupy

    NcclCommunicator.cuda = cuda
    nccl = ModuleType("cupy.cuda.nccl")
    nccl.NcclCommunicator = NcclCommunicator
    nccl.NCCL_SUM, nccl.NCCL_PROD, nccl.NCCL_MAX, nccl.NCCL_MIN, nccl.NCCL_AVG = range(5)
    for number, kind in enumerate(ring.TYPES):
        setattr(nccl, f"NCCL_{kind.name.upper()}", number)
    nccl.get_version = lambda: 22809
    nccl.get_unique_id = lambda: next(_ids).to_bytes(128, "little")
    nccl.groupStart, nccl.groupEnd = group_start, group_end
    sys.modules["cupy.cuda.nccl"] = cupy.cuda.nccl = nccl
