"""Up to 128 ranks as threads of one process, for tests at any world size. It is not fast.

Ranks meet at a barrier, read each other's arrays, and meet again before any rank goes on. A rank that fails
breaks every barrier of its world, so that the other ranks raise instead of hanging.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardrt.comm import counts, world
from shardrt.comm.calls import Call, Names, abandoned, describe, encode, mismatch, pack_message, unlike
from shardrt.comm.errors import CollectiveMismatch, PeerFailed
from shardrt.comm.protocol import Communicator
from shardrt.comm.reduction import Reduction, combine

__all__ = ["run"]

_PATIENCE = 100.0  # seconds that a rank waits for other ranks before it raises and names them
_FAILED = object()  # wakes a rank that waits for a message


def run(size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `function(*args, **kwargs)` in `size` threads, each a rank of one world; results by rank.

    When a rank raises, `run` wakes the other ranks, joins all threads, and raises the first error with a note
    that names its rank.
    """
    ranks = _World(size)
    results = [None] * size
    threads = [
        threading.Thread(
            target=_run_rank, args=(ranks, rank, results, function, args, kwargs), name=f"rank {rank}"
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.daemon = True  # an interrupted test must not hang at exit
        thread.start()
    for thread in threads:
        thread.join()
    if ranks.failure is not None:
        rank, error = ranks.failure
        error.add_note(f"on rank {rank} of {size} (thread world)")
        raise error
    return results


def _run_rank(
    ranks: "_World", rank: int, results: list, function: Callable[..., Any], args: tuple, kwargs: dict
) -> None:
    try:
        communicator = ThreadCommunicator(ranks.everyone, rank)
        with world.use(world.World("thread", rank, ranks.size, rank, ranks.size, communicator)):
            results[rank] = function(*args, **kwargs)
    except BaseException as error:  # kept for run(), which raises the first of them
        ranks.fail(rank, error)


class _World:
    """The ranks of one run, their groups, and the first failure among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: tuple[int, BaseException] | None = None
        self.names = Names()  # shared, so that each rank can print every rank's calls
        self._lock = threading.Lock()
        self._groups: list[_Group] = []
        self.everyone = _Group(self, list(range(size)))

    def add(self, group: "_Group") -> None:
        with self._lock:
            self._groups.append(group)
        if self.failure is not None:  # a group made after the failure must not wait either
            group.wake()

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first failure and wake all waiting ranks of all groups."""
        with self._lock:
            if self.failure is None:
                self.failure = (rank, error)
            groups = list(self._groups)
        for group in groups:
            group.wake()


class _Group:
    """The state that the ranks of one communicator share."""

    def __init__(self, ranks: _World, members: list[int]) -> None:
        self.world = ranks
        self.members = members  # ranks in the world, by rank in the group
        self.size = len(members)
        self.calls: list[Call] = [(0, 0, 0, 0, 0)] * self.size
        self.offers: list[Any] = [None] * self.size
        self.rounds = [0] * self.size
        self.mail: dict[tuple[int, int, str], queue.SimpleQueue] = {}  # by sender, receiver, content
        self.abandoned: set[int] = set()
        self.enter = threading.Barrier(self.size, action=self._compare)
        self.leave = threading.Barrier(self.size)
        self._mismatch: str | None = None
        ranks.add(self)

    def wake(self) -> None:
        self.enter.abort()
        self.leave.abort()
        for box in list(self.mail.values()):
            box.put(_FAILED)

    def abandon(self, rank: int) -> None:
        """Wake this rank if it waits for a message, or for a receiver to take one."""
        self.abandoned.add(rank)
        for (source, destination, content), box in list(self.mail.items()):
            if rank == (source if content == "taken" else destination):
                box.put(_FAILED)

    def _compare(self) -> None:
        """Check that all ranks made the same call. One thread runs this when all ranks have entered."""
        if self.calls.count(self.calls[0]) < self.size:
            error = mismatch(self.rounds[0], self.calls, self.world.names)
            self._mismatch = str(error)
            raise error

    def reason(self, rank: int) -> Exception:
        """Why a wait of `rank` ended without its peers."""
        if self._mismatch is not None:
            return CollectiveMismatch(self._mismatch)
        if self.world.failure is not None:
            failed, error = self.world.failure
            return PeerFailed(f"rank {failed} failed: {error!r}")
        if rank in self.abandoned:
            return abandoned(self.members[rank])
        missing = [self.members[r] for r in range(self.size) if self.rounds[r] < self.rounds[rank]]
        call = describe(self.calls[rank], self.world.names)
        return PeerFailed(f"{call}: ranks {missing} did not come in {_PATIENCE:.0f} s")


class ThreadCommunicator(Communicator):
    """One rank's view of a group of threads."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def split(self, color: int | None, key: int) -> "ThreadCommunicator | None":
        with self._meet((color, key), "split") as offers:
            mine = sorted((k, r) for r, (c, k) in enumerate(offers) if c == color)
        members = [r for _, r in mine]
        group = None
        if color is not None and self.rank == members[0]:
            group = _Group(self._group.world, [self._group.members[r] for r in members])
        with self._meet(group, "split") as groups:
            group = groups[members[0]]
        return None if color is None else ThreadCommunicator(group, members.index(self.rank))

    def register_names(self, names: Iterable[str]) -> None:
        self._group.world.names.register(names)

    @contextmanager
    def _meet(self, offer: Any, collective: str, *facts: Any) -> Iterator[list[Any]]:
        """Offer an object, read the objects of all ranks, and go on when all ranks have read.

        `facts` (see calls.encode) describe the call.
        """
        group, rank = self._group, self.rank
        group.calls[rank] = encode(group.world.names, collective, *facts)
        group.offers[rank] = offer
        group.rounds[rank] += 1
        self._wait(group.enter)
        try:
            yield list(group.offers)
        except (
            BaseException
        ) as error:  # wake the other ranks, which wait below, now and not when this rank ends
            group.world.fail(group.members[rank], error)
            raise
        self._wait(group.leave)

    def _wait(self, barrier: threading.Barrier) -> None:
        try:
            barrier.wait(_PATIENCE)
        except threading.BrokenBarrierError:
            raise self._group.reason(self.rank) from None

    def _all_gather(self, buffer: np.ndarray, tag: str) -> None:
        n = buffer.size // self.size
        with self._meet(buffer, "all_gather", buffer, 0, tag) as buffers:
            for rank, theirs in enumerate(buffers):
                if rank != self.rank:
                    buffer[rank * n : (rank + 1) * n] = theirs[rank * n : (rank + 1) * n]

    def _reduce_scatter(self, output: np.ndarray, buffer: np.ndarray, how: Reduction, tag: str) -> None:
        own = slice(self.rank * output.size, (self.rank + 1) * output.size)
        with self._meet(buffer, "reduce_scatter", buffer, how.op, tag, how.kind) as buffers:
            combine(output, [theirs[own] for theirs in buffers], *how)

    def _all_reduce_small(self, buffer: np.ndarray, op: str, tag: str) -> None:
        with self._meet(buffer.copy(), "all_reduce", buffer, op, tag) as copies:
            combine(buffer, copies, op=op)

    def _broadcast(self, buffer: np.ndarray, root: int, tag: str) -> None:
        with self._meet(buffer, "broadcast", buffer, root, tag) as buffers:
            if self.rank != root:
                buffer[...] = buffers[root]

    def _all_to_all(
        self, output: np.ndarray, buffer: np.ndarray, received: counts.Counts, sent: counts.Counts, tag: str
    ) -> None:
        facts = (buffer, 0) if sent is None else (buffer[:0], 1)
        received, sent = (given or counts.equal(buffer.size, self.size) for given in (received, sent))
        row = counts.row(received, sent)
        differ = None
        with self._meet((buffer, row), "all_to_all", *facts, tag) as offers:
            try:
                table = counts.compared([theirs for _, theirs in offers], self._group.rounds[self.rank], tag)
            except CollectiveMismatch as error:
                differ = error  # all ranks find it, so no rank needs waking
            else:
                for part, by, (theirs, _) in zip(counts.slices(received), table, offers, strict=True):
                    output[part] = theirs[counts.slices(by)[self.rank]]
        if differ is not None:
            raise differ

    def abandon(self) -> None:
        self._group.abandon(self.rank)

    def _send(self, buffer: np.ndarray, peer: int, tag: str, direct: bool) -> None:
        report = pack_message(buffer, tag)
        self._box(self.rank, peer, _content(direct)).put((report, buffer if direct else buffer.copy()))
        if direct:
            self._take(self.rank, peer, "taken")

    def _recv(self, buffer: np.ndarray, peer: int, tag: str, direct: bool) -> None:
        report, message = self._take(peer, self.rank, _content(direct))
        expected = pack_message(buffer, tag)
        if report == expected:
            buffer[...] = message
        del message  # the sender may free it from here on
        if direct:
            self._box(peer, self.rank, "taken").put(None)
        if report != expected:
            members = self._group.members
            raise unlike(report, expected, members[peer], members[self.rank])

    def _exchange(self, output: np.ndarray, buffer: np.ndarray, to: int, source: int) -> None:
        self._send(buffer, to, "", False)
        self._recv(output, source, "", False)

    def _take(self, source: int, destination: int, content: str) -> Any:
        """The next message in a box. Raises PeerFailed."""
        # Before the check: either wake() finds the box, or this thread sees the failure.
        waiting = self._box(source, destination, content)
        if self._group.world.failure is not None or self.rank in self._group.abandoned:
            raise self._group.reason(self.rank)
        try:
            taken = waiting.get(timeout=_PATIENCE)
        except queue.Empty:
            peer = self._group.members[destination if content == "taken" else source]
            raise PeerFailed(f"a message from rank {peer} did not come in {_PATIENCE:.0f} s") from None
        if taken is _FAILED:
            raise self._group.reason(self.rank)
        return taken

    def _box(self, source: int, destination: int, content: str) -> queue.SimpleQueue:
        return self._group.mail.setdefault((source, destination, content), queue.SimpleQueue())

    def _barrier(self, tag: str) -> None:
        with self._meet(None, "barrier", None, 0, tag):
            pass


def _content(direct: bool) -> str:
    return "direct" if direct else "copies"
