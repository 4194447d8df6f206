"""What each rank calls, told to all others over MPI, with the data of a small call in the same message.

A call is prepared once, and told whenever it is made again: training makes the same calls in every step, and
views of memory and requests of MPI take longer to make than to use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from shardrt.comm.calls import HEAD, PACKED
from shardrt.comm.patience import Patience

LITTLE = 1 << 15  # bytes of data in a notice; for more, the copies cost what a second message does
_FEW = 8  # ranks of which each writes to each; more of them gather what they call, and nothing goes along
_TAG = 1  # apart from messages that users send


class Page(NamedTuple):
    """Memory where all ranks' calls arrive: by rank, what each calls, and those data that are for this rank.

    `parts` is empty where nothing goes along. Of this rank itself the data may be missing.
    """

    heads: list[memoryview]
    parts: list[np.ndarray]


def page(boxes: Sequence[memoryview], dtype: np.dtype | None, start: int, count: int) -> Page:
    """In a box for each rank: behind the head `count` elements from element `start`, if there is a dtype."""
    parts = []
    if dtype is not None:
        place = HEAD + start * dtype.itemsize
        parts = [np.frombuffer(box, dtype, count, place) for box in boxes]
    return Page([box[:PACKED] for box in boxes], parts)


@dataclass(frozen=True)
class _Letter:
    """What goes to one peer: `data[own]` into `place`."""

    head: memoryview
    place: np.ndarray | None
    own: slice


@dataclass(frozen=True)
class Notice:
    """One call of this rank, prepared."""

    call: bytes
    letters: list[_Letter]
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
        self._receives = [mpi.Recv_init([self._boxes[peer], nbytes, MPI.BYTE], peer, _TAG) for peer in peers]
        self._sends: dict[int, list[MPI.Prequest]] = {}  # by bytes, to every peer

    def close(self) -> None:
        """Free what belongs to the communicator. What was prepared must not be told any more."""
        for request in self._receives:
            request.Free()
        self.forget()

    def forget(self) -> None:
        """Free what was prepared, which must not be told any more."""
        for requests in self._sends.values():
            for request in requests:
                request.Free()
        self._sends.clear()

    def fits(self, nbytes: int, sliced: bool) -> bool:
        """Whether so many bytes of data go along."""
        return self._few and nbytes <= (LITTLE * self._mpi.size if sliced else LITTLE)

    def prepare(
        self, call: bytes, data: np.ndarray | None = None, sliced: bool = False, root: int | None = None
    ) -> Notice:
        """A notice of `call` with data like these, that fit: all of them, or to each rank its slice.

        root: only what this rank has is sent.
        """
        ranks, rank = self._mpi.size, self._mpi.rank
        if data is None:
            return Notice(call, *self._to_peers(HEAD, None, 0, 0), page(self._boxes, None, 0, 0))
        count = data.size // ranks if sliced else data.size
        sent = count if root in (None, rank) else 0
        nbytes = HEAD + sent * data.itemsize
        letters, sends = self._to_peers(nbytes, data.dtype, sent, count if sliced else 0)
        return Notice(call, letters, sends, page(self._boxes, data.dtype, 0, count))

    def _to_peers(
        self, nbytes: int, dtype: np.dtype | None, count: int, step: int
    ) -> tuple[list[_Letter], list[MPI.Prequest]]:
        """Messages of `nbytes` with `count` elements, from element `step` * peer of the data on."""
        letters = []
        for peer, box in self._sent.items():
            place = np.frombuffer(box, dtype, count, HEAD) if count else None
            letters.append(_Letter(box[:PACKED], place, slice(step * peer, step * peer + count)))
        if nbytes not in self._sends:
            self._sends[nbytes] = [
                self._mpi.Send_init([box, nbytes, MPI.BYTE], peer, _TAG) for peer, box in self._sent.items()
            ]
        return letters, self._sends[nbytes]

    def tell(self, notice: Notice, data: np.ndarray | None, doing: str) -> Page:
        """Exchange calls and data. The page lasts until the next notice. Raises PeerFailed."""
        self.sequence += 1
        notice.page.heads[self._mpi.rank][:] = notice.call
        if not self._few:
            gathered = self._mpi.Iallgather(MPI.IN_PLACE, [self._memory, HEAD, MPI.BYTE])
            self._patience.wait(gathered, doing)
            return notice.page
        for request in self._receives:
            request.Start()
        for letter, request in zip(notice.letters, notice.sends, strict=True):
            letter.head[:] = notice.call
            if letter.place is not None:
                letter.place[:] = data[letter.own]
            request.Start()
        for request in self._receives:
            self._patience.wait(request, doing)
        for request in notice.sends:
            self._patience.wait(request, doing)
        return notice.page
