"""Programs written by hand, and by chance; and the truth about them by search in a graph, without clocks."""

from hypothesis import strategies as st

from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    Group,
    HostRead,
    HostWait,
    Program,
    Range,
    Record,
    Take,
    Wait,
    Work,
)


class Written(Program):
    """A program with a method for each item; memory is (start, stop), and every site is a word."""

    def __init__(self, rank=0, world_size=1, by_host=()):
        super().__init__(rank, world_size, groups={"all": Group(range(world_size))}, by_host=by_host)
        self.marks, self.calls = 0, 0

    def work(self, stream, site, reads=(), writes=(), **facts):
        self.items.append(Work(stream, "kernel", _ranges(reads), _ranges(writes), site=site, **facts))

    def record(self, stream):
        self.marks += 1
        self.items.append(Record(stream, self.marks))
        return self.marks

    def wait(self, stream, mark, site):
        self.items.append(HostWait(mark, site) if stream == HOST else Wait(stream, mark, site))

    def host(self, site, reads=(), writes=(), why=""):
        if reads:
            self.items.append(HostRead(_ranges(reads), why, site))
        if writes:
            self.items.append(Work(HOST, "kernel", (), _ranges(writes), site=site))

    def call(
        self, stream, call, site, reads=(), writes=(), group="all", number=None, nbytes=0, peer=-1, **facts
    ):
        self.calls += number is None
        number = self.calls if number is None else number
        memory = _ranges(reads), _ranges(writes)
        self.items.append(Collective(stream, call, group, number, nbytes, *memory, peer, site=site, **facts))

    def take(self, memory, label="", site="", place="device"):
        self.items.append(Take(Range(*memory), place, "activations", label, site))

    def free(self, start, site="", stream=""):
        self.items.append(Free(start, site, stream))

    def thread(self, item):
        stream = getattr(item, "stream", HOST) or HOST
        return HOST if stream in self.by_host else stream


def _ranges(memory):
    """Of one (start, stop) or of several."""
    if memory and isinstance(memory[0], int):
        memory = [memory]
    return tuple(Range(*each) for each in memory)


# --- by chance ----------------------------------------------------------------------------------------------

STREAMS = ("compute", "gather", "reduce")

_threads = st.sampled_from(STREAMS)
_memory = st.tuples(st.integers(0, 5), st.integers(0, 4)).map(lambda m: (m[0], m[0] + m[1]))
_accesses = st.tuples(st.lists(_memory, max_size=2), st.lists(_memory, max_size=1))


