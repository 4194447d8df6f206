"""Links of a pipeline: outputs go to the rank of the next stage, and gradients back, in streams of their own.

    links = Links(mesh["pp"], {(0, 1, "F"), (1, 0, "B")}, slots={(0, 1, "F"): 3})

    links.send("F", 1, arrays, key=key, what="F3 of stage 1", keep=2)  # returns at once, keeps arrays
    links.expect("F", 0, key=key, what="F3 of stage 1")  # ahead of use, in order of use; returns at once
    received = links.receive("F", 0, what="F3 of stage 1")  # compute may read received.arrays
    received.free()  # after the last op that reads them was issued
    links.finish()  # the end of a step: all messages are delivered

A link is (sender, receiver, kind): a communicator of two ranks and a stream on both ranks. A send waits for
its receiver, so each link has its own stream. A link receives messages into slots of memory, in the order of
the `expect` calls, as slots become free. Both ends give the same `tag` and the same `key`; the key identifies
the shapes of a message. With the first message of a key the sender sends the shapes, through the host. From
then on the receiver posts receives as soon as they are expected.
(With NCCL it posts them only in `receive`. While the GPU waits for a message that the peer sends later, calls
that free memory or load a kernel wait, too. Then this rank could not send what the peer needs.)

The flight recorder sees the waits of the program, in `receive` and `finish`. It does not see a stream that
waits for a message before the program needs it.
"""

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardrt import dtypes
from shardrt.comm import objects, recording
from shardrt.comm.interceptors import message_from, message_to
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, Event, Stream
from shardrt.device.arena import Arena, Slot

Array = Any
Link = tuple[int, int, str]  # (sender, receiver, kind); ranks of the mesh
Shape = tuple[tuple[int, ...], str]  # (shape, dtype) of an array

_ALIGNMENT = 256  # bytes between the arrays of a slot
_CARRIED = {
    1: np.uint8,
    2: np.uint16,
    4: np.int32,
    8: np.int64,
}  # by item size, for types that communicators do not carry


