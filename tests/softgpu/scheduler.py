"""Who goes on when: ranks, their streams, and work that waits for its turn.

Nothing runs when it is issued. It runs when the host waits, and then as far as it must, in an order that
events allow. `mode` says which of all these orders:

late            only what is waited for, and what that waits for
side first      streams of high priority as far as they can go, the others when nothing else can
compute first   the other way round
random          any stream that can go on, drawn by `seed`
at once         when it is issued
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable

from tests.softgpu.errors import INVALID_HANDLE, failed
from tests.softgpu.graph import Capture

MODES = ("late", "side first", "compute first", "random", "at once")
PATIENCE = 60.0  # seconds in which nobody issues or does anything, after which a wait is a deadlock
_POLLS = 4  # somebody who asks again and again sees an end


class Deadlock(RuntimeError):
    """Nobody can go on, and somebody waits."""


class Rank:
    """What has a GPU: a thread, or a process. An error of its work stays, and each later call has it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.thread = threading.current_thread()
        self.nulls: dict[int, Stream] = {}  # the null stream of each device
        self.seen: dict[Stream, int] = {}  # what its host has waited for: stream -> its latest work


class Stream:
    """Work in order. priority: CUDA's, below 0 for what should go first."""

    def __init__(self, rank: Rank, handle: int, priority: int, device: int) -> None:
        self.rank, self.handle, self.priority, self.device = rank, handle, priority, device
        self.queue: deque[Work] = deque()
        self.capture: Capture | None = None
        self.issued = 0  # how much work so far
        self.seen: dict[Stream, int] = {}  # what its next work comes after: stream -> its latest work
        self.groups: Counter = Counter()  # of ranks: how much of its work is a call with them

    def now(self) -> dict["Stream", int]:
        """All that comes before what would be issued next."""
        return {**self.seen, self: self.issued}

    def comes_after(self, stream: "Stream", number: int) -> bool:
        """Whether its next work must wait for a piece of work in a stream."""
        return stream is self or max(seen.get(stream, 0) for seen in (self.seen, self.rank.seen)) >= number


class Work:
    """One thing that a stream does, when its turn comes."""

    groups: Iterable[Hashable] = ()  # of ranks that must all come to it

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def fresh(self) -> "Work":
        """For a replay: one that has not begun."""
        return self

    def ready(self) -> bool:
        return True

    def blockers(self) -> list[Stream]:
        """Streams that have to go on before this is ready."""
        return []

    def step(self) -> bool:
        """Do it, or some of it; whether all is done."""
        self._run()
        return True


