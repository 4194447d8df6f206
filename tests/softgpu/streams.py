"""CUDA's calls about streams, events and graphs, by CuPy's names."""

import itertools

from tests.softgpu import errors
from tests.softgpu.errors import failed
from tests.softgpu.graph import Capture, Executable
from tests.softgpu.scheduler import Scheduler, Stream, Work

_NO_TIMING = 2


class Point:
    """Where an event was recorded: a wait is for the last one that it had then."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.reached = stream, False

    def reach(self) -> None:
        self.reached = True


class Event:
    def __init__(self, timed: bool, device: int) -> None:
        self.timed, self.device = timed, device
        self.last: Point | None = None
        self.capture: tuple | None = None  # (Capture, the work before it), if recorded in one
        self.after: dict[Stream, int] = {}  # what comes before it: stream -> its latest work


class Wait(Work):
    """For a point that was recorded before."""

    def __init__(self, point: Point) -> None:
        self._point = point

    def ready(self) -> bool:
        return self._point.reached

    def blockers(self) -> list[Stream]:
        return [self._point.stream]

    def step(self) -> bool:
        return True


class Streams(Scheduler):
    """All streams are non-blocking: nothing but events orders them, and none waits for the null one."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._numbers = itertools.count(1)
        self._events: dict[int, Event] = {}
        self._graphs: dict[int, Capture] = {}
        self._executables: dict[int, Executable] = {}

    def handle(self) -> int:
        """A new one. None is used twice."""
        return 16 * next(self._numbers)

    def streamCreateWithPriority(self, flags, priority):
        assert flags == 1, "a stream that waits for the null stream"
        handle = self.handle()
        with self.lock:
            self.enter_context()
            self._streams[handle] = Stream(self.rank, handle, priority, self.device)
        return handle

    def streamDestroy(self, stream):
        """What is in it still runs."""
        with self.lock:
            self.stream(stream)
            del self._streams[stream]

    def streamSynchronize(self, stream):
        found = self.stream(stream)
        self.refuse_in_capture(found)
        self._until(lambda: not found.queue, found)
        self._met(found.now())

    def streamQuery(self, stream):
        found = self.stream(stream)
        self.refuse_in_capture(found)
        self.poll(found)
        if found.queue:
            return errors.NOT_READY
        self._met(found.now())
        return 0

    def deviceSynchronize(self):
        """Threads that are ranks have a GPU each."""
        rank = self.rank
        self.refuse_in_capture(*self.of(rank))
        self.check(rank)
        self.drain(rank)

    def of(self, rank) -> list[Stream]:
        """Its streams, those included that have been destroyed before they were through."""
        return [s for s in {*self._streams.values(), *self._working} if s.rank is rank]

    def drain(self, rank) -> None:
        """Wait for all streams of a rank."""
        streams = self.of(rank)
        self._until(lambda: not any(stream.queue for stream in streams), *streams)
        for stream in streams:
            self._met(stream.now())

    def refuse_in_capture(self, *streams: Stream) -> None:
        """The captures of these streams are lost, as all in which something is called that must not be."""
        captures = [stream.capture for stream in streams if stream.capture is not None]
        for capture in captures:
            capture.invalid = True
        if captures:
            raise failed(errors.CAPTURE_UNSUPPORTED)

    def _met(self, seen: dict[Stream, int]) -> None:
        """This rank's host knows that these are done."""
        _merge(self.rank.seen, seen)

    # -- events

    def eventCreateWithFlags(self, flags):
        handle = self.handle()
        self.enter_context()
        self._events[handle] = Event(not flags & _NO_TIMING, self.device)
        return handle

    def _event(self, handle: int) -> Event:
        self.enter_context()
        if handle not in self._events:
            raise failed(errors.INVALID_HANDLE, f"no event {handle}")
        return self._events[handle]

    def eventDestroy(self, event):
        """Who waits for it goes on waiting."""
        self._event(event)
        del self._events[event]

    def eventRecord(self, event, stream):
        with self.lock:
            found, where = self._event(event), self.stream(stream)
            if found.device != where.device:
                raise failed(errors.INVALID_HANDLE, "an event of one device recorded in a stream of another")
            found.after = where.now()
            if where.capture is not None:
                self.log.append(("record", stream, event))
                found.capture = where.capture, where.capture.before(where)
                return
            point = Point(where)
            self.issue("record", stream, Work(point.reach), event)
            found.capture, found.last = None, point

    def streamWaitEvent(self, stream, event):
        with self.lock:
            found, where = self._event(event), self.stream(stream)
            if found.capture is not None:
                self.log.append(("wait", stream, event))
                capture, before = found.capture
                capture.join(where, before)
            elif found.last is not None:
                if where.capture is not None:
                    where.capture.invalid = True
                    raise failed(errors.CAPTURE_ISOLATION)
                self.issue("wait", stream, Wait(found.last), event)
            _merge(where.seen, found.after)

    def eventQuery(self, event):
        found = self._captured_nowhere(event)
        if found.last is None:
            return 0
        self.poll(found.last.stream)
        if not found.last.reached:
            return errors.NOT_READY
        self._met(found.after)
        return 0

    def eventSynchronize(self, event):
        found = self._captured_nowhere(event)
        point = found.last
        if point is not None:
            self._until(lambda: point.reached, point.stream)
            self._met(found.after)

    def eventElapsedTime(self, start, stop):
        """The time means nothing."""
        for event in (start, stop):
            found = self._captured_nowhere(event)
            if found.last is None or not found.timed:
                raise failed(errors.INVALID_HANDLE)
            if not found.last.reached:
                raise failed(errors.NOT_READY)
        return 1.0

    def _captured_nowhere(self, event) -> Event:
        found = self._event(event)
        if found.capture is not None:
            found.capture[0].invalid = True
            raise failed(errors.CAPTURED_EVENT)
        return found

    # -- graphs

    def streamBeginCapture(self, stream):
        found = self.stream(stream)
        if not stream or found.capture is not None:
            raise failed(errors.CAPTURE_UNSUPPORTED)
        Capture(found)

    def streamIsCapturing(self, stream):
        capture = self.stream(stream).capture
        if capture is not None and capture.invalid:
            raise failed(errors.CAPTURE_INVALIDATED)
        return int(capture is not None)

    def streamEndCapture(self, stream):
        found = self.stream(stream)
        if found.capture is None or found.capture.origin is not found:
            raise failed(errors.CAPTURE_UNMATCHED)
        capture = found.capture
        with self.lock:
            capture.end()
        handle = self.handle()
        self._graphs[handle] = capture
        return handle

    def graphInstantiate(self, graph):
        handle = self.handle()
        self._executables[handle] = Executable(self._graphs[graph])
        return handle

    def graphLaunch(self, graph, stream):
        found = self.stream(stream)
        self.refuse_in_capture(found)  # CUDA would make a node of it
        with self.lock:
            self.issue("graph", stream, self._executables[graph].launch(self._random, found))

    def captured(self) -> list[Work]:
        """The work of all graphs that are not destroyed."""
        graphs = [*self._graphs.values(), *(each.capture for each in self._executables.values())]
        return [work for graph in graphs for work in graph.works()]

    def graphDestroy(self, graph):
        del self._graphs[graph]

    def graphExecDestroy(self, graph):
        """What was launched still runs."""
        del self._executables[graph]


def _merge(seen: dict[Stream, int], more: dict[Stream, int]) -> None:
    for stream, number in more.items():
        seen[stream] = max(number, seen.get(stream, 0))
