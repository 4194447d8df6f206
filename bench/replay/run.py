"""Runs a plan: streams that are threads, one communicator for each group and stream, buffers used again.

A stream runs its items in order. Events make it wait for items of other streams, as in the trace.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from shardrt.comm import CollectiveCounter, Communicator
from shardrt.comm.objects import all_gather_object
from shardrt.device import Device
from shardrt.dtypes import LOW, storage

from .plan import Item, Key, Plan
from .trace import COMPUTE

Array = Any
ALONE, GAPS, FILLED = MODES = ("alone", "gaps", "compute")
_SIDE, _SMALL = 128, 32  # of the matrices that fill compute in, and of those of its last microseconds
_SOON = 100e-6  # seconds before an end in which a thread no longer sleeps


@dataclass(frozen=True)
class Round:
    """Seconds from the round's start, by item: when it began and ended on this rank; nan if it did not run.

    flops: of the matmuls that filled compute in. seconds: of all of it.
    """

    began: np.ndarray
    ended: np.ndarray
    flops: float
    seconds: float


class Player:
    """One rank's streams, communicators and buffers for a plan. Making one is collective.

    keys: the communicators of all ranks' plans, in one order on all ranks.
    """

    def __init__(
        self, plan: Plan, keys: Sequence[Key], base: Communicator, control: Communicator, device: Device
    ) -> None:
        self.plan, self.control, self.device = plan, control, device
        self._watch = _Watch(len(plan.items))
        self.communicators: dict[Key, Communicator] = {}
        for key in keys:
            inside = base.rank in key.members
            rank = key.members.index(base.rank) if inside else 0
            made = base.split(0 if inside else None, rank)
            if inside:
                self.communicators[key] = made
                _Stopwatch(made, self._watch)
        self.streams = {name: device.new_stream(f"replay {name}") for name in plan.streams}
        self._matmuls = {name: _Matmuls(device) for name in plan.streams}
        self._late = dict.fromkeys(
            plan.streams, (0.0, 0.0)
        )  # when a stream last computed, and how late it was
        self._events = [device.new_event() if item.awaited else None for item in plan.items]
        sizes = needs(plan)  # the same on all ranks of a group, but for parts that differ
        self.buffers = {
            key: Buffers(self.communicators[key], device, key.stream == COMPUTE, *sizes.get(key, (0, 0, 0)))
            for key in keys
            if key in self.communicators
        }
        self.rate, self.core_rate = self._rates()

    def close(self) -> None:
        """End the streams' threads and free the communicators. Collective."""
        for stream in self.streams.values():
            stream.synchronize()
            stream.close()
        for communicator in self.communicators.values():
            communicator.close()

    def zero(self) -> None:
        """Put zeros into all buffers: sums of sums would run out of their type."""
        for buffers in self.buffers.values():
            for array in (buffers.gathered, buffers.source, buffers.target):
                array.fill(0)
        self.control.barrier(stream=self.device.current_stream)

    def play(self, mode: str, work: bool = False) -> Round:
        """All items once. Collective.

        work: FILLED computes as much as the trace did, not for as long.
        """
        watch = self._watch
        watch.reset()
        gate = threading.Event()
        for stream in self.streams.values():
            stream.submit(gate.wait)  # all streams begin together, when all is submitted
        for place, item in enumerate(self.plan.items):
            stream = self.streams[item.stream]
            for wait in item.waits:
                stream.wait(self._events[wait])
            if mode != ALONE and item.idle > 0:
                stream.submit(_sleep, item.idle)
            if item.call != COMPUTE:
                watch.item = place
                issue(item, self.communicators[item.key], self.buffers[item.key], stream)
            elif mode != ALONE and (item.seconds or item.flops):
                stream.submit(self._compute, place, item, mode, work)
            if item.awaited:
                stream.record(self._events[place])
        self.control.barrier(stream=self.device.current_stream)
        watch.start = start = time.perf_counter()
        gate.set()
        for stream in self.streams.values():
            stream.synchronize()
        seconds = time.perf_counter() - start
        return Round(watch.began.copy(), watch.ended.copy(), watch.flops, seconds)

    def _compute(self, place: int, item: Item, mode: str, work: bool) -> None:
        begin = time.perf_counter()
        if mode == FILLED and work:
            flops = item.core * self.core_rate + item.flops
            self._watch.flops += self._matmuls[item.stream].operations(flops)
            return self._watch.note(place, begin, time.perf_counter())
        before, late = self._late[item.stream]
        if begin - before > _SOON:  # it has waited since
            late = 0.0
        end = begin + item.seconds + item.flops / self.core_rate - late
        if mode == FILLED:
            used = time.thread_time() + item.core + item.flops / self.core_rate
            self._watch.flops += self._matmuls[item.stream].until(end, used)
        _sleep_until(end)  # also for what the trace's thread had no core
        now = time.perf_counter()
        self._late[item.stream] = now, max(0.0, now - end)
        return self._watch.note(place, begin, now)

    def _rates(self) -> tuple[float, float]:
        """Operations per second of the matmuls that fill compute in: of all ranks at once, and of a core.

        Collective.
        """
        matmuls = _Matmuls(self.device)
        matmuls.until(time.perf_counter() + 0.05)
        self.control.barrier(stream=self.device.current_stream)
        begin, used = time.perf_counter(), time.thread_time()
        flops = matmuls.until(begin + 0.2)
        return flops / (time.perf_counter() - begin), flops / (time.thread_time() - used)


