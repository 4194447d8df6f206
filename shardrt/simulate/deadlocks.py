"""Deadlocks: recorded ranks that wait for each other for ever.

    for waiting in deadlock(programs):
        print(waiting)

A thread is a rank's host, or a stream (of ops on a CPU: the host). Threads run as order.py says, and more
waits than it needs for races:

- what is behind a collective in its stream waits until all recorded ranks of its group have come to it
- a receive waits until its send has come; a send that `waits` (NCCL's, for large messages) until its receive
  has come
- a grouped send and the next message of its stream come at once, and are done when both have been met

One order of steps shows all. A thread's steps are fixed: a program doesn't depend on how fast others are. A
step waits only for steps of other threads; once it can be done, nothing that others do prevents that. So any
two orders come to the same end, as in Kahn's networks (1974): if a thread waits for ever in one, it does in
all.

Streams run at once. So two communicators that ranks call in different orders are a deadlock in one stream, or
if events put the streams in these orders. In two free streams they are none: NCCL's kernels are taken to have
room next to each other on the GPU. A driver's queue is as long as the host needs.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardrt.device.program import HOST, Collective, HostWait, Program, Record, Wait
from shardrt.simulate.calls import Calls, described

__all__ = ["deadlock"]

Thread = tuple[int, str]  # number of the program; stream or HOST


@dataclass(frozen=True)
class Waiting:
    """The call at which a stream of `rank` waits for other ranks, which never come to it."""

    rank: int
    call: str
    missing: tuple[int, ...]

    def __str__(self) -> str:
        missing = ", ".join(map(str, self.missing[:8])) + (", ..." if len(self.missing) > 8 else "")
        return f"rank {self.rank}, {self.call}: waits for rank{'s' * (len(self.missing) > 1)} {missing}"


def deadlock(programs: Sequence[Program]) -> list[Waiting]:
    """Where each stream waits that can't go on, by program; empty if all come to their end.

    A stream that only waits for another stream of its rank is left out.
    """
    return _Run(programs).run()


class _Run:
    """Runs every thread as far as it comes."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._calls = Calls(programs)
        self._next = [0] * len(programs)  # the host's item
        self._left: dict[Thread, deque[int]] = defaultdict(deque)  # issued, by stream
        self._come: dict[Hashable, list[int]] = defaultdict(list)  # ranks, by name of a call
        self._reached: set[tuple[int, int]] = set()  # marks, by program
        self._stopped: dict[Hashable, list[Thread]] = defaultdict(list)  # by what they wait for
        self._grouped: dict[Thread, list[int]] = defaultdict(list)  # messages whose group is still open
        self._at: dict[Thread, list[int]] = {}  # the calls that a thread has come to and waits at
        self._ends = self._ends_of_roles()
        self._ready: list[Thread] = [(number, HOST) for number in reversed(range(len(programs)))]

    def run(self) -> list[Waiting]:
        while self._ready:
            thread = self._ready.pop()
            self._host(thread) if thread[1] == HOST else self._stream(thread)
        found = [(number, index) for (number, _), at in self._at.items() for index in at]
        return [waiting for place in sorted(found) if (waiting := self._waiting(*place)).missing]

    def _host(self, thread: Thread) -> None:
        number = thread[0]
        program = self._programs[number]
        while self._next[number] < len(program.items):
            index = self._next[number]
            item = program.items[index]
            stream = program.thread_of(item)
            if stream == HOST:
                if not self._passes(thread, index):
                    return
            elif isinstance(item, Collective | Record | Wait):
                queue = self._left[number, stream]
                queue.append(index)
                if len(queue) == 1:
                    self._ready.append((number, stream))
            self._next[number] += 1

    def _stream(self, thread: Thread) -> None:
        queue = self._left[thread]
        while queue and self._passes(thread, queue[0]):
            queue.popleft()

    def _passes(self, thread: Thread, index: int) -> bool:
        """Whether the thread gets past an item. If not, it is stopped until what it waits for is there."""
        item = self._programs[thread[0]].items[index]
        if isinstance(item, Record):
            self._reached.add((thread[0], item.mark))
            self._wake((thread[0], item.mark))
        elif isinstance(item, Wait | HostWait):
            mark = thread[0], item.mark
            return mark in self._reached or self._stop(thread, mark)
        elif isinstance(item, Collective):
            return self._passes_call(thread, index, item)
        return True

    def _passes_call(self, thread: Thread, index: int, item: Collective) -> bool:
        if thread not in self._at:
            self._grouped[thread].append(index)
            if item.grouped:
                return True
            self._at[thread] = self._grouped.pop(thread)
            for each in self._at[thread]:
                self._comes(thread[0], each)
        for each in self._at[thread]:
            if (needed := self._needed(thread[0], each)) is not None:
                return self._stop(thread, needed)
        del self._at[thread]
        return True

    def _comes(self, number: int, index: int) -> None:
        """A rank comes to a call: a collective that is whole, or a message, lets others go on."""
        name = self._calls.name(number, index)
        come = self._come[name]
        come.append(self._programs[number].rank)
        if name[0] != "all" or len(come) == len(self._calls.members(number, index)):
            self._wake(name)

    def _needed(self, number: int, index: int) -> Hashable | None:
        """The call that has to come before this one is done; None if it has, or there is none."""
        item, calls = self._calls.item(number, index), self._calls
        if item.peer < 0:
            name = calls.name(number, index)
            return None if len(self._come[name]) == len(calls.members(number, index)) else name
        if item.call == "send" and not item.waits:
            return None
        other = calls.other_end(number, index)
        known = calls.both_recorded(number, index) or other in self._ends
        return other if known and other not in self._come else None

    def _waiting(self, number: int, index: int) -> Waiting:
        calls, program, missing = self._calls, self._programs[number], []
        if calls.item(number, index).peer < 0:
            come = self._come[calls.name(number, index)]
            missing = [rank for rank in calls.members(number, index) if rank not in come]
        elif self._needed(number, index) is not None:
            missing = [calls.peer(number, index)]
        return Waiting(program.rank, described(program, index), tuple(missing))

    def _stop(self, thread: Thread, needed: Hashable) -> bool:
        self._stopped[needed].append(thread)
        return False

    def _wake(self, reason: Hashable) -> None:
        self._ready += self._stopped.pop(reason, ())

    def _ends_of_roles(self) -> set[Hashable]:
        """Names of the messages that a recorded rank and a rank of its role exchange."""
        places = (
            (number, index)
            for number, program in enumerate(self._programs)
            for index, item in enumerate(program.items)
            if isinstance(item, Collective) and item.peer >= 0
        )
        calls = self._calls
        return {calls.name(*p) for p in places if not calls.both_recorded(*p) and calls.other_end(*p)}
