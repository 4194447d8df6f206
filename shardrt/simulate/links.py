"""What a collective, or a message, takes the links of a machine: seconds, and bytes on each; and copies."""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2

from shardrt.device.program import HOST, Free, Program, Range, Take, Work
from shardrt.simulate.machine import Machine, at

_PAT_BASE, _PAT_HOPS, _PAT_EFFICIENCY = 8e-6, 3.5, 0.75  # of NCCL's tuner


@dataclass(frozen=True)
class Transfer:
    """A collective alone.

    Attributes:
        inside, outside: bytes that a rank sends within its node and out of it.
        node, network: seconds for which that keeps each link.
        latency: seconds in addition.
    """

    latency: float
    inside: float = 0.0
    outside: float = 0.0
    node: float = 0.0
    network: float = 0.0

    @property
    def sent(self) -> float:
        """Bytes that the rank sends, inside its node and to others."""
        return self.inside + self.outside

    @property
    def seconds(self) -> float:
        """Seconds of the collective: the latency, and the slower of both links."""
        return self.latency + max(self.node, self.network)


def transfer(
    machine: Machine,
    call: str,
    nbytes: int,
    ranks: Sequence[int],
    rank: int = 0,
    parts: Sequence[tuple[int, int]] = (),
) -> Transfer:
    """What a collective of `nbytes` (the whole buffer of a rank), or a message, takes these ranks.

    As NCCL's tuner says (src/graph/tuning.cc of 2.30, protocol Simple), with what is fastest of:

    - rings: a gather or a reduce-scatter is ranks - 1 steps, of which nodes - 1 cross nodes, and each rank
      sends all but its part; an all-reduce is both. There are as many rings as a node has ranks, and each
      leaves it over a network link of its own with its part of the bytes.
    - a tree of nodes, with a chain in each, of an all-reduce.
    - the switch of the node, which adds and copies (NVLS): an all-reduce, also under a tree of nodes, and
      a gather or a reduce-scatter within one node.
    - parallel trees (PAT) of a gather or a reduce-scatter, with one rank a node.

    An all-to-all and a message are one step. A broadcast is a ring, in pieces. Inside a node what was
    measured of a call goes before.

    CPUs on several nodes exchange with their counterparts, all at once (comm/hierarchical.py): each sends its
    part of what the other nodes lack, twice in an all-reduce.

    Args:
        rank: the one that is asked about, with `parts`.
        parts: Collective.parts; the larger direction of each link counts.
    """
    found, curve = _by_links(machine, call, nbytes, ranks), machine.collectives.calls.get(call)
    moved = found.sent
    if parts:
        found = _in_parts(machine, ranks, rank, parts, found.latency)
        moved = found.node * machine.node.bandwidth
    if curve and moved and not found.network:
        return replace(found, node=moved / at(curve, moved))
    return found


