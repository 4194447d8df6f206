"""Messages between two ranks of a node, by shared memory: written once, read once.

Each direction has a counter of pieces that were put in, one of pieces that were taken out, and room for two
pieces: the sender fills one while the receiver empties the other. So a message costs two copies, which run at
the same time, and its memory is bounded. Who has to wait sleeps in the kernel (futex.py).
"""

import numpy as np
from mpi4py import MPI

from shardrt.comm import calls, futex
from shardrt.comm.flags import Flags
from shardrt.comm.patience import Patience
from shardrt.comm.segments import map_shared

PIECE = 1 << 20  # bytes: both stay in a cache
_HEADS = 128  # bytes; the two counters have a cache line each before them
_DATA = 4096
_FILLED, _TAKEN = 0, 8  # int64 words from the start of a direction
_LOOKS = 10  # before a rank sleeps: what it waits for is computed, or a copy
_NAP = 50_000_000  # nanoseconds until a sleeper looks again unwoken, in case its peer has left


class Mailbox:
    """Of the two ranks of one communicator, whose `flags` say whether the other one has left."""

    def __init__(self, mpi: MPI.Intracomm, flags: Flags, patience: Patience) -> None:
        """Collective over `mpi`. Memory is taken when it is first written. Raises SharedMemoryUnavailable."""
        self._flags = flags
        self._patience = patience
        self._own = mpi.rank
        self._fence = futex.fence()
        memory = map_shared(mpi, 2 * (_DATA + 2 * PIECE))
        self._out = _Direction(memory, mpi.rank)
        self._in = _Direction(memory, 1 - mpi.rank)

    def send(self, array: np.ndarray, tag: str) -> None:
        """Return when the peer has taken it. Raises PeerFailed."""
        message, out = calls.pack_message(array, tag), self._out
        for piece in _pieces(array):
            self._wait(out, _TAKEN, out.count - 1, "send")  # the piece before the last was taken
            out.put(message, piece)
            self._publish(out, _FILLED)
        self._wait(out, _TAKEN, out.count, "send")

    def receive(self, array: np.ndarray, tag: str) -> None:
        """The next message, which must be like `array`. Raises CollectiveMismatch and PeerFailed."""
        expected, source = calls.pack_message(array, tag), self._in
        self._wait(source, _FILLED, source.count + 1, "recv")
        message = source.head()
        # What is not what was expected is taken all the same, so that its sender can go on and end.
        for piece in _pieces(array if message == expected else calls.array_of(message)):
            self._wait(source, _FILLED, source.count + 1, "recv")
            source.take(piece)
            self._publish(source, _TAKEN)
        if message != expected:
            raise calls.unlike(message, expected, *self._world_ranks())

    def _publish(self, direction: "_Direction", word: int) -> None:
        """Say how far this rank has come, after what it has written or read; wake the other one."""
        self._fence.Sync()
        direction.words[word] = direction.count
        self._fence.Sync()
        futex.wake(direction.address + 8 * word)

    def _wait(self, direction: "_Direction", word: int, value: int, doing: str) -> None:
        """Return when the peer has come so far; then what it wrote before is seen."""
        words, peer = direction.words, 1 - self._own
        for _ in range(_LOOKS):
            if words[word] >= value:
                return self._fence.Sync()
            self._fence.Sync()
        while True:
            has_left = self._flags.has_left(peer)  # before the counter: it may come so far and then leave
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
        """The other one and this one, among all ranks."""
        return self._patience.world_rank(1 - self._own), self._patience.world_rank(self._own)


class _Direction:
    """What one rank sends the other."""

    def __init__(self, memory: np.ndarray, sender: int) -> None:
        part = memory.reshape(2, -1)[sender]
        self.count = 0  # of the pieces that this rank has put in, or taken out
        self.address = part.ctypes.data
        self.words = memoryview(part[:_HEADS]).cast("q")
        self._heads = [memoryview(part[_HEADS + i * calls.MESSAGE :][: calls.MESSAGE]) for i in range(2)]
        self._boxes = [part[_DATA + i * PIECE :][:PIECE] for i in range(2)]

    def put(self, message: bytes, piece: np.ndarray) -> None:
        """Fill the next half with a piece of the message of which this is told."""
        half = self.count % 2
        self._heads[half][:] = message
        self._boxes[half][: piece.size] = piece
        self.count += 1

    def head(self) -> bytes:
        """What is told in the next half, which is filled."""
        return bytes(self._heads[self.count % 2])

    def take(self, piece: np.ndarray) -> None:
        """Empty the next half."""
        piece[:] = self._boxes[self.count % 2][: piece.size]
        self.count += 1


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """The bytes of an array in parts for which there is room, at least one."""
    data = array.view(np.uint8)
    return [data[start : start + PIECE] for start in range(0, max(1, data.size), PIECE)]
