"""Outbox: sent messages that the receiver has not taken. A thread polls MPI until it has.

MPI moves a large message only while its sender is in an MPI call. But the sender may next compute, or wait in
shared memory.
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
_MOMENT = 0.5  # seconds in which the receipt of a message must arrive


class Outbox:
    """The outbox of one communicator. A rank ends when its messages are taken or their receivers are gone."""

    def __init__(self, rank: int, patience: Patience) -> None:
        self._rank = rank
        self._patience = patience
        self._waiting: deque[tuple[list[MPI.Request], Any, int]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # while messages wait
        self._error: PeerFailed | None = None
        _open.add(self)

    def add(self, requests: list[MPI.Request], memory: Any, peer: int) -> None:
        """Keep `memory` until these sends of it are done. No other code may write to it."""
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
        """A text about a message that was not taken; "" if there is none."""
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
    """Keep memory of abandoned messages that MPI may still read or write."""
    _abandoned.append((requests, memory))


@supervision.after_all_programs
def _report() -> None:
    """End the job with an error if a message was not taken and no call has reported it."""
    deadline = time.monotonic() + _MOMENT
    while any(outbox.lost() for outbox in _open) and time.monotonic() < deadline:
        time.sleep(0.001)
    for outbox in list(_open):
        if message := outbox.lost():
            supervision.supervisor.end_job(f"{message}\n", 1)
