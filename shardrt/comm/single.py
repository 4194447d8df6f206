"""The communicator of a world of one rank: every collective is the identity on the one rank's data."""

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
        """`device`: where `allocate` gets memory; None: the host."""
        self._device = device

    def split(self, color: int | None, key: int) -> "SingleCommunicator | None":
        return None if color is None else SingleCommunicator(self._device)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> Any:
        if self._device is None:
            return super().allocate(count, dtype, shared=shared)
        return self._device.buffer(count, dtype)

    def _reduce_scatter(self, output: Any, buffer: Any, how: Reduction, tag: str) -> None:
        combine(output, [buffer], *how)

    def _all_to_all(self, output: Any, buffer: Any, received: Any, sent: Any, tag: str) -> None:
        output[...] = buffer

    def _nothing(self, *args: Any) -> None:
        """The array already holds the result."""

    def _no_peer(self, *args: Any) -> None:
        raise AssertionError("send and recv: one rank alone has no peer")

    _all_gather = _all_reduce = _all_reduce_small = _broadcast = _barrier = _nothing
    _send = _recv = _exchange = _no_peer
