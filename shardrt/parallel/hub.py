"""The hub through which hosts exchange outer gradients, each host in a job of its own: `shardrt hub`.

Counterparts, ranks with the same number on their hosts, form a group. A round is an outer step: each rank
sends its message, and gets those of all hosts that came in time. The hub waits for hosts that are connected,
and for `deadline` seconds after a round's first message; then it closes the round without the others. A host
that is late for the last round gets that round's messages. A host further behind gets BEHIND and fetches the
outer state, which the hub gets from another host. (torchft's Lighthouse and manager have these roles.)

A message is a header (HEAD) and a body. The hub knows no arrays.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import NamedTuple

from shardrt.untrusted import say

__all__ = ["HEAD", "Hub", "Message", "receive", "send", "watch"]

# b"dlc2", kind, number (of a step in JOIN, else of a round), which hosts, bytes of the body
HEAD = struct.Struct("<4sIQQQ")
MARK = b"dlc2"
JOIN, EXCHANGE, FETCH, GIVE, WAIT, REFUSED = range(6)
# of JOIN: host, hosts, rank, bytes of a message and of the outer state, digest of what hosts have alike
BODY = struct.Struct("<QQQQQQ")
MOST_HOSTS, MOST_RANKS = 64, 1 << 16  # bits of "which hosts"; ranks of a host
WANTED = 1 << 63  # flag in the number of an answer to EXCHANGE: send GIVE
BEHIND = 1 << 62  # flag in the same: this host must catch up
_JOINING = 64  # connections that have not joined yet
_JOIN = 10.0  # seconds to join
_PAUSE = 1.0  # seconds after a connection that the hub could not take
_AHEAD = 1 << 20  # rounds that a host can be ahead of others
_SILENT = 120  # seconds after which a machine counts as lost
_SPEAKING = threading.Lock()  # a line at a time
_ALIVE = 2.0  # seconds from one sign of life to the next, to a rank that waits


class Message(NamedTuple):
    """One message, as `receive` gives it."""

    kind: int
    number: int
    hosts: int
    body: bytes


def send(connection: socket.socket, kind: int, number: int = 0, hosts: int = 0, *bodies: bytes) -> None:
    """Send a message whose body is `bodies`, one after the other."""
    connection.sendall(HEAD.pack(MARK, kind, number, hosts, sum(map(len, bodies))))
    for body in bodies:
        connection.sendall(body)


def receive(connection: socket.socket, most: int, progress: Callable[[], None] | None = None) -> Message:
    """The next message.

    Args:
        most: bytes that its body may have.
        progress: called after each piece that arrives.

    Raises:
        ConnectionError: if the connection ends, or the message is malformed.
    """
    mark, kind, number, hosts, size = HEAD.unpack(_read(connection, HEAD.size, progress))
    if mark != MARK or size > most:
        raise ConnectionError(f"a message of {size} bytes, of at most {most}: not a hub of this version")
    return Message(kind, number, hosts, _read(connection, size, progress))


def _read(connection: socket.socket, size: int, progress: Callable[[], None] | None) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the connection has ended")
        found += part
        if progress is not None:
            progress()
    return bytes(found)


def watch(connection: socket.socket) -> None:
    """Send small messages at once; end the connection to a machine that is silent for _SILENT seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * _SILENT}).items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _say(text: str) -> None:
    with _SPEAKING, suppress(OSError, ValueError):  # the reader may have left
        say(f"hub: {text}")


class _Group:
    """The ranks of one place, on all hosts. The hub's lock guards it."""

    def __init__(self) -> None:
        self.sizes = 0, 0  # bytes of a message, and of the outer state
        self.digest = 0  # of what its messages have, and how hosts use it
        self.connections: dict[int, socket.socket] = {}  # by host
        self.lagging: set[int] = set()  # connected, and late for a round
        self.steps: dict[int, int] = {}  # by host, when it joined
        self.first = 0  # the earliest of these at the start
        self.started = False
        self.closed = -1  # the last round that is over
        self.result: dict[int, bytes] = {}  # its messages by host
        self.open: dict[int, bytes] = {}  # of the round after it
        self.ends = 0.0  # when the open round closes
        self.fetching = 0  # hosts that wait for the outer state
        self.state: tuple[int, bytes] = (-1, b"")  # the round after which it was, and the bytes

    def awaited(self) -> set[int]:
        """Hosts that the open round waits for."""
        return self.connections.keys() - self.lagging

    def has(self, connection: socket.socket) -> bool:
        """Whether it is the last one of its host."""
        return connection in list(self.connections.values())

    def start(self) -> None:
        """All hosts are there."""
        self.started, self.first, self.closed = True, min(self.steps.values()), -1
        self.result, self.open = {}, {}
        self.lagging.clear()

    def leave(self, host: int, connection: socket.socket) -> None:
        """A connection has ended. The host may have another one by now."""
        if self.connections.get(host) is connection:
            del self.connections[host], self.steps[host]
            self.lagging.discard(host)
            self.started &= bool(self.connections)

    def close(self) -> None:
        """End the open round."""
        self.lagging |= self.awaited() - self.open.keys()
        self.closed, self.result, self.open = self.closed + 1, self.open, {}

    def add_message(self, host: int, number: int, body: bytes, deadline: float) -> None:
        """A message of round `number`. If it is ahead, rounds before it are over."""
        if number > self.closed + 1:
            self.closed, self.result, self.open = number - 1, {}, {}
        if number >= self.closed:  # the next round waits for this host again
            self.lagging.discard(host)
        if number == self.closed + 1:
            if not self.open:
                self.ends = time.monotonic() + deadline
            self.open[host] = body


