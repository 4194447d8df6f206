"""How hosts exchange outer gradients: in one job by collectives, in jobs of their own through a hub.

An exchange adds up the hosts' buffers, of which the last element counts the hosts that take part.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.kernels.packed import packed_bytes
from shardrt.parallel import hub

Array = Any
OUTER_BITS, OUTER_BLOCK = 4, 32  # of quantised outer gradients: 5 bits for each element with its scale


class HubLost(Exception):
    """The hub is gone or refuses this host."""

    exit_code = 65


class LeftBehind(Exception):
    """The other hosts are rounds ahead: this host takes their outer state, and goes on from there."""


def elements(size: int, quantize: bool) -> int:
    """Elements of a buffer for `size` elements and the number of hosts, which begins a block of its own."""
    return -(-size // OUTER_BLOCK) * OUTER_BLOCK + 1 if quantize else size + 1


def message_bytes(size: int, quantize: bool) -> int:
    """Bytes that a host sends of an outer gradient of `size` elements."""
    count = elements(size, quantize)
    return packed_bytes(count, OUTER_BITS, OUTER_BLOCK) if quantize else 4 * count


class QuantisedRows:
    """The messages of all hosts in 4 bits, one row each.

    A row has the quantised elements (kernels/packed.py). The number of hosts is the only one of its block, so
    it is exact; an absent host's row is zeros, and adds nothing.
    """

    def __init__(self, hosts: int, size: int) -> None:
        self.bytes = packed_bytes(size, OUTER_BITS, OUTER_BLOCK)
        self.rows = device.current().zeros(hosts * self.bytes, np.uint8).reshape(hosts, self.bytes)
        self._kernels = device.current().kernels.quantise

    def pack(self, buffer: Array, host: int) -> None:
        """Quantise `buffer` into the row of `host`."""
        self._kernels.pack(buffer, self.rows[host], OUTER_BITS, OUTER_BLOCK)

    def sum(self, buffer: Array) -> None:
        """The sum of all rows, in the order of the hosts, in float32."""
        self._kernels.sum_rows(self.rows, buffer, OUTER_BITS, OUTER_BLOCK, 1.0, False)


class MeshExchange:
    """Hosts of one job: the ranks along the axis of the hosts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._communicator, self.stream = mesh.communicator("outer"), mesh.stream("outer")
        self.hosts, self.host = self._communicator.size, self._communicator.rank

    def sum(self, number: int, buffer: Array, codes: QuantisedRows | None) -> None:
        """Add up the buffers of all hosts, in the stream. Collective."""
        if codes is None:
            self._communicator.all_reduce(buffer, stream=self.stream, tag="outer gradient")
            return
        self.stream.submit(codes.pack, buffer, self.host, label="quantise outer gradient")
        self._communicator.all_gather(codes.rows.reshape(-1), stream=self.stream, tag="outer gradient")
        self.stream.submit(codes.sum, buffer, label="sum outer gradients")

    def took_part(self, present: bool) -> bool:
        """Whether the last sum has this host's buffer."""
        return present

    def after_step(self, number: int, state: list[Array]) -> None:
        """After round `number`: nothing, as all hosts are there."""

    def take_from(self, root: int, state: list[Array]) -> int:
        """Copy the outer state of host `root`, on all hosts; gives 0. Collective."""
        stream = device.current().current_stream
        for array in state:
            self._communicator.broadcast(array, root=root, stream=stream, tag="outer state")
        return 0


