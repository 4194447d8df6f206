"""The Communicator contract: what every backend does.

A public method checks its arguments in the caller (checks.py), then submits the blocking `_method` to the
stream. So a backend implements `_all_gather(buffer)` and its like and nothing else. Nothing here knows a
model, a unit or a mean over ranks; what records, counts and delays calls are interceptors (interceptors.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import checks
from shardrt.comm.interceptors import Call, Interceptor, message_from, message_to
from shardrt.comm.reduction import Reduction

_Counts = tuple[int, ...] | None  # elements by peer; None: as many for each
_SHORT = 248  # bytes of a message that one collective carries, in rows of 256
_SMALL = 1 << 16  # bytes of all ranks together up to which an all_reduce sends everything to everyone


class Communicator(ABC):
    """Collectives over a group of ranks.

    Arrays are 1-D, C-contiguous, of a type in dtypes.CARRIED (uint16 holds bits, which only
    `reduce_scatter` sums, where `kind` says what they are). A call returns None at once: its work is in order
    in `stream`, and is seen through the stream's events. One communicator serves one stream at a time;
    `duplicate()` gives an independent one.

    Every rank of the group makes the same collective calls in the same order, with equal `tag`: the name of
    the thing the call is for ("blocks.3"). Ranks that differ all get a CollectiveMismatch that says who
    called what.

    Where `reduction` is "tree", sums go by a fixed binary tree over the ranks, adjacent pairs first:
    (0 + 1) + 2, (0 + 1) + (2 + 3). So the bits are the same on every such backend, every rank, every run.
    """

    rank: int
    size: int
    reduction = "tree"  # how sums are made; "nccl": as NCCL likes, and 16 bits in 16 bits
    shares_memory = False  # whether allocate(shared=True) is one physical buffer for several ranks
    keeps_host = True  # whether a call keeps the thread that runs it until it is done
    role = ""  # what its mesh wants it for
    interceptors: tuple[Interceptor, ...] = ()  # of its calls; the last one's is what runs in the stream

    def all_gather(self, buffer: Any, *, stream: Any, tag: str = "") -> None:
        """In place: `buffer` (size * n,) holds this rank's slice [rank*n : (rank+1)*n] on entry, all on exit.

        On a buffer from `allocate(shared=True)` where `shares_memory`, nothing is copied: the call waits
        until every rank has written its slice. Such a buffer is read by peers until they have moved on:
        put a `barrier` before writing new values into it.
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

        `output` may be this rank's own slice of `buffer`; the rest of `buffer` (size * n,) is left as it
        is, except that with `accumulate` or `kind` that slice may be written. On completion nobody reads
        `buffer` any more.

        kind="bfloat16" or "float16" says what the bits of a uint16 `buffer` are. They are sent as they are;
        `output` is float32. Where `reduction` is "tree", so are the sums: the bytes of a 16-bit exchange, no
        rounding on the way. With "nccl" the sums are made in 16 bits.
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
        """In place: every rank's `buffer` becomes that of rank `root`."""
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

        With counts per peer, which all ranks give or none: the first sent[0] elements of `buffer` go to rank
        0, the next sent[1] to rank 1; the first received[0] of `output` come from rank 0. Any may be 0, and
        other ranks' counts differ. Where a rank sends another number than its peer expects, all ranks get a
        CollectiveMismatch that names both, and nothing is moved; NCCL compares nothing.
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

        It does not wait for the receiver: both ranks of a pair may send first. What has not been taken yet is
        kept as a copy. direct=True, on both ends: nothing is kept, and the stream goes on when the receiver
        has taken it. (With "nccl" a send always waits: where both send first, use `exchange`.)
        """
        checks.check_call("send", stream, tag)
        checks.check_array("send", "buffer", buffer)
        checks.check_rank("send", "peer", peer, self.size, self.rank)
        message = message_to(peer, tag)
        self._submit(stream, f"send {tag}".rstrip(), "send", message, buffer, buffer, peer, tag, direct)

    def recv(self, buffer: Any, *, peer: int, stream: Any, tag: str = "", direct: bool = False) -> None:
        """Receive into `buffer` what rank `peer` sends; messages between two ranks keep their order.

        (Those that are direct and those that are not are two orders.) Where sizes, dtypes or `tag` differ
        from what was sent, this rank gets a CollectiveMismatch that names both; NCCL compares nothing.
        """
        checks.check_call("recv", stream, tag)
        checks.check_array("recv", "buffer", buffer)
        checks.check_rank("recv", "peer", peer, self.size, self.rank)
        message = message_from(peer, tag)
        self._submit(stream, f"recv {tag}".rstrip(), "recv", message, buffer, buffer, peer, tag, direct)

    def exchange(self, output: Any, buffer: Any, *, to: int, source: int, stream: Any) -> None:
        """Send `buffer` to rank `to` and receive `output` from rank `source`, at once and without a copy.

        The two may be one rank or two, their sizes and dtypes differ. The ranks at the other ends call
        `exchange` as well, or `send` and `recv`.
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
        """Whatever comes later in `stream` runs after every rank's stream has reached its barrier."""
        checks.check_call("barrier", stream, tag)
        self._submit(stream, "barrier", "barrier", tag, None, tag)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's `data`, by rank, of any lengths. Collective, and done when it returns: it has no stream.

        What ranks tell each other beside arrays goes through this one method.
        """
        if device.current().dry_run:
            return [data] * self.size
        run = self._all_gather_bytes
        for interceptor in self.interceptors:
            run = interceptor.intercept_talk(run)
        return run(data)

    def _submit(self, stream: Any, label: str, call: str, tag: str, array: Any, *args: Any) -> None:
        """Run `_call(*args)` in the stream, or what the interceptors make of it."""
        if device.current().dry_run:
            return
        run = getattr(self, f"_{call}")
        for interceptor in self.interceptors:
            run = interceptor.intercept(Call(call, tag, array, args, stream), run)
        stream.submit(run, *args, label=label)

    def register_names(self, names: Iterable[str]) -> None:  # noqa: B027 (a world of one has nobody to name)
        """Say beforehand which `tag` will come, so that an error can print the one a peer gave.

        Not collective. Names that were used in a call are known without it; those of a communicator are
        known to its duplicates and splits.
        """

    @abstractmethod
    def split(self, color: int | None, key: int) -> "Communicator | None":
        """A communicator over the ranks with this `color`, ordered by `key`; None where color is None.

        Collective, and done when it returns: it has no stream.
        """

    def among(self, members: Sequence[int], color: int) -> "Communicator":
        """As `split`, where the caller knows who is with it: these ranks, in this order.

        Ranks with other members, or in no group at all, come as well, with other colors, or to `split`.
        """
        return self.split(color, list(members).index(self.rank))

    def duplicate(self) -> "Communicator":
        """An independent communicator over the same ranks, for another stream. Collective."""
        return self.split(0, self.rank)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        """A 1-D array of zeros that this backend serves best. Collective, in the same order on all ranks.

        shared=False: this rank's own buffer. shared=True: meant for all_gather; one physical buffer for
        several ranks where `shares_memory`, an ordinary buffer elsewhere. A `duplicate` knows it as well.
        """
        return aligned_zeros(count, dtype)

    def allocated(self, nbytes: int) -> int:
        """Bytes that `allocate` takes for an array of `nbytes`."""
        return nbytes

    def scratch(self, call: str, nbytes: int, output: int = 0, *, own: bool = True) -> tuple[int, int]:
        """Bytes on a GPU, and pinned on the host, that this communicator needs for a collective on a GPU.

        nbytes: of the buffer. output: of what is written besides. own: whether `allocate` gave the buffer.
        The memory is kept for all later calls, so of several the one that needs most counts.
        """
        return 0, 0

    def reserve(self, on_device: int, on_host: int) -> None:  # noqa: B027 (most backends need none)
        """Take what `scratch` says now, so that no later call has to. While no call is under way."""

    def abandon(self) -> None:  # noqa: B027 (a world of one waits for nobody)
        """Whatever waits for a message here, in any stream, now or later, raises PeerFailed. Not collective.

        For a communicator that is not used again: messages may be under way.
        """

    def close(self) -> None:  # noqa: B027 (most backends hold nothing)
        """Give back what the backend holds. Collective; arrays from `allocate` stay valid."""

    # What a backend implements. Blocking, run by the stream; arguments have been checked. A communicator that
    # is made over another one calls these of it in turn, in its own stream, as a part of its own call.

    @abstractmethod
    def _all_gather(self, buffer: Any, tag: str) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, output: Any, buffer: Any, how: Reduction, tag: str) -> None: ...

    def _all_reduce(self, buffer: Any, op: str, tag: str) -> None:
        """Reduce-scatter and all-gather of what divides by size; the rest, or little, goes to everyone."""
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
        """By one gather of the lengths with what is short, and another if anything is longer."""
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
    """Zeros that begin on a cache line (64 bytes), as the kernels like them."""
    nbytes = count * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype)
