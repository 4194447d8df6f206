"""Counts calls and bytes per collective: what tests hold against the formulas."""

from collections import Counter
from typing import Any

from shardrt.comm.protocol import Communicator
from shardrt.comm.wrapper import Wrapper


class CountedCommunicator(Wrapper):
    """`calls[name]` and `bytes[name]` per collective; bytes are what this rank receives from others.

    Where a collective is symmetric (all but broadcast, send, recv, exchange, and an all_to_all with counts
    per peer) it sends as much. A backend
    that shares memory moves less: the formula, not the machine, is counted.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def reset(self) -> None:
        """Count from zero."""
        self.calls.clear()
        self.bytes.clear()

    def _wrap(self, inner: Communicator) -> "CountedCommunicator":
        return CountedCommunicator(inner)

    def _submit(self, stream: Any, label: str, call: str, what: str, array: Any, *args: Any) -> None:
        self.calls[call] += 1
        received = args[2] if call == "all_to_all" else None
        if received is not None:
            self.bytes[call] += (sum(received) - received[self.rank]) * array.itemsize
        elif array is not None:
            self.bytes[call] += wire_bytes(call, array.nbytes, self.size)
        self.inner._submit(stream, label, call, what, array, *args)


def wire_bytes(call: str, nbytes: int, size: int) -> int:
    """Bytes on one rank's wire for a collective on a full buffer of `nbytes` among `size` ranks."""
    if call in ("all_gather", "reduce_scatter", "all_to_all"):
        return nbytes // size * (size - 1)
    if call == "all_reduce":  # a reduce-scatter and an all-gather
        return 2 * nbytes * (size - 1) // size
    return nbytes if size > 1 else 0
