"""Several nodes: shared memory inside a node, MPI between counterparts: ranks of the same local rank.

With ranks 0, 1 on node A and 2, 3 on node B, the counterparts are 0 and 2, 1 and 3.
A gathered buffer is one physical buffer per node. Every rank fetches the slices of its counterparts directly
into it, so each slice crosses the network once per node, not once per rank.

A node sums in its own memory first, if the node is a subtree of the tree over ranks: 2, 4, 8, ... adjacent
ranks per node. So the sum is bitwise identical to every other placement. Then counterparts exchange the sums
of their nodes: 1/ranks-per-node of the bytes crosses the network. Small data and all else go through MPI.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from shardrt.comm import outbox
from shardrt.comm.calls import Names
from shardrt.comm.errors import PeerFailed
from shardrt.comm.mpi import MPICommunicator, begin_exchange, elements_at_once
from shardrt.comm.patience import Patience
from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction, combine
from shardrt.comm.segments import Segments, SharedMemoryUnavailable
from shardrt.comm.shm import ShmCommunicator


def create(mpi: MPI.Intracomm, node: int | None = None, names: Names | None = None) -> Communicator:
    """The communicator that fits where the ranks of `mpi` are.

    Collective.

    One node: shm. Several nodes with equal numbers of ranks: hierarchical. Otherwise, or if ranks can't share
    memory: mpi, with a warning on rank 0 that gives the reason.

    Args:
        node: this rank's node; None: ask MPI.
        names: the names of the communicator that this one is made from.
    """
    names = names or Names()
    local = mpi.Split_type(MPI.COMM_TYPE_SHARED, mpi.rank) if node is None else mpi.Split(node, mpi.rank)
    sizes = set(mpi.allgather(local.size))
    if len(sizes) > 1 or (sizes == {1} and mpi.size > 1):
        local.Free()
        return _plain(mpi, names, f"nodes hold {sorted(sizes)} ranks" if len(sizes) > 1 else None)
    shm = segments = reason = None
    try:
        segments = Segments(local)
        shm = ShmCommunicator(local, segments, names)
    except SharedMemoryUnavailable as error:
        reason = str(error)
    reasons = [text for text in mpi.allgather(reason) if text]
    if reasons:
        return _plain(mpi, names, reasons[0])
    if local.size < mpi.size:
        return HierarchicalCommunicator(mpi, shm, segments, node, names)
    mpi.Free()
    return shm


def _plain(mpi: MPI.Intracomm, names: Names, reason: str | None) -> MPICommunicator:
    if reason is not None and mpi.rank == 0:
        warnings.warn(
            f"communicator: collectives use plain MPI, since ranks of a node can't share memory: {reason}",
            stacklevel=3,
        )
    return MPICommunicator(mpi, names)


class HierarchicalCommunicator(MPICommunicator):
    """Ranks on several nodes, equally many on each, placed on them in any order."""

    shares_memory = True

    def __init__(
        self, mpi: MPI.Intracomm, local: ShmCommunicator, segments: Segments, node: int | None, names: Names
    ) -> None:
        """Collective over `mpi`.

        Args:
            local: the ranks of this node, in rank order; `segments`: their memory.
        """
        super().__init__(mpi, names)
        self._local = local
        self._segments = segments
        self._node = node
        self._across = mpi.Split(local.rank, mpi.rank)
        self._counterparts = self._across.allgather(mpi.rank)  # by node
        self._across_patience = Patience(self._across)
        here = self._across.rank * local.size + local.rank
        self._nested = all(mpi.allgather(here == mpi.rank and not local.size & (local.size - 1)))
        self.bytes_across = 0  # sent to other nodes by all_gather and reduce_scatter

    def split(self, color: int | None, key: int) -> Communicator | None:
        mpi = self._split(color, key)
        return None if mpi is None else create(mpi, self._node, self._names)

    def duplicate(self) -> "HierarchicalCommunicator":
        self._meet("split", None)
        local = self._local.duplicate()
        return HierarchicalCommunicator(self._mpi.Dup(), local, self._segments, self._node, self._names)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        return self._local.allocate(count, dtype, shared=shared)

    def close(self) -> None:
        self._across.Free()
        self._local.close()
        super().close()

    def _all_gather(self, buffer: np.ndarray, tag: str) -> None:
        place, n = self._segments.find(buffer), buffer.size // self.size
        shared = place is not None and place.segment.shared
        if not shared and (not self._nested or self._calls.fits(n * buffer.itemsize, False)):
            return super()._all_gather(buffer, tag)
        self._meet("all_gather", buffer, 0, tag, "", 0 if place is None else place.word)
        slices = [buffer[rank * n : (rank + 1) * n] for rank in self._counterparts]
        own = slices[self._across.rank]
        self._finish(self._exchange_across([own] * len(slices), slices), "all_gather", buffer)
        if shared:
            return self._local._all_gather(
                buffer, tag
            )  # waits until every rank of the node has fetched its part
        for rows in buffer.reshape(self._across.size, -1):  # of each node
            self._local._all_gather(rows, tag)
        return None

    def _reduce_scatter(self, output: np.ndarray, buffer: np.ndarray, how: Reduction, tag: str) -> None:
        place = self._local.separate("reduce_scatter", buffer)
        if not self._nested or self._calls.fits(buffer.nbytes, True):
            return super()._reduce_scatter(output, buffer, how, tag)
        self._meet("reduce_scatter", buffer, how.op, tag, how.kind, 0 if place is None else place.word)
        nodes, own = self._across.size, self._across.rank
        each = min(output.size, elements_at_once(nodes, output.itemsize))
        memory = self._scratch_array(4 * nodes * each, output.dtype).reshape(2, 2, nodes, each)
        under_way = None
        for columns, everyone in self._columns(buffer.reshape(self.size, -1), each, how.op, tag, how.kind):
            memory = memory[::-1]  # alternating: compute the next sums while these are sent
            sums, parts = memory[0, :, :, : columns.stop - columns.start]
            for part, rank in zip(sums, self._counterparts, strict=True):
                combine(part, [rows[rank] for rows in everyone], op=how.op, kind=how.kind)
            requests = self._exchange_across(sums, parts)
            if under_way is not None:
                self._add(*under_way, how)
            under_way = output[columns], [*parts[:own], sums[own], *parts[own + 1 :]], requests, memory
        return self._add(*under_way, how)

    def _columns(
        self, rows: np.ndarray, each: int, op: str, tag: str, kind: str
    ) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """As ShmCommunicator.columns of the node, at most `each` columns at a time."""
        for columns, everyone in self._local.columns(rows, op, tag, kind):
            first, end, _ = columns.indices(rows.shape[1])
            for start in range(first, end, each):
                stop = min(start + each, end)
                yield slice(start, stop), [part[:, start - first : stop - first] for part in everyone]

    def _add(
        self,
        output: np.ndarray,
        parts: list[np.ndarray],
        requests: list[MPI.Request],
        memory: np.ndarray,
        how: Reduction,
    ) -> None:
        """Wait for the sums of all nodes, and combine them to `output`."""
        self._finish(requests, "reduce_scatter", memory)
        combine(output, parts, how.scale, how.accumulate, how.op)

    def _exchange_across(
        self, given: Sequence[np.ndarray], wanted: Sequence[np.ndarray]
    ) -> list[MPI.Request]:
        """Begin to send `given` to this rank's counterpart on each other node, and to receive `wanted`."""
        self.bytes_across += sum(part.nbytes for part in given) - given[self._across.rank].nbytes
        return begin_exchange(self._across, given, wanted)

    def _finish(self, requests: list[MPI.Request], doing: str, memory: Any) -> None:
        """Wait for requests that use `memory`."""
        try:
            for request in requests:
                self._across_patience.wait(request, doing)
        except PeerFailed:
            outbox.keep(requests, memory)
            raise
