"""What moves arrays of a device between ranks: the lowest seam, below what a communicator makes of it.

NCCL's is in nccl.py; a simulated world has one that records. Every call works in the stream that runs it, and
returns when it is issued. Arrays are contiguous and on the device, and have been checked.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

Array = Any


class Transport(ABC):
    """Between the ranks of one communicator; all of them make the same calls in the same order."""

    @abstractmethod
    def gather(self, buffer: Array) -> None:
        """In place: equal slices, of which rank r has number r."""

    @abstractmethod
    def reduce_scatter(self, output: Array, buffer: Array, op: str, kind: str) -> None:
        """Slice `rank` of all ranks' `buffer`, combined, into `output`. kind: of what type the numbers are.

        `output` may be that slice.
        """

    @abstractmethod
    def all_reduce(self, buffer: Array, op: str) -> None:
        """In place: all ranks' numbers, combined."""

    @abstractmethod
    def broadcast(self, buffer: Array, root: int) -> None:
        """In place: those of rank `root`."""

    @abstractmethod
    def swap(self, output: Array, buffer: Array, received: Sequence[slice], sent: Sequence[slice]) -> None:
        """Part sent[r] of `buffer` goes to rank r, received[r] of `output` comes from it; some are empty."""

    @abstractmethod
    def send(self, buffer: Array, peer: int) -> None:
        """To rank `peer`, which receives it."""

    @abstractmethod
    def recv(self, buffer: Array, peer: int) -> None:
        """From rank `peer`, which sends it."""

    @abstractmethod
    def exchange(self, output: Array, buffer: Array, to: int, source: int) -> None:
        """`send` and `recv` as one, of which neither waits for the other."""

    def abort(self) -> None:  # noqa: B027 (what waits for nothing)
        """End what waits for other ranks. Not collective; the last call."""

    def close(self) -> None:  # noqa: B027
        """Give back what it holds. Collective; the last call."""
