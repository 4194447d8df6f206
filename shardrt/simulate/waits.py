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
(Berge 1989, "Hypergraphs", chapter 2). No recording is made again, and no clock. There may be very many ways.
Beyond MOST_WAYS between two points, only the sites that are in all of them are followed on, and sets have at
most MOST_SITES: of a site that is good for something, but in no set found so, it is said that many cover it.

A barrier is a wait too: for the other ranks. Neighbours that race as they are count for nothing here.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from shardrt.device.program import HOST, Collective, HostWait, Item, Program, Record, Wait
from shardrt.simulate.order import Order, order_of, site_of
from shardrt.simulate.races import Race, neighbours, race_of

NEEDED, COVERED, NEVER = "needed", "covered by", "never needed"

MOST_WAYS, MOST_SITES = 24, 4

Sites = int  # a set of sites: bit n stands for the nth


@dataclass(frozen=True)
class WaitSite:
    """All waits of one site.

    Attributes:
        what: waiting and awaited sides, counted.
        verdict: NEEDED, COVERED or NEVER.
        covered_by: the smallest set of other sites without which it is needed; empty if that is large, or was
            not found among very many ways.
        prevents: the race that would be there without it and them, if it is known.
    """

    site: str
    what: tuple[str, ...]
    verdict: str
    covered_by: tuple[str, ...] = ()
    prevents: Race | None = None

    def __str__(self) -> str:
        others = " and ".join(self.covered_by) or ("many others" if self.verdict == COVERED else "")
        message = f"{self.verdict} {others}".rstrip()
        lines = [f"{self.site}: {message} ({'; '.join(self.what)})"]
        if self.prevents is not None:
            lines += [f"  first   {self.prevents.first}", f"  second  {self.prevents.second}"]
        return "\n".join(lines)


def waits(programs: Sequence[Program]) -> list[WaitSite]:
    """Every wait site of the programs, in their order, with what it is good for.

    Raises:
        ValueError: as `order_of` does.
    """
    order, found = order_of(programs), _sites(programs)
    names, pairs = list(found), neighbours(order)
    best, used = _best(order, pairs, names)
    sites = []
    for n, name in enumerate(names):
        what = tuple(f"{message}, {count} times" for message, count in found[name].items())
        if n not in best:
            sites.append(WaitSite(name, what, COVERED if used >> n & 1 else NEVER))
            continue
        _, together, pair = best[n]
        others = tuple(names[other] for other in _numbers(together) if other != n)
        race = race_of(order, *pair, pairs[pair])
        sites.append(WaitSite(name, what, COVERED if others else NEEDED, others, race))
    return sites


def _sites(programs: Sequence[Program]) -> dict[str, Counter[str]]:
    """By site, the waiting and the awaited."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for number, program in enumerate(programs):
        recorded = {item.mark: item.stream for item in program.items if isinstance(item, Record)}
        for index, item in enumerate(program.items):
            if (message := _reported(item, recorded)) is not None:
                found[site_of(number, index, item.site)][message] += 1
    return found


def _reported(item: Item, recorded: Mapping[int, str]) -> str | None:
    if isinstance(item, Wait | HostWait):
        return f"{getattr(item, 'stream', HOST)} waits for {recorded.get(item.mark, 'nothing')}"
    if isinstance(item, Collective) and item.call == "barrier":
        return f"{item.stream} waits for the other ranks"
    return None


Best = tuple[int, Sites, tuple[int, int]]  # how many sites, which, and the neighbours whose ways they meet


def _best(
    order: Order, pairs: Mapping[tuple[int, int], int], names: Sequence[str]
) -> tuple[dict[int, Best], Sites]:
    """By site, the smallest set with none to spare that it is in; and all sites that are in a way."""
    bits = {name: 1 << n for n, name in enumerate(names)}
    best: dict[int, Best] = {}
    used = 0
    for (clauses, whole), pair in _ways(order, pairs, bits).items():
        used |= reduce(or_, clauses) if whole else (1 << len(names)) - 1
        for together in _transversals(clauses):
            found = together.bit_count(), together, pair
            for n in _numbers(together):
                if (n not in best or found < best[n]) and (
                    whole or _spares_none(order, names, *found[1:], n)
                ):
                    best[n] = found
    return best, used


def _spares_none(order: Order, names: Sequence[str], together: Sites, pair: tuple[int, int], n: int) -> bool:
    """Whether two points are in order if all of a set but `n` are left out."""
    others = {names[other]: 1 for other in _numbers(together) if other != n}
    return _ways_to(order, pair[1], {pair[0]}, others)[0][pair[0]] == (0,)


def _ways(
    order: Order, pairs: Mapping[tuple[int, int], int], bits: Mapping[str, Sites]
) -> dict[tuple[tuple[Sites, ...], bool], tuple[int, int]]:
    """The sets of ways that neighbours have, and whether these are all; with the first that have them."""
    firsts = defaultdict(set)
    for first, second in pairs:
        firsts[second].add(first)
    found = {}
    for second, points in sorted(firsts.items()):
        reached, whole = _ways_to(order, second, points, bits)
        for first, ways in reached.items():
            if ways and (ways != (0,) or not whole):  # (0,): in order without any wait
                found.setdefault((tuple(sorted(ways)), whole), (first, second))
    return found


def _ways_to(
    order: Order, second: int, firsts: set[int], bits: Mapping[str, Sites]
) -> tuple[dict[int, tuple[Sites, ...]], bool]:
    """The ways from each of some points to a later one, and whether these are all."""
    lowest, found, whole = min(firsts), {}, True
    reached: list[tuple[Sites, ...]] = [()] * len(order.threads)  # ways from where a thread is to `second`
    reached[order.thread[second]] = (0,)
    joined: dict[int, tuple[Sites, ...]] = {}  # ways that begin with a join of a point
    for point in range(second, lowest - 1, -1):
        thread = order.thread[point]
        if point in joined:
            reached[thread] = _least(reached[thread], joined.pop(point))
            if len(reached[thread]) > MOST_WAYS:
                reached[thread], whole = (reduce(and_, reached[thread]),), False
        if point in firsts:
            found[point] = reached[thread]
        if reached[thread]:
            for other, site in order.joins[point]:
                if other >= lowest:
                    new = [way | bits.get(site, 0) for way in reached[thread]]
                    joined[other] = _least(joined.get(other, ()), new)
    return found, whole


def _least(sets: tuple[Sites, ...], new: Sequence[Sites]) -> tuple[Sites, ...]:
    """Those of both that contain no other."""
    for more in new:
        if not any(less & more == less for less in sets):
            sets = (*(less for less in sets if less & more != more), more)
    return sets


def _transversals(sets: Sequence[Sites]) -> tuple[Sites, ...]:
    """The sets that meet each of these and have none to spare, of at most MOST_SITES."""
    found: tuple[Sites, ...] = (0,)
    for one in sets:
        met = [t for t in found if t & one]
        more = [t | 1 << n for t in found if not t & one for n in _numbers(one)]
        found = _least((), met + [t for t in more if t.bit_count() <= MOST_SITES])
    return found


def _numbers(sites: Sites) -> list[int]:
    return [n for n in range(sites.bit_length()) if sites >> n & 1]
