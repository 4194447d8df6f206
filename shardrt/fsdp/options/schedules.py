"""each_schedule: tells of every schedule that is built, as simulate/provenance.py asks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardrt.fsdp.observers import OBSERVERS, ScheduleObserver

__all__ = ["each_schedule"]


@contextmanager
def each_schedule(tell: Callable[[Any], None]) -> Iterator[None]:
    """Inside, `tell` is called with each schedule that is built, before its units have memory."""

    def observer(schedule: Any) -> ScheduleObserver:
        tell(schedule)
        return ScheduleObserver()

    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)
