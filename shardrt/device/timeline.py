"""Records what ran when, in which stream: the source of the schedule's picture and of overlap figures.

Off unless `record()` is active. Times are seconds of time.perf_counter().
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """`label` ran in `stream` from `start` to `stop` (seconds)."""

    stream: str
    label: str
    start: float
    stop: float


_spans: list[Span] | None = None
_lock = threading.Lock()


def recording() -> bool:
    """Whether spans are kept now."""
    return _spans is not None


def add(stream: str, label: str, start: float, stop: float) -> None:
    """Keep one span; list.append is atomic, so streams need no lock."""
    if _spans is not None:
        _spans.append(Span(stream, label, start, stop))


@contextmanager
def span(stream: str, label: str) -> Iterator[None]:
    """Keep the time that a with block takes, where spans are recorded at all."""
    if _spans is None:
        yield
        return
    start = time.perf_counter()
    yield
    add(stream, label, start, time.perf_counter())


@contextmanager
def record() -> Iterator[list[Span]]:
    """Record this process's streams inside a with block; gives the list that fills."""
    global _spans
    with _lock:
        if _spans is not None:
            raise RuntimeError("timeline.record: a recording is active already")
        _spans = spans = []
    try:
        yield spans
    finally:
        _spans = None
