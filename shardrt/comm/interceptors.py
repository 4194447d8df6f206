"""Interceptor: sees each call of a communicator before it runs, to count, delay or record it."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a communicator. A barrier has no array."""

    name: str  # "all_gather"
    tag: str  # the unit or array that the call is for
    array: Any  # the full buffer: all slices of an all_gather, the input of a reduce_scatter
    args: tuple  # arguments of the backend's method
    stream: Any


class Interceptor:
    """Sees the calls of `communicator` from now on, but no calls of its duplicates and splits."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        communicator.interceptors = (*communicator.interceptors, self)

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that the stream runs in place of `run`. Called before the call is submitted."""
        return run

    def intercept_bytes(self, run: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
        """The same for `all_gather_bytes`, which has no stream."""
        return run


def message_to(peer: int, tag: str) -> str:
    """The tag that interceptors see for a message to a rank."""
    return f"{tag} to rank {peer}".lstrip()


def message_from(peer: int, tag: str) -> str:
    """The tag that interceptors see for a message from a rank."""
    return f"{tag} from rank {peer}".lstrip()
