"""Ranks as MPI processes, arrays in host memory, over mpi4py.

Before every collective the ranks exchange what each is about to call, and wait for each other without
spinning. So a difference is an error here, not a hang in MPI, and a waiting rank leaves its core to those
that compute, unlike in a blocking MPI call. The reduce-scatter is our own: MPI's takes twice as long on large
arrays, and sums in an order of its own.
"""

import time
from array import array as array_of
from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from shardrt.comm import failure
from shardrt.comm.calls import WORDS, Names, encode, mismatch
from shardrt.comm.protocol import Communicator, PeerFailed
from shardrt.comm.reduction import combine

_CHUNK = 1 << 20  # bytes of one message of the reduce-scatter: large enough for the wire, small for the cache
_SCRATCH = 1 << 24  # bytes of all ranks' chunks together, at most
_MESSAGE = 1 << 30  # elements of one MPI call: counts are 32-bit in MPI 3
_SPIN = 2e-5  # seconds of polling before a waiting rank sleeps
_SLEEP = 1e-3  # seconds, the longest sleep between two polls
_LOOK = 0.5  # seconds between two looks at who has left


class MPICommunicator(Communicator):
    """A group of MPI processes."""

    def __init__(self, mpi: MPI.Intracomm, names: Names | None = None) -> None:
        """`mpi` is used by nobody else: this object's collectives and messages have it for themselves.

        `names`: of the communicator that this one was made from.
        """
        self._mpi = mpi
        self.rank = mpi.rank
        self.size = mpi.size
        self._names = names or Names()
        self._sequence = 0  # of the collectives of this communicator, the latest
        self._scratch = np.empty(0, np.uint8)
        self._calls = array_of("q", [0] * (WORDS * mpi.size))  # what each rank calls
        self._own_call = array_of("q", [0] * WORDS)
        self._exchange = [self._own_call, WORDS, MPI.INT64_T], [self._calls, WORDS, MPI.INT64_T]

    def split(self, color: int | None, key: int) -> "MPICommunicator | None":
        mpi = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else MPICommunicator(mpi, self._names)

    def close(self) -> None:
        self._mpi.Free()

    def register_names(self, names: Iterable[str]) -> None:
        self._names.register(names)

    def _meet(self, collective: str, *facts: Any) -> None:
        """Return when every rank has come to this call, leaving the core to others meanwhile.

        `facts` (see calls.encode) describe it. Raises CollectiveMismatch, on all ranks, where they differ.
        """
        self._sequence += 1
        self._own_call[:] = array_of("q", encode(self._names, collective, *facts))
        self._wait(self._mpi.Iallgather(*self._exchange), collective)
        if self._calls != self._own_call * self.size:
            calls = [tuple(self._calls[start : start + WORDS]) for start in range(0, len(self._calls), WORDS)]
            raise mismatch(self._sequence, calls, self._names)

    def _all_gather(self, buffer: np.ndarray, what: str) -> None:
        self._meet("all_gather", buffer, 0, what)
        n = buffer.size // self.size
        if buffer.size <= _MESSAGE:
            self._mpi.Allgather(MPI.IN_PLACE, buffer)
        else:  # every rank's slice in turn, in pieces
            for rank in range(self.size):
                self._broadcast_pieces(buffer[rank * n : (rank + 1) * n], rank)

    def _reduce_scatter(
        self,
        output: np.ndarray,
        buffer: np.ndarray,
        scale: float,
        accumulate: bool,
        op: str,
        kind: str,
        what: str,
    ) -> None:
        self._meet("reduce_scatter", buffer, op, what, kind)
        n = output.size
        chunk = max(1, min(_CHUNK, _SCRATCH // self.size) // buffer.itemsize)
        theirs = self._scratch_array(self.size * min(chunk, n), buffer.dtype).reshape(self.size, -1)
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            parts = [theirs[rank, : stop - start] for rank in range(self.size)]
            parts[self.rank] = buffer[self.rank * n + start : self.rank * n + stop]
            for step in range(1, self.size):
                to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                piece = buffer[to * n + start : to * n + stop]
                self._mpi.Sendrecv(piece, to, recvbuf=parts[source], source=source)
            combine(output[start:stop], parts, scale, accumulate, op, kind)

    def _all_reduce_small(self, buffer: np.ndarray, op: str, what: str) -> None:
        self._meet("all_reduce", buffer, op, what)
        everyone = self._scratch_array(self.size * buffer.size, buffer.dtype).reshape(self.size, -1)
        self._mpi.Allgather(buffer, everyone)
        combine(buffer, list(everyone), op=op)

    def _broadcast(self, buffer: np.ndarray, root: int, what: str) -> None:
        self._meet("broadcast", buffer, root, what)
        self._broadcast_pieces(buffer, root)

    def _broadcast_pieces(self, buffer: np.ndarray, root: int) -> None:
        for start in range(0, buffer.size, _MESSAGE):
            self._mpi.Bcast(buffer[start : start + _MESSAGE], root)

    def _all_to_all(self, output: np.ndarray, buffer: np.ndarray, what: str) -> None:
        self._meet("all_to_all", buffer, 0, what)
        n = buffer.size // self.size
        for step in range(self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            for start in range(0, n, _MESSAGE):
                stop = min(start + _MESSAGE, n)
                piece = buffer[to * n + start : to * n + stop]
                self._mpi.Sendrecv(
                    piece, to, recvbuf=output[source * n + start : source * n + stop], source=source
                )

    def _send(self, buffer: np.ndarray, peer: int) -> None:
        for start in range(0, buffer.size, _MESSAGE):
            self._wait(self._mpi.Isend(buffer[start : start + _MESSAGE], peer), "send", peer)

    def _recv(self, buffer: np.ndarray, peer: int) -> None:
        for start in range(0, buffer.size, _MESSAGE):
            self._wait(self._mpi.Irecv(buffer[start : start + _MESSAGE], peer), "recv", peer)

    def _barrier(self, what: str) -> None:
        self._meet("barrier", None, 0, what)

    def _scratch_array(self, count: int, dtype: Any) -> np.ndarray:
        """Memory that the next call may take again; it grows to the largest that was asked for."""
        nbytes = count * np.dtype(dtype).itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype)

    def _wait(self, request: MPI.Request, doing: str, peer: int | None = None) -> None:
        """Poll a request: busily at first, since most peers are only microseconds late, then with pauses.

        Raises PeerFailed if a rank that takes part (`peer`, or any) has ended its program instead.
        """
        deadline = time.perf_counter() + _SPIN
        pause, next_look, gone = _SPIN, deadline + _LOOK, None
        while not request.Test():
            now = time.perf_counter()
            if now > next_look:
                if gone is not None:  # since it said so, half a second has passed for what was under way
                    raise PeerFailed(f"rank {gone} has left; rank {self.rank} waits for it in {doing}")
                gone = next((rank for rank in self._departed() if peer in (None, rank)), None)
                next_look = now + _LOOK
            if now > deadline:
                time.sleep(pause)
                pause = min(2 * pause, _SLEEP)

    def _departed(self) -> list[int]:
        """Ranks of this communicator whose programs have ended."""
        left = sorted(failure.departed())
        if not left:
            return []
        world, own = MPI.COMM_WORLD.Get_group(), self._mpi.Get_group()
        here = MPI.Group.Translate_ranks(world, left, own)
        return [rank for rank in here if rank != MPI.UNDEFINED]
