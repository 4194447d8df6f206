"""Ranks of one node that read each other's memory, with one copy or none.

An all_gather on a buffer from `allocate(shared=True)` only waits until every rank has written its slice: it
takes microseconds at any size. A reduce_scatter on a buffer from `allocate(shared=False)` is one pass: it
reads this rank's slice from every rank's buffer and writes the sum. An all_to_all there is one copy. Small
data travel with the call (flags.py). Ranks copy other arrays, such as activations, piece by piece to shared
memory; so do direct messages of two ranks (mailbox.py). All else goes through MPI.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from shardrt.comm import counts
from shardrt.comm.calls import Names
from shardrt.comm.flags import Flags
from shardrt.comm.mailbox import Mailbox
from shardrt.comm.mpi import MPICommunicator
from shardrt.comm.reduction import Reduction, combine
from shardrt.comm.segments import Segments, SharedOffset

_STAGED = 1 << 20  # bytes that a rank copies to shared memory at a time; they stay in a cache


class ShmCommunicator(MPICommunicator):
    """A group of MPI processes on one node."""

    shares_memory = True

    def __init__(
        self, mpi: MPI.Intracomm, segments: Segments | None = None, names: Names | None = None
    ) -> None:
        """Collective over `mpi`.

        Args:
            segments: the memory of another communicator over the same ranks.
            names: the names of the communicator that this one was made from.
        """
        self._flags = Flags(mpi)
        super().__init__(mpi, names, self._flags)
        self._segments = segments or Segments(mpi)
        # Two alternating stages: shared memory for data of this rank. All ranks meet before one is reused.
        self._stages: list[tuple[np.ndarray, SharedOffset]] = []
        self._mailbox = Mailbox(mpi, self._flags, self._patience) if mpi.size == 2 else None

    def close(self) -> None:
        self._stages.clear()
        self._mailbox = None
        super().close()

    def split(self, color: int | None, key: int) -> "ShmCommunicator | None":
        mpi = self._split(color, key)
        return None if mpi is None else ShmCommunicator(mpi, None, self._names)

    def duplicate(self) -> "ShmCommunicator":
        self._meet("split", None)
        return ShmCommunicator(self._mpi.Dup(), self._segments, self._names)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        return self._segments.allocate(self._mpi, count, dtype, shared)

    def _all_gather(self, buffer: np.ndarray, tag: str) -> None:
        place = self._segments.find(buffer)
        n = buffer.size // self.size
        little = self._flags.fits(n * buffer.itemsize, False)
        if little and (place is None or not place.segment.shared):
            return super()._all_gather(buffer, tag)
        if place is None:
            return self._gather_staged(buffer, tag)
        self._meet("all_gather", buffer, 0, tag, "", place.word)
        if place.segment.shared:
            return None  # all slices are written in this buffer
        for step in range(1, self.size):  # each rank starts with another peer
            peer = (self.rank + step) % self.size
            buffer[peer * n : (peer + 1) * n] = place.of(peer, buffer)[peer * n : (peer + 1) * n]
        return self._flags.part("all_gather")

    def _reduce_scatter(self, output: np.ndarray, buffer: np.ndarray, how: Reduction, tag: str) -> None:
        if self._flags.fits(buffer.nbytes, True):
            self.separate("reduce_scatter", buffer)
            return super()._reduce_scatter(output, buffer, how, tag)
        for columns, everyone in self.columns(buffer.reshape(self.size, -1), how.op, tag, how.kind):
            own = [rows[self.rank] for rows in everyone]
            combine(output[columns], own, *how)
        return None

    def columns(
        self, rows: np.ndarray, op: str, tag: str, kind: str
    ) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Yield (columns, each rank's rows in these columns) for a reduce_scatter, until all columns were.

        Collective over all columns. The rows are valid until the next are yielded.
        """
        place = self.separate("reduce_scatter", rows)
        if place is not None:
            self._meet("reduce_scatter", rows, op, tag, kind, place.word)
            yield slice(None), [place.of(rank, rows).reshape(rows.shape) for rank in range(self.size)]
            self._flags.part("reduce_scatter")
            return
        each = max(1, _STAGED // (len(rows) * rows.itemsize))
        for start in range(0, rows.shape[1], each):
            columns = slice(start, start + each)
            parts = self._staged(rows[:, columns], "reduce_scatter", rows, op, tag, kind)
            yield columns, [part.reshape(len(rows), -1) for part in parts]

    def _all_reduce(self, buffer: np.ndarray, op: str, tag: str) -> None:
        place = self.separate("all_reduce", buffer)
        if place is not None or self._flags.fits(buffer.nbytes, False):
            return super()._all_reduce(buffer, op, tag)
        each = _STAGED // buffer.itemsize
        for start in range(0, buffer.size, each):
            self._sum_staged(buffer[start : start + each], op, tag)
        return None

    def _sum_staged(self, buffer: np.ndarray, op: str, tag: str) -> None:
        """Two ranks each sum the whole buffer. More ranks each sum a part, and copy the other parts."""
        parts = self._staged(buffer, "all_reduce", buffer, op, tag)
        if self.size == 2:
            return combine(buffer, parts, op=op)
        n = -(-buffer.size // self.size)
        rows = [slice(rank * n, (rank + 1) * n) for rank in range(self.size)]
        own = rows[self.rank]
        combine(parts[self.rank][own], [part[own] for part in parts], op=op)
        self._flags.part("all_reduce")
        for part, row in zip(parts, rows, strict=True):
            buffer[row] = part[row]
        return None

    def _gather_staged(self, buffer: np.ndarray, tag: str) -> None:
        """Gather in pieces of every rank's slice."""
        rows = buffer.reshape(self.size, -1)
        each = _STAGED // buffer.itemsize
        for start in range(0, rows.shape[1], each):
            pieces = rows[:, start : start + each]
            parts = self._staged(pieces[self.rank], "all_gather", buffer, start, tag)
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    pieces[rank] = part

    def _staged(self, own: np.ndarray, *call: Any) -> list[np.ndarray]:
        """The `own` of every rank, valid until the next call. call: arguments for `_meet`."""
        self._make_stages(*call)
        self._stages.reverse()
        memory, place = self._stages[0]
        mine = memory[: own.nbytes].view(own.dtype)
        mine.reshape(own.shape)[...] = own
        self._meet(*call)
        return [place.of(rank, mine) for rank in range(self.size)]

    def _make_stages(self, *call: Any) -> None:
        """Allocate the stages. The first call is collective. call: arguments for `_meet`."""
        if not self._stages:
            self._meet(*call)
            segments = Segments(self._mpi)
            made = [segments.allocate(self._mpi, _STAGED, np.uint8, False) for _ in range(2)]
            self._stages = [(memory, segments.find(memory)) for memory in made]

    def _broadcast(self, buffer: np.ndarray, root: int, tag: str) -> None:
        place = self._segments.find(buffer)
        if place is None or not place.segment.shared:
            super()._broadcast(buffer, root, tag)
        else:  # root has written to this same memory
            self._meet("broadcast", buffer, root, tag, "", place.word)

    def _all_to_all(
        self, output: np.ndarray, buffer: np.ndarray, received: counts.Counts, sent: counts.Counts, tag: str
    ) -> None:
        place = self.separate("all_to_all", buffer)
        if sent is not None:
            return self._all_to_all_by_counts(output, buffer, place, received, sent, tag)
        if self._flags.fits(buffer.nbytes, True):
            return super()._all_to_all(output, buffer, None, None, tag)
        sent = counts.equal(buffer.size, self.size)
        table = [sent] * self.size
        if place is None:
            call = "all_to_all", buffer, 0, tag
            self._make_stages(*call)
            return self._send_by_stages(output, buffer, table, sent, call)
        self._meet("all_to_all", buffer, 0, tag, "", place.word)
        return self._take(output, [place.of(peer, buffer) for peer in range(self.size)], table, sent)

    def _all_to_all_by_counts(
        self,
        output: np.ndarray,
        buffer: np.ndarray,
        place: SharedOffset | None,
        received: tuple[int, ...],
        sent: tuple[int, ...],
        tag: str,
    ) -> None:
        """Read directly from peers' buffers if all are of one allocation, else go through stages."""
        call = "all_to_all", buffer[:0], 2, tag
        self._make_stages(*call)
        if place is None:  # before the ranks meet, so that they meet once for counts and data
            self._put(buffer, sent, 0)
        word = 0 if place is None else place.word
        rows, table = self._exchange_counts(buffer, counts.row(received, sent, word), tag)
        words = [int(row[-1]) for row in rows]
        if place is not None and all(map(place.in_same_segment, words)):
            sizes = [sum(by) for by in table]
            theirs = [place.at(words[r], r, sizes[r], buffer.dtype) for r in range(self.size)]
            return self._take(output, theirs, table, received)
        if any(words):  # some ranks have not filled their stage
            if place is not None:
                self._put(buffer, sent, 0)
            self._meet(*call)
        return self._send_by_stages(output, buffer, table, received, call, first=False)

    def _take(
        self, output: np.ndarray, buffers: list[np.ndarray], table: Any, received: tuple[int, ...]
    ) -> None:
        """Copy this rank's part of each rank's buffer. Each rank starts with another peer."""
        parts = counts.slices(received)
        for peer in (*range(self.rank, self.size), *range(self.rank)):
            output[parts[peer]] = buffers[peer][counts.slices(table[peer])[self.rank]]
        self._flags.part("all_to_all")

    def _send_by_stages(
        self,
        output: np.ndarray,
        buffer: np.ndarray,
        table: Any,
        received: tuple[int, ...],
        call: tuple,
        first: bool = True,
    ) -> None:
        """Send by stages: all ranks fill a stage, meet, and read the others' stages, until all data moved.

        table: see counts.compared. first=False: the first stages are filled.
        """
        queues = [counts.Queue(rank, sent) for rank, sent in enumerate(table)]
        parts, sent = counts.slices(received), table[self.rank]
        each = _STAGED // buffer.itemsize
        for start in range(0, max(queue.size for queue in queues), each):
            if start or first:
                self._put(buffer, sent, start)
                self._meet(*call)
            memory, place = self._stages[0]
            for peer in (*range(self.rank + 1, self.size), *range(self.rank)):
                window = queues[peer].window(self.rank, start, start + each)
                if window is not None:
                    output[parts[peer]][window[0]] = place.of(peer, memory).view(buffer.dtype)[window[1]]
        output[parts[self.rank]] = buffer[counts.slices(sent)[self.rank]]

    def _put(self, buffer: np.ndarray, sent: Any, start: int) -> None:
        """Fill the next stage with elements of this rank's queue (counts.Queue) from `start` on."""
        self._stages.reverse()
        stage = self._stages[0][0].view(buffer.dtype)
        queue, parts = counts.Queue(self.rank, sent), counts.slices(sent)
        for peer in range(self.size):
            window = queue.window(peer, start, start + stage.size) if peer != self.rank else None
            if window is not None:
                stage[window[1]] = buffer[parts[peer]][window[0]]

    def _send(self, buffer: np.ndarray, peer: int, tag: str, direct: bool) -> None:
        if direct and self._mailbox is not None:
            self._mailbox.send(buffer, tag)
        else:
            super()._send(buffer, peer, tag, direct)

    def _recv(self, buffer: np.ndarray, peer: int, tag: str, direct: bool) -> None:
        if direct and self._mailbox is not None:
            self._mailbox.receive(buffer, tag)
        else:
            super()._recv(buffer, peer, tag, direct)

    def separate(self, call: str, buffer: np.ndarray) -> SharedOffset | None:
        """Place of a buffer; None if it is not shared memory. ValueError if all ranks share one buffer."""
        place = self._segments.find(buffer)
        if place is not None and place.segment.shared:
            raise ValueError(
                f"{call}: buffer comes from allocate(shared=True), which all ranks share, so their values "
                f"cannot differ; allocate it with shared=False"
            )
        return place