class Links:
    """The links of `needed` with this rank at one end.

    Collective over the mesh, with the same `needed` on all ranks.

    Args:
        mesh: a mesh with one axis.
        slots: most messages that are received and not freed, for all links or by link (default 2).
        poison: fill slots with NaN when they are freed.

    Raises:
        ValueError: if they differ.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        needed: Iterable[Link],
        *,
        slots: int | Mapping[Link, int] = 2,
        poison: bool = False,
    ) -> None:
        self._mesh = mesh
        links = sorted({(int(source), int(to), kind) for source, to, kind in needed})
        for source, to, kind in links:
            if source == to or not (0 <= source < mesh.size and 0 <= to < mesh.size):
                raise ValueError(f"links: link {kind!r} from rank {source} to {to} is impossible on {mesh!r}")
        if differ := objects.differing_ranks(mesh.communicator("control"), links):
            raise ValueError(
                f"links: ranks {differ} of {mesh!r} passed other links than rank 0; this rank passed {links}"
            )
        self._out: dict[tuple[str, int], _Outgoing] = {}
        self._in: dict[tuple[str, int], _Incoming] = {}
        for link in links:  # in the same order on all ranks, which avoids deadlock
            source, to, kind = link
            pair = mesh.pair(source, to)
            if pair is not None and mesh.rank == source:
                self._out[kind, to] = _Outgoing(link, mesh, *pair)
            elif pair is not None:
                count = slots if isinstance(slots, int) else slots.get(link, 2)
                self._in[kind, source] = _Incoming(link, mesh, *pair, slots=count, poison=poison)

    def send(
        self,
        kind: str,
        to: int,
        arrays: Sequence[Array | None],
        *,
        key: Hashable = None,
        tag: str,
        about: Any = None,
        keep: int | None = None,
    ) -> None:
        """Send contiguous device arrays of any types, or None in place of an array.

        The link keeps the arrays alive until delivery; they must not be written any more.

        Args:
            keep: number of messages that the link keeps from now on, with this one. The compute stream waits
                until earlier messages are delivered; the caller knows that they are. So kept memory depends
                on the calls, not on timing. None: the link keeps all messages until `finish`.
            about: a JSON value that the receiver gets with the shapes, at the first message of a key.

        Raises:
            ValueError: if shapes, types or `about` differ from an earlier message of this key.
        """
        self._out[kind, to].send(arrays, key, tag, about, keep)

    def expect(self, kind: str, source: int, *, key: Hashable = None, tag: str) -> None:
        """Receive the next message of a link as soon as a slot is free, in the order of these calls."""
        self._in[kind, source].expect(key, tag)

    def receive(self, kind: str, source: int, *, tag: str) -> "Received":
        """The next expected message.

        The compute stream waits until it has arrived.

        Raises:
            RuntimeError: if another message was expected next, or no slot is free.
            StreamError: from a CollectiveMismatch, if the sender has sent another message.
        """
        return self._in[kind, source].receive(tag)

    def finish(self) -> None:
        """Make the compute stream wait until all sent messages are delivered.

        Raises:
            RuntimeError: if a message was expected and not received, or received and not freed.
        """
        for incoming in self._in.values():
            incoming.finish()
        for outgoing in self._out.values():
            outgoing.finish()

    def plan(self, shapes: Mapping[Link, Sequence[Sequence[Shape | None]]]) -> tuple[int, int]:
        """(bytes on the device, pinned bytes on the host) of this rank's links after all messages were sent.

        Args:
            shapes: for each link, the shapes of the messages of each key. It does not count arrays that
                `send` keeps, nor shared memory of a node's ranks: 2 MiB for each link.
        """
        on_device = on_host = 0
        for (source, to, kind), messages in shapes.items():
            for link in (self._out.get((kind, to)), self._in.get((kind, source))):
                if link is not None and link.link == (source, to, kind):
                    taken = link.plan([Layout(tuple(message)) for message in messages])
                    on_device, on_host = on_device + taken[0], on_host + taken[1]
        return on_device, on_host

    def close(self) -> None:
        """Close the links and abandon messages under way. Not collective: a rank may have failed."""
        ends = (*self._out.values(), *self._in.values())
        if all(end.idle for end in ends):
            self._mesh.device.current_stream.synchronize()  # all awaited messages are delivered
        for end in ends:
            end.close()
        self._out.clear()
        self._in.clear()


class Received:
    """A message.

    Args:
        arrays: valid until `free`.
        about: see Links.send.
    """

    __slots__ = ("arrays", "about", "_slot", "_link")

    def __init__(self, arrays: tuple[Array | None, ...], about: Any, slot: Slot, link: "_Incoming") -> None:
        self.arrays = arrays
        self.about = about
        self._slot = slot
        self._link = link

    def free(self) -> None:
        """Free the slot after the present work of the compute stream."""
        slot, self._slot, self.arrays = self._slot, None, ()
        if slot is not None:
            self._link.free(slot)


class Layout(NamedTuple):
    """Shapes of the arrays of a message, and their places in a slot."""

    shapes: tuple[Shape | None, ...]
    about: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return sum(_rounded(_nbytes(shape)) for shape in self.shapes if shape)

    def largest(self) -> int:
        """Bytes of the largest array."""
        return max((_nbytes(shape) for shape in self.shapes if shape), default=0)

    def arrays(self, memory: Array) -> tuple[Array | None, ...]:
        """Views of a slot's memory."""
        found, start = [], 0
        for shape in self.shapes:
            if shape is None:
                found.append(None)
                continue
            nbytes = _nbytes(shape)
            found.append(memory[start : start + nbytes].view(np.dtype(shape[1])).reshape(shape[0]))
            start += _rounded(nbytes)
        return tuple(found)


class _End:
    """This rank's end of a link."""

    def __init__(self, link: Link, mesh: DeviceMesh, communicator: Communicator, host: Communicator) -> None:
        self.link = link
        self.communicator = communicator
        self.layouts: dict[Hashable, Layout] = {}  # of messages, by key
        self._mesh = mesh
        self._host = host  # carries shapes
        source, to, kind = link
        self._stream = _stream(mesh.device, communicator, f"{kind} {source} to {to}")

    def close(self) -> None:
        self.communicator.abandon()
        self._host.abandon()
        self._stream.close()

    @property
    def _compute(self) -> Stream:
        return self._mesh.device.current_stream

    def _new_event(self) -> Event:
        """An event that the link's stream can record."""
        here = self._mesh.device
        return (here.host if self.communicator.keeps_host else here).new_event()

    def _recorded(
        self, call: str, tag: str, array: Array | None, function: Callable[..., None], *args: Any
    ) -> None:
        """Run a function that makes the program wait for the other end, under the flight recorder."""
        source, to, kind = self.link
        recorder, name = recording.recorder_of(self._mesh, kind, source, to)
        if recorder is None:
            function(*args)
        else:
            report = message_to(1, tag) if call == "send" else message_from(0, tag)
            recorder.around(recorder.facts(name, 0, call, report, array), function, args)


