"""Several nodes: shared memory inside a node, MPI between ranks of the same place on different nodes.

A gathered buffer is one physical buffer per node: every rank fetches the slices of its counterparts on the
other nodes straight into it, so that each slice crosses the network once per node, not once per rank.
Everything else goes through MPI over all ranks: the tree of a sum must be the same wherever the ranks are, so
a sum cannot be added up per node first.
"""

import warnings
from typing import Any

import numpy as np
from mpi4py import MPI

from shardrt.comm.calls import Names
from shardrt.comm.mpi import MPICommunicator
from shardrt.comm.protocol import Communicator
from shardrt.comm.segments import Segments, SharedMemoryUnavailable
from shardrt.comm.shm import ShmCommunicator


def create(mpi: MPI.Intracomm, node: int | None = None, names: Names | None = None) -> Communicator:
    """The communicator that fits where the ranks of `mpi` are. Collective.

    One node: shm. Several with equally many ranks each: hierarchical. Else, or where memory cannot be
    shared: mpi, with a warning on rank 0 that says why. `node`: this rank's node; MPI is asked if None.
    `names`: those of the communicator that this one is made from.
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
        warnings.warn(f"communicator: plain MPI, ranks of a node share no memory: {reason}", stacklevel=3)
    return MPICommunicator(mpi, names)


class HierarchicalCommunicator(MPICommunicator):
    """Ranks on several nodes, equally many on each, placed on them in any order."""

    shares_memory = True

    def __init__(
        self, mpi: MPI.Intracomm, local: ShmCommunicator, segments: Segments, node: int | None, names: Names
    ) -> None:
        """Collective over `mpi`. `local`: the ranks of this node, in rank order; `segments`: their memory."""
        super().__init__(mpi, names)
        self._local = local
        self._segments = segments
        self._node = node
        self._across = mpi.Split(local.rank, mpi.rank)
        self._counterparts = self._across.allgather(mpi.rank)

    def split(self, color: int | None, key: int) -> Communicator | None:
        mpi = self._split(color, key)
        return None if mpi is None else create(mpi, self._node, self._names)

    def duplicate(self) -> "HierarchicalCommunicator":
        self._meet("split", None)
        local = self._local.duplicate()
        return HierarchicalCommunicator(self._mpi.Dup(), local, self._segments, self._node, self._names)

    def allocate(self, count: int, dtype: Any, *, shared: bool) -> np.ndarray:
        if shared:
            return self._local.allocate(count, dtype, shared=True)
        return super().allocate(count, dtype, shared=False)

    def close(self) -> None:
        self._across.Free()
        self._local.close()
        super().close()

    def _all_gather(self, buffer: np.ndarray, what: str) -> None:
        place = self._segments.find(buffer)
        if place is None:
            return super()._all_gather(buffer, what)
        self._meet("all_gather", buffer, 0, what, "", place.word)
        n = buffer.size // self.size
        places = ([n] * self._across.size, [rank * n for rank in self._counterparts])
        self._across.Allgatherv(MPI.IN_PLACE, [buffer, places])
        return self._local._all_gather(buffer, what)  # until every rank of the node has fetched its part
