"""The order of items in the programs of one or several ranks, independent of any speed.

The host of each rank is a thread, and so is each of its streams, but for those whose work the host does
itself (Program.by_host: ops on a CPU), which are the host's thread. What a thread does comes in order. Beside
that, and that is all:

- what is submitted to a stream comes after what the host had done by then
- what follows a Wait in its stream, and a HostWait on the host, comes after what the mark was recorded behind
- no rank begins a collective before all recorded ranks of its group have come to it, and none leaves a
  reduction before all have read
- a receive comes after everything before its send; a send waits for no rank (but see deadlocks.py)

A *point* is an item's place in its thread. Points are numbered so that what must come first has the lower
number. A *join* of a point is a point of another thread that comes before it.

The clock of a point (Lamport 1978; vectors: Fidge 1988, Mattern 1989) holds, for each thread, the last of
its points that comes before. A point `a` comes before a point `b` of another thread if `b`'s clock for the
thread of `a` is `a` or later.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    HostRead,
    HostWait,
    Program,
    Record,
    Wait,
    Work,
)

__all__ = ["Order", "order_of", "site_of"]

Thread = tuple[int, str]  # rank in the world, and stream or HOST
Join = tuple[int, str]  # a point, and the site of the wait that joins it, "" if the join can't be left out

# A collective of several recorded ranks is up to three points: it has come, it moves bytes, it leaves.
COME, MOVE, LEAVE = "come", "move", "leave"
_IN_A_THREAD = (Work, Collective, Record, Wait, HostWait, HostRead)
_WAITS = (Wait, HostWait)
REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass
class Order:
    """Points, by number: their thread, their place (program and item, from 0), and their joins.

    Attributes:
        accesses: whether the item's reads and writes happen at this point.
    """

    programs: Sequence[Program]
    threads: list[Thread] = field(default_factory=list)
    thread: list[int] = field(default_factory=list)
    place: list[tuple[int, int]] = field(default_factory=list)
    joins: list[tuple[Join, ...]] = field(default_factory=list)
    accesses: list[bool] = field(default_factory=list)

    def clocks(self) -> list[list[int]]:
        """By point, for each thread, the last point of it that comes before; -1 if none does.

        Its own thread's entry says nothing.
        """
        nothing = [-1] * len(self.threads)
        latest = [nothing] * len(self.threads)  # by thread; shared by its points until one joins anything
        clocks = []
        for thread, joins in zip(self.thread, self.joins, strict=True):
            for point, _ in joins:
                other = self.thread[point]
                if latest[thread][other] < point:
                    clock = list(map(max, latest[thread], clocks[point]))
                    clock[other] = max(clock[other], point)
                    latest[thread] = clock
            clocks.append(latest[thread])
        return clocks


def site_of(program: int, item: int, site: str) -> str:
    """An item's site, or its place where a program made by hand has none."""
    return site or f"item {item} of program {program}"


def order_of(programs: Sequence[Program]) -> Order:
    """The points of all programs.

    Those of a rank keep the order of its items as far as that can be.

    Raises:
        ValueError: for two programs of one rank, a wait for a mark that was not recorded before it, a group
            that the program does not name, and for programs in which ranks wait for each other for ever.
    """
    return _Merge(programs).run()


