"""Share: what a rank has of a parameter where modules themselves are cut along an axis of the mesh.

A parameter's `shape` is that of what this rank has: all that ops, layouts and optimizers see. The share says
what that is of the whole, which initial values, loading, checkpoints and files go by.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.digits import Digits, without
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.nn.runs import Part, put, run, size_of, spans
from shardrt.nn.runs import cut as cut_of

CUT, SAME, PARTIAL = "cut", "same", "partial"


@dataclass(frozen=True, eq=False)
class Share:
    """Of a parameter of shape `whole`, along the one axis of `mesh`.

    kind: CUT, each rank has elements of its own; SAME, all have all of them, and equal gradients; PARTIAL,
    all have all of them, and each a gradient that is to be added to the others'. shape: of what this rank
    has. parts: of CUT, the elements of each rank of the axis; none in two of them.
    """

    kind: str
    mesh: DeviceMesh
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    own_data: bool = False  # of CUT: the ranks have other data, whose gradient is summed before it is here
    beside: Digits = ()  # of own_data: axes of the root mesh whose ranks have parts of the data of one loss
    words: Any = None  # where these are rows of a vocabulary: how they are looked up, and make logits

    @classmethod
    def of_all(cls, kind: str, mesh: DeviceMesh, whole: tuple[int, ...]) -> "Share":
        """All elements, on every rank of the axis: SAME or PARTIAL."""
        return cls(kind, mesh, whole, whole)

    @property
    def axes(self) -> Digits:
        """Along what of the root mesh it is (comm/digits.py)."""
        return self.mesh.axes

    @property
    def one_loss(self) -> Digits:
        """Axes whose ranks make one loss together: gradients along these are not divided by their number."""
        return self.beside if self.own_data else self.axes

    @property
    def partial(self) -> Digits:
        """Axes along which each rank's gradient is a part of a sum that nobody has made yet."""
        return self.axes if self.kind == PARTIAL else without(self.beside, self.axes)

    @property
    def summing(self) -> DeviceMesh:
        """The ranks along `partial`. Collective over the root mesh at the first time."""
        return self.mesh if self.kind == PARTIAL else self.mesh.root.along(self.partial)

    @property
    def part(self) -> Part:
        """The elements of the whole that this rank has, in the order in which they lie in `shape`."""
        return self.part_of(self.mesh.rank)

    def part_of(self, rank: int) -> Part:
        """As `part`, of another rank of the axis."""
        return self.parts[rank] if self.kind == CUT else run(0, int(np.prod(self.whole)))

    def in_whole(self, part: Part) -> Part:
        """Some elements of what this rank has, as elements of the whole."""
        if self.kind != CUT:
            return part
        found: Part = ()
        for _, first, length in spans(part):
            found += cut_of(self.part, first, first + length)
        return found

    def owner(self, apart: Digits = ()) -> bool:
        """Whether this rank, where it holds all of its share, counts and saves it.

        apart: that of the root mesh along which ranks have other parameters than this one.
        """
        return not self.mesh.number_but(apart, self.axes if self.kind == CUT else ())

    @property
    def communicator(self) -> Communicator:
        """Over the ranks of the axis, for what hosts tell each other."""
        return self.mesh.communicator("control")


def joined(share: Share | None, own: np.ndarray) -> np.ndarray | None:
    """The whole of what ranks have of a parameter of this share, or of the state of one: host arrays.

    Where the parameter is cut, on the first rank of that axis, with None elsewhere, and collective over it;
    else `own`.
    """
    if share is None or share.kind != CUT:
        return own
    return collected(share.communicator, own, share.whole, share.parts)


def collected(control: Communicator, own: np.ndarray, shape: tuple[int, ...], parts: Sequence[Part]) -> Any:
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
    for rank, part in enumerate(parts[1:], start=1):
        piece = np.empty(size_of(part), own.dtype)
        if piece.size:
            control.recv(piece, peer=rank, stream=here.current_stream)
            here.wait_here()
            put(part, whole, piece)
    return whole


def whole_shape(array: Any) -> tuple[int, ...]:
    """Of a parameter, whatever this rank has of it; of another array its shape."""
    return getattr(array, "whole_shape", array.shape)


def whole_size(array: Any) -> int:
    """How many elements that are."""
    return prod(whole_shape(array))
