"""Waits for MPI without spinning for long, so that ranks that compute can use the core."""

import ctypes
import os
import sys
import threading
import time

from mpi4py import MPI

from shardrt.comm import supervision
from shardrt.comm.calls import abandoned, left

_SPIN = 2e-5  # seconds of polling before a waiting rank yields its core
_YIELD = 1e-4  # seconds before it sleeps
_SLEEP = 1e-3  # seconds, the longest sleep between two polls
_LOOK = 0.5  # seconds between two checks which ranks have left

_PR_SET_TIMERSLACK = 29  # nanoseconds that a thread's timers may be late
_libc = ctypes.CDLL(None)
_here = threading.local()


class Patience:
    """The waits of one rank of a group."""

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi
        self.abandoned = False  # True: waits for messages raise

    def world_rank(self, rank: int) -> int:
        """The world rank of a rank of this group."""
        return MPI.Group.Translate_ranks(self._mpi.Get_group(), [rank], MPI.COMM_WORLD.Get_group())[0]

    def wait(self, request: MPI.Request, doing: str, peer: int | None = None) -> None:
        """Poll a request: busily at first, since most peers are only microseconds late, then with pauses.

        Raises:
            PeerFailed: if a rank that takes part (`peer`, or any) has ended its program instead, or if this
                rank has abandoned its messages.
        """
        if request.Test():
            return
        start = time.perf_counter()
        spun, yielded, next_look = start + _SPIN, start + _YIELD, start + _LOOK
        gone = None
        while not request.Test():
            now = time.perf_counter()
            if self.abandoned and peer is not None:
                raise abandoned(self.world_rank(self._mpi.rank))
            if now > next_look:
                if gone is not None:  # half a second after it left: no message is under way any more
                    raise left(self.world_rank(gone), self.world_rank(self._mpi.rank), doing)
                gone = next((rank for rank in self._departed() if peer in (None, rank)), None)
                next_look = now + _LOOK
            if now < yielded:
                if now > spun:
                    os.sched_yield()
            else:
                _sleep(min(max(_SPIN, (now - start) / 8), _SLEEP))

    def _departed(self) -> list[int]:
        """Ranks of this group whose programs have ended."""
        left = sorted(supervision.supervisor.departed())
        if not left:
            return []
        world, own = MPI.COMM_WORLD.Get_group(), self._mpi.Get_group()
        here = MPI.Group.Translate_ranks(world, left, own)
        return [rank for rank in here if rank != MPI.UNDEFINED]


def _sleep(seconds: float) -> None:
    """time.sleep, exact to microseconds: by default Linux may add 50 us to each sleep of a thread."""
    if not hasattr(_here, "precise"):
        _here.precise = sys.platform == "linux" and _libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0) == 0
    time.sleep(seconds)
