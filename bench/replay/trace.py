"""A recorded rank, from whatever file: nodes in an order in which they can run, and the groups they name.

The readers (chakra.py, param.py) check what a file says, so that nothing after them has to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from shardrt.untrusted import read_regular, strict_json

COLLECTIVES = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"),
    *("reduce", "gather", "scatter", "barrier"),
)
MESSAGES = ("send", "recv")
COMPUTE = "compute"  # a node that computes, and the stream of computing nodes that name none
MOST_NODES = 500_000  # of a rank
MOST_RANKS = 1 << 20
LARGEST = 1 << 50  # bytes of a collective
LONGEST = 1e6  # seconds of a node, and of a trace
_GROUPS = 64 << 20  # bytes of a file of groups


@dataclass(frozen=True, slots=True)
class Node:
    """What a rank did.

    Attributes:
        call: one of COLLECTIVES or MESSAGES, or COMPUTE.
        deps: ids of the nodes that end before it begins.
        start, seconds: when it began, from the step's start, and how long it took; None: the file has none.
        core: seconds of a core that it took, of a node that computes; None: `seconds`.
        idles: it takes its time and computes nothing: a copy, or a host that issues.
        on_host: a CPU runs it.
        nbytes: of the whole buffer of a rank: all slices of an all_gather, the input of a reduce_scatter.
            With `given` it is of the slice that a rank gives.
        group: a name in Trace.groups; "": all ranks.
        root: rank in the world, -1 for the first of the group.
        peer: rank in the world at the other end of a message.
        sent, received: elements by rank of the group, for an all_to_all of unequal parts.
        flops: of a node that computes and whose seconds the file does not have.
    """

    id: int
    name: str
    call: str
    stream: str
    deps: tuple[int, ...] = ()
    start: float | None = None
    seconds: float | None = None
    core: float | None = None
    idles: bool = False
    on_host: bool = False
    nbytes: int = 0
    given: bool = False
    dtype: str = ""
    group: str = ""
    root: int = -1
    peer: int = -1
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    flops: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Rank `rank` of `world`, which stands for the ranks `alike`.

    Attributes:
        source: the file, and `kind` of file, for messages.
        notes: what of the file is not replayed, for the head of a report.
    """

    source: str
    kind: str
    rank: int
    world: int
    nodes: Sequence[Node]
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    alike: Sequence[int] = ()
    notes: tuple[str, ...] = ()


def in_order(trace: Trace) -> Trace:
    """The trace with its nodes behind those that they depend on, else in the file's order.

    Raises:
        ValueError: for an id that is there twice, a dependency that is not there, and a cycle.
    """
    places = {node.id: place for place, node in enumerate(trace.nodes)}
    if len(places) != len(trace.nodes):
        seen: set[int] = set()
        twice = next(node.id for node in trace.nodes if node.id in seen or seen.add(node.id))
        raise ValueError(f"{trace.source}: two nodes have the id {twice}")
    for node in trace.nodes:
        for dep in node.deps:
            if dep not in places:
                raise ValueError(f"{trace.source}: node {node.id} depends on {dep}, which is not there")
    if all(places[dep] < place for place, node in enumerate(trace.nodes) for dep in node.deps):
        return trace
    return replace(trace, nodes=_sorted(trace, places))


def _sorted(trace: Trace, places: dict[int, int]) -> list[Node]:
    """Kahn's algorithm; of the nodes that can come next the first of the file."""
    nodes = trace.nodes
    left = [len(set(node.deps)) for node in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for dep in set(node.deps):
            after[places[dep]].append(place)
    ready = [place for place, count in enumerate(left) if not count]
    heapify(ready)
    found = []
    while ready:
        place = heappop(ready)
        found.append(nodes[place])
        for later in after[place]:
            left[later] -= 1
            if not left[later]:
                heappush(ready, later)
    if len(found) < len(nodes):
        stuck = next(node.id for node, count in zip(nodes, left, strict=True) if count)
        raise ValueError(f"{trace.source}: node {stuck} depends on itself, by a cycle of dependencies")
    return found


def read_groups(path: Path, world: int) -> dict[str, tuple[int, ...]]:
    """A JSON object of the ranks of each group. Raises ValueError that names the file."""
    try:
        given = strict_json(read_regular(path, _GROUPS))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: must be an object of lists of ranks by name")
    return {name: ranks_of(ranks, world, f"{path}: group {name[:80]!r}") for name, ranks in given.items()}


def ranks_of(given: Any, world: int, what: str) -> tuple[int, ...]:
    """A list of different ranks of the world. Raises ValueError."""
    good = isinstance(given, list) and given and all(type(rank) is int for rank in given)
    if not good:
        raise ValueError(f"{what} must be a list of ranks")
    if bad := [rank for rank in given if not 0 <= rank < world]:
        raise ValueError(f"{what} has rank {bad[0]}, but the trace has the ranks 0 to {world - 1}")
    if len(set(given)) < len(given):
        raise ValueError(f"{what} has a rank twice")
    return tuple(given)
