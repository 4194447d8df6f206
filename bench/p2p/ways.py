"""The ways to send messages: calls of shardrt's communicators, of mpi4py and of NCCL.

A way prepares calls: what can be done before a message is done when its call is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from shardrt.comm import Communicator
from shardrt.comm import world as worlds
from shardrt.comm.backends import CARRIERS
from shardrt.device import Device

from ..harness.timing import Call, in_order

Array = Any
RAW = ("mpi4py", "nccl")
ONE_WAY = ("latency", "bandwidth", "message_rate")


class Way(ABC):
    """Prepares calls. Several arrays are a window: messages that are under way at once, where there are such.

    Attributes:
        name: as lines have it; one of RAW calls a library without shardrt.
        tests: those that it can do.
    """

    name = ""
    tests: Sequence[str] = (*ONE_WAY, "bibw")

    @abstractmethod
    def send(self, arrays: Sequence[Array], peer: int) -> Call:
        """A call that sends these."""

    @abstractmethod
    def receive(self, arrays: Sequence[Array], peer: int) -> Call:
        """A call that receives these."""

    @abstractmethod
    def swap(self, outputs: Sequence[Array], arrays: Sequence[Array], peer: int) -> Call:
        """A call that sends `arrays` and receives `outputs`; the peer makes the same."""


class Buffered(Way):
    """shardrt's send, which keeps a copy and does not wait for the receiver."""

    name = "buffered"
    direct = False

    def __init__(self, communicator: Communicator, device: Device) -> None:
        self._communicator, self._stream = communicator, device.current_stream

    def send(self, arrays: Sequence[Array], peer: int) -> Call:
        return in_order(*(self._prepared("send", array, peer) for array in arrays))

    def receive(self, arrays: Sequence[Array], peer: int) -> Call:
        return in_order(*(self._prepared("recv", array, peer) for array in arrays))

    def swap(self, outputs: Sequence[Array], arrays: Sequence[Array], peer: int) -> Call:
        return in_order(self.send(arrays, peer), self.receive(outputs, peer))

    def _prepared(self, name: str, array: Array, peer: int) -> Call:
        call = getattr(self._communicator, name)
        return partial(call, array, peer=peer, stream=self._stream, direct=self.direct)


class Direct(Buffered):
    """shardrt's send with direct=True: no copy, and it waits for the receiver, so not both ways at once."""

    name = "direct"
    direct = True
    tests = ONE_WAY


class Exchange(Buffered):
    """shardrt's exchange: both ways at once without a copy, one pair of messages after another."""

    name = "exchange"
    tests = ("bibw",)

    def swap(self, outputs: Sequence[Array], arrays: Sequence[Array], peer: int) -> Call:
        exchange = partial(self._communicator.exchange, to=peer, source=peer, stream=self._stream)
        pairs = zip(outputs, arrays, strict=True)
        return in_order(*(partial(exchange, output, array) for output, array in pairs))


class MPI(Way):
    """mpi4py's Send and Recv; of a window Isend and Irecv."""

    name = "mpi4py"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI.COMM_WORLD.Dup()
        self._wait = MPI.Request.Waitall

    def send(self, arrays: Sequence[Array], peer: int) -> Call:
        if len(arrays) == 1:
            return partial(self._mpi.Send, arrays[0], peer)
        return self._window(partial(self._mpi.Isend, array, peer) for array in arrays)

    def receive(self, arrays: Sequence[Array], peer: int) -> Call:
        if len(arrays) == 1:
            return partial(self._mpi.Recv, arrays[0], peer)
        return self._window(partial(self._mpi.Irecv, array, peer) for array in arrays)

    def swap(self, outputs: Sequence[Array], arrays: Sequence[Array], peer: int) -> Call:
        receives = [partial(self._mpi.Irecv, array, peer) for array in outputs]
        return self._window([*receives, *(partial(self._mpi.Isend, array, peer) for array in arrays)])

    def _window(self, begins: Any) -> Call:
        begins, wait = tuple(begins), self._wait
        return lambda: wait([begin() for begin in begins])


class NCCL(Way):
    """cupy.cuda.nccl's send and recv, a window in one group. Never run on a GPU."""

    name = "nccl"

    def __init__(self, communicator: Any, device: Device) -> None:
        from shardrt.comm.nccl import TYPES

        self._comm, self._nccl = communicator._transport.comm, communicator._transport.nccl
        self._more = TYPES["uint8"], device.stream_here()

    def send(self, arrays: Sequence[Array], peer: int) -> Call:
        return self._grouped([], arrays, peer)

    def receive(self, arrays: Sequence[Array], peer: int) -> Call:
        return self._grouped(arrays, [], peer)

    def swap(self, outputs: Sequence[Array], arrays: Sequence[Array], peer: int) -> Call:
        return self._grouped(outputs, arrays, peer)

    def _grouped(self, outputs: Sequence[Array], arrays: Sequence[Array], peer: int) -> Call:
        messages = [(self._comm.recv, each) for each in outputs] + [
            (self._comm.send, each) for each in arrays
        ]
        kind, stream = self._more
        calls = [partial(call, each.data.ptr, each.size, kind, peer, stream) for call, each in messages]
        return in_order(self._nccl.groupStart, *calls, self._nccl.groupEnd)


def ways_of(kind: str, communicator: Communicator, device: Device) -> list[Way]:
    """All that there are with a communicator of this kind. Collective."""
    if kind == "nccl":  # whose sends all wait for the receiver
        raw = NCCL(communicator, device)
        return [Direct(communicator, device), Exchange(communicator, device), raw]
    ours = [way(communicator, device) for way in (Buffered, Direct, Exchange)]
    return [*ours, MPI()] if kind not in CARRIERS and worlds.current().kind == "mpi" else ours
