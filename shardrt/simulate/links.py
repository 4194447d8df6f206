"""What a collective, or a message, takes the links of a machine: seconds, and bytes on each; and copies."""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2

from shardrt.device.program import HOST, Free, Program, Range, Take, Work
from shardrt.simulate.machine import Machine, at


@dataclass(frozen=True)
class Transfer:
    """A collective alone: seconds of latency, bytes that a rank sends, seconds on each link."""

    latency: float
    sent: float
    node: float = 0.0
    network: float = 0.0

    @property
    def seconds(self) -> float:
        return self.latency + max(self.node, self.network)


def transfer(machine: Machine, call: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
    """What a collective of `nbytes` (the whole buffer of a rank), or a message, takes these ranks.

    Rings, as NCCL's: a gather or a reduce-scatter is ranks - 1 steps, of which nodes - 1 cross nodes, and
    each rank sends all but its part; an all-reduce is both, or a tree where that is faster. There are as many
    rings as a node has ranks, and each leaves it over a network link of its own with its part of the bytes.
    An all-to-all and a message are one step. Inside a node what was measured of a call goes before.
    """
    found, curve = _by_links(machine, call, nbytes, ranks), machine.collectives.calls.get(call)
    if curve and found.sent and not found.network:
        return replace(found, node=found.sent / at(curve, found.sent))
    return found


def _by_links(machine: Machine, call: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
    size, nodes = len(ranks), _nodes(machine, ranks)
    base, step, far = machine.collectives.base, machine.node.latency, machine.network.latency
    if size < 2 and call not in ("send", "recv"):
        return Transfer(base, 0.0)
    each = size / nodes
    if call in ("send", "recv"):
        return _shared(machine, base + (step if nodes == 1 else far), nbytes, nodes, 1)
    if call == "barrier":
        return Transfer(base + _tree(each, nodes, step, far) / 2, 0.0)
    ring = base + (size - nodes) * step + (nodes - 1) * far
    part = nbytes * (size - 1) / size
    if call == "all_to_all":
        inside = nbytes * (each - 1) / size / machine.node.bandwidth
        outside = nbytes * (size - each) / size / machine.network.bandwidth
        return Transfer(base + (step if nodes == 1 else far), part, inside, outside)
    if call != "all_reduce":  # all_gather, reduce_scatter, and a broadcast in pieces
        return _shared(machine, ring, nbytes if call == "broadcast" else part, nodes, each)
    around = _shared(machine, 2 * ring - base, 2 * part, nodes, each)
    down = _shared(machine, base + _tree(each, nodes, step, far), 2 * nbytes, nodes, each)
    return min(around, down, key=lambda found: found.seconds)


def _tree(each: float, nodes: int, step: float, far: float) -> float:
    """Up and down a tree of nodes, with a chain in each."""
    return 2 * ((each - 1) * step + (log2(nodes) * far if nodes > 1 else 0))


def _shared(machine: Machine, latency: float, sent: float, nodes: int, each: float) -> Transfer:
    """Every rank sends `sent` to its neighbour; of a node, `each` ranks have a network link each."""
    inside = sent / machine.node.bandwidth if nodes == 1 or each > 1 else 0.0
    return Transfer(latency, sent, inside, sent / each / machine.network.bandwidth if nodes > 1 else 0.0)


def _nodes(machine: Machine, ranks: Sequence[int]) -> int:
    """How many nodes ranks in ascending order lie on."""
    if isinstance(ranks, range) and 0 < ranks.step <= machine.ranks_per_node:
        return 1 + ranks[-1] // machine.ranks_per_node - ranks[0] // machine.ranks_per_node
    found = [rank // machine.ranks_per_node for rank in ranks]
    return 1 + sum(a != b for a, b in pairwise(found))


def copies(program: Program) -> dict[int, tuple[str, int]]:
    """By item, those between host and device memory: "to device" or "to host", and their bytes."""
    host: list[tuple[int, int]] = []  # what is lent of host memory, ascending
    found = {}
    for index, item in enumerate(program.items):
        if isinstance(item, Take) and item.place == "host":
            insort(host, (item.memory.start, item.memory.stop))
        elif isinstance(item, Free) and host:
            place = bisect_right(host, (item.start, 0))
            if place < len(host) and host[place][0] == item.start:
                del host[place]
        elif isinstance(item, Work) and item.stream != HOST and host:
            read, written = ([r for r in ranges if _within(r, host)] for ranges in (item.reads, item.writes))
            if read or written:
                nbytes = sum(r.stop - r.start for r in read or written)
                found[index] = "to device" if read else "to host", nbytes
    return found


def _within(memory: Range, lent: list[tuple[int, int]]) -> bool:
    place = bisect_right(lent, (memory.start, float("inf"))) - 1
    return place >= 0 and memory.start < lent[place][1]