class Hub:
    """Serves `hosts` jobs, in a thread for each connection.

    Args:
        hosts: the number of hosts.
        deadline: seconds that a round waits after its first message.
        most: bytes that the message or the outer state of one rank may have.
    """

    def __init__(self, hosts: int, deadline: float, most: int = 1 << 33) -> None:
        if not 2 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a hub needs 2 to {MOST_HOSTS} hosts, got {hosts}")
        if not 0 < deadline < inf:
            raise ValueError(f"a hub's deadline must be above 0 seconds, got {deadline}")
        self.hosts, self.deadline, self.most = hosts, deadline, most
        self._groups: dict[int, _Group] = {}
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._joining = threading.Semaphore(_JOINING)

    def listen(self, address: str, port: int) -> int:
        """Begin to listen; gives the port, chosen freely for 0. Raises OSError."""
        self._listener = socket.create_server((address, port))
        return self._listener.getsockname()[1]

    def serve(self) -> None:
        """Serve until `close`."""
        while (listener := self._listener) is not None:
            self._joining.acquire()
            connection = None
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError) as error:  # closed; or too many files or threads: some may end
                self._joining.release()
                if connection is not None:
                    connection.close()
                if self._listener is not None:
                    _say(f"warning: cannot take a connection: {error}")
                    time.sleep(_PAUSE)

    def close(self) -> None:
        """End `serve`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()

    def _serve(self, connection: socket.socket) -> None:
        group, host = None, -1
        try:
            try:
                watch(connection)
                group, host = self._join(connection)
            finally:
                self._joining.release()
            if group is not None:
                self._start(connection, group, host)
            while group is not None:
                self._answer(connection, group, host)
        except OSError:  # the rank has left, or this is no rank
            if group is not None and host in group.connections and not group.has(connection):
                with suppress(OSError):
                    send(connection, REFUSED, 0, 0, f"another job joined as host {host}".encode())
        finally:
            connection.close()
            if group is not None:
                with self._changed:
                    left = group.has(connection)
                    group.leave(host, connection)
                    self._changed.notify_all()
                if left and group is self._groups.get(0):
                    _say(f"host {host} left")

    def _join(self, connection: socket.socket) -> tuple[_Group | None, int]:
        end = time.monotonic() + _JOIN
        connection.settimeout(_JOIN)
        kind, step, _, body = receive(
            connection, BODY.size, lambda: connection.settimeout(max(0.0, end - time.monotonic()))
        )
        connection.settimeout(None)
        if kind != JOIN or len(body) != BODY.size or step >= BEHIND:
            raise ConnectionError("no rank")
        host, hosts, rank, *sizes, digest = BODY.unpack(body)
        with self._changed:
            wrong = self._wrong(host, hosts, rank, tuple(sizes), digest)
            if not wrong:
                group = self._groups.setdefault(rank, _Group())
                group.sizes, group.digest = tuple(sizes), digest
                before = group.connections.get(host)
                group.connections[host], group.steps[host] = connection, step
                self._changed.notify_all()  # the one before waits no more
        if wrong:
            send(connection, REFUSED, 0, 0, wrong.encode())
            return None, -1
        if rank == 0:
            _say(f"host {host} joined at step {step}")
        if before is not None:  # of a job that was lost with its machine, or by mistake: its thread says so
            with suppress(OSError):
                before.shutdown(socket.SHUT_RD)
        return group, host

    def _wrong(self, host: int, hosts: int, rank: int, sizes: tuple[int, ...], digest: int) -> str:
        """Why a rank can't join; "" if it can."""
        if hosts != self.hosts or host >= hosts:
            return f"the hub serves {self.hosts} hosts, this is host {host} of {hosts}"
        if rank >= MOST_RANKS or max(sizes) > self.most:
            return (
                f"rank {rank} with {max(sizes)} bytes is above the hub's limits, {MOST_RANKS} and {self.most}"
            )
        group = self._groups.get(rank)
        if group is None or not group.connections.keys() - {host}:
            return ""
        if group.sizes != sizes:
            return f"rank {rank} of host {host} has {sizes[0]} bytes to send, of other hosts {group.sizes[0]}"
        if group.digest != digest:
            return f"rank {rank} of host {host} has other parameters, units or DiLoCo settings than others"
        return ""

    def _start(self, connection: socket.socket, group: _Group, host: int) -> None:
        """Tell a rank the step to begin with, and the last round; wait for all hosts if none has begun."""
        with self._changed:
            first = group.steps[host]
            waits = not group.started
            if waits and len(group.connections) == self.hosts:
                group.start()
                self._changed.notify_all()
        if waits:
            self._wait(connection, group, lambda: group.started)
            first = group.first
        send(connection, JOIN, first, 0, struct.pack("<q", -1 if waits else group.closed))

    def _answer(self, connection: socket.socket, group: _Group, host: int) -> None:
        kind, number, _, body = receive(connection, max(group.sizes))
        if number >= BEHIND or (group.closed >= 0 and number > group.closed + _AHEAD):
            raise ConnectionError("no round")
        if kind == EXCHANGE:
            self._exchange(connection, group, host, number, body)
        elif kind == GIVE and len(body) == group.sizes[1]:
            with self._changed:
                group.state = number, body
                self._changed.notify_all()
        elif kind == FETCH:
            self._fetch(connection, group, host, number)
        else:
            raise ConnectionError("no request")

    def _exchange(
        self, connection: socket.socket, group: _Group, host: int, number: int, body: bytes
    ) -> None:
        with self._changed:
            others = group.open.values() if number == group.closed + 1 else ()
            if any(len(body) != len(other) for other in others):
                raise ConnectionError("hosts differ in the size of their messages")
            group.add_message(host, number, body, self.deadline)
            self._changed.notify_all()
        self._wait(connection, group, lambda: self._end_if_due(group, number), group.ends)
        with self._changed:
            if group.closed > number or not group.result:
                found, number = {}, BEHIND
            else:
                found = dict(sorted(group.result.items()))
                number = WANTED * (group.fetching > 0 and host == min(found))
        bodies = [other for other in found.values() if other is not body]  # the rank has its own
        send(connection, EXCHANGE, number, sum(1 << each for each in found), *bodies)

    def _end_if_due(self, group: _Group, number: int) -> bool:
        """End the round if it is due; gives whether it is over. Called with the lock."""
        if group.closed < number and (group.awaited() <= group.open.keys() or time.monotonic() >= group.ends):
            missing = sorted(group.connections.keys() - group.open.keys())
            group.close()
            if missing and group is self._groups.get(0):
                _say(f"outer step {group.closed} without host {', '.join(map(str, missing))}")
            self._changed.notify_all()
        return group.closed >= number

    def _fetch(self, connection: socket.socket, group: _Group, host: int, least: int) -> None:
        with self._changed:
            group.lagging.add(host)
            group.fetching += 1
            self._changed.notify_all()
        try:
            self._wait(connection, group, lambda: group.state[0] >= least or not group.awaited())
            with self._changed:
                number, body = group.state
                if number >= least:
                    group.lagging.discard(host)
            if number >= least:
                send(connection, GIVE, number, 0, body)
            else:
                send(connection, REFUSED, 0, 0, b"the other hosts have left, with newer checkpoints")
        finally:
            with self._changed:
                group.fetching -= 1
                if not group.fetching:
                    group.state = -1, b""

    def _wait(
        self, connection: socket.socket, group: _Group, done: Callable[[], bool], until: float = inf
    ) -> None:
        """Wait for `done`, rechecking at the time `until`. Gives the rank signs of life."""
        while True:
            alive = time.monotonic()
            with self._changed:
                while (now := time.monotonic()) < alive + _ALIVE:
                    if not group.has(connection):
                        raise ConnectionError("another job has joined as this host")
                    if done():
                        return
                    left = until - now if until > now else inf
                    self._changed.wait(min(left, alive + _ALIVE - now))
            send(connection, WAIT)  # raises OSError where the rank has left
