"""Counts calls and bytes per collective, which tests compare with formulas."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from shardrt.comm.interceptors import Call, Interceptor


class CollectiveCounter(Interceptor):
    """Counts `calls[name]` and `bytes[name]` per collective of a communicator from now on.

    Bytes are the bytes that this rank receives from other ranks. In a symmetric collective it sends as many;
    not symmetric are broadcast, send, recv, exchange, and all_to_all with counts per peer. The bytes follow
    the formula: a backend that shares memory moves fewer.
    """

    def __init__(self, communicator: Any) -> None:
        super().__init__(communicator)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def reset(self) -> None:
        """Count from zero."""
        self.calls.clear()
        self.bytes.clear()

    def intercept(self, call: Call, run: Callable[..., Any]) -> Callable[..., Any]:
        name, array, group = call.name, call.array, self.communicator
        self.calls[name] += 1
        received = call.args[2] if name == "all_to_all" else None
        if received is not None:
            self.bytes[name] += (sum(received) - received[group.rank]) * array.itemsize
        elif array is not None:
            self.bytes[name] += wire_bytes(name, array.nbytes, group.size)
        return run


def wire_bytes(call: str, nbytes: int, size: int) -> int:
    """Bytes on one rank's wire for a collective on a full buffer of `nbytes` among `size` ranks."""
    if call in ("all_gather", "reduce_scatter", "all_to_all"):
        return nbytes // size * (size - 1)
    if call == "all_reduce":  # a reduce-scatter and an all-gather
        return 2 * nbytes * (size - 1) // size
    return nbytes if size > 1 else 0
