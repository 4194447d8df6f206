"""Exchange: brings the matrices that ranks hold in pieces to their owners, and the results back.

The ranks of one communicator hold pieces of every matrix, as the extents of its elements say: shards of flat
buffers, columns of a split layer, or both. Each matrix has one owner. One all-to-all brings all pieces to the
owners and one brings the owners' results to all ranks that hold pieces. A rank receives, in bytes of other
ranks, its matrices less its own pieces of them, then its own pieces less those of its matrices.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.mesh_layout import MeshLayout, index_in, without
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.device import Array, Device
from shardrt.nn.extents import Extent, Extents, contiguous, cut, size_of, spans
from shardrt.nn.parameter import Parameter
from shardrt.optim.muon import newton_schulz


def owners_of(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The owner of each matrix: the largest first, each to the rank that has the least to compute so far."""
    owners, load = [0] * len(shapes), [0] * ranks
    costs = [newton_schulz.flops(shape) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += costs[index]
    return owners


@dataclass(frozen=True, eq=False)
class Exchange:
    """How the matrices of one update travel.

    mesh: the ranks that hold pieces; None for this one alone.
    shapes: of the whole matrices, (rows, columns).
    held: of each matrix, the elements that each rank holds, in the order of the rank's shard.
    """

    mesh: Mesh | None
    shapes: tuple[tuple[int, int], ...]
    held: tuple[tuple[Extents, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return 0 if self.mesh is None else self.mesh.rank

    @cached_property
    def owners(self) -> list[int]:
        """The owner of each matrix."""
        return owners_of(self.shapes, self.size)

    @cached_property
    def sources(self) -> list[list[int]]:
        """The ranks whose pieces are one whole matrix: the owner first, where ranks hold copies.

        Raises:
            RuntimeError: if the ranks do not hold all elements.
        """
        found = []
        for shape, owner, held in zip(self.shapes, self.owners, self.held, strict=True):
            chosen: list[int] = []
            seen: set[Extents] = set()
            for rank in [owner, *(rank for rank in range(len(held)) if rank != owner)]:
                if held[rank] and held[rank] not in seen:
                    seen.add(held[rank])
                    chosen.append(rank)
            if sum(size_of(held[rank]) for rank in chosen) != shape[0] * shape[1]:
                raise RuntimeError(f"Muon: the ranks' pieces of a matrix {shape} are not one whole matrix")
            found.append(sorted(chosen))
        return found

    @property
    def own(self) -> list[int]:
        """The matrices that this rank owns, in order."""
        return [index for index, owner in enumerate(self.owners) if owner == self.rank]

    @cached_property
    def by_owner(self) -> list[int]:
        """All matrices, those of rank 0 first."""
        return sorted(range(len(self.shapes)), key=lambda i: self.owners[i])

    @cached_property
    def sent(self) -> list[int]:
        """The matrices of which this rank sends its piece, by owner."""
        return [i for i in self.by_owner if self.rank in self.sources[i]]

    @cached_property
    def received(self) -> list[tuple[int, int]]:
        """(rank, matrix) of the pieces that come to this rank, which owns the matrices, by rank."""
        return [(rank, i) for rank, i in self.returned if rank in self.sources[i]]

    @cached_property
    def returned(self) -> list[tuple[int, int]]:
        """(rank, matrix) of the pieces that go back, by rank: more where ranks hold copies."""
        return [(rank, i) for rank in range(self.size) for i in self.own]

    def step_bytes(self, here: Device, dtype: np.dtype) -> int:
        """Bytes of the device's pool that an update takes: the buffers, and scratch memory for one batch."""

        def pooled(elements: int) -> int:
            return here.pooled(elements * dtype.itemsize)

        scratch = 0
        for shape, count in Counter(self.shapes[i] for i in self.own).items():
            batch = min(count, newton_schulz.batch_of(here, shape))
            arrays = newton_schulz.array_shapes(batch, shape)
            scratch = max(scratch, sum(pooled(prod(each)) for each in arrays))
        return sum(map(pooled, self.elements)) + scratch

    def size_of(self, rank: int, index: int) -> int:
        """Elements of a matrix that a rank holds."""
        return size_of(self.held[index][rank])

    def by_matrix(
        self, buffer: Array, parts: Sequence[tuple[int, int]]
    ) -> dict[int, list[tuple[Extents, Array]]]:
        """The pieces of each matrix, with their extents. parts: (rank, matrix), as they lie in the buffer."""
        found: dict[int, list[tuple[Extents, Array]]] = {i: [] for _, i in parts}
        pieces = _parts_of(buffer, [self.size_of(*part) for part in parts])
        for (rank, i), piece in zip(parts, pieces, strict=True):
            found[i].append((self.held[i][rank], piece))
        return found

    @property
    def elements(self) -> tuple[int, ...]:
        """Elements of each buffer that an update needs on this rank: one, and two more with other ranks."""
        pieces = sum(self.size_of(self.rank, i) for i in self.by_owner)
        if self.size == 1:
            return (pieces,)
        received, returned = (
            sum(self.size_of(*part) for part in parts) for parts in (self.received, self.returned)
        )
        return (pieces, received) if received == returned else (pieces, received, returned)


class Redistribution:
    """One update's matrices on their way: pieces of all matrices, then whole ones, then pieces again.

    A rank needs a buffer for its pieces and one for the matrices that it owns (Exchange.elements).

    Attributes:
        pieces: of each matrix what this rank holds, 1-D: to be filled before to_owners, results after
            to_holders.
        dtype: of their elements.

    Args:
        exchange: how they travel.
        like: an array of their dtype, on their device.
    """

    def __init__(self, exchange: Exchange, like: Array) -> None:
        self.exchange, self.dtype, self._device = exchange, like.dtype, device.of(like)
        self._pieces = self._device.empty(exchange.elements[0], like.dtype)
        unsent = [i for i in exchange.by_owner if i not in exchange.sent]
        self.pieces = self._cut([*exchange.sent, *unsent])

    def to_owners(self) -> None:
        """Send this rank's pieces, and receive those of the matrices that it owns. Collective."""
        exchange = self.exchange
        if exchange.size == 1:
            self._incoming = self._outgoing = {
                i: [(exchange.held[i][0], piece)] for i, piece in self.pieces.items()
            }
            return
        received, *more = (self._device.empty(size, self.dtype) for size in exchange.elements[1:])
        self._returned = more[0] if more else received
        sent = [(exchange.owners[i], exchange.size_of(exchange.rank, i)) for i in exchange.sent]
        coming = [(rank, exchange.size_of(rank, i)) for rank, i in exchange.received]
        self._all_to_all(received, coming, self._pieces, sent)
        self._incoming = exchange.by_matrix(received, exchange.received)
        self._outgoing = exchange.by_matrix(more[0], exchange.returned) if more else self._incoming

    def read(self, index: int, whole: Array) -> None:
        """Write a matrix that this rank owns into `whole`, (rows, columns)."""
        for extents, piece in self._incoming[index]:
            for part, view in _views(extents, whole, piece):
                view[...] = part

    def write(self, index: int, whole: Array) -> None:
        """Take `whole` as the result of a matrix, which was read before."""
        for extents, piece in self._outgoing[index]:
            for part, view in _views(extents, whole, piece):
                part[...] = view

    def to_holders(self) -> None:
        """Send the results, and receive this rank's pieces of all results. Collective."""
        exchange = self.exchange
        if exchange.size > 1:
            sent = [(rank, exchange.size_of(rank, i)) for rank, i in exchange.returned]
            coming = [(exchange.owners[i], exchange.size_of(exchange.rank, i)) for i in exchange.by_owner]
            self._all_to_all(self._pieces, coming, self._returned, sent)
            self.pieces = self._cut(exchange.by_owner)

    def _cut(self, order: Sequence[int]) -> dict[int, Array]:
        sizes = [self.exchange.size_of(self.exchange.rank, i) for i in order]
        return dict(zip(order, _parts_of(self._pieces, sizes), strict=True))

    def _all_to_all(
        self, output: Array, coming: list[tuple[int, int]], buffer: Array, sent: list[tuple[int, int]]
    ) -> None:
        """coming, sent: (rank, elements) in the order of the two buffers, of which `buffer` may be longer."""
        here, mesh = self._device, self.exchange.mesh
        counts = np.zeros((2, mesh.size), np.int64)
        for row, parts in zip(counts, (coming, sent), strict=True):
            for rank, size in parts:
                row[rank] += size
        compute, reduce = here.current_stream, mesh.stream("reduce")
        given, done = here.new_event(), here.new_event()
        compute.record(given)
        reduce.wait(given)  # compute has written what is sent, and has read what was in `output`
        received, outgoing = counts.tolist()
        mesh.communicator("reduce").all_to_all(
            output, buffer[: sum(outgoing)], received=received, sent=outgoing, stream=reduce, tag="muon"
        )
        reduce.record(done)
        compute.wait(done)  # the others' pieces are here


def _parts_of(buffer: Array, sizes: Sequence[int]) -> Iterator[Array]:
    """Neighbours in a 1-D buffer, one after the other."""
    stop = 0
    for size in sizes:
        start, stop = stop, stop + size
        yield buffer[start:stop]


def planned(
    parameters: Sequence[tuple[Parameter, Any]], mesh: Mesh | None
) -> list[tuple[Extents, ...]] | None:
    """Of each matrix the extents of every rank, as layouts of flat buffers say (fsdp/layout.py).

    A layer that is split before it is sharded is laid out alike on all ranks that split it.

    Args:
        parameters: the matrices, each with its storage's layout, or None.
        mesh: the ranks that hold pieces of them; None for this one alone.

    Returns:
        None where ranks split a layer into parts of other sizes.
    """
    found = []
    for parameter, layout in parameters:
        placement, shards = parameter.placement, [contiguous(0, parameter.size)]
        if layout is not None:
            entry = layout.entries[parameter.storage.position[id(parameter)]]
            shards = [layout.in_shard(entry, rank)[2] for rank in range(layout.shards)]
        if placement is not None and placement.cut_axes:
            parts = [placement.extents_of(rank) for rank in range(placement.mesh.size)]
            if {size_of(part) for part in parts} != {parameter.size}:
                return None
            places = _places(mesh, placement.cut_axes)
            shards = [_part_of(parts[part], shards[number]) for part, number in places]
        if len(shards) != (1 if mesh is None else mesh.size):
            return None
        found.append(tuple(shards))
    return found


def _part_of(part: Extents, elements: Extents) -> Extents:
    """Some elements of a part of a matrix, as elements of the matrix."""
    pieces = (cut(part, first, first + length) for _, first, length in spans(elements))
    return tuple(extent for piece in pieces for extent in piece)


def _places(mesh: Mesh, split: MeshLayout) -> list[tuple[int, int]]:
    """(place along the axes that split layers, number of the shard) of each rank of a mesh."""
    others, shards = without(mesh.root.axes, mesh.axes), without(mesh.axes, split)
    ranks = [rank for rank in range(mesh.root.size) if not index_in(others, rank)]
    return [(index_in(split, rank), index_in(shards, rank)) for rank in ranks]


def gathered(communicator: Communicator, own: Sequence[Extents]) -> list[tuple[Extents, ...]]:
    """Of each matrix the extents of every rank, by rank, from this rank's. Collective.

    Raises:
        RuntimeError: if ranks update other numbers of matrices.
    """
    flat: list[int] = []
    for extents in own:
        flat.append(len(extents))
        for extent in extents:
            flat += [extent.first, extent.length, extent.stride, extent.count]
    data = np.array(flat, np.int64).tobytes()
    ranks = [_extents_in(each) for each in communicator.all_gather_bytes(data)]
    if len({len(each) for each in ranks}) != 1:
        raise RuntimeError(f"Muon: ranks have {[len(each) for each in ranks]} matrices; all need the same")
    return list(zip(*ranks, strict=True))


def _extents_in(data: bytes) -> list[Extents]:
    numbers = np.frombuffer(data, np.int64).tolist()
    found = []
    while numbers:
        stop = 1 + 4 * numbers[0]
        found.append(tuple(Extent(*numbers[i : i + 4]) for i in range(1, stop, 4)))
        numbers = numbers[stop:]
    return found


def _views(extents: Extents, whole: Array, piece: Array) -> Iterator[tuple[Array, Array]]:
    """(part of the 1-D piece, the same elements of the whole matrix), as views of one shape."""
    flat, start = whole.reshape(-1), 0
    for extent in extents:
        part = piece[start : start + extent.size]
        start += extent.size
        (row, column), stride = divmod(extent.first, extent.stride), extent.stride
        if extent.count == 1:
            yield part, flat[extent.first : extent.stop]
        elif flat.size % stride == 0 and column + extent.length <= stride:
            columns = flat.reshape(-1, stride)[row : row + extent.count, column : column + extent.length]
            yield part.reshape(extent.count, extent.length), columns
        else:
            for place, first, length in spans((extent,)):
                yield part[place : place + length], flat[first : first + length]