@st.composite
def programs(draw, ranks=1, length=24, wait_sites=6):
    """Programs of some ranks that share all memory: what they call together, they call in one order."""
    by_host = draw(st.sampled_from(((), ("compute",))))
    written = [Written(rank, ranks, by_host) for rank in range(ranks)]
    for n in range(draw(st.integers(length // 2, length))):
        rank = draw(st.integers(0, ranks - 1))
        program, stream, site = written[rank], draw(_threads), f"line {n}"
        kinds = ["work"] * 3 + ["join"] * 4 + ["record", "wait", "host", "host wait"]
        kind = draw(st.sampled_from(kinds + (["call", "message"] if ranks > 1 else ["free"])))
        wait_site = f"wait {draw(st.integers(0, wait_sites - 1))}"
        if kind == "join":
            program.wait(draw(_threads), program.record(stream), wait_site)
        elif kind in ("wait", "host wait") and program.marks:
            mark = draw(st.integers(1, program.marks))
            program.wait(HOST if kind == "host wait" else stream, mark, wait_site)
        elif kind == "record":
            program.record(stream)
        elif kind == "host":
            program.host(site, *draw(_accesses))
        elif kind == "free":
            start, stop = draw(_memory)
            program.take((start, stop))
            program.free(start, site, draw(st.sampled_from(("", HOST, *STREAMS))))
        elif kind == "call":
            call = draw(st.sampled_from(("all_gather", "reduce_scatter", "barrier")))
            for each in written:
                accesses = ((), ()) if call == "barrier" else draw(_accesses)
                # A rank's own line: races are told by pairs of lines.
                own = wait_site if call == "barrier" else f"{site} of {each.rank}"
                each.call(draw(_threads), call, own, *accesses, number=n)
        elif kind == "message":
            other = (rank + 1) % ranks
            program.call(stream, "send", site, draw(_accesses)[0], (), number=n, peer=other)
            written[other].call(
                draw(_threads), "recv", f"{site} there", (), draw(_accesses)[1], number=n, peer=rank
            )
        else:
            program.work(stream, site, *draw(_accesses))
    return written


# --- the truth ----------------------------------------------------------------------------------------------


class Truth:
    """The graph of what comes before what, and every pair of accesses in conflict. Nodes: (rank, item,
    phase).

    An item has come to its turn (0), does what it does (1), and is over (2).
    """

    def __init__(self, written):
        self.written = written
        self.edges = {}  # node -> [(node after it, wait site or None)]
        for program in written:
            self._threads(program)
            self._marks(program)
        self._calls()
        self.touched = [(program.rank, n) for program in written for n in range(len(program.items))]
        self._reached = {}

    def reached(self, rank, item, without=frozenset()):
        """Nodes that come after what an item does, where some wait sites are left out."""
        start = rank, item, 1
        if (start, without) not in self._reached:
            seen, left = set(), [start]
            while left:
                for node, site in self.edges.get(left.pop(), ()):
                    if node not in seen and site not in without:
                        seen.add(node)
                        left.append(node)
            self._reached[start, without] = seen
        return self._reached[start, without]

    def in_order(self, first, second, without=frozenset()):
        return (*second, 1) in self.reached(*first, without)

    def races(self, without=frozenset()):
        """All pairs ((rank, item), (rank, item)) that conflict and have no order."""
        found = set()
        for a, first in enumerate(self.touched):
            for second in self.touched[a + 1 :]:
                if self.conflict(first, second):
                    if not (self.in_order(first, second, without) or self.in_order(second, first, without)):
                        found.add((first, second))
        return found

    def conflict(self, first, second):
        items = [self.written[rank].items[n] for rank, n in (first, second)]
        if isinstance(items[0], Free):
            return False  # what comes after memory was given back is another's
        (r1, w1), (r2, w2) = (self.bytes_of(*place) for place in (first, second))
        return bool(w1 & (r2 | w2) or r1 & w2)

    def bytes_of(self, rank, n):
        item = self.written[rank].items[n]
        if isinstance(item, Free):
            items = self.written[rank].items[:n]
            taken = next(
                i.memory for i in reversed(items) if isinstance(i, Take) and i.memory.start == item.start
            )
            return set(), set(range(taken.start, taken.stop)) if item.stream else set()
        return tuple(
            {byte for memory in getattr(item, name, ()) for byte in range(memory.start, memory.stop)}
            for name in ("reads", "writes")
        )

    def _edge(self, first, second, site=None):
        self.edges.setdefault(first, []).append((second, site))

    def _threads(self, program):
        """Each item after the one before it in its thread, and after what the host had done."""
        rank, last = program.rank, {}
        for n, item in enumerate(program.items):
            thread = program.thread(item)
            for phase in (0, 1):
                self._edge((rank, n, phase), (rank, n, phase + 1))
            for before in {last.get(thread), last.get(HOST)} - {None}:
                self._edge((rank, before, 2), (rank, n, 0))
            last[thread] = n

    def _marks(self, program):
        recorded = {item.mark: n for n, item in enumerate(program.items) if isinstance(item, Record)}
        for n, item in enumerate(program.items):
            if isinstance(item, Wait | HostWait):
                self._edge((program.rank, recorded[item.mark], 2), (program.rank, n, 0), item.site)

    def _calls(self):
        calls = {}
        for program in self.written:
            for n, item in enumerate(program.items):
                if isinstance(item, Collective):
                    calls.setdefault(item.number, []).append((program.rank, n, item))
        for several in calls.values():
            for rank, n, item in several:
                for other, m, theirs in several:
                    if other == rank or (theirs.peer >= 0 and theirs.call == "recv"):
                        continue
                    if item.peer >= 0:
                        self._edge((other, m, 1), (rank, n, 1))
                    else:
                        self._edge((other, m, 0), (rank, n, 1), item.site if item.call == "barrier" else None)
                    if item.call == "reduce_scatter":
                        self._edge((other, m, 1), (rank, n, 2))
