"""CUDA as CuPy calls it: memory of the host, streams that run late, events, captures, kernels that compute.

Methods have the names of CuPy's functions (cupy_backends.cuda.api); plug.py puts them in their place.

Nothing runs when it is issued. It runs when the host waits (for a stream, an event, a copy to memory that is
not pinned, memory that is given back), and then as far as it must, in an order that the events allow. `mode`
says which of all these orders:

late            only what is waited for, and what that waits for
side first      streams of high priority as far as they can go, the others when nothing else can
compute first   the other way round
random          any stream that can go on, drawn by `seed`
at once         when it is issued

Memory that is new or given back holds 0xFF bytes, which are NaN in every floating type. So a wait that is
missing shows as other bits or as NaN.
"""

import ctypes
import itertools
import json
import random
import threading
import time
from bisect import bisect
from collections import deque

import numpy as np

from tests.cuda.emulator import runtime
from tests.softgpu.graph import Capture, Launch

MODES = ("late", "side first", "compute first", "random", "at once")
PATIENCE = 60.0  # seconds in which nobody issues or does anything, after which a wait is a deadlock
_ATTRIBUTES = {1: 1024, 16: 132, 75: 9, 76: 0}  # threads of a block, multiprocessors, compute capability 9.0
_VERSION = 13000
_NOT_READY = 600
_SHARED = 227 << 10  # bytes that a block may have
_PAGE = 2 << 20


class _Here(threading.local):
    """Of a thread: which rank it is. (The identity of a thread is used again when it has ended.)"""

    def __init__(self) -> None:
        self.rank = object()


_here = _Here()


class Point:
    """Where an event was recorded: a wait is for the last one that it had then."""

    def __init__(self, stream: "Stream") -> None:
        self.stream, self.reached = stream, False

    def reach(self) -> None:
        self.reached = True


class Event:
    def __init__(self) -> None:
        self.last: Point | None = None
        self.capture: tuple | None = None  # (Capture, the work before it), if recorded in one


class Work:
    """One thing that a stream does, when its turn comes."""

    def __init__(self, run) -> None:
        self._run = run

    def ready(self) -> bool:
        return True

    def blockers(self) -> list:
        """Streams that have to go on before this is ready."""
        return []

    def step(self) -> bool:
        """Do it, or some of it; whether all is done."""
        self._run()
        return True


class Wait(Work):
    """For a point that was recorded before."""

    def __init__(self, point: Point) -> None:
        self._point = point

    def ready(self) -> bool:
        return self._point.reached

    def blockers(self) -> list:
        return [self._point.stream]

    def step(self) -> bool:
        return True


class Stream:
    """Work in order. priority: CUDA's, below 0 for what should go first. rank: the thread that made it."""

    def __init__(self, handle: int, priority: int) -> None:
        self.handle, self.priority, self.rank = handle, priority, _here.rank
        self.queue: deque[Work] = deque()
        self.capture: Capture | None = None