class _Watch:
    """When items began and ended, in seconds from `start`. Each item is written by one stream."""

    def __init__(self, items: int) -> None:
        self.began, self.ended = np.full(items, np.nan), np.full(items, np.nan)
        self.start, self.flops, self.item = 0.0, 0.0, 0

    def reset(self) -> None:
        self.began.fill(np.nan)
        self.ended.fill(np.nan)
        self.flops = 0.0

    def note(self, item: int, began: float, ended: float) -> None:
        if np.isnan(self.began[item]):
            self.began[item] = began - self.start
        self.ended[item] = ended - self.start


class _Stopwatch(CollectiveCounter):
    """Notes when the calls of a communicator ran, for the item that is being submitted."""

    def __init__(self, communicator: Communicator, watch: _Watch) -> None:
        super().__init__(communicator)
        self._watch = watch

    def intercept(self, call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        watch, item = self._watch, self._watch.item

        def timed(*args: Any) -> None:
            began = time.perf_counter()
            run(*args)
            watch.note(item, began, time.perf_counter())

        return timed


class _Matmuls:
    """Matmuls of the library's own kernel on matrices that stay in a cache."""

    def __init__(self, device: Device) -> None:
        self._kernel = device.kernels.matmul.matmul
        self._large, self._small = (
            [device.zeros((side, side), np.float32) for _ in range(3)] for side in (_SIDE, _SMALL)
        )

    def until(self, end: float, used: float = inf) -> float:
        """Multiply until that time of the clock, or of this thread's; gives the number of operations."""
        now, took, flops = time.perf_counter(), 0.0, 0.0
        while now < end and time.thread_time() < used:
            side, matrices = (_SIDE, self._large) if end - now > took else (_SMALL, self._small)
            self._kernel(*matrices)
            flops += 2.0 * side**3
            before, now = now, time.perf_counter()
            took = now - before if side == _SIDE else took
        return flops

    def operations(self, flops: float) -> float:
        """Multiply that many operations, to the next matmul; gives their number."""
        large, rest = divmod(flops, 2.0 * _SIDE**3)
        for matrices, count in ((self._large, int(large)), (self._small, round(rest / (2.0 * _SMALL**3)))):
            for _ in range(count):
                self._kernel(*matrices)
        return flops


def _sleep(seconds: float) -> None:
    _sleep_until(time.perf_counter() + seconds)


def _sleep_until(end: float) -> None:
    seconds = end - time.perf_counter()
    if seconds > _SOON:
        time.sleep(seconds - _SOON)
    while time.perf_counter() < end:
        time.sleep(0)


class Buffers:
    """The memory of one communicator's calls, each part as large as its largest call needs. Collective.

    gathered: of all_gathers, shared where ranks share memory. source: what other calls send, or change in
    place. target: what comes out of them. ordinary: it is no memory of the communicator's, but such as
    activations have, which the stream that computes sends.
    """

    def __init__(
        self,
        communicator: Communicator,
        device: Device,
        ordinary: bool,
        gathered: int,
        source: int,
        target: int,
    ) -> None:
        def make(nbytes: int, shared: bool) -> Array:
            if ordinary:
                return device.buffer(nbytes, np.uint8)
            return communicator.allocate(nbytes, np.uint8, shared=shared)

        self.gathered = make(gathered, True)
        self.source, self.target = make(source, False), make(target, False)

    def of(self, item: Item) -> tuple[Array, Array]:
        """(source, target) of a call, of its type; one and the same where it works in place."""
        kind, out = storage(item.dtype), storage(item.dtype)
        if item.call == "all_gather":
            array = self.gathered[: item.nbytes].view(kind)
            return array, array
        source = self.source[: item.nbytes].view(kind)
        if item.call in _IN_PLACE:
            return source, source
        if item.call == "reduce_scatter" and item.dtype in LOW:
            out = np.dtype(np.float32)
        target = self.target.view(out)
        if item.sent:
            return source[: sum(item.sent)], target[: sum(item.received)]
        return source, target


_IN_PLACE = ("all_reduce", "reduce", "broadcast", "send", "recv", "gather", "scatter")


def needs(plan: Plan) -> dict[Key, tuple[int, int, int]]:
    """Bytes of each communicator's buffers: gathered, source, target."""
    found: dict[Key, tuple[int, int, int]] = {}
    for _, item in plan.communication:
        ranks, nbytes = len(item.key.members), -(-item.nbytes // 64) * 64
        if item.call == "all_gather":
            own = nbytes, 0, 0
        elif item.call == "reduce_scatter":
            own = 0, nbytes, -(-nbytes // ranks) * (2 if item.dtype in LOW else 1)
        else:
            own = 0, nbytes, 0 if item.call in _IN_PLACE else nbytes
        found[item.key] = tuple(map(max, found.get(item.key, (0, 0, 0)), own))
    # Views of float64 need whole elements.
    return {key: tuple(-(-size // 64) * 64 for size in sizes) for key, sizes in found.items()}


def issue(item: Item, communicator: Communicator, buffers: Buffers, stream: Any) -> None:
    """Submit a call to its stream.

    There is no reduce: an all_reduce runs in its place. A gather and a scatter are a message for each rank.
    """
    if item.call == "barrier":
        return communicator.barrier(stream=stream)
    source, target = buffers.of(item)
    if item.call == "all_gather":
        communicator.all_gather(source, stream=stream)
    elif item.call == "reduce_scatter":
        kind = item.dtype if item.dtype in LOW else ""
        target = target[: source.size // communicator.size]
        communicator.reduce_scatter(target, source, kind=kind, stream=stream)
    elif item.call in ("all_reduce", "reduce"):
        communicator.all_reduce(source, stream=stream)
    elif item.call == "broadcast":
        communicator.broadcast(source, root=item.root, stream=stream)
    elif item.call == "all_to_all":
        parts = {"sent": item.sent, "received": item.received} if item.sent else {}
        communicator.all_to_all(target if parts else target[: source.size], source, **parts, stream=stream)
    elif item.call == "send":
        communicator.send(source, peer=item.peer, stream=stream)
    elif item.call == "recv":
        communicator.recv(source, peer=item.peer, stream=stream)
    else:
        _by_messages(item, communicator, source, stream)
    return None


def _by_messages(item: Item, communicator: Communicator, buffer: Array, stream: Any) -> None:
    """A gather or a scatter: the root's buffer is whole, and the others' slices are in their places of it."""
    slices = np.split(buffer, communicator.size)
    rank, root, gathers = communicator.rank, item.root, item.call == "gather"
    for peer in range(communicator.size) if rank == root else [rank]:
        if peer != root:
            call = communicator.recv if gathers == (rank == root) else communicator.send
            call(slices[peer], peer=peer if rank == root else root, stream=stream)


def refuse_without_memory(plan: Plan, control: Communicator, available: int) -> None:
    """Raise ValueError if the buffers of all ranks here need more memory than there is. Collective."""
    own = needs(plan)
    split = [
        sum(sizes[0] / len(key.members) + sizes[1] + sizes[2] for key, sizes in own.items()),
        max((item.nbytes for _, item in plan.communication if item.call == "send"), default=0),
    ]
    needed = int(sum(map(sum, all_gather_object(control, split))))
    if needed > available:
        raise ValueError(
            f"the buffers of the {control.size} ranks need {needed / 1e9:.1f} GB, and "
            f"{available / 1e9:.1f} GB are free here"
        )