def _by_links(machine: Machine, call: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
    size, nodes = len(ranks), _nodes(machine, ranks)
    if size < 2 and call not in ("send", "recv"):
        return Transfer(machine.collectives.base)
    way = _Way(machine, nbytes, size, nodes)
    if call in ("send", "recv", "all_to_all"):
        return way.step(call)
    if call == "barrier":
        return Transfer(machine.collectives.base + way.tree_latency / 2)
    if call == "broadcast":
        return way.ring(nbytes)
    if machine.host_streams and nodes > 1:
        return way.counterparts(rounds=2 if call == "all_reduce" else 1, sums=call != "all_gather")
    ways = way.reductions() if call == "all_reduce" else way.halves()
    return min(ways, key=lambda found: found.seconds)


def _in_parts(
    machine: Machine, ranks: Sequence[int], rank: int, parts: Sequence[tuple[int, int]], latency: float
) -> Transfer:
    """Of an all-to-all with so many bytes to and from each rank."""
    inside, outside = [0, 0], [0, 0]
    for other, part in zip(ranks, parts, strict=True):
        if other != rank:
            near = other // machine.ranks_per_node == rank // machine.ranks_per_node
            for way, nbytes in enumerate(part):
                (inside if near else outside)[way] += nbytes
    links = max(inside) / machine.node.bandwidth, max(outside) / machine.network.bandwidth
    return Transfer(latency, inside[0], outside[0], *links)


@dataclass(frozen=True)
class _Way:
    """The ways of a collective over some nodes, with as many ranks on each."""

    machine: Machine
    nbytes: int
    size: int
    nodes: int

    @property
    def each(self) -> float:
        return self.size / self.nodes

    def over(self, latency: float, sent: float) -> Transfer:
        """Every rank sends `sent` to its neighbours: one ring of `each` leaves the node at this rank."""
        latency += self.machine.collectives.base
        outside = sent / self.each if self.nodes > 1 else 0.0
        return self._of(latency, sent - outside, outside)

    def _of(self, latency: float, inside: float, outside: float) -> Transfer:
        """Of bytes within the node and out of it."""
        links = inside / self.machine.node.bandwidth, outside / self.machine.network.bandwidth
        return Transfer(latency, inside, outside, *links)

    def step(self, call: str) -> Transfer:
        latency = self.machine.node.latency if self.nodes == 1 else self.machine.network.latency
        latency += self.machine.collectives.base
        if call != "all_to_all":
            return self._of(latency, *((self.nbytes, 0.0) if self.nodes == 1 else (0.0, self.nbytes)))
        part = self.nbytes / self.size
        return self._of(latency, part * (self.each - 1), part * (self.size - self.each))

    def ring(self, sent: float, rounds: int = 1) -> Transfer:
        node, network = self.machine.node.latency, self.machine.network.latency
        around = (self.size - self.nodes) * node + (self.nodes - 1) * network
        return self.over(rounds * around, sent)

    def counterparts(self, rounds: int, sums: bool) -> Transfer:
        """Sums are made in a node first where it is a subtree of the tree over ranks."""
        apart = sums and (self.each % 1 or int(self.each) & (int(self.each) - 1))
        kept = self.each / self.size if apart else 1 / self.nodes
        outside = rounds * self.nbytes * (1 - kept) / (1 if apart else self.each)
        return self._of(rounds * self.machine.network.latency + self.machine.collectives.base, 0.0, outside)

    @property
    def tree_latency(self) -> float:
        """Up and down."""
        hops = log2(self.nodes) * self.machine.network.latency
        return 2 * ((self.each - 1) * self.machine.node.latency + hops)

    def halves(self) -> list[Transfer]:
        """Of a gather or a reduce-scatter, of which an all-reduce has both."""
        machine, part = self.machine, self.nbytes * (self.size - 1) / self.size
        found = [self.ring(part)]
        if machine.switch is not None and self.nodes == 1:
            seconds = self.nbytes / (machine.switch.efficiency * machine.node.bandwidth)
            seconds *= self.size / (self.size - 1)
            found.append(Transfer(machine.switch.latency, part, 0.0, seconds))
        if machine.collectives.parallel_trees and self.nodes == self.size:
            latency = _PAT_BASE + log2(self.nodes) * machine.network.latency / _PAT_HOPS
            latency += self.size * machine.collectives.parallel_trees
            seconds = self.nbytes / (_PAT_EFFICIENCY * machine.network.bandwidth)
            found.append(Transfer(latency, 0.0, part, 0.0, seconds))
        return found

    def reductions(self) -> list[Transfer]:
        """Of an all-reduce."""
        machine, part = self.machine, self.nbytes * (self.size - 1) / self.size
        found = [self.ring(2 * part, rounds=2), self.over(self.tree_latency, 2 * self.nbytes)]
        if machine.switch is not None and self.each > 1:
            latency = machine.switch.latency
            inside, outside = self.nbytes + self.nbytes / self.each, 0.0  # all is read, a part is written
            seconds = part / (machine.switch.efficiency * machine.node.bandwidth)
            if self.nodes > 1:
                latency += 2 * log2(self.nodes) * machine.switch.hop
                outside = (part if self.nodes == 2 else 2 * part) / self.each
            found.append(Transfer(latency, inside, outside, seconds, outside / machine.network.bandwidth))
        return found


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
