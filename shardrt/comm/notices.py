"""What each rank calls, told to all others over MPI, with the data of a small call in the same message."""

import numpy as np
from mpi4py import MPI

from shardrt.comm.calls import HEAD, PACKED
from shardrt.comm.patience import Patience

LITTLE = 1 << 15  # bytes of data in a notice; for more, the copies cost what a second message does
_FEW = 8  # ranks of which each writes to each; more of them gather what they call, and nothing goes along
_TAG = 1  # apart from messages that users send


class Notices:
    """The notices of one communicator."""

    cuts = True  # a box holds this rank's slice of what another has

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

    def close(self) -> None:
        """Free what belongs to the communicator."""
        for request in self._receives:
            request.Free()

    def fits(self, data: np.ndarray, sliced: bool) -> bool:
        """Whether data go along."""
        return self._few and data.nbytes <= (LITTLE * self._mpi.size if sliced else LITTLE)

    def tell(
        self, call: bytes, data: np.ndarray | None, sliced: bool, root: int | None, doing: str
    ) -> list[memoryview]:
        """Exchange calls, and data that fit, of all ranks or of `root`: all of them, or to each its slice.

        The box of each rank holds its call and from HEAD on its data; that of this rank the call. It lasts
        until the next notice. Raises PeerFailed.
        """
        self.sequence += 1
        self._boxes[self._mpi.rank][:PACKED] = call
        if not self._few:
            gathered = self._mpi.Iallgather(MPI.IN_PLACE, [self._memory, HEAD, MPI.BYTE])
            self._patience.wait(gathered, doing)
            return self._boxes
        raw = b""
        if data is not None and data.nbytes and root in (None, self._mpi.rank):
            raw = data.data.cast("B")
        step = len(raw) // self._mpi.size
        for receive in self._receives:
            receive.Start()
        sends = []
        for peer, box in self._sent.items():
            piece = raw[peer * step : (peer + 1) * step] if sliced else raw
            end = HEAD + len(piece)
            box[:PACKED], box[HEAD:end] = call, piece
            sends.append(self._mpi.Isend([box, end, MPI.BYTE], peer, _TAG))
        for request in self._receives + sends:
            self._patience.wait(request, doing)
        return self._boxes
