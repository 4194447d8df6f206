"""Messages on their way, of a sender that goes on: a thread keeps MPI moving until they have been taken.

MPI moves a large message only while its sender is in some call of MPI, and this rank may next compute, or
wait in memory that ranks share.
"""

import threading
import time
import weakref
from collections import deque
from typing import Any

from mpi4py import MPI

from shardrt.comm import supervision
from shardrt.comm.errors import PeerFailed
from shardrt.comm.patience import Patience
from shardrt.device import threads

_open: "weakref.WeakSet[Outbox]" = weakref.WeakSet()
_abandoned: list[Any] = []
_MOMENT = 0.5  # seconds for the news that a message was taken


class Outbox:
    """Of one communicator. A rank ends only when its messages are taken, or nobody is left to take them."""

    def __init__(self, rank: int, patience: Patience) -> None:
        self._rank = rank
        self._patience = patience
        self._waiting: deque[tuple[list[MPI.Request], Any, int]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # while messages wait
        self._error: PeerFailed | None = None
        _open.add(self)

    def add(self, requests: list[MPI.Request], memory: Any, peer: int) -> None:
        """Keep `memory`, which nobody else writes, until these sends of it are done."""
        requests = [request for request in requests if not request.Test()]
        if not requests:
            return
        with self._lock:
            self._waiting.append((requests, memory, peer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sends", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise the PeerFailed of a message that its receiver did not take, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Return when all messages have been taken."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def lost(self) -> str:
        """What was sent and is not taken; "" if nothing is."""
        waiting = next(iter(self._waiting), None)
        if self._error is None and waiting is not None:
            return f"rank {waiting[2]} has left without what rank {self._rank} sent it"
        return str(self._error or "")

    def _run(self) -> None:
        threads.enter()
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
            requests, memory, peer = self._waiting[0]
            try:
                for request in requests:
                    self._patience.wait(request, "send", peer)
            except PeerFailed as error:
                keep(requests, memory)
                self._error = error
            self._waiting.popleft()


def keep(requests: list[MPI.Request], memory: Any) -> None:
    """Keep what MPI may still read or write, of messages that nobody waits for any more."""
    _abandoned.append((requests, memory))


@supervision.after_all_programs
def _report() -> None:
    """A message that nobody took, and nobody was told of, is a failure."""
    deadline = time.monotonic() + _MOMENT
    while any(outbox.lost() for outbox in _open) and time.monotonic() < deadline:
        time.sleep(0.001)
    for outbox in list(_open):
        if message := outbox.lost():
            supervision.supervisor.end_job(f"{message}\n", 1)
