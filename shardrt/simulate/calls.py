"""Whether the recorded ranks' calls of their communicators match.

    for line in mismatches(programs):
        print(line)

Calls of a communicator match by number, and a rank's numbers follow the order in which its host issues them.
So a match depends on no speed, unless a rank gives one communicator to two streams: then `unordered` asks
that events order its calls.

Nothing is said of ranks that are not recorded.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from shardrt.device.program import Collective, Program
from shardrt.simulate.order import order_of, site_of

__all__ = ["Calls", "described", "mismatches", "unordered"]


class Calls:
    """Names of calls: a call has the same name on each recorded rank that takes part in it."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self._numbers = {program.rank: number for number, program in enumerate(programs)}
        self._identities: dict[Hashable, int] = {}
        self._groups: dict[tuple[int, str], tuple[int, int, list[int], bool]] = {}

    def communicator(self, number: int, item: Collective) -> Hashable:
        """The same for all calls of one communicator."""
        return self._group(number, item.group)[0]

    def members(self, number: int, item: Collective) -> list[int]:
        """The recorded ranks of the call's group."""
        return self._group(number, item.group)[2]

    def peer(self, number: int, item: Collective) -> int:
        """The world rank at the other end of a message."""
        return self.programs[number].groups[item.group].ranks[item.peer]

    def both_recorded(self, number: int, item: Collective) -> bool:
        """Whether both ends of a message are recorded."""
        return self.peer(number, item) in self._numbers

    def name(self, number: int, item: Collective) -> Hashable:
        """The name of a collective, or of this end of a message."""
        if item.peer < 0:
            return "all", self._group(number, item.group)[0], item.number
        return item.call, *self._message(number, item)

    def other_end(self, number: int, item: Collective) -> Hashable | None:
        """The name of the other end of a message; None if the program of no recorded rank has it.

        If all ranks of the group have this rank's role, they do the same, moved along the group. Then this
        rank's receive from the rank before it stands for the next rank's receive from this rank.
        """
        message = self._message(number, item)
        return ("recv" if item.call == "send" else "send", *message) if message[1] else None

    def _message(self, number: int, item: Collective) -> tuple:
        identity, place, _, alike = self._group(number, item.group)
        here, there = self.programs[number].rank, self.peer(number, item)
        ends: tuple[int, ...] = ()
        if there in self._numbers:
            ends = (here, there) if item.call == "send" else (there, here)
        elif alike:
            size = len(self.programs[number].groups[item.group].ranks)
            ends = ((item.peer - place if item.call == "send" else place - item.peer) % size,)
        return identity, ends, item.number

    def _group(self, number: int, name: str) -> tuple[int, int, list[int], bool]:
        """(its number, this rank's place in it, its recorded ranks, whether all its ranks have one role)."""
        if (number, name) not in self._groups:
            program = self.programs[number]
            ranks = program.groups[name].ranks
            identity = self._identities.setdefault((name, ranks), len(self._identities))
            recorded = [rank for rank in ranks if rank in self._numbers]
            alike = len(recorded) == 1 and set(ranks) <= set(program.alike)
            self._groups[number, name] = identity, ranks.index(program.rank), recorded, alike
        return self._groups[number, name]


def described(program: Program, index: int) -> str:
    """A call with its bytes, unit, stream and site."""
    item = program.items[index]
    words = [item.call, f"of {item.nbytes:,} bytes" if item.nbytes else "", item.op]
    if item.peer >= 0:
        other = program.groups[item.group].ranks[item.peer]
        words.append(f"{'to' if item.call == 'send' else 'from'} rank {other}")
    words.append(f"for {item.tag}" if item.tag else "")
    site = site_of(program.rank, index, item.site)
    return f"{' '.join(word for word in words if word)}, stream {item.stream}, {site}"


def mismatches(programs: Sequence[Program], most: int = 4) -> list[str]:
    """Calls in which recorded ranks differ: the first of each communicator, `most` in all.

    Ranks agree on a collective's call, bytes, dtype, op, root and tag. In an all-to-all, rank b receives from
    rank a as many bytes as a sends to b. Both ends of a message agree on bytes, dtype and tag, and neither
    end is without the other. Host bytes (dtype "") may differ in length, and so may planned parts
    (Program.exact).
    """
    found: dict[Hashable, str] = {}
    for communicator, line in _differences(Calls(programs)):
        found.setdefault(communicator, line)
        if len(found) == most:
            break
    return list(found.values())


