"""Devices by name, and the current device of each thread. shardrt/_backends.py registers all devices."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np

from shardrt.device.protocol import Array, Device, Event, Stream, StreamError

__all__ = [
    "KINDS",
    "Array",
    "Device",
    "Event",
    "Kind",
    "Stream",
    "StreamError",
    "current",
    "get",
    "of",
    "on_host",
    "set_current",
    "use",
]


class _State(threading.local):
    """This thread's device."""

    device: Device | None = None  # on the class: looking up a missing attribute takes five times as long


@dataclass(frozen=True)
class Kind:
    """A kind of devices other than the CPU, with names "kind:N". `get` calls its functions."""

    make: Callable[[int, Device], Device]  # makes it from N and the CPU; RuntimeError if it can't be used
    count: Callable[[], int]  # number of devices that this process sees


_state = _State()
make_cpu: Callable[[], Device] | None = None  # set by shardrt/_backends.py
KINDS: dict[str, Kind] = {}


def get(name: str) -> Device:
    """The device called `name`: "cpu", "cuda" or "cuda:1" (the second GPU). One object for each in a process.

    Raises:
        ValueError: for an unknown name.
        RuntimeError: for a GPU that can't be used.
    """
    return _get(f"{name}:0" if name in KINDS else name)


@cache
def _get(name: str) -> Device:
    kind, _, index = name.partition(":")
    if name == "cpu":
        return make_cpu()
    if kind in KINDS and index.isdigit():
        made = KINDS[kind].make(int(index), _get("cpu"))
        current().enter()  # making a GPU has switched this thread to it
        return made
    known = ["'cpu'", *(f"{kind!r}, '{kind}:N'" for kind in KINDS)]
    raise ValueError(f"device: unknown device {name!r}; known: {', '.join(known)}")


def current() -> Device:
    """The device on which this thread makes new arrays; "cpu" by default."""
    return _state.device or _get("cpu")


def of(array: Array) -> Device:
    """The device of an array: the CPU for a NumPy array, else this thread's current device."""
    if type(array) is np.ndarray:  # the usual case: the rest takes four times as long
        return _get("cpu")
    simulated = getattr(type(array), "shardrt_device", None)
    if simulated is not None:
        return simulated
    return _get("cpu") if isinstance(array, np.ndarray) else current()


def on_host(array: Array) -> bool:
    """Whether an array is in host memory. The current device of the thread does not matter."""
    if type(array) is np.ndarray:
        return True
    simulated = getattr(type(array), "shardrt_device", None)
    return isinstance(array, np.ndarray) if simulated is None else simulated.in_host_memory


def set_current(device: Device) -> None:
    """Make `device` the current one of this thread from now on."""
    device.enter()
    _state.device = device


@contextmanager
def use(device: Device) -> Iterator[Device]:
    """Make `device` the current one of this thread inside a with block."""
    before = _state.device
    set_current(device)
    try:
        yield device
    finally:
        _state.device = before
        current().enter()