class Block:
    """Memory of the device, or of the host if it is pinned."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.pinned, self.rank = size, pinned, _here.rank
        boundary = _PAGE if size >= _PAGE else 512
        self._bytes = np.empty(size + boundary, np.uint8)
        self.address = self._bytes.ctypes.data + -self._bytes.ctypes.data % boundary
        self.poison()

    def poison(self) -> None:
        """Of much, the ends: what nobody touches should take no memory here."""
        end = min(self.size, _PAGE)
        ctypes.memset(self.address, 0xFF, end)
        ctypes.memset(self.address + self.size - end, 0xFF, end)


class CUDA:
    """One GPU. `log`: (what, stream, detail) of all that was issued."""

    def __init__(self, mode: str = "late", seed: int = 0) -> None:
        self.choose(mode, seed)
        self.log: list[tuple] = []
        self.lock = threading.Condition(threading.RLock())
        self._numbers = itertools.count(1)
        self._blocks: list[Block] = []  # by address
        self._addresses: list[int] = []
        self._streams = {0: Stream(0, 0)}
        self._events: dict[int, Event] = {}
        self._kernels: dict[int, Kernel] = {}
        self._modules: dict[int, dict] = {}
        self._graphs: dict[int, Capture] = {}
        self._error: Exception | None = None
        self._stepping = False
        self._progress = time.monotonic()  # when anything was last issued or done
        self._given_back: list[Block] = []  # and not taken back yet

    def choose(self, mode: str, seed: int = 0) -> None:
        """How streams take turns from now on."""
        assert mode in MODES, mode
        self.mode, self._random = mode, random.Random(seed)

    def _handle(self) -> int:
        return 16 * next(self._numbers)

    # -- streams

    def issue(self, what: str, stream: int, work: Work, detail=None) -> None:
        """Put work to the end of a stream, or into the graph that it is captured in."""
        with self.lock:
            self.log.append((what, stream, detail))
            found, self._progress = self._streams[stream], time.monotonic()
            if found.capture is not None:
                found.capture.add(found, work)
                return
            found.queue.append(work)
            self.lock.notify_all()
            if self.mode == "at once" and not self._stepping:
                self._until(lambda: work not in found.queue, found)

    def _until(self, done, *targets: Stream) -> None:
        """Let streams go on until `done()`: at least these must. Raises RuntimeError where nothing can."""
        with self.lock:
            while not done():
                stream = self._next(targets)
                if stream is None:
                    # Another rank, a thread, has not issued its part yet.
                    self.lock.wait(0.05)
                    if time.monotonic() - self._progress > PATIENCE:
                        raise RuntimeError("a stream waits for what nobody does")
                    continue
                self._step(stream)
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def _step(self, stream: Stream) -> None:
        self._stepping, self._progress = True, time.monotonic()
        try:
            finished = stream.queue[0].step()
        except Exception as error:
            self._error, finished = error, True
        self._stepping = False
        if finished:
            stream.queue.popleft()
        self.lock.notify_all()

    def _next(self, targets: tuple) -> Stream | None:
        """The stream whose turn it is; None if none can go on."""
        if self.mode in ("late", "at once"):
            able = self._needed(targets)
        else:
            able = [s for s in self._streams.values() if s.queue and s.queue[0].ready()]
            if self.mode != "random":
                side = [s for s in able if s.priority < 0]
                compute = [s for s in able if s.priority >= 0]
                able = (side or compute) if self.mode == "side first" else (compute or side)
        return self._random.choice(able) if able else None

    def _needed(self, targets: tuple) -> list[Stream]:
        """Of these streams and those that they wait for, the ones that can go on."""
        found, seen, stack = [], set(), list(targets)
        while stack:
            stream = stack.pop()
            if stream in seen or not stream.queue:
                continue
            seen.add(stream)
            if stream.queue[0].ready():
                found.append(stream)
            else:
                stack += stream.queue[0].blockers()
        return found

    def streamCreateWithPriority(self, flags, priority):
        assert flags == 1, "a stream that waits for the null stream"
        handle = self._handle()
        self._streams[handle] = Stream(handle, priority)
        return handle

    def streamDestroy(self, stream):
        """What is in it still runs."""

    def streamSynchronize(self, stream):
        self._refuse_in_capture(stream)
        found = self._streams[stream]
        self._until(lambda: not found.queue, found)

    def streamQuery(self, stream):
        self._refuse_in_capture(stream)
        return _NOT_READY if self._streams[stream].queue else 0

    def deviceSynchronize(self):
        self._synchronize(_here.rank)

    def _synchronize(self, rank: object) -> None:
        """Wait for all streams of a rank: threads that are ranks have a GPU each."""
        streams = [stream for stream in self._streams.values() if stream.rank == rank]
        self._refuse_in_capture(*(stream.handle for stream in streams))
        self._until(lambda: not any(stream.queue for stream in streams), *streams)

    def _refuse_in_capture(self, *streams):
        if any(self._streams[stream].capture is not None for stream in streams):
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    # -- events

    def eventCreateWithFlags(self, flags):
        handle = self._handle()
        self._events[handle] = Event()
        return handle

    def eventDestroy(self, event):
        """Who waits for it goes on waiting."""

    def eventRecord(self, event, stream):
        with self.lock:
            found, where = self._events[event], self._streams[stream]
            if where.capture is not None:
                self.log.append(("record", stream, event))
                found.capture = where.capture, where.capture.before(where)
                return
            found.capture, found.last = None, Point(where)
            self.issue("record", stream, Work(found.last.reach), event)

    def streamWaitEvent(self, stream, event):
        with self.lock:
            found, where = self._events[event], self._streams[stream]
            if found.capture is None:
                if where.capture is not None and found.last is not None:
                    raise RuntimeError("cudaErrorStreamCaptureIsolation")
                if found.last is not None:
                    self.issue("wait", stream, Wait(found.last), event)
                return
            self.log.append(("wait", stream, event))
            capture, before = found.capture
            if capture.ended:
                raise RuntimeError("cudaErrorCapturedEvent")
            capture.join(where, before)

    def eventQuery(self, event):
        with self.lock:
            point = self._captured_nowhere(event).last
            if point is not None and not point.reached and self.mode != "late":
                stream = self._next((point.stream,))  # somebody who asks again and again sees an end
                if stream is not None:
                    self._step(stream)
            return 0 if point is None or point.reached else _NOT_READY

    def eventSynchronize(self, event):
        point = self._captured_nowhere(event).last
        if point is not None:
            self._until(lambda: point.reached, point.stream)

    def eventElapsedTime(self, start, stop):
        self.eventSynchronize(start)
        self.eventSynchronize(stop)
        return 1.0

    def _captured_nowhere(self, event) -> Event:
        found = self._events[event]
        if found.capture is not None:
            raise RuntimeError("cudaErrorCapturedEvent")
        return found

    # -- graphs

    def streamBeginCapture(self, stream):
        assert stream, "the null stream can't be captured"
        found = self._streams[stream]
        if found.capture is not None:
            raise RuntimeError("cudaErrorIllegalState")
        Capture(found)

    def streamIsCapturing(self, stream):
        return int(self._streams[stream].capture is not None)

    def streamEndCapture(self, stream):
        capture = self._streams[stream].capture
        assert capture.origin is self._streams[stream]
        capture.end()
        handle = self._handle()
        self._graphs[handle] = capture
        return handle

    def graphInstantiate(self, graph):
        return graph

    def graphLaunch(self, graph, stream):
        self.issue("graph", stream, Launch(self._graphs[graph], self._random))

    # -- memory

    def malloc(self, size):
        return self._allocate(size, pinned=False)

    def hostAlloc(self, size, flags):
        return self._allocate(size, pinned=True)

    def _allocate(self, size, pinned):
        block = Block(max(1, size), pinned)
        with self.lock:
            place = bisect(self._addresses, block.address)
            self._addresses.insert(place, block.address)
            self._blocks.insert(place, block)
        return block.address

    def free(self, address):
        """Waits for all streams of this rank, as CUDA does, and then takes back what it has given so far.

        The garbage collector may come by in another rank's thread, which must not wait for this one.
        """
        with self.lock:
            block = self._block(address)
            self._given_back.append(block)
            if self._stepping or block.rank is not _here.rank:
                return
        if not any(stream.capture is not None for stream in self._streams.values()):
            self._synchronize(block.rank)
        with self.lock:
            for block in [block for block in self._given_back if block.rank is _here.rank]:
                self._given_back.remove(block)
                place = self._addresses.index(block.address)
                del self._addresses[place], self._blocks[place]
                block.poison()

    freeHost = free

    def _block(self, address) -> Block | None:
        """The one with this address in it; None for memory of the host that is not pinned."""
        place = bisect(self._addresses, address) - 1
        block = self._blocks[place] if place >= 0 else None
        return block if block is not None and address < block.address + block.size else None

    def memcpyAsync(self, target, source, size, kind, stream):
        """Memory that is not pinned is read when the copy is issued, and written before the call returns."""
        with self.lock:
            source_block, target_block = self._block(source), self._block(target)
        for address, block in ((source, source_block), (target, target_block)):
            assert block is None or address + size <= block.address + block.size, "a copy beyond the memory"
        if source_block is None:
            if self._streams[stream].capture is not None:
                raise RuntimeError("cudaErrorStreamCaptureUnsupported: pageable memory in a capture")
            kept = ctypes.create_string_buffer(ctypes.string_at(source, size), size)
            self.issue("copy", stream, Work(lambda: ctypes.memmove(target, kept, size)))
        else:
            self.issue("copy", stream, Work(lambda: ctypes.memmove(target, source, size)))
        if target_block is None:
            self.streamSynchronize(stream)

    def memcpy(self, target, source, size, kind):
        self.memcpyAsync(target, source, size, kind, 0)
        self.streamSynchronize(0)

    def memsetAsync(self, target, value, size, stream):
        self.issue("set", stream, Work(lambda: ctypes.memset(target, value, size)))

    def poison(self, address, size, stream):
        """Memory that a pool has taken back, which its stream alone may give out again."""
        found = self._streams[stream]
        if found.capture is None:
            self.issue("poison", stream, Work(lambda: ctypes.memset(address, 0xFF, size)))

    def memGetInfo(self):
        return 1 << 37, 1 << 37

    def pointerGetMemoryType(self, address):
        return 0

    # -- the device

    def getDeviceCount(self):
        return 1

    def getDevice(self):
        return 0

    def setDevice(self, index):
        assert index == 0

    def deviceGetAttribute(self, attribute, index):
        return _ATTRIBUTES.get(attribute, 65536)

    def deviceCanAccessPeer(self, index, peer):
        return 1

    def runtimeGetVersion(self):
        return _VERSION

    def driverGetVersion(self):
        return _VERSION

    def _nothing(self, *args):
        """What has no effect here."""

    _ensure_context = _deviceEnsurePeerAccess = check_status = ctxSetCurrent = _nothing
    graphDestroy = graphExecDestroy = moduleUnload = _nothing

    # -- kernels

    def moduleLoadData(self, code):
        """`code`: what compiler.py made, in the place of a cubin."""
        handle = self._handle()
        self._modules[handle] = json.loads(bytes(code)[4:].decode())
        return handle

    def moduleGetFunction(self, module, name):
        name = name.decode() if isinstance(name, bytes) else name
        runtime()  # which the library needs
        library = ctypes.CDLL(self._modules[module]["library"])
        handle = self._handle()
        self._kernels[handle] = Kernel(library, name)
        return handle

    def funcGetAttribute(self, attribute, function):
        return 64

    def funcSetAttribute(self, function, attribute, value):
        assert attribute == 8 and value <= _SHARED
        self._kernels[function].shared = value

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return 1

    def launchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        kernel, grid = self._kernels[function], (gx, gy, gz)
        assert min(grid) > 0 and gx < 2**31 and max(gy, gz) < 65536, grid
        assert 0 < bx <= 1024 and (by, bz) == (1, 1), (bx, by, bz)
        assert shared <= kernel.shared, f"{kernel.name}: {shared} bytes of shared memory were not asked for"
        arguments = kernel.arguments(parameters)
        self.issue("launch", stream, Work(lambda: kernel.run(grid, bx, shared, arguments)), kernel.name)


class Kernel:
    """A function of a library that compiler.py made."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name, self.shared = name, 48 << 10
        self._call = getattr(library, f"call_{name}")
        sizes = (ctypes.c_size_t * 64)()
        self._sizes = sizes[: getattr(library, f"sizes_{name}")(sizes)]

    def arguments(self, parameters: int) -> tuple:
        """A copy of what a launch is given, which may change after it."""
        pointers = (ctypes.c_void_p * len(self._sizes)).from_address(parameters) if self._sizes else ()
        kept = [
            ctypes.create_string_buffer(ctypes.string_at(pointer, size), size)
            for pointer, size in zip(pointers, self._sizes, strict=True)
        ]
        return kept, (ctypes.c_void_p * max(1, len(kept)))(*map(ctypes.addressof, kept))

    def run(self, grid, threads, shared, arguments) -> None:
        message = ctypes.create_string_buffer(200)
        where = (ctypes.c_uint * 3)(*grid)
        if runtime().shim_launch(self._call, arguments[1], where, threads, ctypes.c_size_t(shared), message):
            raise RuntimeError(f"cudaErrorLaunchFailure: {self.name}: {message.value.decode()}")
