"""What a rank here does of a trace: its items, with groups of the ranks that run and sizes that fit them.

With as many ranks as the trace has, every rank does what it did there. With fewer, rank 3 here does what rank
3 did, or the rank that stands for it, and a group of more ranks than run becomes one of those that run. Each
rank's slice keeps its bytes, as in PARAM.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from shardrt.dtypes import LOW, storage

from .trace import COMPUTE, MESSAGES, Node, Trace

SLICED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")  # nbytes is of all ranks' slices
SUMS = ("reduce_scatter", "all_reduce", "reduce")
_MOST_STREAMS = 64
_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
_ALIASES |= {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "char": "int8"}
_CARRIED = ("float32", "float64", "int32", "int64", "uint8", "bfloat16", "float16")
_OTHER = ("bool", "int8", "int16", "uint16", "uint32", "uint64", "byte", "complex64", "complex128")


class Key(NamedTuple):
    """A communicator: its ranks here, and the stream that it serves; "" for messages of a pair."""

    members: tuple[int, ...]
    stream: str


@dataclass(slots=True)
class Item:
    """What a stream does next; several nodes that compute are one item.

    Attributes:
        waits: items of other streams that end before it begins. awaited: whether others wait for it.
        idle: seconds between what it waited for and its begin. seconds: of computing; of communication what
            the trace says, None where it says nothing. flops: to be computed in addition. core: seconds of a
            core, for computing as much as the trace did.
        nbytes, sent, received, dtype: as in Node, of the group here. root, peer: ranks in the group.
    """

    name: str
    call: str
    stream: str
    waits: tuple[int, ...]
    awaited: bool = False
    idle: float = 0.0
    seconds: float | None = None
    flops: float = 0.0
    core: float = 0.0
    key: Key | None = None
    nbytes: int = 0
    dtype: str = ""
    root: int = 0
    peer: int = -1
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    @property
    def what(self) -> str:
        """The call as all its ranks have to make it."""
        parts = "unequal parts" if self.sent else f"{self.nbytes} bytes of {self.dtype}"
        call = "message" if self.call in MESSAGES else self.call
        return f"{call} of {parts}, root {self.root}" if self.call != "barrier" else self.call


@dataclass
class Plan:
    """All items of a rank, in the order in which they are submitted.

    Attributes:
        counted: what is not as it was in the trace, and how often.
    """

    trace: Trace
    items: list[Item] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def streams(self) -> list[str]:
        """In the order of their first item."""
        return list(dict.fromkeys(item.stream for item in self.items))

    @property
    def communication(self) -> list[tuple[int, Item]]:
        """The items that communicate, with their places."""
        return [(place, item) for place, item in enumerate(self.items) if item.key is not None]


def plan(trace: Trace, rank: int, ranks: int) -> Plan:
    """What rank `rank` of `ranks` does of a trace that is in order.

    Raises:
        ValueError: for what can't be done here: it names the file and the node.
    """
    if trace.world < ranks:
        raise ValueError(
            f"{trace.source}: the trace is of {trace.world} ranks, and {ranks} run here: start mpirun "
            f"-n {trace.world}"
        )
    made = _Maker(trace, rank, ranks)
    made.run()
    if len(made.plan.streams) > _MOST_STREAMS:
        found = len(made.plan.streams)
        raise ValueError(f"{trace.source}: has {found} streams; the limit is {_MOST_STREAMS}")
    return made.plan


class _Maker:
    def __init__(self, trace: Trace, rank: int, ranks: int) -> None:
        self.trace, self.rank, self.ranks = trace, rank, ranks
        self.plan = Plan(trace)
        self.places = {node.id: place for place, node in enumerate(trace.nodes)}
        self.groups: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # their ranks there, and here
        self.waits = self._waits()
        awaited = {dep for deps in self.waits for dep in deps}
        self.awaited = [place in awaited for place in range(len(trace.nodes))]

    def _waits(self) -> list[tuple[int, ...]]:
        """By node, the nodes of other streams that it waits for, without those that others imply.

        A clock holds, for each stream, the last node of it that ends before (Fidge 1988, Mattern 1989).
        """
        nodes, found = self.trace.nodes, []
        clocks: list[dict[str, int]] = []
        latest: dict[str, dict[str, int]] = {}
        for place, node in enumerate(nodes):
            clock = dict(latest.get(node.stream, {}))
            deps = sorted((self.places[dep] for dep in node.deps), reverse=True)
            waits = []
            for dep in deps:
                stream = nodes[dep].stream
                if stream != node.stream and clock.get(stream, -1) < dep:
                    waits.append(dep)
                    for other, last in clocks[dep].items():
                        clock[other] = max(clock.get(other, -1), last)
            clock[node.stream] = place
            clocks.append(clock)
            latest[node.stream] = clock
            found.append(tuple(waits))
        return found

    def run(self) -> None:
        item_of: list[int] = []
        ends = _Ends()
        open_: dict[str, int] = {}  # by stream, the item that the next node that computes may join
        items = self.plan.items
        for place, node in enumerate(self.trace.nodes):
            waits = tuple(dict.fromkeys(item_of[dep] for dep in self.waits[place]))
            item = self._item(node, waits)
            item.idle = ends.idle(node) + (node.seconds or 0.0) * node.idles
            last = open_.get(node.stream)
            if item.call == COMPUTE and last is not None and not waits:
                _join(items[last], item)
                item_of.append(last)
            else:
                item_of.append(len(items))
                items.append(item)
            items[item_of[-1]].awaited |= self.awaited[place]
            if item.call == COMPUTE and not self.awaited[place]:
                open_[node.stream] = item_of[-1]
            else:
                open_.pop(node.stream, None)

    def _item(self, node: Node, waits: tuple[int, ...]) -> Item:
        item = Item(node.name, COMPUTE, node.stream, waits)
        what = f"{self.trace.source}: node {node.id} ({node.name[:60]!r})"
        if node.call == COMPUTE:
            item.seconds, item.flops = (0.0 if node.idles else node.seconds or 0.0), node.flops
            item.core = item.seconds if node.core is None else node.core
        elif node.call in MESSAGES:
            self._message(item, node, what)
        else:
            self._collective(item, node, what)
        return item

    def _message(self, item: Item, node: Node, what: str) -> None:
        peer = node.peer + self.rank - self.trace.rank  # a rank that stands for this one has its own peers
        if not node.peer < self.trace.world:
            raise ValueError(f"{what} names rank {node.peer} of {self.trace.world}")
        if peer == self.rank:
            raise ValueError(f"{what} is a message to its own rank")
        if not node.nbytes:
            self.plan.counted["messages of no bytes dropped"] += 1
        elif not 0 <= peer < self.ranks:
            self.plan.counted["messages with ranks that do not run here dropped"] += 1
        else:
            pair = (self.rank, peer) if node.call == "send" else (peer, self.rank)
            item.call, item.key, item.peer = node.call, Key(pair, ""), int(node.call == "send")
            item.seconds = node.seconds
            self._sizes(item, node, 1, 1, what)

    def _collective(self, item: Item, node: Node, what: str) -> None:
        theirs, here = self._group(node, what)
        if node.call != "barrier" and not node.nbytes:
            self.plan.counted["collectives of no bytes dropped"] += 1
        elif len(here) == 1:
            self.plan.counted["collectives of one rank dropped"] += 1
        else:
            if len(here) < len(theirs):
                self.plan.counted[f"collectives of {len(theirs)} ranks run on {len(here)}"] += 1
            item.call, item.key, item.seconds = node.call, Key(here, node.stream), node.seconds
            item.root = self._root(node, theirs, what) % len(here)
            if node.call != "barrier":
                self._sizes(item, node, len(theirs), len(here), what)
            if node.sent:
                self._parts(item, node, theirs, here, what)

    def _group(self, node: Node, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks of a group in the trace, and here."""
        if node.group not in self.groups:
            theirs = self.trace.groups.get(node.group) or tuple(range(self.trace.world))
            self.groups[node.group] = theirs, self._here(theirs, what)
        return self.groups[node.group]

    def _here(self, theirs: tuple[int, ...], what: str) -> tuple[int, ...]:
        if self.trace.rank not in theirs:
            raise ValueError(f"{what} is of a group without rank {self.trace.rank}, whose file this is")
        own = theirs if self.rank == self.trace.rank else _moved(theirs, self.rank, what)
        if all(rank < self.ranks for rank in own):
            return own
        size = min(len(own), self.ranks)  # neighbours: so all of them make the same group
        first = self.rank // size * size
        return tuple(range(first, min(first + size, self.ranks)))

    def _root(self, node: Node, theirs: tuple[int, ...], what: str) -> int:
        if node.root < 0:
            return 0
        if node.root not in theirs:
            raise ValueError(f"{what} has the root {node.root}, which is not in its group")
        return theirs.index(node.root)

    def _sizes(self, item: Item, node: Node, theirs: int, here: int, what: str) -> None:
        parts = theirs if node.call in SLICED and not node.given else 1
        if node.nbytes % parts:
            raise ValueError(f"{what}: {node.nbytes} bytes do not divide over the {parts} ranks of its group")
        each = node.nbytes // parts
        item.dtype = _carried(node, each, what)
        if each % storage(item.dtype).itemsize:
            raise ValueError(f"{what}: a slice of {each} bytes is no whole number of {item.dtype}")
        item.nbytes = each * (here if node.call in SLICED else 1)
        if node.dtype and item.dtype != _ALIASES.get(node.dtype, node.dtype):
            self.plan.counted[f"{node.call} of {node.dtype} run as {item.dtype}"] += 1

    def _parts(
        self, item: Item, node: Node, theirs: tuple[int, ...], here: tuple[int, ...], what: str
    ) -> None:
        """The unequal parts of an all_to_all, for the ranks of the group that run here."""
        if len(node.sent) != len(theirs) or len(node.received) != len(theirs):
            raise ValueError(f"{what}: has {len(node.sent)} parts, and its group has {len(theirs)} ranks")
        if not set(here) <= set(theirs):
            raise ValueError(f"{what}: an all_to_all of unequal parts can't be moved to other ranks")
        item.sent, item.received = (
            tuple(parts[theirs.index(rank)] for rank in here) for parts in (node.sent, node.received)
        )
        item.nbytes = max(sum(item.sent), sum(item.received)) * storage(item.dtype).itemsize


