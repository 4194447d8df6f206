"""Exchange: brings the matrices that ranks hold in pieces to their owners, and the results back.

The ranks of one communicator hold pieces of every matrix, as the extents of its elements say: shards of flat
buffers, columns of a split layer, or both. Each matrix has one owner. One all-to-all brings all pieces to the
owners and one brings the owners' results to all ranks that hold pieces. A rank receives, in bytes of other
ranks, its matrices less its own pieces of them, then its own pieces less those of its matrices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardrt import device
from shardrt.comm.mesh_layout import MeshLayout, index_in, without
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.device import Array
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

    def to_owners(self, pieces: Sequence[Array], like: Array) -> dict[int, Array]:
        """The whole matrices that this rank owns, (rows, columns), by their numbers. Collective.

        Args:
            pieces: of each matrix what this rank holds, 1-D.
            like: an array of their dtype, on their device.
        """
        me = self.rank
        sent = [(self.owners[i], pieces[i]) for i in self._by_owner if me in self.sources[i]]
        coming = [(rank, i) for rank in range(self.size) for i in self.own]
        coming = [(rank, i) for rank, i in coming if rank in self.sources[i]]
        received = self._all_to_all(sent, [(r, size_of(self.held[i][r])) for r, i in coming], like)
        wholes: dict[int, Array] = {}
        for (rank, i), piece in zip(coming, received, strict=True):
            if self.held[i][rank] == self._all_of(i):
                wholes[i] = piece.reshape(self.shapes[i])
                continue
            if i not in wholes:
                wholes[i] = device.of(like).empty(self.shapes[i], like.dtype)
            for part, view in _views(self.held[i][rank], wholes[i], piece):
                view[...] = part
        return wholes

    def to_holders(self, wholes: dict[int, Array], like: Array) -> list[Array]:
        """Of each matrix what this rank holds, 1-D, from its owner's whole matrix. Collective."""
        me, ranks = self.rank, range(self.size)
        sent = []
        for rank, i in ((rank, i) for rank in ranks for i in self.own):
            if self.held[i][rank] == self._all_of(i):
                sent.append((rank, wholes[i].reshape(-1)))
                continue
            piece = device.of(like).empty(size_of(self.held[i][rank]), like.dtype)
            for part, view in _views(self.held[i][rank], wholes[i], piece):
                part[...] = view
            sent.append((rank, piece))
        received = self._all_to_all(
            sent, [(self.owners[i], size_of(self.held[i][me])) for i in self._by_owner], like
        )
        pieces = dict(zip(self._by_owner, received, strict=True))
        return [pieces[i] for i in range(len(pieces))]

    def _all_of(self, index: int) -> Extents:
        """The extents of a piece that is a whole matrix, in memory order."""
        rows, columns = self.shapes[index]
        return contiguous(0, rows * columns)

    @cached_property
    def _by_owner(self) -> list[int]:
        return sorted(range(len(self.shapes)), key=lambda i: self.owners[i])

    def _all_to_all(
        self, sent: list[tuple[int, Array]], coming: list[tuple[int, int]], like: Array
    ) -> list[Array]:
        """Send (rank, 1-D piece), receive (rank, size), each ordered by rank. A rank alone copies nothing."""
        if self.size == 1:
            return [piece for _, piece in sent]
        here, counts = device.of(like), np.zeros((2, self.size), np.int64)
        for rank, piece in sent:
            counts[0, rank] += piece.size
        for rank, size in coming:
            counts[1, rank] += size
        buffer, output = (here.empty(int(total), like.dtype) for total in counts.sum(axis=1))
        stop = 0
        for _, piece in sent:
            start, stop = stop, stop + piece.size
            buffer[start:stop] = piece
        compute, reduce = here.current_stream, self.mesh.stream("reduce")
        given, done = here.new_event(), here.new_event()
        compute.record(given)
        reduce.wait(given)  # compute has written what is sent
        received, outgoing = counts[1].tolist(), counts[0].tolist()
        self.mesh.communicator("reduce").all_to_all(
            output, buffer, received=received, sent=outgoing, stream=reduce, tag="muon"
        )
        reduce.record(done)
        compute.wait(done)  # the others' pieces are here
        stops = np.cumsum([size for _, size in coming]).tolist()
        return [output[stop - size : stop] for stop, (_, size) in zip(stops, coming, strict=True)]


def planned(parameters: Sequence[Parameter], ranks: int) -> list[tuple[Extents, ...]] | None:
    """Of each matrix the extents of every rank, as layouts of flat buffers say (fsdp/layout.py).

    A layer that is split before it is sharded is laid out alike on all ranks that split it.

    Returns:
        None where ranks split a layer into parts of other sizes.
    """
    found = []
    for parameter in parameters:
        storage, placement = parameter.storage, parameter.placement
        shards, layout = [contiguous(0, parameter.size)], getattr(storage, "layout", None)
        if layout is not None:
            entry = layout.entries[storage.position[id(parameter)]]
            shards = [layout.in_shard(entry, rank)[2] for rank in range(layout.shards)]
        if placement is not None and placement.cut_axes:
            parts = [placement.extents_of(rank) for rank in range(placement.mesh.size)]
            if {size_of(part) for part in parts} != {parameter.size}:
                return None
            places = _places(storage.whole_mesh, placement.cut_axes)
            shards = [_part_of(parts[part], shards[number]) for part, number in places]
        if len(shards) != ranks:
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
