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
from itertools import product

from shardrt.device.program import Collective, Program
from shardrt.simulate.order import order_of, site_of

__all__ = ["Calls", "described", "mismatches", "unordered"]


Place = tuple[int, int]  # numbers of a program and of its item


class Calls:
    """Names of calls: a call has the same name on each recorded rank that takes part in it."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self._numbers = {program.rank: number for number, program in enumerate(programs)}
        self._identities: dict[Hashable, int] = {}
        self._groups: dict[tuple[int, str], tuple[int, int, list[int], bool]] = {}

    def item(self, number: int, index: int) -> Collective:
        """A call, by the numbers of its program and of its item there; other methods take these too."""
        return self.programs[number].items[index]

    def communicator(self, number: int, index: int) -> Hashable:
        """The same for all calls of one communicator."""
        return self._group(number, self.item(number, index).group)[0]

    def members(self, number: int, index: int) -> list[int]:
        """The recorded ranks of the call's group."""
        return self._group(number, self.item(number, index).group)[2]

    def peer(self, number: int, index: int) -> int:
        """The world rank at the other end of a message."""
        item = self.item(number, index)
        return self.programs[number].groups[item.group].ranks[item.peer]

    def both_recorded(self, number: int, index: int) -> bool:
        """Whether both ends of a message are recorded."""
        return self.peer(number, index) in self._numbers

    def name(self, number: int, index: int) -> Hashable:
        """The name of a collective, or of this end of a message."""
        item = self.item(number, index)
        if item.peer < 0:
            return "all", self._group(number, item.group)[0], item.number
        return item.call, *self._message(number, item)

    def other_end(self, number: int, index: int) -> Hashable | None:
        """The name of the other end of a message; None if the program of no recorded rank has it.

        If all ranks of the group have this rank's role, they do the same, moved along the group. Then this
        rank's receive from the rank before it stands for the next rank's receive from this rank.
        """
        item = self.item(number, index)
        message = self._message(number, item)
        return ("recv" if item.call == "send" else "send", *message) if message[1] else None

    def _message(self, number: int, item: Collective) -> tuple:
        identity, place, _, alike = self._group(number, item.group)
        ranks = self.programs[number].groups[item.group].ranks
        here, there = self.programs[number].rank, ranks[item.peer]
        ends: tuple[int, ...] = ()
        if there in self._numbers:
            ends = (here, there) if item.call == "send" else (there, here)
        elif alike:
            ends = ((item.peer - place if item.call == "send" else place - item.peer) % len(ranks),)
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
    first: dict[Hashable, Place] = {}  # of the ranks of a collective; messages whose other end is to come
    swaps: dict[Hashable, list[Place]] = defaultdict(list)
    for number, program in enumerate(calls.programs):
        for index, item in enumerate(program.items):
            if not isinstance(item, Collective):
                continue
            here = number, index
            if item.peer < 0:
                there = first.setdefault(calls.name(*here), here)
                if item.call == "all_to_all" and (program.exact or not item.parts):
                    swaps[calls.name(*here)].append(here)
            elif calls.both_recorded(*here):
                there = first.pop(calls.other_end(*here), here)
                if there is here:
                    first[calls.name(*here)] = here
            else:
                continue
            if _compared(item) != _compared(calls.item(*there)):
                yield calls.communicator(*here), _sentence(calls, here, "meets", there)
    for places in swaps.values():
        yield from _unequal_parts(calls, places)
    for here in first.values():
        if calls.item(*here).peer >= 0:
            verb = "receives" if calls.item(*here).call == "send" else "sends"
            words = f"{_placed(calls, here)}: rank {calls.peer(*here)} {verb} no such message"
            yield calls.communicator(*here), words


def _compared(item: Collective) -> tuple:
    """Equal on all ranks of a collective, and on both ends of a message."""
    if item.peer >= 0:
        return item.nbytes, item.dtype, item.tag
    nbytes = item.nbytes if item.dtype and item.call != "all_to_all" else 0
    return item.call, nbytes, item.dtype, item.op, item.root, item.tag


def _unequal_parts(calls: Calls, places: Sequence[Place]) -> Iterator[tuple[Hashable, str]]:
    """Pairs of ranks of an all-to-all: one sends other bytes than the other one receives."""
    if len({(calls.item(*place).nbytes, calls.item(*place).parts) for place in places}) == 1:
        if not calls.item(*places[0]).parts:
            return
    for here, there in product(places, places):
        sent, received = _part(calls, here, there)[0], _part(calls, there, here)[1]
        if sent != received:
            words = f"sends {sent:,} bytes, and {received:,} are received, by"
            yield calls.communicator(*here), _sentence(calls, here, words, there)


def _part(calls: Calls, here: Place, there: Place) -> tuple[int, int]:
    """Bytes that the rank sends to the other one, and receives from it."""
    item = calls.item(*here)
    ranks = calls.programs[here[0]].groups[item.group].ranks
    if not item.parts:
        return item.nbytes // len(ranks), item.nbytes // len(ranks)
    return item.parts[ranks.index(calls.programs[there[0]].rank)]


def _placed(calls: Calls, place: Place) -> str:
    program = calls.programs[place[0]]
    return f"rank {program.rank}, {described(program, place[1])}"


def _sentence(calls: Calls, here: Place, words: str, there: Place) -> str:
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