class _Ends:
    """When the nodes so far have ended in the trace."""

    def __init__(self) -> None:
        self._streams: dict[str, float] = {}
        self._nodes: dict[int, float] = {}
        self._first: float | None = None

    def idle(self, node: Node) -> float:
        """Seconds for which the node could have begun, and had not."""
        if self._first is None:  # of shardrt's, a step may begin with what the one before has left
            self._first = min(0.0, node.start or 0.0)
        before = [self._streams.get(node.stream, self._first)]
        ready = max([*before, *(self._nodes.get(dep, self._first) for dep in node.deps)])
        begin = ready if node.start is None else max(node.start, ready)
        self._streams[node.stream] = self._nodes[node.id] = begin + (node.seconds or 0.0)
        return begin - ready


def _join(item: Item, more: Item) -> None:
    item.idle += more.idle
    item.seconds += more.seconds
    item.flops += more.flops
    item.core += more.core


def _moved(group: tuple[int, ...], rank: int, what: str) -> tuple[int, ...]:
    """The group of `rank` that is like this one: of a mesh, in which a group's ranks are evenly apart."""
    stride = group[1] - group[0] if len(group) > 1 else 1
    even = all(after - before == stride for before, after in zip(group, group[1:], strict=False))
    if stride < 1 or not even:
        raise ValueError(f"{what}: rank {rank} has no file, and its group can't be made of {group!r:.80}")
    first = rank - rank // stride % len(group) * stride
    return tuple(range(first, first + stride * len(group), stride))


def _carried(node: Node, each: int, what: str) -> str:
    """The type that communicators here move or sum in place of the trace's."""
    name = _ALIASES.get(node.dtype.lower(), node.dtype.lower())
    if name and name not in (*_CARRIED, *_OTHER) and not name.startswith("float8"):
        raise ValueError(f"{what} has the unknown type {node.dtype[:80]!r}")
    if name in LOW and node.call in SUMS and node.call != "reduce_scatter":
        name = ""  # shardrt sums 16-bit types in its reduce_scatter alone
    if name in _CARRIED or (name == "uint16" and node.call not in SUMS):
        return name
    return "uint8" if name or each % 4 else "float32"