class _Sent(NamedTuple):
    arrays: list[Array]  # flat, see _carried
    delivered: Event
    tag: str


class _Outgoing(_End):
    """The sender's end."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self._kept: deque[_Sent] = deque()

    def send(
        self, arrays: Sequence[Array | None], key: Hashable, tag: str, about: Any, keep: int | None
    ) -> None:
        layout = Layout(tuple(None if array is None else _shape(array, tag) for array in arrays), about)
        if key not in self.layouts:
            self._report(layout, tag)
            self.layouts[key] = layout
        elif layout != self.layouts[key]:
            raise ValueError(
                f"send {tag}: shapes are {layout}, but were {self.layouts[key]} with this key; use another "
                "key"
            )
        for sent in self._kept:
            sent.delivered.check()
        while keep is not None and len(self._kept) >= keep:
            self._let_go()
        written, delivered = self._mesh.device.new_event(), self._new_event()
        self._compute.record(written)
        self._stream.wait(written)
        carried = [_carried(array) for array in arrays if array is not None]
        for array in carried:
            self.communicator.send(array, peer=1, stream=self._stream, tag=tag, direct=True)
        self._stream.record(delivered)
        self._kept.append(_Sent(carried, delivered, tag))

    @property
    def idle(self) -> bool:
        return not self._kept

    def _report(self, layout: Layout, tag: str) -> None:
        data = np.frombuffer(json.dumps(layout).encode(), np.uint8)
        for part in (np.array([data.size], np.int64), data):
            self._host.send(part, peer=1, stream=self._compute, tag=f"shapes of {tag}")

    def finish(self) -> None:
        while self._kept:
            self._let_go()

    def _let_go(self) -> None:
        """Drop the oldest message once it is delivered."""
        arrays, delivered, tag = self._kept[0]
        self._recorded("send", tag, next(iter(arrays), None), self._compute.wait, delivered)
        self._kept.popleft()

    def plan(self, layouts: Sequence[Layout]) -> tuple[int, int]:
        return self.communicator.scratch(
            "send", max(map(Layout.largest, layouts), default=0), allocated=False
        )


class _Incoming(_End):
    """The receiver's end."""

    def __init__(self, *ends: Any, slots: int, poison: bool) -> None:
        super().__init__(*ends)
        self._slots = slots
        self._poison = poison
        self._arena: Arena | None = None  # with slots for the largest message so far
        self._outgrown: list[Arena] = []  # freed at the end of a step: freeing waits for posted receives
        self._expected: deque[tuple[Hashable, str]] = deque()  # not posted yet
        self._posted: deque[tuple[Slot, Layout, str]] = deque()
        self._held: dict[Slot, str] = {}  # received and not freed

    def expect(self, key: Hashable, tag: str) -> None:
        self._expected.append((key, tag))
        self._post_ahead()

    def receive(self, tag: str) -> Received:
        source, _, kind = self.link
        nearest = (
            self._posted[0][2] if self._posted else self._expected[0][1] if self._expected else "nothing"
        )
        if nearest != tag:
            raise RuntimeError(
                f"receive {tag} from rank {source}: the next message is {nearest}; receive in the order of "
                "expect"
            )
        if not self._posted:
            key, _ = self._expected[0]
            if key not in self.layouts:
                self.layouts[key] = self._hear(tag)
            self._post()
        if not self._posted:
            raise RuntimeError(
                f"receive {tag} from rank {source}: all {self._slots} slots of this link hold messages that "
                f"have not been freed ({', '.join(self._held.values())}); give it more slots"
            )
        slot, layout, _ = self._posted.popleft()
        self._held[slot] = tag
        arrays = layout.arrays(slot.array)
        carried = next((_carried(array) for array in arrays if array is not None), None)
        self._recorded("recv", tag, carried, self._compute.wait, slot.ready)
        return Received(arrays, layout.about, slot, self)

    @property
    def idle(self) -> bool:
        return not (self._expected or self._posted or self._held)

    def _hear(self, tag: str) -> Layout:
        """Receive the layout of a message of a new key."""
        size = np.empty(1, np.int64)
        self._recorded("recv", f"shapes of {tag}", size, self._hear_part, size, tag)
        data = np.empty(size[0], np.uint8)
        self._hear_part(data, tag)
        shapes, about = json.loads(data.tobytes())
        return Layout(tuple(shape and (tuple(shape[0]), shape[1]) for shape in shapes), about)

    def _hear_part(self, part: np.ndarray, tag: str) -> None:
        self._host.recv(part, peer=0, stream=self._compute, tag=f"shapes of {tag}")

    def free(self, slot: Slot) -> None:
        if self._poison:
            slot.array.fill(0xFF)  # NaN in every floating-point type
        self._compute.record(slot.free)
        del self._held[slot]
        slot.give_back()
        self._post_ahead()

    def finish(self) -> None:
        left = [tag for *_, tag in (*self._posted, *self._expected)]
        if left:
            raise RuntimeError(
                f"links: messages {', '.join(left)} from rank {self.link[0]} were not received; call "
                "receive for each"
            )
        if self._held:
            held = ", ".join(self._held.values())
            raise RuntimeError(
                f"links: messages {held} from rank {self.link[0]} were not freed; call free on each"
            )
        for arena in self._outgrown:
            arena.drop()
        self._outgrown.clear()

    def plan(self, layouts: Sequence[Layout]) -> tuple[int, int]:
        device, host = self.communicator.scratch(
            "recv", max(map(Layout.largest, layouts), default=0), allocated=False
        )
        return device + self._slots * max((layout.nbytes for layout in layouts), default=0), host

    def _post_ahead(self) -> None:
        """Post expected receives while their shapes are known and slots are free."""
        ahead = self.communicator.keeps_host
        while ahead and self._expected and self._expected[0][0] in self.layouts and self._post():
            pass

    def _post(self) -> bool:
        """Post the receive of the next expected message, of known shapes. False if no slot is free."""
        key, tag = self._expected[0]
        layout = self.layouts[key]
        slot = self._slot(layout.nbytes)
        if slot is None:
            return False
        self._expected.popleft()
        self._stream.wait(slot.free)  # the earlier message in this slot has been read
        for array in layout.arrays(slot.array):
            if array is not None:
                flat = _carried(array)
                self.communicator.recv(flat, peer=0, stream=self._stream, tag=tag, direct=True)
        self._stream.record(slot.ready)
        self._posted.append((slot, layout, tag))
        return True

    def _slot(self, nbytes: int) -> Slot | None:
        if self._arena is None or self._arena.slots[0].array.size < nbytes:
            if self._arena is not None:
                self._outgrown.append(self._arena)
            self._arena = self._made(nbytes)
        return self._arena.acquire()

    def _made(self, nbytes: int) -> Arena:
        place, (source, _, kind) = self._mesh.device, self.link
        arena = Arena(place, partial(place.buffer, nbytes, np.uint8), self._slots, name=f"{kind} of {source}")
        for slot in arena.slots:
            slot.ready = self._new_event()
        return arena


def _stream(device: Device, communicator: Communicator, name: str) -> Stream:
    """The stream of a link: a thread, if a call blocks its thread until it is done."""
    if not communicator.keeps_host:
        return device.new_stream(name)
    stream = device.host.new_stream(name)
    stream.submit(device.enter)
    return stream


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _nbytes(shape: Shape) -> int:
    return int(np.prod(shape[0], dtype=np.int64)) * np.dtype(shape[1]).itemsize


def _shape(array: Array, tag: str) -> Shape:
    if not array.flags.c_contiguous:
        raise ValueError(
            f"send {tag}: arrays must be contiguous, got shape {array.shape}, strides {array.strides}"
        )
    return tuple(array.shape), dtypes.name_of(array.dtype)


def _carried(array: Array) -> Array:
    """The array in one dimension, viewed as a type that communicators carry."""
    flat = array.reshape(-1)
    return flat if flat.dtype in dtypes.CODES else flat.view(_CARRIED[flat.dtype.itemsize])
