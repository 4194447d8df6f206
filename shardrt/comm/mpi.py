"""Ranks as MPI processes, arrays in host memory, over mpi4py.

Before every collective the ranks exchange descriptions of their calls (notices.py). So a difference is an
error here, not a hang in MPI. Small data travel in the same message. A waiting rank polls for a moment and
then sleeps (patience.py), so its core is free for ranks that compute; a blocking MPI call would use it.
The reduce-scatter is our own: MPI's takes twice as long on large arrays, and sums in another order.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from shardrt.comm import counts, outbox
from shardrt.comm.calls import MESSAGE, Names, array_of, mismatch, pack, pack_message, unlike, unpack
from shardrt.comm.errors import PeerFailed
from shardrt.comm.notices import Notices, Page
from shardrt.comm.patience import Patience
from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction, combine

_CHUNK = 1 << 20  # bytes of one message of the reduce-scatter: large enough for the wire, small for the cache
_GATHERED = 1 << 14  # bytes of a rank that travel with its call; for more, a gather after it is faster
_SCRATCH = 1 << 24  # bytes of all ranks' chunks together, at most
_MESSAGE = 1 << 30  # elements of one MPI call: counts are 32-bit in MPI 3
_REMEMBERED = 4096  # number of prepared calls that a communicator keeps
_TAG = 0  # MPI tag of collectives; notices use 1
_MESSAGE_TAG = 2  # MPI tag of sends; direct sends use 3


class CallExchange(Protocol):
    """Exchanges the calls of all ranks: Notices over MPI, Flags in shared memory."""

    sequence: int

    def fits(self, nbytes: int, sliced: bool) -> bool: ...

    def prepare(
        self, call: bytes, data: np.ndarray | None = None, sliced: bool = False, root: int | None = None
    ) -> Any: ...

    def exchange(self, notice: Any, data: np.ndarray | None, doing: str) -> Page: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class MPICommunicator(Communicator):
    """A group of MPI processes."""

    def __init__(
        self, mpi: MPI.Intracomm, names: Names | None = None, exchange: CallExchange | None = None
    ) -> None:
        """Only this object may use `mpi`.

        Args:
            names: the names of the communicator that this one was made from.
            exchange: None: Notices over `mpi`.
        """
        self._mpi = mpi
        self.rank = mpi.rank
        self.size = mpi.size
        self._names = names or Names()
        self._patience = Patience(mpi)
        self._calls = exchange or Notices(mpi, self._patience)
        self._prepared: dict[Hashable, tuple[Any, bytes, slice | None]] = {}  # by form of call
        self._outbox = outbox.Outbox(self.rank, self._patience)
        self._scratch = np.empty(0, np.uint8)

    def split(self, color: int | None, key: int) -> "MPICommunicator | None":
        mpi = self._split(color, key)
        return None if mpi is None else MPICommunicator(mpi, self._names)

    def _split(self, color: int | None, key: int) -> MPI.Intracomm | None:
        """MPI's split, after all ranks have come: a wait inside MPI for a missing rank can't end."""
        self._meet("split", None)
        mpi = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else mpi

    def abandon(self) -> None:
        self._patience.abandoned = True
        outbox.keep([], self._mpi)  # never freed: its messages must not reach another communicator

    def close(self) -> None:
        self._outbox.close()
        self._prepared.clear()
        self._calls.close()
        self._mpi.Free()

    def register_names(self, names: Iterable[str]) -> None:
        self._names.register(names)

    def _meet(
        self,
        collective: str,
        array: np.ndarray | None,
        *facts: Any,
        data: np.ndarray | None = None,
        sliced: bool = False,
        root: int | None = None,
    ) -> list[np.ndarray]:
        """Return when every rank has come to this call; `array` and `facts` (see calls.encode) describe it.

        Small `data`, equally long on all ranks, travel with the call. Then the result has each rank's data
        for this rank: all of them, or with `sliced` a slice. Read it before the next call. For large data the
        result is empty. `root`: only this rank sends data. Raises CollectiveMismatch, on all ranks, if calls
        differ.
        """
        form = (collective, facts) if array is None else (collective, array.dtype.num, array.size, facts)
        prepared = self._prepared.get(form)
        if prepared is None:
            prepared = self._prepare(form, pack(self._names, collective, array, *facts), data, sliced, root)
        notice, call, own = prepared
        page = self._calls.exchange(notice, data, collective)
        if page.heads.count(call) < self.size:
            calls = [unpack(head) for head in page.heads]
            world = [self._patience.world_rank(rank) for rank in range(self.size)]
            raise mismatch(self._calls.sequence, calls, self._names, self.rank, world)
        if not page.parts:
            return []
        everyone = page.parts.copy()
        everyone[self.rank] = data if own is None else data[own]
        return everyone

    def _prepare(
        self, form: Hashable, call: bytes, data: np.ndarray | None, sliced: bool, root: int | None
    ) -> tuple[Any, bytes, slice | None]:
        """(notice, its call, the slice of `data` for this rank), kept under `form`.

        The slice is None if this rank gets all of the data, or if no data travel with the call.
        """
        if len(self._prepared) == _REMEMBERED:
            self._prepared.clear()
            self._calls.forget()
        if data is None or not self._calls.fits(data.nbytes, sliced):
            prepared = self._calls.prepare(call), call, None
        else:
            count = data.size // self.size
            own = slice(self.rank * count, (self.rank + 1) * count) if sliced else None
            prepared = self._calls.prepare(call, data, sliced, root), call, own
        self._prepared[form] = prepared
        return prepared

    def _all_gather(self, buffer: np.ndarray, tag: str) -> None:
        n = buffer.size // self.size
        own = buffer[self.rank * n : (self.rank + 1) * n]
        along = own if own.nbytes <= _GATHERED else None
        everyone = self._meet("all_gather", buffer, 0, tag, data=along)
        if everyone:
            for rank, theirs in enumerate(everyone):
                if rank != self.rank:
                    buffer[rank * n : (rank + 1) * n] = theirs
        elif buffer.size <= _MESSAGE:
            self._mpi.Allgather(MPI.IN_PLACE, buffer)
        else:  # every rank's slice in turn, in pieces
            for rank in range(self.size):
                self._broadcast_pieces(buffer[rank * n : (rank + 1) * n], rank)

    def _reduce_scatter(self, output: np.ndarray, buffer: np.ndarray, how: Reduction, tag: str) -> None:
        n = output.size
        everyone = self._meet("reduce_scatter", buffer, how.op, tag, how.kind, data=buffer, sliced=True)
        if everyone:
            return combine(output, everyone, *how)
        chunk = elements_at_once(self.size, buffer.itemsize)
        theirs = self._scratch_array(self.size * min(chunk, n), buffer.dtype).reshape(self.size, -1)
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            parts = [theirs[rank, : stop - start] for rank in range(self.size)]
            parts[self.rank] = buffer[self.rank * n + start : self.rank * n + stop]
            for step in range(1, self.size):
                to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                piece = buffer[to * n + start : to * n + stop]
                self._mpi.Sendrecv(piece, to, _TAG, parts[source], source, _TAG)
            combine(output[start:stop], parts, *how)
        return None

    def _all_reduce_small(self, buffer: np.ndarray, op: str, tag: str) -> None:
        everyone = self._meet("all_reduce", buffer, op, tag, data=buffer)
        if not everyone:
            rows = self._scratch_array(self.size * buffer.size, buffer.dtype).reshape(self.size, -1)
            self._mpi.Allgather(buffer, rows)
            everyone = list(rows)
        combine(buffer, everyone, op=op)

    def _broadcast(self, buffer: np.ndarray, root: int, tag: str) -> None:
        everyone = self._meet("broadcast", buffer, root, tag, data=buffer, root=root)
        if not everyone:
            self._broadcast_pieces(buffer, root)
        elif self.rank != root:
            buffer[:] = everyone[root]

    def _broadcast_pieces(self, buffer: np.ndarray, root: int) -> None:
        for start in range(0, buffer.size, _MESSAGE):
            self._mpi.Bcast(buffer[start : start + _MESSAGE], root)

    def _all_to_all(
        self, output: np.ndarray, buffer: np.ndarray, received: counts.Counts, sent: counts.Counts, tag: str
    ) -> None:
        if sent is None:
            everyone = self._meet("all_to_all", buffer, 0, tag, data=buffer, sliced=True)
            n = buffer.size // self.size
            if everyone:
                for rank, theirs in enumerate(everyone):
                    output[rank * n : (rank + 1) * n] = theirs
                return
            if n <= _MESSAGE:
                self._mpi.Alltoall(buffer, output)
                return
            received = sent = counts.equal(buffer.size, self.size)
        else:
            self._exchange_counts(buffer, counts.row(received, sent), tag)
        given = [buffer[part] for part in counts.slices(sent)]
        wanted = [output[part] for part in counts.slices(received)]
        requests = begin_exchange(self._mpi, given, wanted)
        wanted[self.rank][:] = given[self.rank]
        MPI.Request.Waitall(requests)

    def _exchange_counts(self, buffer: np.ndarray, row: np.ndarray, tag: str) -> tuple[Any, list[list[int]]]:
        """(each rank's row (see counts.row), table of counts), when all ranks have come to this call."""
        rows = self._meet("all_to_all", buffer[:0], 1, tag, data=row)
        if not rows:  # with many ranks no data travel with the call
            rows = np.empty((self.size, row.size), np.int64)
            self._mpi.Allgather(row, rows)
        return rows, counts.compared(rows, self._calls.sequence, tag, self.rank)

    def _send(self, buffer: np.ndarray, peer: int, tag: str, direct: bool) -> None:
        self._outbox.check()
        kept = buffer if direct else buffer.copy()
        header, sends = self._begin_send(kept, peer, tag, _MESSAGE_TAG + direct)
        if direct:
            self._finish_send(sends, (header, kept), "send", peer)
        else:
            self._outbox.add(sends, (header, kept), peer)

    def _recv(self, buffer: np.ndarray, peer: int, tag: str, direct: bool) -> None:
        self._outbox.check()
        header, expected, mpi_tag = bytearray(MESSAGE), pack_message(buffer, tag), _MESSAGE_TAG + direct
        self._receive(header, peer, mpi_tag)
        # Receive an unexpected header, too, so that its sender can go on and end.
        target = buffer if header == expected else array_of(header)
        for piece in _pieces(target):
            self._receive(piece, peer, mpi_tag)
        if header != expected:
            raise unlike(
                header, expected, self._patience.world_rank(peer), self._patience.world_rank(self.rank)
            )

    def _exchange(self, output: np.ndarray, buffer: np.ndarray, to: int, source: int) -> None:
        self._outbox.check()
        header, sends = self._begin_send(buffer, to, "", _MESSAGE_TAG)
        self._recv(output, source, "", False)
        self._finish_send(sends, (header, buffer), "exchange", to)

    def _begin_send(
        self, buffer: np.ndarray, peer: int, tag: str, mpi_tag: int
    ) -> tuple[bytes, list[MPI.Request]]:
        """(header, sends of header and array). The sends read both until they are done."""
        header = pack_message(buffer, tag)
        first = self._mpi.Isend(header, peer, mpi_tag)
        return header, [first, *(self._mpi.Isend(piece, peer, mpi_tag) for piece in _pieces(buffer))]

    def _finish_send(self, sends: list[MPI.Request], memory: Any, doing: str, peer: int) -> None:
        try:
            for send in sends:
                self._patience.wait(send, doing, peer)
        except PeerFailed:
            outbox.keep(sends, memory)
            raise

    def _receive(self, memory: Any, peer: int, mpi_tag: int) -> None:
        request = self._mpi.Irecv(memory, peer, mpi_tag)
        try:
            self._patience.wait(request, "recv", peer)
        except PeerFailed:
            outbox.keep([request], memory)
            raise

    def _barrier(self, tag: str) -> None:
        self._meet("barrier", None, 0, tag)

    def _scratch_array(self, count: int, dtype: Any) -> np.ndarray:
        """Memory that the next call overwrites. It grows to the largest size so far."""
        nbytes = count * np.dtype(dtype).itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)


def elements_at_once(ranks: int, itemsize: int) -> int:
    """Elements that each of `ranks` ranks sends at a time in a reduce_scatter."""
    return max(1, min(_CHUNK, _SCRATCH // ranks) // itemsize)


def begin_exchange(
    mpi: MPI.Intracomm, given: Sequence[np.ndarray], wanted: Sequence[np.ndarray]
) -> list[MPI.Request]:
    """Begin to send given[r] to each other rank r, and to receive wanted[r] from it."""
    requests = []
    for step in range(1, mpi.size):
        to, source = (mpi.rank + step) % mpi.size, (mpi.rank - step) % mpi.size
        requests += [mpi.Irecv(piece, source, _TAG) for piece in _pieces(wanted[source])]
        requests += [mpi.Isend(piece, to, _TAG) for piece in _pieces(given[to])]
    return requests


def _pieces(buffer: np.ndarray) -> list[np.ndarray]:
    """An array in parts that one MPI call can count."""
    return [buffer[start : start + _MESSAGE] for start in range(0, buffer.size, _MESSAGE)]
