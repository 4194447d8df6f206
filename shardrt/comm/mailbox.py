"""Mailbox: direct messages between two ranks of a node by shared memory.

Each direction has a counter of written pieces, a counter of read pieces, and room for two pieces: the sender
fills one while the receiver empties the other. So a message costs two copies, which run at the same time, in
bounded memory. A waiting rank sleeps in the kernel (futex.py).
"""

import numpy as np
from mpi4py import MPI

from shardrt.comm import calls, futex
from shardrt.comm.flags import Flags
from shardrt.comm.patience import Patience
from shardrt.comm.segments import map_shared

PIECE = 1 << 20  # bytes; two pieces stay in a cache
_HEADS = 128  # offset of the headers in bytes; each counter has a cache line before
_DATA = 4096
_FILLED, _TAKEN = 0, 8  # int64 words from the start of a direction
_LOOKS = 10  # polls before a rank sleeps: the peer computes or copies, so waits are long
_NAP = 50_000_000  # nanoseconds after which a sleeper checks whether its peer has left


class Mailbox:
    """The mailbox of a communicator of two ranks. `flags` knows whether the other rank has left."""

    def __init__(self, mpi: MPI.Intracomm, flags: Flags, patience: Patience) -> None:
        """Collective over `mpi`. Memory gets pages at its first write. Raises SharedMemoryUnavailable."""
        self._flags = flags
        self._patience = patience
        self._own = mpi.rank
        self._fence = futex.fence()
        memory = map_shared(mpi, 2 * (_DATA + 2 * PIECE))
        self._out = _Direction(memory, mpi.rank)
        self._in = _Direction(memory, 1 - mpi.rank)

    def send(self, array: np.ndarray, tag: str) -> None:
        """Send a message; return when the peer has received it. Raises PeerFailed."""
        message, out = calls.pack_message(array, tag), self._out
        for piece in _pieces(array):
            self._wait(out, _TAKEN, out.count - 1, "send")  # the piece before the last was taken
            out.put(message, piece)
            self._publish(out, _FILLED)
        self._wait(out, _TAKEN, out.count, "send")

    def receive(self, array: np.ndarray, tag: str) -> None:
        """Receive the next message into `array`. Raises CollectiveMismatch and PeerFailed."""
        expected, source = calls.pack_message(array, tag), self._in
        self._wait(source, _FILLED, source.count + 1, "recv")
        message = source.head()
        # Receive an unexpected message, too, so that its sender can go on and end.
        for piece in _pieces(array if message == expected else calls.array_of(message)):
            self._wait(source, _FILLED, source.count + 1, "recv")
            source.take(piece)
            self._publish(source, _TAKEN)
        if message != expected:
            raise calls.unlike(message, expected, *self._world_ranks())

    def _publish(self, direction: "_Direction", word: int) -> None:
        """Set this rank's counter after its reads and writes, and wake the other rank."""
        self._fence.Sync()
        direction.words[word] = direction.count
        self._fence.Sync()
        futex.wake(direction.address + 8 * word)

    def _wait(self, direction: "_Direction", word: int, value: int, doing: str) -> None:
        """Return when the peer's counter has come to `value`. Then this rank sees the peer's writes."""
        words, peer = direction.words, 1 - self._own
        for _ in range(_LOOKS):
            if words[word] >= value:
                return self._fence.Sync()
            self._fence.Sync()
        while True:
            has_left = self._flags.has_left(
                peer
            )  # read before the counter: the peer may arrive and then leave
            self._fence.Sync()
            seen = int(words[word])
            if seen >= value:
                return self._fence.Sync()
            if self._patience.abandoned:
                raise calls.abandoned(self._world_ranks()[1])
            if has_left:
                raise calls.left(*self._world_ranks(), doing)
            futex.sleep(direction.address + 8 * word, seen, _NAP)

    def _world_ranks(self) -> tuple[int, int]:
        """World ranks of the peer and of this rank."""
        return self._patience.world_rank(1 - self._own), self._patience.world_rank(self._own)


class _Direction:
    """The messages of one rank to the other."""

    def __init__(self, memory: np.ndarray, sender: int) -> None:
        part = memory.reshape(2, -1)[sender]
        self.count = 0  # pieces that this rank has written, or read
        self.address = part.ctypes.data
        self.words = memoryview(part[:_HEADS]).cast("q")
        self._heads = [memoryview(part[_HEADS + i * calls.MESSAGE :][: calls.MESSAGE]) for i in range(2)]
        self._boxes = [part[_DATA + i * PIECE :][:PIECE] for i in range(2)]

    def put(self, message: bytes, piece: np.ndarray) -> None:
        """Fill the next half with a piece, and with the header `message`."""
        half = self.count % 2
        self._heads[half][:] = message
        self._boxes[half][: piece.size] = piece
        self.count += 1

    def head(self) -> bytes:
        """The header in the next half, which is filled."""
        return bytes(self._heads[self.count % 2])

    def take(self, piece: np.ndarray) -> None:
        """Copy the next half to `piece`."""
        piece[:] = self._boxes[self.count % 2][: piece.size]
        self.count += 1


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of an array in pieces of at most PIECE bytes; at least one piece."""
    data = array.view(np.uint8)
    return [data[start : start + PIECE] for start in range(0, max(1, data.size), PIECE)]
