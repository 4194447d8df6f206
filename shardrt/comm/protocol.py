"""The Communicator contract: what every backend does.

A public method checks its arguments in the caller (checks.py), then submits the blocking `_method` to the
stream. So a backend implements only `_all_gather(buffer, tag)` and the other `_methods`. Nothing here knows a
model, a unit or a mean over ranks. Interceptors (interceptors.py) record, count and delay calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import checks
from shardrt.comm.interceptors import Call, Interceptor, message_from, message_to
from shardrt.comm.reduction import Reduction

__all__ = ["Communicator", "aligned_zeros"]

_Counts = tuple[int, ...] | None  # elements by peer; None: the same number for each peer
_SHORT = 248  # bytes of a message that one collective carries, in rows of 256
_SMALL = 1 << 16  # bytes of all ranks together up to which an all_reduce sends all data to all ranks


class Communicator(ABC):
    """Collectives over a group of ranks.

    Arrays are 1-D, C-contiguous, of a type in dtypes.CARRIED. (uint16 holds the bits of a 16-bit type; only
    `reduce_scatter` sums them, with `kind`.) A call returns None at once. Its work runs in order in `stream`;
    the stream's events mark when it is done. One communicator serves one stream at a time; `duplicate()`
    gives an independent communicator.

    All ranks of the group make the same collective calls in the same order, with equal `tag`: the name of
    the unit or array that the call is for ("blocks.3"). If calls differ, each rank gets a CollectiveMismatch
    that lists every rank's call; NCCL, which compares no calls, hangs until the watchdog ends the job.

    With `reduction` "tree", a fixed binary tree over the ranks sums adjacent pairs first: (0 + 1) + 2,
    (0 + 1) + (2 + 3). So sums are bitwise identical on every such backend, every rank, every run.
    """

    rank: int
    size: int
    reduction = "tree"  # how ranks are summed; "nccl": in NCCL's order, and 16-bit types in 16 bits
    shares_memory = False  # whether allocate(shared=True) is one physical buffer for several ranks
    keeps_host = True  # whether a call occupies the thread that runs it until the call is done
    role = ""  # its role in its mesh ("gather")
    interceptors: tuple[Interceptor, ...] = ()  # see its calls in this order

    def all_gather(self, buffer: Any, *, stream: Any, tag: str = "") -> None:
        """In place: `buffer` (size * n,) holds this rank's slice [rank*n : (rank+1)*n] on entry, all on exit.

        With `shares_memory` and a buffer from `allocate(shared=True)` nothing is copied: the call waits until
        every rank has written its slice. Peers read such a buffer after the call. Put a `barrier` before
        the next write to it.
        """
        checks.check_call("all_gather", stream, tag)
        checks.check_array("all_gather", "buffer", buffer)
        checks.check_divisible("all_gather", "buffer", buffer, self.size)
        self._submit(stream, f"all_gather {tag}", "all_gather", tag, buffer, buffer, tag)

    def reduce_scatter(
        self,
        output: Any,
        buffer: Any,
        *,
        stream: Any,
        scale: float = 1.0,
        accumulate: bool = False,
        kind: str = "",
        tag: str = "",
    ) -> None:
        """`output` (n,) = (output if accumulate) + scale * sum of every rank's buffer[rank*n : (rank+1)*n].

        `output` may be this rank's own slice of `buffer`. The rest of `buffer` (size * n,) does not change;
        with `accumulate` or `kind` this rank's slice may. After the call no rank reads `buffer`.

        Args:
            kind: "bfloat16" or "float16", the type whose bits a uint16 `buffer` holds; `output` is float32.
                Ranks send 16 bits. With `reduction` "tree" they sum in float32, with "nccl" in 16 bits.
        """
        checks.check_call("reduce_scatter", stream, tag)
        if kind or not checks.plain(output, buffer, self.size, self.rank):
            checks.check_array("reduce_scatter", "output", output)
            checks.check_array("reduce_scatter", "buffer", buffer)
            if kind:
                checks.check_bits("reduce_scatter", output, buffer, kind)
            else:
                checks.check_same("reduce_scatter", output, buffer)
                checks.check_sums("reduce_scatter", buffer, "sum", scale)
            checks.check_count("reduce_scatter", output, buffer, output.size * self.size)
            checks.check_overlap("reduce_scatter", output, buffer, None if kind else self.rank * output.size)
        label, how = f"reduce_scatter {tag}", Reduction(scale, accumulate, "sum", kind)
        self._submit(stream, label, "reduce_scatter", tag, buffer, output, buffer, how, tag)

    def all_reduce(self, buffer: Any, *, op: str = "sum", stream: Any, tag: str = "") -> None:
        """In place: `buffer` becomes its "sum", "max", "min" or "prod" over ranks, the same bits on each."""
        checks.check_call("all_reduce", stream, tag)
        checks.check_array("all_reduce", "buffer", buffer)
        checks.check_sums("all_reduce", buffer, op, 1.0)
        self._submit(stream, f"all_reduce {tag}".rstrip(), "all_reduce", tag, buffer, buffer, op, tag)

    def broadcast(self, buffer: Any, *, root: int, stream: Any, tag: str = "") -> None:
        """In place: every rank's `buffer` gets the values of rank `root`'s `buffer`."""
        checks.check_call("broadcast", stream, tag)
        checks.check_array("broadcast", "buffer", buffer)
        checks.check_rank("broadcast", "root", root, self.size)
        self._submit(stream, "broadcast", "broadcast", tag, buffer, buffer, root, tag)

    def all_to_all(
        self,
        output: Any,
        buffer: Any,
        *,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        stream: Any,
        tag: str = "",
    ) -> None:
        """Slice r of this rank's `output` becomes slice `rank` of rank r's `buffer`; both are (size * n,).

        With counts per peer, from all ranks or none: the first sent[0] elements of `buffer` go to rank 0, the
        next sent[1] to rank 1. The first received[0] elements of `output` come from rank 0. Counts may be 0.
        If two ranks disagree on a count, all ranks get a CollectiveMismatch and no data moves. NCCL does not
        compare counts.
        """
        checks.check_call("all_to_all", stream, tag)
        equal = received is None and sent is None
        if not (equal and checks.plain(output, buffer, 1, None)):
            checks.check_array("all_to_all", "output", output)
            checks.check_array("all_to_all", "buffer", buffer)
            checks.check_same("all_to_all", output, buffer)
            if equal:
                checks.check_count("all_to_all", output, buffer, output.size)
            else:
                received, sent = checks.check_counts("all_to_all", output, buffer, received, sent, self)
            checks.check_overlap("all_to_all", output, buffer, None)
        if equal:
            checks.check_divisible("all_to_all", "buffer", buffer, self.size)
        label, args = f"all_to_all {tag}".rstrip(), (output, buffer, received, sent, tag)
        self._submit(stream, label, "all_to_all", tag, buffer, *args)

    def send(self, buffer: Any, *, peer: int, stream: Any, tag: str = "", direct: bool = False) -> None:
        """Send `buffer` to rank `peer`, which receives an array of the same size and dtype with equal `tag`.

        It does not wait for the receiver: both ranks of a pair may send first. The sender keeps a copy until
        the receiver has taken it. direct=True, on both ends: no copy, and the stream waits for the receiver.
        (With "nccl" a send always waits: if both ranks send first, use `exchange`.)
        """
        checks.check_call("send", stream, tag)
        checks.check_array("send", "buffer", buffer)
        checks.check_rank("send", "peer", peer, self.size, self.rank)
        message = message_to(peer, tag)
        self._submit(stream, f"send {tag}".rstrip(), "send", message, buffer, buffer, peer, tag, direct)

    def recv(self, buffer: Any, *, peer: int, stream: Any, tag: str = "", direct: bool = False) -> None:
        """Receive the next message of rank `peer` into `buffer`; messages between two ranks keep their order.

        Direct messages and others keep two separate orders. If the sent size, dtype or `tag` differs, this
        rank gets a CollectiveMismatch that names both. NCCL does not compare them.
        """
        checks.check_call("recv", stream, tag)
        checks.check_array("recv", "buffer", buffer)
        checks.check_rank("recv", "peer", peer, self.size, self.rank)
        message = message_from(peer, tag)
        self._submit(stream, f"recv {tag}".rstrip(), "recv", message, buffer, buffer, peer, tag, direct)

    def exchange(self, output: Any, buffer: Any, *, to: int, source: int, stream: Any) -> None:
        """Send `buffer` to rank `to` and receive `output` from rank `source`, at once and without a copy.

        `to` and `source` may be the same rank; sizes and dtypes may differ. The other ranks call `exchange`,
        or `send` and `recv`.
        """
        checks.check_call("exchange", stream)
        checks.check_array("exchange", "output", output)
        checks.check_array("exchange", "buffer", buffer)
        checks.check_overlap("exchange", output, buffer, None)
        checks.check_rank("exchange", "to", to, self.size, self.rank)
        checks.check_rank("exchange", "source", source, self.size, self.rank)
        message = message_from(source, "")
        self._submit(stream, "exchange", "exchange", message, output, output, buffer, to, source)

    def barrier(self, *, stream: Any, tag: str = "") -> None:
        """Later work in `stream` runs after every rank's stream has reached its barrier."""
        checks.check_call("barrier", stream, tag)
        self._submit(stream, "barrier", "barrier", tag, None, tag)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of all ranks, in order, of any lengths. Collective; blocks, and uses no stream.

        Ranks exchange all objects other than arrays through this method.
        """
        if device.current().dry_run:
            return [data] * self.size
        run = self._all_gather_bytes
        for interceptor in self.interceptors:
            run = interceptor.intercept_bytes(run)
        return run(data)

    def _submit(self, stream: Any, label: str, call: str, tag: str, array: Any, *args: Any) -> None:
        """Run `_call(*args)`, or the function that the interceptors put in its place, in the stream."""
        if device.current().dry_run:
            return
        run = getattr(self, f"_{call}")
        for interceptor in self.interceptors:
            run = interceptor.intercept(Call(call, tag, array, args, stream), run)
        stream.submit(run, *args, label=label)

    def register_names(self, names: Iterable[str]) -> None:  # noqa: B027 (a world of one has no peers)
        """Register the `tag` of later calls, so that an error message can print a peer's tag. Not collective.

        A call registers its own tag. Duplicates and splits of a communicator share its names.
        """

    @abstractmethod
    def split(self, color: int | None, key: int) -> "Communicator | None":
        """A communicator over the ranks with this `color`, ordered by `key`; None if color is None.

        Collective; blocks, and uses no stream.
        """

    def among(self, members: Sequence[int], color: int) -> "Communicator":
        """As `split`, if the caller knows the ranks of its group: `members`, in this order.

        Ranks of other groups call it with other colors. Ranks of no group call `split(None, 0)`.
        """
        return self.split(color, list(members).index(self.rank))

    def duplicate(self) -> "Communicator":
        """An independent communicator over the same ranks, for another stream. Collective."""
        return self.split(0, self.rank)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        """A 1-D array of zeros in the memory that suits this backend. Collective, in one order on all ranks.

        shared=False: a buffer of this rank alone. shared=True: a buffer for all_gather. With `shares_memory`
        it is one physical buffer for several ranks. Duplicates of this communicator can use it, too.
        """
        return aligned_zeros(count, dtype)

    def allocated(self, nbytes: int) -> int:
        """Bytes that `allocate` takes for an array of `nbytes`."""
        return nbytes

    def scratch(self, call: str, nbytes: int, output: int = 0, *, allocated: bool = True) -> tuple[int, int]:
        """(bytes on a GPU, pinned bytes on the host) that a collective on a GPU needs besides its arrays.

        nbytes: size of the buffer. output: of a separate output. allocated: whether `allocate` made the
        buffer. Later calls use the same memory, so the largest of all calls counts.
        """
        return 0, 0

    def reserve(self, on_device: int, on_host: int) -> None:  # noqa: B027 (most backends need none)
        """Allocate the bytes that `scratch` says now, not in a later call. No call may be under way."""

    def abandon(self) -> None:  # noqa: B027 (a world of one never waits)
        """Let each wait for a message, now or later, in any stream, raise PeerFailed. Not collective.

        The communicator must not be used again: messages may be under way.
        """

    def close(self) -> None:  # noqa: B027 (most backends hold nothing)
        """Free the resources of the backend. Collective; arrays from `allocate` stay valid."""

    # A backend implements these methods. They block, the stream runs them, and their arguments are checked. A
    # communicator on top of another communicator calls the other's methods from its own, in its own stream.

    @abstractmethod
    def _all_gather(self, buffer: Any, tag: str) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, output: Any, buffer: Any, how: Reduction, tag: str) -> None: ...

    def _all_reduce(self, buffer: Any, op: str, tag: str) -> None:
        """Reduce-scatter, then all-gather. Ranks exchange small data, or an indivisible rest, in full."""
        even = buffer.size - buffer.size % self.size
        if buffer.nbytes * self.size <= _SMALL:
            even = 0
        if even:
            n = even // self.size
            own = buffer[self.rank * n : (self.rank + 1) * n]
            self._reduce_scatter(own, buffer[:even], Reduction(op=op), tag)
            self._all_gather(buffer[:even], tag)
        if even < buffer.size:
            self._all_reduce_small(buffer[even:], op, tag)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        """One gather carries the lengths and short data; a second gather carries longer data."""
        heads = np.zeros((self.size, 8 + _SHORT), np.uint8)
        heads[self.rank, :8] = np.array([len(data)], np.int64).view(np.uint8)
        heads[self.rank, 8 : 8 + len(data)] = np.frombuffer(data[:_SHORT], np.uint8)
        self._all_gather(heads.reshape(-1), "")
        lengths = heads[:, :8].copy().view(np.int64).ravel().tolist()
        rows = heads[:, 8:]
        if max(lengths) > _SHORT:
            rows = np.zeros((self.size, max(lengths)), np.uint8)
            rows[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
            self._all_gather(rows.reshape(-1), "")
        return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    @abstractmethod
    def _all_reduce_small(self, buffer: Any, op: str, tag: str) -> None: ...

    @abstractmethod
    def _broadcast(self, buffer: Any, root: int, tag: str) -> None: ...

    @abstractmethod
    def _all_to_all(self, output: Any, buffer: Any, received: _Counts, sent: _Counts, tag: str) -> None: ...

    @abstractmethod
    def _send(self, buffer: Any, peer: int, tag: str, direct: bool) -> None: ...

    @abstractmethod
    def _recv(self, buffer: Any, peer: int, tag: str, direct: bool) -> None: ...

    @abstractmethod
    def _exchange(self, output: Any, buffer: Any, to: int, source: int) -> None: ...

    @abstractmethod
    def _barrier(self, tag: str) -> None: ...


def aligned_zeros(count: int, dtype: Any) -> np.ndarray:
    """Zeros that begin on a cache line (64 bytes), which is faster for the kernels."""
    nbytes = count * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype)
