"""A world of many ranks of which a few are recorded. Its communicators record every call and move no data.

A call with arrays without elements (device/shapes.py) becomes a Collective of the program. Host arrays have
values: each recorded rank stands for other ranks, which give the same values. With one recorded rank a sum is
its own value times the number of ranks, a gather repeats its own value, and ranks always agree. Several
recorded ranks are threads and exchange values (board.py). If a rank that is not recorded sends a message,
floats stay unchanged; other numbers, on which a program may depend, can't be received.

A Collective's number counts the calls of its group; messages count separately for each pair and direction.
The name of a group says how the program made it, so it is the same on all its ranks and recordings match.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shardrt.comm import world as worlds
from shardrt.comm.board import Board
from shardrt.comm.counts import equal, slices
from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction
from shardrt.comm.transport import Transport
from shardrt.device.addresses import block_of, joined, ranges_of
from shardrt.device.program import HOST, Collective, Group
from shardrt.device.simulated import SimulatedDevice, site
from shardrt.dtypes import name_of

__all__ = ["run"]

Array = Any
Ranks = tuple[int, ...] | range
_UNKNOWN = "what rank {} sends is not known: in this simulated world it is not recorded"


def world_of(
    size: int,
    device: SimulatedDevice,
    rank: int = 0,
    local_size: int = 8,
    *,
    shared: bool = False,
    board: Board | None = None,
    shape: tuple[int, ...] | None = None,
) -> worlds.World:
    """A world of `size` ranks, `local_size` per node, for world.use.

    `rank` is the recorded rank on `device`.

    Args:
        shared: CPU ranks of a node share gathered buffers, as under mpirun.
        board: the board of all recorded ranks, if there are several.
        shape: default shape of a mesh, see World.

    Raises:
        ValueError: if `rank` is not in the world.
    """
    if not 0 <= rank < size:
        raise ValueError(f"world_of: rank {rank} is not one of {size}")
    device.program.rank, device.program.world_size = rank, size
    transport = None if device.like.in_host_memory else SimulatedTransport
    local_size = min(local_size, size)
    board = board or Board({rank: range(size)})
    node = local_size if shared and transport is None else 0
    root = SimulatedCommunicator(device, range(size), rank, "world", board, node)
    return worlds.World(
        "simulated", rank, size, rank % local_size, local_size, root, device, transport, shape
    )


def run(
    size: int,
    stands_for: Mapping[int, Iterable[int]],
    device_of: Callable[[int], SimulatedDevice],
    function: Callable[[], Any],
    local_size: int = 8,
    *,
    shared: bool = False,
    shape: tuple[int, ...] | None = None,
) -> list[Any]:
    """Call `function()` for each recorded rank of a simulated world, each in a thread.

    For other arguments see world_of. Raises the first error of a rank.

    Args:
        stands_for: see Board.
        device_of: device_of(rank) makes the device of a rank.

    Returns:
        All results.
    """
    board, results, errors = Board(stands_for), {}, []

    def one(rank: int) -> None:
        try:
            how = {"shared": shared, "board": board, "shape": shape}
            with worlds.use(world_of(size, device_of(rank), rank, local_size, **how)):
                results[rank] = function()
        except BaseException as error:  # raised below, without the errors that it causes
            error.add_note(f"on recorded rank {rank} of {size}")
            errors.append(error)
            board.fail(error)

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in stands_for]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in stands_for]


class Channel:
    """Records the calls of one communicator in the program of `device`, under a name."""

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
        launches: int = 1,
        grouped: bool = False,
        root: int = -1,
        kind: str = "",
        parts: tuple[tuple[int, int], ...] = (),
        how: Any = None,
        op: str = "",
        tag: str = "",
        waits: bool = False,
    ) -> int:
        """Record a call and return its number. Arrays with elements have no ranges.

        kind: the type of sums, whose arrays may hold its bits.
        """
        dtype = kind or next((name_of(array.dtype) for array in (*reads, *writes)), "")
        counted = (call, peer) if peer >= 0 else None
        number = self._numbers[counted]
        self._numbers[counted] += 1
        self.device.program.groups.setdefault(self.name, Group(self.ranks, self.role))
        given = reads, writes
        reads, writes = (
            joined(
                (found.start, found.stop)
                for array in arrays
                if hasattr(array, "shardrt_device")
                for found in ranges_of(array)
            )
            for arrays in (reads, writes)
        )
        ends = peer, launches, self.device.label, site(), grouped, dtype, root, parts, op, tag, waits
        self.device.add(Collective(stream, call, self.name, number, nbytes, reads, writes, *ends))
        if self.device.on_collective is not None:
            self.device.on_collective(call, self.ranks, *given, how)
        return number


class SimulatedTransport(Transport):
    """Replaces NCCL.

    Args:
        host: the simulated communicator of the same ranks.
    """

    def __init__(self, host: "SimulatedCommunicator", device: SimulatedDevice) -> None:
        self._rank = host.rank
        self._size = host.size
        self._device = device
        self._channel = Channel(device, f"{host.channel.name}, devices", host.channel.ranks)
        self._host = host

    def _keep(self, call: str, buffer: Array, *args: Any, **kwargs: Any) -> None:
        """Record a call. No tag comes down to a transport: the label of the work holds it."""
        self._channel.role = self._host.role
        tag = self._device.label.partition(" ")[2]
        self._channel.keep(call, self._device.stream_here(), buffer.nbytes, *args, tag=tag, **kwargs)

    def gather(self, buffer: Array) -> None:
        own, others = _apart(buffer, self._rank, self._size)
        self._keep("all_gather", buffer, own, others)

    def reduce_scatter(self, output: Array, buffer: Array, op: str, kind: str) -> None:
        self._keep("reduce_scatter", buffer, [buffer], [output], kind=kind, op=op)

    def all_reduce(self, buffer: Array, op: str) -> None:
        self._keep("all_reduce", buffer, [buffer], [buffer], op=op)

    def broadcast(self, buffer: Array, root: int) -> None:
        both = [[buffer], []]
        self._keep("broadcast", buffer, *(both if root == self._rank else both[::-1]), root=root)

    def swap(self, output: Array, buffer: Array, received: Sequence[slice], sent: Sequence[slice]) -> None:
        messages = sum(part.stop > part.start for part in (*received, *sent))
        counts = [[part.stop - part.start for part in parts] for parts in (sent, received)]
        self._keep("all_to_all", buffer, [buffer], [output], launches=messages, parts=_parts(buffer, *counts))

    def send(self, buffer: Array, peer: int) -> None:
        self._keep("send", buffer, [buffer], peer=peer, waits=True)

    def recv(self, buffer: Array, peer: int) -> None:
        self._keep("recv", buffer, [], [buffer], peer=peer)

    def exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        self._keep("send", buffer, [buffer], peer=to, grouped=True, waits=True)
        self.recv(output, source)


class SimulatedCommunicator(Communicator):
    """Replaces MPI and shared memory: records calls with host arrays, and with arrays of a simulated CPU."""

    def __init__(
        self, device: SimulatedDevice, ranks: Ranks, rank: int, name: str, board: Board, node: int
    ) -> None:
        """ranks: world ranks of the group; rank: this rank's index in them.

        node: number of ranks of a node that share memory; 0: none.
        """
        self.rank = rank
        self.size = len(ranks)
        self.channel = Channel(device, name, ranks)
        self._device = device
        self._board = board
        self._node = node
        self._made = 0
        self.shares_memory = node > 0 and len({each // node for each in (min(ranks), max(ranks))}) == 1

    def among(self, members: Sequence[int], color: int) -> "SimulatedCommunicator":
        self._made += 1
        ranks = _short([self.channel.ranks[member] for member in members])
        name = f"{self.channel.name}/{self._made}" + (f".{color}" if len(members) < self.size else "")
        return SimulatedCommunicator(
            self._device, ranks, list(members).index(self.rank), name, self._board, self._node
        )

    def duplicate(self) -> "SimulatedCommunicator":
        return self.among(range(self.size), 0)

    def split(self, color: int | None, key: int) -> "SimulatedCommunicator | None":
        if color is None:
            self._made += 1
            return None
        raise NotImplementedError(
            "split: a simulated world does not know the colors of other ranks; use `among`"
        )

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Array:
        if not (shared and self.shares_memory):
            return self._device.buffer(count, dtype)
        self._made += 1
        first = min(self._recorded)
        own = self._device.buffer(count, dtype) if self._here == first else None
        memory = self._meet(("memory", self._made), own)[first]
        self._barrier("")  # the rank that made it has filled it with zeros
        self._board.shared.add(block_of(memory))
        return self._device.its_own(memory)

    def _keep(self, call: str, nbytes: int, *args: Any, **kwargs: Any) -> int:
        """Record a call in the host's current stream; on a simulated CPU, in the device's."""
        stream = self._device.host.stream_here()
        if stream == HOST and self._device.like.in_host_memory:
            stream = self._device.stream_here()
        self.channel.role = self.role
        return self.channel.keep(call, stream, nbytes, *args, **kwargs)

    # Values of recorded ranks.

    @cached_property
    def _here(self) -> int:
        return self.channel.ranks[self.rank]

    @cached_property
    def _recorded(self) -> frozenset[int]:
        return self._board.recorded.intersection(self.channel.ranks)

    @cached_property
    def _speakers(self) -> list[int]:
        return self._board.speakers(self.channel.ranks)

    def _meet(self, tag: Any, own: Any) -> dict[int, Any]:
        """The values of the recorded ranks of the group, by world rank."""
        if len(self._recorded) == 1:
            return {self._here: own}
        return self._board.meet((self.channel.name, tag), self._here, own, self._recorded)

    def _reported(self, number: int, own: Any) -> dict[int, Any]:
        """As _meet, for each rank that stands for a rank of the group; `own` if it is not in the group."""
        values = self._meet(number, own)
        return {speaker: values.get(speaker, own) for speaker in set(self._speakers)}

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        values = self._reported(self._keep("all_gather", self.size * len(data)), data)
        return [values[speaker] for speaker in self._speakers]

    def _all_gather(self, buffer: Array, tag: str) -> None:
        if block_of(buffer) in self._board.shared:  # all slices are written in this buffer
            return self._barrier(tag)
        own, others = _apart(buffer, self.rank, self.size)
        number = self._keep("all_gather", buffer.nbytes, own, others, tag=tag)
        if _has_values(buffer):
            values = self._reported(number, own[0].copy())
            for row, speaker in zip(buffer.reshape(self.size, -1), self._speakers, strict=True):
                row[:] = values[speaker]

    def _reduce_scatter(self, output: Array, buffer: Array, how: Reduction, tag: str) -> None:
        reads = [buffer, output] if how.accumulate else [buffer]
        what = {"kind": how.kind, "how": how, "op": how.op, "tag": tag}
        number = self._keep("reduce_scatter", buffer.nbytes, reads, [output], **what)
        if _has_values(output):
            own = slice(self.rank * output.size, (self.rank + 1) * output.size)
            total = how.scale * self._combined(number, buffer, how.op)[own]
            output[...] = output + total if how.accumulate else total

    def _all_reduce(self, buffer: Array, op: str, tag: str) -> None:
        number = self._keep("all_reduce", buffer.nbytes, [buffer], [buffer], op=op, tag=tag)
        if _has_values(buffer):
            buffer[...] = self._combined(number, buffer, op)

    _all_reduce_small = _all_reduce

    def _combined(self, number: int, own: np.ndarray, op: str) -> np.ndarray:
        values, times = self._reported(number, own.copy()), Counter(self._speakers)
        if op == "sum":
            return sum(values[speaker] * count for speaker, count in times.items())
        if op == "prod":
            return np.prod([values[speaker] ** count for speaker, count in times.items()], axis=0)
        return (np.max if op == "max" else np.min)(list(values.values()), axis=0)

    def _broadcast(self, buffer: Array, root: int, tag: str) -> None:
        both = [[buffer], []]
        both = both if root == self.rank else both[::-1]
        number = self._keep("broadcast", buffer.nbytes, *both, root=root, tag=tag)
        if _has_values(buffer):
            buffer[...] = self._reported(number, buffer.copy())[self._speakers[root]]

    def _all_to_all(self, output: Array, buffer: Array, received: Any, sent: Any, tag: str) -> None:
        parts = _parts(buffer, sent or (), received or ())
        number = self._keep("all_to_all", buffer.nbytes, [buffer], [output], parts=parts, tag=tag)
        if _has_values(output):
            sent = sent or equal(buffer.size, self.size)
            values = self._reported(number, (buffer.copy(), slices(sent)))
            parts = slices(received or equal(output.size, self.size))
            for part, speaker in zip(parts, self._speakers, strict=True):
                theirs, cut = values[speaker]
                output[part] = np.resize(theirs[cut[self.rank]], part.stop - part.start)

    # Messages.

    def _letter(self, number: int, source: int, to: int) -> tuple:
        return self.channel.name, "letter", number, self.channel.ranks[source], self.channel.ranks[to]

    def _send(self, buffer: Array, peer: int, tag: str, direct: bool, grouped: bool = False) -> None:
        how = {"grouped": grouped, "tag": tag, "waits": direct or grouped}
        number = self._keep("send", buffer.nbytes, [buffer], peer=peer, **how)
        if _has_values(buffer) and self.channel.ranks[peer] in self._board.recorded:
            self._board.put(self._letter(number, self.rank, peer), buffer.copy())

    def _recv(self, buffer: Array, peer: int, tag: str, direct: bool) -> None:
        unknown = self.channel.ranks[peer] not in self._board.recorded
        if _has_values(buffer) and unknown and buffer.dtype.kind != "f":
            raise NotImplementedError(f"recv {tag}: {_UNKNOWN.format(peer)}")
        number = self._keep("recv", buffer.nbytes, [], [buffer], peer=peer, tag=tag)
        if _has_values(buffer) and not unknown:
            buffer[...] = self._board.take(self._letter(number, peer, self.rank))

    def _exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        self._send(buffer, to, "", False, grouped=True)
        self._recv(output, source, "", False)

    def _barrier(self, tag: str) -> None:
        self._keep("barrier", 0, tag=tag)


def _has_values(array: Array) -> bool:
    return not hasattr(array, "shardrt_device")


def _apart(buffer: Array, rank: int, size: int) -> tuple[list[Array], list[Array]]:
    """([this rank's slice], [the elements before it, the elements after it])."""
    n = buffer.size // size
    return [buffer[rank * n : (rank + 1) * n]], [buffer[: rank * n], buffer[(rank + 1) * n :]]


def _parts(buffer: Array, sent: Sequence[int], received: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Collective.parts of an all_to_all with these counts of elements."""
    if len({*sent, *received}) < 2:
        return ()
    size = buffer.itemsize
    return tuple([(size * to, size * source) for to, source in zip(sent, received, strict=True)])


def _short(ranks: list[int]) -> Ranks:
    """The ranks as a range, if they have one stride."""
    steps = set(np.diff(ranks).tolist())
    if len(steps) > 1 or not ranks:
        return tuple(ranks)
    step = steps.pop() if steps else 1
    return range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step)
