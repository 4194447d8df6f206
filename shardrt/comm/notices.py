"""Notices: each rank sends its call to all other ranks over MPI, with the data of a small call.

A rank prepares the notice of a call once and sends it at each repetition. Training makes the same calls in
every step, and making views and MPI requests takes longer than using them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from shardrt.comm.calls import HEAD, PACKED
from shardrt.comm.errors import PeerFailed
from shardrt.comm.outbox import keep
from shardrt.comm.patience import Patience

LITTLE = 1 << 15  # bytes of data in a notice; the copies of more data cost as much as a second message
_FEW = 8  # up to so many ranks send notices to each other; more ranks gather their calls, without data
_TAG = 1  # MPI tag of notices; collectives use 0


class Page(NamedTuple):
    """Memory where the calls of all ranks arrive, in order: each call, and the data for this rank.

    `parts` is empty if no data travel with the call. This rank's own part may be undefined.
    """

    heads: list[memoryview]
    parts: list[np.ndarray]


def parts_of(boxes: Sequence[memoryview], dtype: np.dtype, start: int, count: int) -> list[np.ndarray]:
    """`count` elements from element `start` on in the box of each rank, behind its head."""
    return [np.frombuffer(box, dtype, count, HEAD + start * dtype.itemsize) for box in boxes]


class Notice(NamedTuple):
    """One call of this rank, prepared.

    Attributes:
        places: (where its data lie in the message, slice of the data or None for all) for each peer; empty if
            no data travel with the call.
    """

    call: bytes
    places: list[tuple[np.ndarray, slice | None]]
    sends: list[MPI.Prequest]
    page: Page


class Notices:
    """The notices of one communicator."""

    def __init__(self, mpi: MPI.Intracomm, patience: Patience) -> None:
        self.sequence = 0  # of the latest notice
        self._mpi = mpi
        self._patience = patience
        self._few = mpi.size <= _FEW
        nbytes = HEAD + LITTLE if self._few else HEAD
        self._memory = np.zeros((mpi.size, nbytes), np.uint8)
        self._boxes = [memoryview(row) for row in self._memory]  # by rank
        peers = [rank for rank in range(mpi.size) if rank != mpi.rank] if self._few else []
        self._sent = {peer: memoryview(np.zeros(nbytes, np.uint8)) for peer in peers}
        self._heads = [box[:PACKED] for box in self._boxes]
        self._calls = [
            self._heads[mpi.rank],
            *(box[:PACKED] for box in self._sent.values()),
        ]  # this rank's, in each message
        self._receives = [mpi.Recv_init([self._boxes[peer], nbytes, MPI.BYTE], peer, _TAG) for peer in peers]
        self._sends: dict[int, list[MPI.Prequest]] = {}  # by bytes, to every peer
        self._failed: PeerFailed | None = None

    def close(self) -> None:
        """Free all MPI requests. Prepared notices must not be used again."""
        if self._failed is None:
            for request in self._receives:
                request.Free()
            self._receives.clear()
            self.forget()

    def __del__(self) -> None:
        if MPI is not None and not MPI.Is_finalized():  # at the very end globals may be gone
            self.close()

    def forget(self) -> None:
        """Free the prepared notices, which must not be used again."""
        for requests in self._sends.values():
            for request in requests:
                request.Free()
        self._sends.clear()

    def fits(self, nbytes: int, sliced: bool) -> bool:
        """Whether so many bytes of data can travel with a call."""
        return self._few and nbytes <= (LITTLE * self._mpi.size if sliced else LITTLE)

    def prepare(
        self, call: bytes, data: np.ndarray | None = None, sliced: bool = False, root: int | None = None
    ) -> Notice:
        """A notice of `call` with data like `data`, which fit: all to each rank, or to each its slice.

        Args:
            root: only this rank sends data.
        """
        if data is None:
            return Notice(call, [], self._to_peers(HEAD), Page(self._heads, []))
        count = data.size // self._mpi.size if sliced else data.size
        page = Page(self._heads, parts_of(self._boxes, data.dtype, 0, count))
        if root not in (None, self._mpi.rank):
            return Notice(call, [], self._to_peers(HEAD), page)
        places = []
        for peer, box in self._sent.items():
            own = slice(count * peer, count * (peer + 1)) if sliced else None
            places.append((parts_of([box], data.dtype, 0, count)[0], own))
        return Notice(call, places, self._to_peers(HEAD + count * data.itemsize), page)

    def _to_peers(self, nbytes: int) -> list[MPI.Prequest]:
        """Requests that send so many bytes of each peer's box to it."""
        if nbytes not in self._sends:
            self._sends[nbytes] = [
                self._mpi.Send_init([box, nbytes, MPI.BYTE], peer, _TAG) for peer, box in self._sent.items()
            ]
        return self._sends[nbytes]

    def exchange(self, notice: Notice, data: np.ndarray | None, doing: str) -> Page:
        """Exchange calls and data. The page lasts until the next notice. Repeats a PeerFailed later."""
        if self._failed is not None:
            raise PeerFailed(str(self._failed))
        self.sequence += 1
        for head in self._calls:
            head[:] = notice.call
        for place, own in notice.places:
            place[:] = data if own is None else data[own]
        try:
            self._exchange(notice, doing)
        except PeerFailed as error:
            self._failed = error
            keep([], self)  # MPI still uses its memory
            raise
        return notice.page

    def _exchange(self, notice: Notice, doing: str) -> None:
        if not self._few:
            gathered = self._mpi.Iallgather(MPI.IN_PLACE, [self._memory, HEAD, MPI.BYTE])
            self._patience.wait(gathered, doing)
            return
        for request in self._receives:
            request.Start()
        for request in notice.sends:
            request.Start()
        for request in self._receives:
            self._patience.wait(request, doing)
        for request in notice.sends:
            if not request.Test():
                self._patience.wait(request, doing)