class Scheduler:
    """`log`: (what, stream, detail) of all that was issued. processes: all threads are one rank.

    contexts: the devices on which this process has one, which takes hundreds of MB on a real GPU.
    """

    def __init__(self, mode: str = "late", seed: int = 0, processes: bool = False) -> None:
        self.choose(mode, seed)
        self.log: list[tuple] = []
        self.lock = threading.Condition(threading.RLock())
        self.processes = processes
        self.contexts: set[int] = set()
        self._pause = 0.001 if processes else 0.05  # other processes do not wake this one
        self._only = Rank()
        self._here = threading.local()
        self._streams: dict[int, Stream] = {}
        self._working: dict[Stream, None] = {}  # those with work, destroyed ones included
        self._busy = False  # a garbage collection that comes by now must not let anything run
        self._polls = 0
        self._progress = time.monotonic()  # when anything was last issued or done
        if processes:
            threading.Thread(target=self._serve, daemon=True).start()

    def choose(self, mode: str, seed: int = 0) -> None:
        """How streams take turns from now on."""
        assert mode in MODES, mode
        self.mode, self._random = mode, random.Random(seed)

    @property
    def rank(self) -> Rank:
        """Of this thread. (Its identity is used again when it has ended.)"""
        if self.processes:
            return self._only
        if not hasattr(self._here, "rank"):
            self._here.rank = Rank()
        return self._here.rank

    @property
    def device(self) -> int:
        """The current one of this thread; 0 in a thread that has not chosen one."""
        return getattr(self._here, "device", 0)

    def enter_context(self) -> None:
        """What CUDA's runtime does first in each call that needs the device."""
        self.contexts.add(self.device)

    def stream(self, handle: int) -> Stream:
        """Raises CUDARuntimeError where it has been destroyed."""
        self.enter_context()
        if handle == 0:
            return self.null()
        if handle not in self._streams:
            raise failed(INVALID_HANDLE, f"no stream {handle}")
        return self._streams[handle]

    def null(self) -> Stream:
        """The null stream of this thread's device."""
        nulls = self.rank.nulls
        if self.device not in nulls:
            nulls[self.device] = Stream(self.rank, 0, 0, self.device)
        return nulls[self.device]

    def working(self) -> list[Stream]:
        return list(self._working)

    def check(self, rank: Rank) -> None:
        """Raise what has gone wrong in its work, now and ever after."""
        if rank.error is not None:
            raise rank.error.with_traceback(None)

    def issue(self, what: str, stream: int, work: Work, detail: object = None) -> None:
        """Put work to the end of a stream, or into the graph that it is captured in."""
        with self.lock:
            found = self.stream(stream)
            self.check(found.rank)
            self.log.append((what, stream, detail))
            self._progress = time.monotonic()
            found.issued += 1
            if found.capture is not None:
                found.capture.add(found, work)
                return
            found.queue.append(work)
            found.groups.update(work.groups)
            self._working[found] = None
            self.lock.notify_all()
            if self.mode == "at once" and not self._busy:
                self._until(lambda: work not in found.queue, found)

    def _until(self, done: Callable[[], bool], *targets: Stream) -> None:
        """Let streams go on until `done()`: at least these must. Raises Deadlock where nothing can."""
        with self.lock:
            while True:
                for rank in {stream.rank for stream in targets}:
                    self.check(rank)
                if done():
                    return
                if not self._turn(targets):
                    # Another rank has not issued its part yet.
                    self.lock.wait(self._pause)
                    if time.monotonic() - self._progress > PATIENCE:
                        raise Deadlock("a stream waits for what nobody does")

    def poll(self, stream: Stream) -> None:
        """The host asks whether something in a stream is done, and does not wait."""
        with self.lock:
            self.check(stream.rank)
            self._polls += 1
            if self.mode != "late" or self._polls % _POLLS == 0:
                self._turn((stream,))

    def _serve(self) -> None:
        """What other processes wait for goes on, whatever the host does."""
        while True:
            time.sleep(self._pause)
            with self.lock:
                for stream in self.working():
                    if any(group.awaited() for group in list(stream.groups)):
                        self._turn((stream,))

    def _turn(self, targets: Iterable[Stream]) -> bool:
        """Let one stream take a step; whether one could."""
        before, self._busy = self._busy, True
        try:
            stream = self._next(targets)
            if stream is None:
                return False
            self._step(stream)
        finally:
            self._busy = before
        return True

    def _step(self, stream: Stream) -> None:
        self._progress, work = time.monotonic(), stream.queue[0]
        try:
            finished = work.step()
        except Exception as error:
            stream.rank.error = error
            for other in self.working():
                if other.rank is stream.rank:
                    self._leave(other)
        else:
            if finished:
                stream.queue.popleft()
                stream.groups -= Counter(work.groups)
            if not stream.queue:
                self._leave(stream)
        self.lock.notify_all()

    def _leave(self, stream: Stream) -> None:
        stream.queue.clear()
        stream.groups.clear()
        self._working.pop(stream, None)

    def _next(self, targets: Iterable[Stream]) -> Stream | None:
        """The stream whose turn it is; None if none can go on."""
        if self.mode in ("late", "at once"):
            able = self._needed(targets)
        else:
            able = [stream for stream in self.working() if stream.queue and stream.queue[0].ready()]
            if self.mode != "random":
                side = [stream for stream in able if stream.priority < 0]
                compute = [stream for stream in able if stream.priority >= 0]
                able = (side or compute) if self.mode == "side first" else (compute or side)
        return self._random.choice(able) if able else None

    def _needed(self, targets: Iterable[Stream]) -> list[Stream]:
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
