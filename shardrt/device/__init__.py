"""Devices by name, and the current one. The only place that maps a name to a class."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shardrt.device.protocol import Array, Device, Event, Stream, StreamError

__all__ = ["Array", "Device", "Event", "Stream", "StreamError", "current", "get", "use"]

_state = threading.local()


@cache
def get(name: str) -> Device:
    """The device called `name`: "cpu". One object per name and process.

    Raises ValueError for a name that is not known.
    """
    if name == "cpu":
        from shardrt.device.cpu import CPUDevice

        return CPUDevice()
    raise ValueError(f"device: unknown device {name!r}; known: 'cpu'")


def current() -> Device:
    """The device on which this thread makes new arrays ("cpu" unless `use` says otherwise)."""
    return getattr(_state, "device", None) or get("cpu")


@contextmanager
def use(device: Device) -> Iterator[Device]:
    """Make `device` the current one of this thread inside a with block."""
    before = getattr(_state, "device", None)
    _state.device = device
    try:
        yield device
    finally:
        _state.device = before
