"""Which waits are needed: each wait site left out in turn, alone and with others.

Two neighbours in memory (races.py) are in order by one or several *ways*: a way leads from the earlier point
to the later one over joins, and needs the sites of the waits among them. One way with all its sites is
enough. So the sites of a set can't all be left out if it meets every way of some two neighbours. Such sets
that have no site to spare tell what a site is good for:

- it is one alone: it is *needed*, for these two neighbours
- it is in one with others, the smallest: it is *covered by* these, while one of them is there
- it is in none: it is *never needed*

Ways are found by going back from the later point, with the sets of sites that were passed; of two sets one of
which contains the other, the larger adds nothing. What the sets must meet is the transversals of these
(Berge 1989, "Hypergraphs", chapter 2). No recording is made again, and no clock.

A barrier is a wait too: for the other ranks. Neighbours that race as they are count for nothing here.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardrt.device.program import HOST, Collective, HostWait, Item, Program, Record, Wait
from shardrt.simulate.order import Order, order_of, site_of
from shardrt.simulate.races import Race, neighbours, race_of

NEEDED, COVERED, NEVER = "needed", "covered by", "never needed"

Sites = int  # a set of sites: bit n stands for the nth


@dataclass(frozen=True)
class WaitSite:
    """All waits of one site. what: who waits for whom, and how often. verdict: NEEDED, COVERED or NEVER.

    covered_by: the smallest set of other sites without which it is needed. prevents: the race that would be
    there without it and them, None if it is never needed.
    """

    site: str
    what: tuple[str, ...]
    verdict: str
    covered_by: tuple[str, ...] = ()
    prevents: Race | None = None

    def __str__(self) -> str:
        told = f"{self.verdict} {' and '.join(self.covered_by)}".rstrip()
        lines = [f"{self.site}: {told} ({'; '.join(self.what)})"]
        if self.prevents is not None:
            lines += [f"  first   {self.prevents.first}", f"  second  {self.prevents.second}"]
        return "\n".join(lines)


def waits(programs: Sequence[Program]) -> list[WaitSite]:
    """Every wait site of the programs, in their order, with what it is good for.

    Raises ValueError as `order_of` does.
    """
    order, found = order_of(programs), _sites(programs)
    names = list(found)
    pairs, best = neighbours(order), {}
    for clauses, pair in _ways(order, pairs, {name: 1 << n for n, name in enumerate(names)}).items():
        for together in _transversals(clauses):
            size = together.bit_count()
            for n in _numbers(together):
                if n not in best or (size, together) < best[n][:2]:
                    best[n] = size, together, pair
    sites = []
    for n, name in enumerate(names):
        what = tuple(f"{told}, {count} times" for told, count in found[name].items())
        if n not in best:
            sites.append(WaitSite(name, what, NEVER))
            continue
        size, together, pair = best[n]
        others = tuple(names[other] for other in _numbers(together) if other != n)
        race = race_of(order, *pair, pairs[pair])
        sites.append(WaitSite(name, what, COVERED if others else NEEDED, others, race))
    return sites


def _sites(programs: Sequence[Program]) -> dict[str, Counter[str]]:
    """By site, who waits for whom."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for number, program in enumerate(programs):
        recorded = {item.mark: item.stream for item in program.items if isinstance(item, Record)}
        for index, item in enumerate(program.items):
            if (told := _told(item, recorded)) is not None:
                found[site_of(number, index, item.site)][told] += 1
    return found


def _told(item: Item, recorded: Mapping[int, str]) -> str | None:
    if isinstance(item, Wait | HostWait):
        return f"{getattr(item, 'stream', HOST)} waits for {recorded.get(item.mark, 'nothing')}"
    if isinstance(item, Collective) and item.call == "barrier":
        return f"{item.stream} waits for the other ranks"
    return None


def _ways(
    order: Order, pairs: Mapping[tuple[int, int], int], bits: Mapping[str, Sites]
) -> dict[tuple[Sites, ...], tuple[int, int]]:
    """The sets of ways that neighbours have, each with the first neighbours that have them."""
    firsts = defaultdict(set)
    for first, second in pairs:
        firsts[second].add(first)
    found = {}
    for second, points in sorted(firsts.items()):
        for first, ways in _ways_to(order, second, points, bits).items():
            if ways and ways != (0,):  # (0,): in order without any wait
                found.setdefault(tuple(sorted(ways)), (first, second))
    return found


def _ways_to(
    order: Order, second: int, firsts: set[int], bits: Mapping[str, Sites]
) -> dict[int, tuple[Sites, ...]]:
    """The ways from each of some points to a later one."""
    lowest, found = min(firsts), {}
    reached: list[tuple[Sites, ...]] = [()] * len(order.threads)  # ways from where a thread is to `second`
    reached[order.thread[second]] = (0,)
    joined: dict[int, tuple[Sites, ...]] = {}  # ways that begin with a join of a point
    for point in range(second, lowest - 1, -1):
        thread = order.thread[point]
        if point in joined:
            reached[thread] = _least(reached[thread], joined.pop(point))
        if point in firsts:
            found[point] = reached[thread]
        if reached[thread]:
            for other, site in order.joins[point]:
                if other >= lowest and (new := [way | bits.get(site, 0) for way in reached[thread]]):
                    joined[other] = _least(joined.get(other, ()), new)
    return found


def _least(sets: tuple[Sites, ...], new: Sequence[Sites]) -> tuple[Sites, ...]:
    """Those of both that contain no other."""
    for more in new:
        if not any(less & more == less for less in sets):
            sets = (*(less for less in sets if less & more != more), more)
    return sets


def _transversals(sets: Sequence[Sites]) -> tuple[Sites, ...]:
    """The smallest sets that meet each of these: without any one of theirs they would not."""
    found: tuple[Sites, ...] = (0,)
    for one in sets:
        met = [t for t in found if t & one]
        found = _least((), met + [t | 1 << n for t in found if not t & one for n in _numbers(one)])
    return found


def _numbers(sites: Sites) -> list[int]:
    return [n for n in range(sites.bit_length()) if sites >> n & 1]
