"""Records what ran when in each stream of a rank, for traces, pictures and measures of overlap.

Without an active `record()` each function only tests for None. Times are seconds of one clock, `now()`.
Ranks that are threads of one process share a recording; for traces run ranks as processes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from shardrt.device import arena

__all__ = ["Passed", "Recording", "Span", "add", "now", "record_all", "recording", "span"]


@dataclass(frozen=True)
class Span:
    """`label` ran in `stream` from `start` to `stop` (seconds)."""

    stream: str
    label: str
    start: float
    stop: float


@dataclass(frozen=True)
class Passed:
    """A stream reached a recorded point: its own (`waited` False), or a point that it waited for.

    The record and all waits for it have the same number.

    Attributes:
        mark: number of the point.
    """

    stream: str
    mark: int
    time: float
    waited: bool


@dataclass(frozen=True)
class Count:
    """From `time` on, `value` slots of the arena `name` are in use. `owner` identifies the arena."""

    name: str
    owner: int
    time: float
    value: int


@dataclass(frozen=True)
class Recording:
    """All records, each list in the order of their ends."""

    spans: list[Span] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)


_recording: Recording | None = None
_clock: Callable[[], float] = time.perf_counter
_lock = threading.Lock()
_marks = count(1)


def recording() -> bool:
    """Whether a recording is active."""
    return _recording is not None


def now() -> float:
    """Seconds of the clock of all records."""
    return _clock()


def add(stream: str, label: str, start: float, stop: float) -> None:
    """Record one span. list.append is atomic, so streams need no lock."""
    if (kept := _recording) is not None:
        kept.spans.append(Span(stream, label, start, stop))


def new_mark() -> int:
    """A number for a point in a stream; 0 without a recording."""
    return next(_marks) if _recording is not None else 0


def passed(stream: str, mark: int, *, waited: bool) -> None:
    """Record that a stream has reached a point, or has waited for one. Ignores marks of 0."""
    if mark and (kept := _recording) is not None:
        kept.passed.append(Passed(stream, mark, now(), waited))


def count_of(name: str, owner: object, value: int) -> None:
    """Record how many slots the arena `owner` has in use from now on."""
    if (kept := _recording) is not None:
        kept.counts.append(Count(name, id(owner), now(), value))


@contextmanager
def span(stream: str, label: str) -> Iterator[None]:
    """Record the time that a with block takes, if a recording is active."""
    if _recording is None:
        yield
        return
    start = now()
    yield
    add(stream, label, start, now())


@contextmanager
def record() -> Iterator[list[Span]]:
    """As `record_all`, for the spans alone."""
    with record_all() as kept:
        yield kept.spans


@contextmanager
def record_all(clock: Callable[[], float] = time.perf_counter) -> Iterator[Recording]:
    """Record this process's streams inside a with block.

    Yields the recording.

    Args:
        clock: Device.clock.

    Raises:
        RuntimeError: if a recording is active already.
    """
    global _recording, _clock
    with _lock:
        if _recording is not None:
            raise RuntimeError("timeline.record: a recording is active already")
        _recording, _clock = (kept := Recording()), clock
        arena.on_change = count_of
    try:
        yield kept
    finally:
        _recording, _clock = None, time.perf_counter
        arena.on_change = None
