"""What may be wrong with a wait or a record, done to a recording: each is a change of what its waits join.

What a program issues does not depend on its waits and records (test_waits.py holds that for the sources), and
which accesses are neighbours in memory (shadow.py) follows from their order alone. So a mutation leaves the
points of a recording as they are, and only clocks are made anew.
"""

import ast
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace

from shardrt.device.program import HOST, Collective, Free, HostWait, Record, Wait
from shardrt.simulate.order import order_of
from shardrt.simulate.races import neighbours, race_of
from tests.ranks import ROOT

SHARDRT = ROOT / "shardrt"
FILES = [
    *sorted((SHARDRT / "fsdp").rglob("*.py")),
    *sorted((SHARDRT / "parallel").glob("*.py")),
    SHARDRT / "nn" / "storage.py",
    SHARDRT / "optim" / "offload.py",
    SHARDRT / "optim" / "muon" / "exchange.py",
    SHARDRT / "activation_offload.py",
    SHARDRT / "comm" / "links.py",
    SHARDRT / "functional" / "collective.py",
    SHARDRT / "functional" / "context.py",
    SHARDRT / "functional" / "waits.py",
]
WAITS, RECORDS, BARRIERS = ("wait", "synchronize", "wait_here"), ("record",), ("barrier",)
# What calls a wait that it is given; and a gather, which is a barrier where ranks share the memory.
GIVEN = {
    ("comm/links.py", "function(*args)"): "wait",
    (
        "fsdp/transfer.py",
        "group.ranks.gather.all_gather(as_sent(full), stream=streams.gather, tag=group.tag)",
    ): "barrier",
}

REMOVED, LATE, EARLY = "removed", "one operation later", "one operation earlier"
TIMES = ("one operation", "two operations", "three operations", "four operations")
NEIGHBOUR = "of the neighbour"  # the event that another slot, group or message has in its place
IN = "in "  # another stream
# The streams that a file has to do with, any of which might stand for another.
OF_UNITS = ("compute", "gather", "reduce", "upload", "download")
STREAMS = {
    "fsdp": OF_UNITS,
    "nn": OF_UNITS,
    "optim": ("compute", "reduce", "optimizer", "optimizer upload", "optimizer download"),
    "activation_offload.py": ("compute", "offload", "fetch"),
    "functional": ("compute", "context", "gather"),
}


@dataclass(frozen=True)
class Site:
    """name: "file class.function: source". kind: "wait", "record" or "barrier". line: as items have it."""

    name: str
    kind: str
    line: str


def sites_of(path):
    """The sites of a file, in its order; of two that read the same the second ends in " #2"."""
    file, found = path.relative_to(SHARDRT).as_posix(), []
    for where, node in _calls(ast.parse(path.read_text()), ()):
        source, called = ast.unparse(node), getattr(node.func, "attr", "")
        called = GIVEN.get((file, source), called)
        kind = next((words[0] for words in (WAITS, RECORDS, BARRIERS) if called in words), None)
        if kind:
            name = f"{file} {'.'.join(where)}: {source}"
            times = sum(site.name.partition(" #")[0] == name for site in found)
            name += f" #{times + 1}" * (times > 0)
            found.append(Site(name, kind, f"shardrt/{file}:{node.lineno}"))
    return found


