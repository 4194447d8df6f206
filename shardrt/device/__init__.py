"""Devices by name, and the current one. All of them are registered (shardrt/_backends.py)."""

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

    device: Device | None = None  # of the class: to ask for what is not there takes five times as long


@dataclass(frozen=True)
class Kind:
    """A kind of devices beside the CPU, called "kind:N". Its functions are called when one is asked for."""

    make: Callable[[int, Device], Device]  # of N and the CPU; raises RuntimeError where it can't be used
    count: Callable[[], int]  # how many this process sees


_state = _State()
make_cpu: Callable[[], Device] | None = None  # of the one device whose arrays are NumPy's, once registered
KINDS: dict[str, Kind] = {}


def get(name: str) -> Device:
    """The device called `name`: "cpu", "cuda" or "cuda:1" (the second GPU). One object for each in a process.

    Raises ValueError for a name that is not known, RuntimeError for a GPU that can't be used.
    """
    return _get(f"{name}:0" if name in KINDS else name)


@cache
def _get(name: str) -> Device:
    kind, _, index = name.partition(":")
    if name == "cpu":
        return make_cpu()
    if kind in KINDS and index.isdigit():
        made = KINDS[kind].make(int(index), _get("cpu"))
        current().enter()  # which making another one has left
        return made
    known = ["'cpu'", *(f"{kind!r}, '{kind}:N'" for kind in KINDS)]
    raise ValueError(f"device: unknown device {name!r}; known: {', '.join(known)}")


def current() -> Device:
    """The device on which this thread makes new arrays ("cpu" unless told otherwise)."""
    return _state.device or _get("cpu")


def of(array: Array) -> Device:
    """Where an array lies: the CPU if it is NumPy's, else this thread's current device."""
    if type(array) is np.ndarray:  # the usual case: the rest takes four times as long
        return _get("cpu")
    simulated = getattr(type(array), "shardrt_device", None)
    if simulated is not None:
        return simulated
    return _get("cpu") if isinstance(array, np.ndarray) else current()


def on_host(array: Array) -> bool:
    """Whether an array lies in memory of the host; in any thread, whatever its current device is."""
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
