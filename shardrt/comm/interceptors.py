"""Interceptor sees the calls of a communicator on their way: to count them, to delay them, to record them."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a communicator, as it was made. A barrier has no array."""

    name: str  # "all_gather"
    tag: str  # it is made for
    array: Any  # that is full: of an all_gather what is gathered, of a reduce_scatter what is reduced
    args: tuple  # of the backend's method
    stream: Any


class Interceptor:
    """Sees the calls of `communicator` from now on, not those of its duplicates and splits."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        communicator.interceptors = (*communicator.interceptors, self)

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """What is to run in the stream in place of run(*call.args). In the caller, before it is submitted."""
        return run

    def intercept_talk(self, run: Callable[[bytes], list[bytes]]) -> Callable[[bytes], list[bytes]]:
        """The same for `all_gather_bytes`, which has no stream."""
        return run


def message_to(peer: int, tag: str) -> str:
    """What is recorded of a message to a rank of its communicator."""
    return f"{tag} to rank {peer}".lstrip()


def message_from(peer: int, tag: str) -> str:
    """What is recorded of a message from a rank of its communicator."""
    return f"{tag} from rank {peer}".lstrip()
