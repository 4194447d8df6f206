"""ParameterPlacement: how a parameter lies on the ranks of a mesh axis along which modules are split.

A parameter's `shape` is the shape of this rank's elements. Ops, layouts and optimizers see nothing else. The
placement says which elements of the whole parameter these are: for initial values, loading and checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import MeshLayout, without
from shardrt.comm.protocol import Communicator
from shardrt.nn.extents import Extents, contiguous, put, size_of, spans
from shardrt.nn.extents import cut as cut_of

SHARD, REPLICATE, PARTIAL = "shard", "replicate", "partial"


@dataclass(frozen=True, eq=False)
class ParameterPlacement:
    """Of a parameter of shape `whole`, along the one axis of `mesh`.

    The kinds are DTensor's. SHARD: each rank has elements of its own. REPLICATE: each rank has all elements,
    and equal gradients. PARTIAL: each rank has all elements; its gradient is one term of a sum over ranks.

    Attributes:
        shape: of this rank's elements.
        parts: SHARD only; the elements of each rank of the axis. No element is in two of them.
        own_data: SHARD only; the ranks have other data, and an op sums the gradient before it arrives here.
        beside: with own_data, the axes of the root mesh whose ranks have parts of the data of one loss.
        words: for rows of a vocabulary, how a rank looks them up and makes logits of them.
    """

    kind: str
    mesh: DeviceMesh
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Extents, ...] = ()
    own_data: bool = False
    beside: MeshLayout = ()
    words: Any = None

    @classmethod
    def of_all(cls, kind: str, mesh: DeviceMesh, whole: tuple[int, ...]) -> "ParameterPlacement":
        """All elements, on every rank of the axis: REPLICATE or PARTIAL."""
        return cls(kind, mesh, whole, whole)

    @property
    def axes(self) -> MeshLayout:
        """The layout of the axis in the root mesh (comm/mesh_layout.py)."""
        return self.mesh.axes

    @property
    def one_loss(self) -> MeshLayout:
        """Axes whose ranks make one loss together: gradients along these are not divided by their number."""
        return self.beside if self.own_data else self.axes

    @property
    def partial(self) -> MeshLayout:
        """Axes along which each rank's gradient is a term of a sum that is still to be made."""
        return self.axes if self.kind == PARTIAL else without(self.beside, self.axes)

    @property
    def summing(self) -> DeviceMesh:
        """The ranks along `partial`. Collective over the root mesh at the first time."""
        return self.mesh if self.kind == PARTIAL else self.mesh.root.along(self.partial)

    @property
    def extents(self) -> Extents:
        """The elements of the whole that this rank has, in the order in which they lie in `shape`."""
        return self.extents_of(self.mesh.rank)

    def extents_of(self, rank: int) -> Extents:
        """As `part`, of another rank of the axis."""
        return self.parts[rank] if self.kind == SHARD else contiguous(0, int(np.prod(self.whole)))

    def in_whole(self, extents: Extents) -> Extents:
        """Some elements of what this rank has, as elements of the whole."""
        if self.kind != SHARD:
            return extents
        found: Extents = ()
        for _, first, length in spans(extents):
            found += cut_of(self.extents, first, first + length)
        return found

    def owner(self, apart: MeshLayout = ()) -> bool:
        """Whether this rank, where it holds all of its share, counts and saves it.

        apart: that of the root mesh along which ranks have other parameters than this one.
        """
        return not self.mesh.index_except(apart, self.axes if self.kind == SHARD else ())

    @property
    def communicator(self) -> Communicator:
        """Over the ranks of the axis, for what hosts tell each other."""
        return self.mesh.communicator("control")


def joined(placement: ParameterPlacement | None, own: np.ndarray) -> np.ndarray | None:
    """The whole of what ranks have of a parameter of this share, or of the state of one: host arrays.

    Where the parameter is cut, on the first rank of that axis, with None elsewhere, and collective over it;
    else `own`.
    """
    if placement is None or placement.kind != SHARD:
        return own
    return collected(placement.communicator, own, placement.whole, placement.parts)


def collected(
    control: Communicator, own: np.ndarray, shape: tuple[int, ...], parts: Sequence[Extents]
) -> Any:
    """A host array of `shape` on rank 0, put together from the ranks' parts; None elsewhere. Collective.

    own: what this rank has, a host array. parts: by rank, the elements that each one has.
    """
    here = device.current()
    if control.rank > 0:
        if own.size:
            control.send(np.ascontiguousarray(own).reshape(-1), peer=0, stream=here.current_stream)
            here.wait_here()  # it has been read
        return None
    whole = np.empty(shape, own.dtype)
    put(parts[0], whole, own.reshape(-1))
    for rank, extents in enumerate(parts[1:], start=1):
        piece = np.empty(size_of(extents), own.dtype)
        if piece.size:
            control.recv(piece, peer=rank, stream=here.current_stream)
            here.wait_here()
            put(extents, whole, piece)
    return whole


def whole_shape(array: Any) -> tuple[int, ...]:
    """Of a parameter, whatever this rank has of it; of another array its shape."""
    return getattr(array, "whole_shape", array.shape)


def whole_size(array: Any) -> int:
    """How many elements that are."""
    return prod(whole_shape(array))
