"""A world of many ranks of which one is recorded: its communicators move nothing, and record every call.

Arrays without elements (device/shapes.py) are told to the program as a Collective. Arrays of the host have
values: they become what they would if every rank said the same. So a sum is as many times one's own, what is
gathered is one's own from each, and ranks always agree. What another rank alone can say, such as what a stage
of a pipeline sends, is not known here: to receive it is an error.

The number of a Collective counts the calls of its group, those of messages apart for each pair and direction.
Groups are named by how they were made, which is alike on all of their ranks: recordings of several ranks fit.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardrt.comm.counts import equal, slices
from shardrt.comm.protocol import Communicator
from shardrt.comm.transport import Transport
from shardrt.comm.world import World
from shardrt.device.addresses import joined, ranges_of
from shardrt.device.program import HOST, Collective, Group
from shardrt.device.simulated import SimulatedDevice, site

Array = Any
Ranks = tuple[int, ...] | range
_UNKNOWN = "what rank {} sends is not known in a simulated world"


def world_of(size: int, device: SimulatedDevice, rank: int = 0, local_size: int = 8) -> World:
    """A world of `size` ranks on `device`, `local_size` a node, for world.use: this is number `rank`.

    Raises ValueError for a rank that is not of it.
    """
    if not 0 <= rank < size:
        raise ValueError(f"world_of: rank {rank} is not one of {size}")
    device.program.rank, device.program.world_size = rank, size
    transport = None if device.like.in_host_memory else SimulatedTransport
    root = SimulatedCommunicator(device, range(size), rank, "world")
    local_size = min(local_size, size)
    return World("simulated", rank, size, rank % local_size, local_size, root, device, transport)


class Channel:
    """Where the calls of one communicator go: to the program of `device`, under a name."""

    def __init__(self, device: SimulatedDevice, name: str, ranks: Ranks) -> None:
        self.device = device
        self.name = name
        self.ranks = ranks
        self.role = ""
        self._numbers: Counter[Any] = Counter()

    def keep(
        self,
        call: str,
        stream: str,
        nbytes: int,
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
        peer: int = -1,
        source: int = -1,
        launches: int = 1,
    ) -> None:
        """Keep a call. What has elements is in no range."""
        counted = (call, peer if call in ("send", "recv") else -1) if peer >= 0 else ""
        number = self._numbers[counted]
        self._numbers[counted] += 1
        self.device.program.groups.setdefault(self.name, Group(self.ranks, self.role))
        reads, writes = (
            joined(
                (found.start, found.stop)
                for array in arrays
                if hasattr(array, "shardrt_device")
                for found in ranges_of(array)
            )
            for arrays in (reads, writes)
        )
        where = self.device.label, site()
        ends = peer, launches, *where, source
        self.device.add(Collective(stream, call, self.name, number, nbytes, reads, writes, *ends))


class SimulatedTransport(Transport):
    """In place of NCCL. `host`: the simulated communicator of the same ranks."""

    def __init__(self, host: "SimulatedCommunicator", device: SimulatedDevice) -> None:
        self._rank = host.rank
        self._size = host.size
        self._device = device
        self._channel = Channel(device, f"{host.channel.name}, devices", host.channel.ranks)
        self._host = host

    def _keep(self, call: str, buffer: Array, *args: Any, **kwargs: Any) -> None:
        self._channel.role = self._host.role
        self._channel.keep(call, self._device.stream_here(), buffer.nbytes, *args, **kwargs)

    def gather(self, buffer: Array) -> None:
        own, others = _apart(buffer, self._rank, self._size)
        self._keep("all_gather", buffer, own, others)

    def reduce_scatter(self, output: Array, buffer: Array, op: str, kind: str) -> None:
        self._keep("reduce_scatter", buffer, [buffer], [output])

    def all_reduce(self, buffer: Array, op: str) -> None:
        self._keep("all_reduce", buffer, [buffer], [buffer])

    def broadcast(self, buffer: Array, root: int) -> None:
        both = [[buffer], []]
        self._keep("broadcast", buffer, *(both if root == self._rank else both[::-1]))

    def swap(self, output: Array, buffer: Array, received: Sequence[slice], sent: Sequence[slice]) -> None:
        messages = sum(part.stop > part.start for part in (*received, *sent))
        self._keep("all_to_all", buffer, [buffer], [output], launches=messages)

    def send(self, buffer: Array, peer: int) -> None:
        self._keep("send", buffer, [buffer], peer=peer)

    def recv(self, buffer: Array, peer: int) -> None:
        self._keep("recv", buffer, [], [buffer], peer=peer)

    def exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        self._keep("exchange", buffer, [buffer], [output], peer=to, source=source, launches=2)


class SimulatedCommunicator(Communicator):
    """In place of MPI, or shared memory: calls of the host, and of devices whose arrays are the host's."""

    def __init__(self, device: SimulatedDevice, ranks: Ranks, rank: int, name: str) -> None:
        """ranks: by their numbers in the world; rank: this one's number among them."""
        self.rank = rank
        self.size = len(ranks)
        self.channel = Channel(device, name, ranks)
        self._device = device
        self._made = 0

    def among(self, members: Sequence[int], color: int) -> "SimulatedCommunicator":
        self._made += 1
        ranks = _short([self.channel.ranks[member] for member in members])
        name = f"{self.channel.name}/{self._made}" + f".{color}" * (len(members) < self.size)
        return SimulatedCommunicator(self._device, ranks, list(members).index(self.rank), name)

    def duplicate(self) -> "SimulatedCommunicator":
        return self.among(range(self.size), 0)

    def split(self, color: int | None, key: int) -> "SimulatedCommunicator | None":
        if color is None:
            self._made += 1
            return None
        raise NotImplementedError("split: in a simulated world nobody else says a color; use `among`")

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Array:
        return self._device.buffer(count, dtype)

    def _talk(self, data: bytes) -> list[bytes]:
        self._keep("all_gather", self.size * len(data))
        return [data] * self.size

    def _keep(self, call: str, nbytes: int, *args: Any, **kwargs: Any) -> None:
        """By the host, or the thread of it that runs this; on a CPU all streams are."""
        stream = self._device.host.stream_here()
        if stream == HOST and self._device.like.in_host_memory:
            stream = self._device.stream_here()
        self.channel.role = self.role
        self.channel.keep(call, stream, nbytes, *args, **kwargs)

    def _all_gather(self, buffer: Array, what: str) -> None:
        own, others = _apart(buffer, self.rank, self.size)
        self._keep("all_gather", buffer.nbytes, own, others)
        if _has_values(buffer):
            rows = buffer.reshape(self.size, -1)
            rows[:] = rows[self.rank].copy()

    def _reduce_scatter(
        self, output: Array, buffer: Array, scale: float, accumulate: bool, op: str, kind: str, what: str
    ) -> None:
        self._keep("reduce_scatter", buffer.nbytes, [buffer, output] if accumulate else [buffer], [output])
        if _has_values(output):
            own = buffer[self.rank * output.size : (self.rank + 1) * output.size]
            total = scale * self._combined(own, op)
            output[...] = output + total if accumulate else total

    def _all_reduce(self, buffer: Array, op: str, what: str) -> None:
        self._keep("all_reduce", buffer.nbytes, [buffer], [buffer])
        if _has_values(buffer):
            buffer[...] = self._combined(buffer, op)

    _all_reduce_small = _all_reduce

    def _combined(self, own: np.ndarray, op: str) -> np.ndarray:
        return {"sum": lambda: own * self.size, "prod": lambda: own**self.size}.get(op, lambda: own)()

    def _broadcast(self, buffer: Array, root: int, what: str) -> None:
        both = [[buffer], []]
        self._keep("broadcast", buffer.nbytes, *(both if root == self.rank else both[::-1]))

    def _all_to_all(self, output: Array, buffer: Array, received: Any, sent: Any, what: str) -> None:
        self._keep("all_to_all", buffer.nbytes, [buffer], [output])
        if _has_values(output):
            own = buffer[slices(sent or equal(buffer.size, self.size))[self.rank]]
            for part in slices(received or equal(output.size, self.size)):
                output[part] = np.resize(own, part.stop - part.start)

    def _send(self, buffer: Array, peer: int, what: str, direct: bool) -> None:
        self._keep("send", buffer.nbytes, [buffer], peer=peer)

    def _recv(self, buffer: Array, peer: int, what: str, direct: bool) -> None:
        if _has_values(buffer):
            raise NotImplementedError(
                f"recv {what}: what rank {peer} sends is not known in a simulated world"
            )
        self._keep("recv", buffer.nbytes, [], [buffer], peer=peer)

    def _exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        if _has_values(output):
            raise NotImplementedError(f"exchange: {_UNKNOWN.format(source)}")
        self._keep("exchange", buffer.nbytes, [buffer], [output], peer=to, source=source)

    def _barrier(self, what: str) -> None:
        self._keep("barrier", 0)


def _has_values(array: Array) -> bool:
    return not hasattr(array, "shardrt_device")


def _apart(buffer: Array, rank: int, size: int) -> tuple[list[Array], list[Array]]:
    """This rank's slice, and what lies before and behind it."""
    n = buffer.size // size
    return [buffer[rank * n : (rank + 1) * n]], [buffer[: rank * n], buffer[(rank + 1) * n :]]


def _short(ranks: list[int]) -> Ranks:
    """As a range where they are equally far apart."""
    steps = set(np.diff(ranks).tolist())
    if len(steps) > 1 or not ranks:
        return tuple(ranks)
    step = steps.pop() if steps else 1
    return range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step)
