"""A world of one: every collective is the identity, but the sums and copies are done as elsewhere."""

from typing import Any

from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction, combine
from shardrt.device import Device


class SingleCommunicator(Communicator):
    """The communicator of the only rank."""

    rank = 0
    size = 1
    shares_memory = True

    def __init__(self, device: Device | None = None) -> None:
        """`device`: where `allocate` gets memory; the host if None."""
        self._device = device

    def split(self, color: int | None, key: int) -> "SingleCommunicator | None":
        return None if color is None else SingleCommunicator(self._device)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Any:
        if self._device is None:
            return super().allocate(count, dtype, shared=shared)
        return self._device.buffer(count, dtype)

    def _all_gather(self, buffer: Any, what: str) -> None:
        pass

    def _reduce_scatter(self, output: Any, buffer: Any, how: Reduction, what: str) -> None:
        combine(output, [buffer], *how)

    def _all_reduce(self, buffer: Any, op: str, what: str) -> None:
        pass

    def _all_reduce_small(self, buffer: Any, op: str, what: str) -> None:
        pass

    def _broadcast(self, buffer: Any, root: int, what: str) -> None:
        pass

    def _all_to_all(self, output: Any, buffer: Any, received: Any, sent: Any, what: str) -> None:
        output[...] = buffer

    def _send(self, buffer: Any, peer: int, what: str, direct: bool) -> None:
        raise AssertionError("a world of one has no peer")

    def _recv(self, buffer: Any, peer: int, what: str, direct: bool) -> None:
        raise AssertionError("a world of one has no peer")

    def _exchange(self, output: Any, buffer: Any, to: int, source: int) -> None:
        raise AssertionError("a world of one has no peer")

    def _barrier(self, what: str) -> None:
        pass