def _differences(calls: Calls) -> Iterator[tuple[Hashable, str]]:
    """(communicator, the sentence)."""
    first: dict[Hashable, tuple[int, int]] = {}  # program and item of a name
    swaps: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for number, program in enumerate(calls.programs):
        for index, item in enumerate(program.items):
            if not isinstance(item, Collective) or len(calls.members(number, item)) < 2:
                continue
            name, other = calls.name(number, item), calls.name(number, item)
            if item.peer >= 0:
                other = calls.other_end(number, item) if calls.both_recorded(number, item) else None
            if other is None:
                continue
            if item.call == "all_to_all" and (program.exact or not item.parts):
                swaps[name].append((number, index))
            there = first.get(other)
            if there is None:
                first[name] = number, index
            elif _compared(item) != _compared(calls.programs[there[0]].items[there[1]]):
                yield calls.communicator(number, item), _sentence(calls, (number, index), "meets", there)
            if there is not None and item.peer >= 0:
                del first[other]
    for places in swaps.values():
        yield from _unequal_parts(calls, places)
    for number, index in first.values():
        item = calls.programs[number].items[index]
        if item.peer >= 0:
            verb = "receives" if item.call == "send" else "sends"
            place = _placed(calls, (number, index))
            yield (
                calls.communicator(number, item),
                f"{place}: rank {calls.peer(number, item)} {verb} no such message",
            )


def _compared(item: Collective) -> tuple:
    """Equal on all ranks of a collective, and on both ends of a message."""
    if item.peer >= 0:
        return item.nbytes, item.dtype, item.tag
    nbytes = item.nbytes if item.dtype and item.call != "all_to_all" else 0
    return item.call, nbytes, item.dtype, item.op, item.root, item.tag


def _unequal_parts(calls: Calls, places: Sequence[tuple[int, int]]) -> Iterator[tuple[Hashable, str]]:
    """Two ranks of an all-to-all of which one sends other bytes than the other one receives."""
    if not any(calls.programs[number].items[index].parts for number, index in places):
        places = places if len({calls.programs[n].items[i].nbytes for n, i in places}) > 1 else ()
    for here in places:
        for there in places:
            sent, received = _part(calls, here, there)[0], _part(calls, there, here)[1]
            if sent != received:
                item = calls.programs[here[0]].items[here[1]]
                words = f"sends {sent:,} bytes, and {received:,} are received, by"
                yield calls.communicator(here[0], item), _sentence(calls, here, words, there)


def _part(calls: Calls, here: tuple[int, int], there: tuple[int, int]) -> tuple[int, int]:
    """Bytes that the rank sends to the other one, and receives from it."""
    item = calls.programs[here[0]].items[here[1]]
    ranks = calls.programs[here[0]].groups[item.group].ranks
    if not item.parts:
        return item.nbytes // len(ranks), item.nbytes // len(ranks)
    return item.parts[ranks.index(calls.programs[there[0]].rank)]


def _placed(calls: Calls, place: tuple[int, int]) -> str:
    program = calls.programs[place[0]]
    return f"rank {program.rank}, {described(program, place[1])}"


def _sentence(calls: Calls, here: tuple[int, int], words: str, there: tuple[int, int]) -> str:
    return f"{_placed(calls, here)}: {words} {_placed(calls, there)}"


def unordered(programs: Sequence[Program], most: int = 4) -> list[str]:
    """Two calls of one communicator, on one rank, that nothing puts in order, as in `mismatches`.

    Raises:
        ValueError: as `order_of` does.
    """
    pairs = [pair for number, program in enumerate(programs) for pair in _changes(number, program)]
    if not pairs:
        return []
    order = order_of(programs)
    wanted = {place for number, *pair in pairs for place in ((number, index) for index in pair)}
    points: dict[tuple[int, int], list[int]] = defaultdict(list)
    for point, place in enumerate(order.place):
        if place in wanted:
            points[place].append(point)
    clocks, found = order.clocks(), {}
    for number, before, behind in pairs:
        last, start = points[number, before][-1], points[number, behind][0]
        if clocks[start][order.thread[last]] < last:
            program = programs[number]
            found.setdefault(
                (number, program.items[behind].group),
                f"rank {program.rank}, {described(program, before)}: nothing puts it before "
                f"{described(program, behind)}, of the same communicator",
            )
    return list(found.values())[:most]


def _changes(number: int, program: Program) -> Iterator[tuple[int, int, int]]:
    """(number, call, the next call of its communicator), where they are in different threads."""
    last: dict[str, int] = {}
    for index, item in enumerate(program.items):
        if isinstance(item, Collective):
            before = last.get(item.group)
            if before is not None and program.thread_of(program.items[before]) != program.thread_of(item):
                yield number, before, index
            last[item.group] = index