def _calls(node, where):
    """(names of what it is in, the call) of each call."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        if isinstance(child, ast.Call):
            yield where, child
        yield from _calls(child, (*where, child.name) if named else where)


SITES = {site.name: site for path in FILES for site in sites_of(path)}


class Recording:
    """Programs, and what there is to be mutated in them.

    joins: by point, what it joins beside what its own waits join. synced: (point, item) of waits, records and
    barriers by rank, in their order.
    """

    def __init__(self, programs):
        self.order = order_of(programs)
        self.pairs = list(neighbours(self.order).items())
        self.own = [thread for thread, _ in self.order.threads]
        self.events = {
            (number, item.mark): (number, item.event)
            for number, program in enumerate(programs)
            for item in program.items
            if isinstance(item, Record)
        }
        self.recorded_at = {
            (number, item.mark): item.site
            for number, program in enumerate(programs)
            for item in program.items
            if isinstance(item, Record)
        }
        self.points = defaultdict(list)  # of each thread
        self.uses = defaultdict(list)  # those of them that use memory
        self.accesses = defaultdict(list)  # and those that give it back
        self.synced = []
        self.there = defaultdict(set)  # (line, kind) -> the streams that are in its place
        self.family = defaultdict(list)  # line of records -> their events, in order
        self.waited = defaultdict(set)  # line of waits -> lines of records that they wait for
        self.joins = []
        for point, (number, index) in enumerate(self.order.place):
            item = programs[number].items[index]
            self.points[self.order.thread[point]].append(point)
            self._take(point, number, item)
        self.threads = {thread: number for number, thread in enumerate(self.order.threads)}
        self.clocks = self.order.clocks()
        self.known = {}  # races, by mutations

    def _take(self, point, number, item):
        order, joins = self.order, self.order.joins[point]
        if isinstance(item, Wait | HostWait):
            joins = joins[:-1]  # its own is the last
            self.synced.append((point, number, item))
            self.there[item.site, "wait"].add(getattr(item, "stream", HOST))
            self.waited[item.site].add(self.recorded_at[number, item.mark])
        elif isinstance(item, Record):
            self.synced.append((point, number, item))
            self.there[item.site, "record"].add(item.stream)
            events = self.family[item.site]
            if (number, item.event) not in events:
                events.append((number, item.event))
        elif isinstance(item, Collective) and item.call == "barrier":
            self.there[item.site, "barrier"].add(item.stream)
        uses = getattr(item, "reads", ()) or getattr(item, "writes", ())
        if uses:
            self.uses[order.thread[point]].append(point)
        if uses or isinstance(item, Free):
            self.accesses[order.thread[point]].append(point)
        self.joins.append(joins)

    def races(self, mutations=()):
        """Pairs of points that race where `mutations`, (line, kind, which) each, are made."""
        mutations = tuple(mutations)
        if mutations not in self.known:
            self.known[mutations] = self._races(mutations)
        return self.known[mutations]

    def _races(self, mutations):
        joins = self._joins(mutations)
        changed = next(
            (p for p, (a, b) in enumerate(zip(joins, self.order.joins, strict=True)) if a != b), None
        )
        if changed is None and mutations:
            return self.races()
        clocks, thread = replace(self.order, joins=joins).clocks(), self.order.thread
        return [(pair, address) for pair, address in self.pairs if clocks[pair[1]][thread[pair[0]]] < pair[0]]

    def waits_for_no_less(self, mutation, but=""):
        """Whether whatever uses memory comes after all that it comes after without this mutation.

        but: a stream that it need not come after.
        """
        mutated = replace(self.order, joins=self._joins([mutation])).clocks()
        points = [point for points in self.accesses.values() for point in points]
        return all(
            late >= least or thread == self.order.thread[point] or self.order.threads[thread][1] == but
            for point in points
            if mutated[point] is not self.clocks[point]
            for thread, (late, least) in enumerate(zip(mutated[point], self.clocks[point], strict=True))
        )

    def waits_for_the_host(self, site):
        """Whether what was issued before each wait of the host at a site was a call of its own."""
        return all(
            (before := [i for i in program.items[:index] if isinstance(i, Collective)])
            and before[-1].stream in (HOST, *program.by_host)
            for program in self.order.programs
            for index, item in enumerate(program.items)
            if isinstance(item, HostWait) and item.site == site.line
        )

    def described(self, race):
        (first, second), address = race
        return race_of(self.order, first, second, address)

    def _joins(self, mutations):
        joins, latest = list(self.joins), {}
        how = {(line, kind): which for line, kind, which in mutations}
        for line in (line for line, kind in how if kind == "barrier"):
            for point, joined in enumerate(joins):
                if any(site == line for _, site in joined):
                    joins[point] = tuple(join for join in joined if join[1] != line)
        for point, number, item in self.synced:
            if isinstance(item, Record):
                self._record(point, (number, item.event), item, how.get((item.site, "record")), latest)
            else:
                which = how.get((item.site, "wait"))
                event = self.events[number, item.mark]
                if which == NEIGHBOUR:
                    event = self._next(self.recorded_at[number, item.mark], event)
                target = self._place(point, number, which)
                joined = latest.get(event)
                if target is not None and joined is not None:
                    joins[target] = (*joins[target], (joined, item.site))
        return joins

    def _record(self, point, event, item, which, latest):
        thread = self.order.thread[point]
        if operations := _operations(which, "earlier"):
            last = bisect_left(self.uses[thread], point) - operations
            point = self._before(thread, self.uses[thread][last]) if last >= 0 else point
        elif which == NEIGHBOUR:
            event = self._next(item.site, event)
        elif which is not None and which != REMOVED:
            point = self._before(self._thread(thread, which), point)
        if which != REMOVED:
            latest[event] = point

    def _place(self, point, number, which):
        """The point that joins, in place of that of a wait; None: none does."""
        thread = self.order.thread[point]
        if which is None or which == NEIGHBOUR:
            return point
        if which == REMOVED:
            return None
        if operations := _operations(which, "later"):
            following = bisect_right(self.accesses[thread], point) + operations - 1
            if following >= len(self.accesses[thread]):
                return None
            point = self.accesses[thread][following]
        else:
            thread = self._thread(thread, which)
        points = self.points[thread]
        place = bisect_right(points, point)
        return points[place] if place < len(points) else None

    def _thread(self, thread, which):
        return self.threads[self.own[thread], which.removeprefix(IN)]

    def _before(self, thread, point):
        """The last point of a thread before this one; None if there is none."""
        place = bisect_left(self.points[thread], point) - 1
        return self.points[thread][place] if place >= 0 else None

    def _next(self, line, event):
        family = self.family[line]
        return family[(family.index(event) + 1) % len(family)]

    def mutations(self, site):
        """What can be done at a site, of what it has there."""
        here = self.there.get((site.line, site.kind))
        if here is None:
            return []
        if site.kind == "barrier":
            return [REMOVED]
        known = STREAMS.get(site.name.split()[0].split("/")[0], ())
        streams = sorted({stream for _, stream in self.order.threads if stream in known} - here)
        others = [] if HOST in here else [IN + stream for stream in streams]
        lines = {site.line} if site.kind == "record" else self.waited[site.line]
        others += [NEIGHBOUR] * any(len(self.family[line]) > 1 for line in lines)
        if site.kind == "record":
            return [REMOVED, EARLY, *others]
        return [REMOVED, *[LATE] * (HOST not in here), *others]


def _operations(mutation, way):
    """How many operations earlier or later it is; 0 where it is another mutation."""
    times, _, described = (mutation or "").rpartition(" ")
    return TIMES.index(times) + 1 if described == way else 0
