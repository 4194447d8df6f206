"""Transport: moves device arrays between ranks, below a communicator of GPUs.

nccl.py has NCCL's transport; a simulated world has one that records. Every call is issued in the caller's
stream and returns at once. Arrays are contiguous, on the device, and checked.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

Array = Any


class Transport(ABC):
    """The transport of one communicator. All its ranks make the same calls in the same order."""

    @abstractmethod
    def gather(self, buffer: Array) -> None:
        """In place: gather equal slices; on entry rank r has slice r."""

    @abstractmethod
    def reduce_scatter(self, output: Array, buffer: Array, op: str, kind: str) -> None:
        """Combine slice `rank` of all ranks' `buffer` into `output`, which may be that slice itself.

        Args:
            kind: the type of the numbers.
        """

    @abstractmethod
    def all_reduce(self, buffer: Array, op: str) -> None:
        """In place: combine the buffers of all ranks."""

    @abstractmethod
    def broadcast(self, buffer: Array, root: int) -> None:
        """In place: copy the buffer of rank `root`."""

    @abstractmethod
    def swap(self, output: Array, buffer: Array, received: Sequence[slice], sent: Sequence[slice]) -> None:
        """Send part sent[r] of `buffer` to rank r, receive received[r] of `output`. Parts may be empty."""

    @abstractmethod
    def send(self, buffer: Array, peer: int) -> None:
        """Send to rank `peer`, which calls recv."""

    @abstractmethod
    def recv(self, buffer: Array, peer: int) -> None:
        """Receive from rank `peer`, which calls send."""

    @abstractmethod
    def exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        """`send` and `recv` at the same time; neither waits for the other."""

    def abort(self) -> None:  # noqa: B027 (some never wait)
        """End all waits for other ranks. Not collective; the last call."""

    def close(self) -> None:  # noqa: B027
        """Free its resources. Collective; the last call."""