class _Merge:
    """Goes through all programs at once; a rank stops where it waits for another."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.order = Order(programs)
        self.ranks = {program.rank: number for number, program in enumerate(programs)}
        if len(self.ranks) < len(programs):
            raise ValueError("order_of: pass one program for each rank; two have the same rank")
        self.numbers: dict[Thread, int] = {}
        self.last: dict[Thread, int] = {}  # the point that a thread has come to
        self.seen: dict[Thread, int] = {}  # the last point of the host that a stream has joined
        self.hosts: list[list[tuple[int, int]]] = [[] for _ in programs]  # (item, point) of each host
        self.marks: dict[tuple[int, int], int] = {}
        self.met: dict[Hashable, list[int]] = defaultdict(list)  # points of ranks that are so far in a call
        self.identities: dict[Hashable, int] = {}
        self.groups: dict[tuple[int, str], tuple[int, int]] = {}
        self.left = [self._steps(number) for number in range(len(programs))]

    def run(self) -> Order:
        while any(self.left):
            moved = False
            for number, left in enumerate(self.left):
                done = 0
                while done < len(left) and self._ready(number, *left[done]):
                    self._go(number, *left[done])
                    done += 1
                del left[:done]
                moved |= done > 0
            # Ranks may call different communicators in different orders, in several streams.
            if not moved and not any([self._overtake(number) for number in range(len(self.left))]):
                stuck = [
                    _reported(self.order.programs[n], left[0][0]) for n, left in enumerate(self.left) if left
                ]
                raise ValueError(f"the recorded programs deadlock: {'; '.join(stuck)}")
        return self.order

    def _steps(self, number: int) -> list[tuple[int, str]]:
        """(item, phase) of a program, in its order."""
        program, steps, recorded = self.order.programs[number], [], set()
        for index, item in enumerate(program.items):
            if isinstance(item, Record):
                recorded.add(item.mark)
            if isinstance(item, _WAITS) and item.mark not in recorded:
                raise ValueError(f"{_reported(program, index)}: mark {item.mark} was not recorded before")
            if isinstance(item, Collective) and item.group not in program.groups:
                raise ValueError(f"{_reported(program, index)}: the program names no group {item.group!r}")
            if isinstance(item, Collective) and item.peer < 0 and self._group(number, item.group)[1] > 1:
                phases = (COME, MOVE, LEAVE) if item.call in REDUCTIONS else (COME, MOVE)
                steps += [(index, phase) for phase in phases]
            elif isinstance(item, _IN_A_THREAD) or (isinstance(item, Free) and item.stream):
                steps.append((index, MOVE))
        return steps

    def _group(self, number: int, name: str) -> tuple[int, int]:
        """A number for a group, the same in all its programs, and how many of its ranks are recorded."""
        if (number, name) not in self.groups:
            ranks = self.order.programs[number].groups[name].ranks
            identity = self.identities.setdefault((name, ranks), len(self.identities))
            self.groups[number, name] = identity, sum(rank in ranks for rank in self.ranks)
        return self.groups[number, name]

    def _key(self, number: int, item: Collective) -> Hashable:
        """The same for all ranks of a call, and for both ends of a message."""
        program = self.order.programs[number]
        group = program.groups[item.group]
        ends: tuple[int, ...] = ()
        if item.peer >= 0:
            ends = (program.rank, group.ranks[item.peer])
            ends = ends if item.call == "send" else ends[::-1]
        return self._group(number, item.group)[0], ends, item.number

    def _before(self, number: int, index: int, phase: str) -> tuple[Hashable, int] | None:
        """What a step needs of other ranks: a list of points in `met`, and how long it has to be."""
        item = self.order.programs[number].items[index]
        if not isinstance(item, Collective) or phase == COME:
            return None
        if item.peer >= 0:
            sender = self.order.programs[number].groups[item.group].ranks[item.peer]
            return (
                ((self._key(number, item), MOVE), 1) if item.call == "recv" and sender in self.ranks else None
            )
        members = self._group(number, item.group)[1]
        return ((self._key(number, item), COME if phase == MOVE else MOVE), members) if members > 1 else None

    def _ready(self, number: int, index: int, phase: str) -> bool:
        item = self.order.programs[number].items[index]
        if isinstance(item, _WAITS):
            return (number, item.mark) in self.marks
        needed = self._before(number, index, phase)
        return needed is None or len(self.met[needed[0]]) >= needed[1]

    def _go(self, number: int, index: int, phase: str) -> None:
        program = self.order.programs[number]
        item = program.items[index]
        thread = (program.rank, program.thread_of(item))
        joins: list[Join] = []
        if thread[1] != HOST:
            joins += self._issue(number, index, thread)
        if isinstance(item, _WAITS):
            joins.append((self.marks[number, item.mark], site_of(number, index, item.site)))
        if (needed := self._before(number, index, phase)) is not None:
            site = site_of(number, index, item.site) if item.call == "barrier" else ""
            joins += [(point, site) for point in self.met[needed[0]] if point != self.last.get(thread)]
        point = self._point(thread, (number, index), joins, phase == MOVE)
        if thread[1] == HOST:
            self.hosts[number].append((index, point))
        if isinstance(item, Record):
            self.marks[number, item.mark] = point
        if isinstance(item, Collective):
            self.met[self._key(number, item), phase].append(point)

    def _issue(self, number: int, index: int, thread: Thread) -> list[Join]:
        """The host's last point before an item, where the stream has not joined it yet."""
        hosts = self.hosts[number]
        place = bisect_left(hosts, (index, 0)) - 1
        if place < 0 or self.seen.get(thread, -1) >= hosts[place][1]:
            return []
        self.seen[thread] = hosts[place][1]
        return [(hosts[place][1], "")]

    def _point(self, thread: Thread, place: tuple[int, int], joins: list[Join], accesses: bool) -> int:
        order = self.order
        if thread not in self.numbers:
            self.numbers[thread] = len(order.threads)
            order.threads.append(thread)
        self.last[thread] = point = len(order.thread)
        order.thread.append(self.numbers[thread])
        order.place.append(place)
        order.joins.append(tuple(joins))
        order.accesses.append(accesses)
        return point

    def _overtake(self, number: int) -> bool:
        """Do the first step that can be done behind those that can't, in another stream than theirs."""
        stopped = set()
        for place, (index, phase) in enumerate(self.left[number]):
            thread = self.order.programs[number].thread_of(self.order.programs[number].items[index])
            if thread not in stopped and self._ready(number, index, phase):
                self._go(number, index, phase)
                del self.left[number][place]
                return True
            stopped.add(thread)
            if thread == HOST:
                break
        return False


def _reported(program: Program, index: int) -> str:
    item = program.items[index]
    words = [f"rank {program.rank}, item {index}", getattr(item, "call", type(item).__name__)]
    words += [getattr(item, name, "") for name in ("label", "site")]
    return ", ".join(word for word in words if word)