class HubExchange:
    """This rank's connection to the hub. The ranks of a host make their calls together.

    Args:
        address: of the hub, HOST:PORT.
        host: this host's number, of `hosts`.
        mesh: the ranks of this host.
        progress: called while this rank waits for the hub, when it hears of it.

    Raises:
        HubLost: if no hub answers.
    """

    def __init__(
        self,
        address: str,
        host: int,
        hosts: int,
        mesh: DeviceMesh,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.host, self.hosts, self._mesh, self._address = host, hosts, mesh, address
        self.stream = device.current().new_stream("outer")
        self._progress = progress
        self._most = hub.BODY.size
        self._wanted = self._behind = False
        self._mask = 0
        self._lost: HubLost | None = None
        name, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((name.strip("[]"), int(port)), timeout=None)
            hub.watch(self._socket)
        except (OSError, ValueError) as error:
            raise HubLost(f"no hub at {address}: {error}") from None

    def join(self, message: int, state: int, layout: str, step: int) -> tuple[int, int]:
        """(the first step, the last round of the others or -1 where all begin now).

        Waits until all hosts are there, or others have begun. `message`, `state`: bytes of an outer gradient
        as it is sent, and of the outer state. `layout`: what all hosts must have alike. Collective.

        Raises:
            HubLost: on all ranks of the host, if the hub refuses one of them or is gone.
        """
        digest = int.from_bytes(blake2b(layout.encode(), digest_size=8).digest(), "little")
        body = hub.BODY.pack(self.host, self.hosts, self._mesh.rank, message, state, digest)
        self._most = max(self.hosts * message, state, 1 << 12)
        found, error = (step, -1), ""
        try:
            answer = self._ask(hub.JOIN, step, body)
            found = answer.number, int.from_bytes(answer.body, "little", signed=True)
        except HubLost as lost:  # the other ranks learn of it
            error = str(lost)
        # A rank's group at the hub can be a round ahead of another's: all ranks of the host do the same.
        each = all_gather_object(self._mesh.communicator("control"), (*found, error))
        if error := next((error for *_, error in each if error), ""):
            raise HubLost(error)
        return min(first for first, *_ in each), max(last for _, last, _ in each)

    def sum(self, number: int, buffer: Array, codes: QuantisedRows | None) -> None:
        """Add up the buffers that come in time for round `number`, in the stream."""
        self.stream.submit(self._try, number, buffer, codes, label="exchange outer gradients")

    def _try(self, *args: Any) -> None:
        try:
            self._sum(*args)
        except HubLost as error:  # for the thread that waits
            self._lost = error

    def _sum(self, number: int, buffer: Array, codes: QuantisedRows | None) -> None:
        here = device.of(buffer)
        if codes is not None:
            codes.pack(buffer, self.host)
        own = here.to_numpy(buffer if codes is None else codes.rows[self.host])
        answer = self._ask(hub.EXCHANGE, number, own.tobytes())
        self._mask, self._wanted = answer.hosts, bool(answer.number & hub.WANTED)
        self._behind = bool(answer.number & hub.BEHIND)
        there = [host for host in range(self.hosts) if answer.hosts >> host & 1]
        bodies = np.frombuffer(answer.body, np.uint8)
        rows = np.zeros((self.hosts, own.nbytes), np.uint8)
        if self.host in there and bodies.size == (len(there) - 1) * own.nbytes:  # without this rank's own
            rows[self.host] = own.view(np.uint8)
            there.remove(self.host)
        if bodies.size != len(there) * own.nbytes:
            raise HubLost(f"the hub at {self._address} sent {bodies.size} bytes for {len(there)} hosts")
        rows[there] = bodies.reshape(len(there), own.nbytes)
        if codes is not None:
            here.copy(codes.rows.reshape(-1), rows.reshape(-1))
            codes.sum(buffer)
            return
        total = np.zeros(buffer.size, np.float32)
        for row in rows.view(np.float32):
            total += row
        here.copy(buffer, total)

    def took_part(self, present: bool) -> bool:
        """Whether the last sum has this host's buffer. Raises HubLost."""
        if self._lost is not None:
            raise self._lost
        return present and bool(self._mask >> self.host & 1)

    def after_step(self, number: int, state: list[Array]) -> None:
        """After round `number`: give the outer state to a host that asks for it.

        Raises:
            LeftBehind: on all ranks of the host, if one of them is.
        """
        behind = np.array([self._behind], np.int64)
        stream = device.current().current_stream
        self._mesh.communicator("control").all_reduce(behind, op="max", stream=stream)
        self._behind = False
        if behind[0]:
            raise LeftBehind
        if self._wanted:
            self._wanted = False
            parts = [device.of(array).to_numpy(array).tobytes() for array in state]
            try:
                hub.send(self._socket, hub.GIVE, number, 0, *parts)
            except OSError as error:
                raise self._gone(error) from None

    def take_from(self, root: int, state: list[Array]) -> int:
        """Fill `state` with that of any other host; gives the round after which it was, on all ranks."""
        least, rounds = 0, [0, 1]
        while min(rounds) < max(rounds):
            answer = self._ask(hub.FETCH, least)
            rounds = all_gather_object(self._mesh.communicator("control"), answer.number)
            least = max(rounds) + 2  # all ranks ask before that round is over
        if len(answer.body) != sum(array.nbytes for array in state):
            raise HubLost(f"the hub at {self._address} sent an outer state of {len(answer.body)} bytes")
        at = 0
        for array in state:
            part = np.frombuffer(answer.body, np.float32, array.size, at)
            device.of(array).copy(array, part)
            at += part.nbytes
        return rounds[0]

    def _ask(self, kind: int, number: int, *body: bytes) -> hub.Message:
        with suppress(OSError):  # the hub may have left; its last words say why
            hub.send(self._socket, kind, number, 0, *body)
        try:
            while (answer := hub.receive(self._socket, self._most, self._progress)).kind == hub.WAIT:
                pass
        except OSError as error:
            raise self._gone(error) from None
        if answer.kind == hub.REFUSED:
            raise HubLost(f"the hub at {self._address}: {answer.body.decode(errors='replace')}")
        return answer

    def _gone(self, error: OSError) -> HubLost:
        return HubLost(f"the hub at {self._address} is gone: {error}; start all hosts with --resume auto")

    def close(self) -> None:
        """Leave the hub. Other hosts no longer wait for this one."""
        with suppress(OSError):
            self._socket.close()
