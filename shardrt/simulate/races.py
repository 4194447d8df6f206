"""Races: two accesses to the same memory, one of them a write, that nothing puts in order.

    for race in races([program]):
        print(race)

Each access is compared with its neighbours in shadow memory (shadow.py) by the clocks of order.py: the
earlier one must be in the later one's clock. None found means that no speed of host, streams and links makes
two accesses of these programs meet, given that streams keep their order and that `reads` and `writes` are
right. It says nothing of programs that were not recorded. Steps: items times threads.

Memory that ranks share, and memory of a pool that is lent again, are addresses like any other. Of memory that
is given back the next owner may not be in the recording. So where a Free names the stream whose work may be
lent it next (pools lend by stream), whatever others have done with it must be in order before that.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from shardrt.device.program import HOST, Free, HostRead, HostWait, Item, Program, Range, Take
from shardrt.simulate.order import Order, order_of, site_of
from shardrt.simulate.shadow import Shadow

__all__ = ["Race", "neighbours", "race_of", "races", "races_both_ways", "without_values"]


@dataclass(frozen=True)
class Access:
    """What `item` of a rank does ("reads", "writes", "gives back") in `stream`, which may be the host."""

    rank: int
    stream: str
    item: Item
    does: str

    def __str__(self) -> str:
        item = self.item
        name = getattr(item, "name", "") or getattr(item, "call", "") or type(item).__name__
        words = [name, getattr(item, "label", "") or getattr(item, "why", ""), self.does]
        message = f"rank {self.rank}, {self.stream}: {' '.join(word for word in words if word)}"
        return f"{message}, {item.site}" if item.site else message


@dataclass(frozen=True)
class Race:
    """Nothing makes `second` wait for `first`; both touch `address`, the lowest such.

    Attributes:
        buffers: what had been lent there when each was issued, None where no Take tells.
        count: how many pairs of accesses of these two sites race; this is the first of them.
    """

    first: Access
    second: Access
    address: int
    buffers: tuple[Take | None, Take | None]
    count: int = 1

    @property
    def repair(self) -> str:
        """What would put them in order."""
        first, second = self.first, self.second
        if first.rank != second.rank:
            return (
                f"let rank {first.rank} come to a barrier after the first, and rank {second.rank} come to it "
                f"before the second, each in its stream ({first.stream}, {second.stream}) or before it"
            )
        record = f"record an event in stream {first.stream} after the first"
        if second.does == "gives back" and second.stream != HOST:
            return f"{record}, and let stream {second.stream} wait for it before the memory is given back"
        waits = "let the host" if second.stream == HOST else f"let stream {second.stream}"
        return f"{record}, and {waits} wait for it before the second"

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        lines = [
            f"race{times}: nothing puts these two in order",
            f"  first   {self.first}",
            f"  second  {self.second}",
            f"  memory  {' and then '.join(dict.fromkeys(map(_lent, self.buffers)))}, at {self.address:#x}",
            f"  repair  {self.repair}",
        ]
        return "\n".join(lines)


def races(programs: Sequence[Program]) -> list[Race]:
    """The races of the recorded ranks, one for each pair of sites, in the order of the programs.

    Addresses are those of one address space: ranks that name the same one share that memory.

    Raises:
        ValueError: as `order_of` does.
    """
    order = order_of(programs)
    return _races(order, neighbours(order))


def races_both_ways(programs: Sequence[Program]) -> tuple[list[Race], list[Race]]:
    """`races`; and those more that are there if the host asks for no value, see `without_values`."""
    order = order_of(programs)
    asked = [_asked(program) for program in programs]
    points = {point for point, (number, index) in enumerate(order.place) if index in asked[number]}
    pairs = neighbours(order, points)
    found = _races(order, pairs)
    joins = [() if point in points else joins for point, joins in enumerate(order.joins)]
    left = {pair: address for pair, address in pairs.items() if points.isdisjoint(pair)}
    known = {_sites(race) for race in found}
    return found, [race for race in _races(replace(order, joins=joins), left) if _sites(race) not in known]


def _races(order: Order, pairs: Mapping[tuple[int, int], int]) -> list[Race]:
    clocks, found, counts = order.clocks(), {}, Counter()
    for (first, second), address in pairs.items():
        if clocks[second][order.thread[first]] < first:
            sites = _site(order, first), _site(order, second)
            counts[sites] += 1
            found.setdefault(sites, (first, second, address))
    return [replace(race_of(order, *found[sites]), count=count) for sites, count in counts.items()]


def without_values(program: Program) -> Program:
    """The program without the values that the host asks for (loss, norm), and without its waits for them.

    A value has a `why`, or is read directly behind a wait of the same site. Such a wait may hide that another
    one is missing, in programs that ask for no value.
    """
    asked = _asked(program)
    items = [item for index, item in enumerate(program.items) if index not in asked]
    return Program(program.rank, program.world_size, items, program.groups, program.alike, program.by_host)


def _asked(program: Program) -> set[int]:
    """The numbers of the items that `without_values` leaves out."""
    found = set()
    for index, item in enumerate(program.items):
        if isinstance(item, HostRead):
            before = program.items[index - 1] if index else None
            waits = isinstance(before, HostWait) and before.site == item.site
            found |= {index} if waits or item.why else set()
            found |= {index - 1} if waits else set()
    return found


def neighbours(order: Order, apart: Container[int] = ()) -> dict[tuple[int, int], int]:
    """(first, second): points of different threads that must be in order; the lowest address of both.

    Args:
        apart: points that read, and stand for no earlier read of their thread: they may be left out.
    """
    shadow, found = Shadow(), {}
    given_back = [_given_back(program) for program in order.programs]
    for point, (number, index) in enumerate(order.place):
        if not order.accesses[point]:
            continue
        item, thread = order.programs[number].items[index], order.thread[point]
        if isinstance(item, Free):
            touched = shadow.conflicts(given_back[number][index])
        else:
            who = ~thread if point in apart else thread
            touched = shadow.access(point, who, getattr(item, "reads", ()), getattr(item, "writes", ()))
        for first, address in touched:
            if order.thread[first] != thread:
                found[first, point] = min(address, found.get((first, point), address))
    return found


def _given_back(program: Program) -> dict[int, Range]:
    """By the number of each Free, the memory that its Take lent; nothing where there is none."""
    lent, found = {}, {}
    for index, item in enumerate(program.items):
        if isinstance(item, Take):
            lent[item.memory.start] = item.memory
        elif isinstance(item, Free):
            found[index] = lent.pop(item.start, Range(item.start, item.start))
    return found


def race_of(order: Order, first: int, second: int, address: int) -> Race:
    """The two points as a race, whether they are one or would be."""
    points = first, second
    buffers = [_buffer(order.programs, *order.place[point], address) for point in points]
    accesses = [_access(order, point, address) for point in points]
    return Race(accesses[0], accesses[1], address, (buffers[0], buffers[1]))


def _access(order: Order, point: int, address: int) -> Access:
    number, index = order.place[point]
    item = order.programs[number].items[index]
    writes = any(memory.start <= address < memory.stop for memory in getattr(item, "writes", ()))
    does = "gives back" if isinstance(item, Free) else "writes" if writes else "reads"
    return Access(order.programs[number].rank, getattr(item, "stream", HOST), item, does)


def _buffer(programs: Sequence[Program], number: int, index: int, address: int) -> Take | None:
    """What was lent at `address` when a program issued an item; else, what another rank takes there."""
    others = [item for other, program in enumerate(programs) if other != number for item in program.items]
    for items in (reversed(programs[number].items[:index]), others):
        for item in items:
            if isinstance(item, Take) and item.memory.start <= address < item.memory.stop:
                return item
    return None


def _lent(buffer: Take | None) -> str:
    if buffer is None:
        return "memory that no Take records"
    message = " ".join(word for word in (buffer.category, buffer.label) if word) or "a buffer"
    return f"{message} on the {buffer.place}{f', taken at {buffer.site}' if buffer.site else ''}"


def _sites(race: Race) -> tuple[str, str]:
    return race.first.item.site, race.second.item.site


def _site(order: Order, point: int) -> str:
    """Where the item of a point was issued, or else where it lies."""
    number, index = order.place[point]
    return site_of(number, index, order.programs[number].items[index].site)
