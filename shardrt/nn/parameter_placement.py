"""ParameterPlacement: how a parameter lies on the ranks of a mesh axis along which modules are split.

A parameter's `shape` is the shape of this rank's elements. Ops, layouts and optimizers see nothing else. The
placement says which elements of the whole parameter these are: for initial values, loading and checkpoints.
"""

from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from shardrt import autograd, device
from shardrt.autograd import WRITTEN
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import MeshLayout, without
from shardrt.comm.protocol import Communicator
from shardrt.device import Array
from shardrt.nn.collect import collected
from shardrt.nn.extents import Extents, contiguous, spans
from shardrt.nn.extents import cut as cut_of
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage

__all__ = [
    "PARTIAL",
    "ParameterPlacement",
    "PlacedStorage",
    "REPLICATE",
    "SHARD",
    "joined",
    "set_placement",
    "whole_shape",
    "whole_size",
]

SHARD, REPLICATE, PARTIAL = "shard", "replicate", "partial"


@dataclass(frozen=True, eq=False)
class ParameterPlacement:
    """Of a parameter of shape `whole`, along the one axis of `mesh`.

    The kinds are DTensor's. SHARD: each rank has its own elements. REPLICATE: each rank has all elements,
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
    def cut_axes(self) -> MeshLayout:
        """Axes along which each rank has its own elements."""
        return self.axes if self.kind == SHARD else ()

    @property
    def fixed_axes(self) -> MeshLayout:
        """Axes along which it can't be sharded. It can where the reduction makes the sum of gradients."""
        return () if self.kind == PARTIAL else self.axes

    @property
    def summed_apart(self) -> bool:
        """Whether its gradients are summed over other ranks than those of parameters without a placement."""
        return self.own_data or self.kind == PARTIAL

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
        """The same for another rank of the axis."""
        return self.parts[rank] if self.kind == SHARD else contiguous(0, int(np.prod(self.whole)))

    def in_whole(self, extents: Extents) -> Extents:
        """Some elements of this rank, as elements of the whole."""
        if self.kind != SHARD:
            return extents
        found: Extents = ()
        for _, first, length in spans(extents):
            found += cut_of(self.extents, first, first + length)
        return found

    def owner(self, apart: MeshLayout = ()) -> bool:
        """Whether this rank, where it holds all of its share, counts and saves it.

        Args:
            apart: that of the root mesh along which ranks have other parameters than this one.
        """
        return not self.mesh.index_except(apart, self.axes if self.kind == SHARD else ())

    @property
    def communicator(self) -> Communicator:
        """Over the ranks of the axis, for messages between hosts."""
        return self.mesh.communicator("control")

    def storage(self, parameter: Parameter, array: Array | None = None) -> "PlacedStorage":
        """A storage for the share: of these values, or of the initial ones."""
        return PlacedStorage(parameter, array)

    def joined(self, own: np.ndarray) -> np.ndarray | None:
        """The whole, of a parameter or of optimizer state, from the ranks' arrays: host arrays.

        If the parameter is split, the call is collective over the axis, and gives None on all but the axis's
        first rank. Otherwise it gives `own`.
        """
        return collected(self.communicator, own, self.whole, self.parts) if self.kind == SHARD else own


class PlacedStorage(LocalStorage):
    """This rank's elements of a parameter that other ranks hold or train too."""

    def __init__(self, parameter: Parameter, array: Array | None = None) -> None:
        super().__init__(parameter, array)
        # backward -> this rank's term of the gradient, while it runs. If a backward raises, the term differs
        # between ranks and is dropped with the backward.
        self._partial: WeakKeyDictionary[autograd.Backward, Array] = WeakKeyDictionary()
        placement = parameter.placement
        if placement is not None:  # a tied replica may have none
            self.whole_mesh = placement.mesh if placement.kind == SHARD else None
            self.communicator = placement.communicator if placement.kind == SHARD else None
            self.everyone = placement.mesh.root.communicator("control")

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        run = autograd.running()
        if run is None or parameter.placement is None or not parameter.placement.partial:
            return super().gradient_target(parameter)
        run = run.outermost
        accumulate = run in self._partial
        if not accumulate:
            self._partial[run] = device.current().empty(parameter.shape, parameter.dtype)
            run.at_end(self._sum_over_ranks)
        return self._partial[run], accumulate, WRITTEN

    def _sum_over_ranks(self) -> None:
        gradient = self._partial.pop(autograd.running(), None)
        if gradient is None:
            return  # forgotten since
        stream = device.current().current_stream
        communicator = self._parameter.placement.summing.communicator("tensor")
        communicator.all_reduce(gradient.reshape(-1), stream=stream, tag=self._parameter.name)
        if self._gradient is not None:
            gradient += self._gradient
        self._gradient = gradient

    def zero_grad(self) -> None:
        super().zero_grad()
        self._partial.clear()


def set_placement(parameter: Parameter, placement: ParameterPlacement) -> None:
    """Place `parameter` as `placement` says: its `shape` is this rank's from now on.

    Call it before the parameter has values, and once; a parameter that all ranks have may still be split.

    Raises:
        ValueError: names the parameter, for a second split.
        RuntimeError: names the parameter, if it has values, or is sharded.
    """
    described = f"parameter {parameter.name!r}"
    if parameter.pipeline is not None:
        raise RuntimeError(
            f"{described} is {parameter.pipeline.description}; call parallelize_module before pipeline_stages"
        )
    known, storage = parameter.placement, parameter.storage
    if known is not None and (
        known.kind == SHARD or not (placement.own_data or placement.mesh is known.mesh)
    ):
        raise ValueError(f"{described} is split already, from {known.whole} into {known.shape}")
    if not isinstance(storage, LocalStorage):
        raise RuntimeError(f"{described} is sharded already; call parallelize_module before fully_shard")
    if storage.materialised:
        raise RuntimeError(
            f"{described} has values already; call parallelize_module before the model is used or loaded"
        )
    if storage.owned:
        raise RuntimeError(f"{described} has an optimizer already; call parallelize_module before making it")
    parameter.placement, parameter._shape = placement, placement.shape
    parameter.storage = parameter.new_storage()


def joined(placement: ParameterPlacement | None, own: np.ndarray) -> np.ndarray | None:
    """placement.joined(own); `own` if the parameter has no placement."""
    return own if placement is None else placement.joined(own)


def whole_shape(array: Any) -> tuple[int, ...]:
    """Of a parameter, whatever this rank has of it; of another array its shape."""
    return getattr(array, "whole_shape", array.shape)


def whole_size(array: Any) -> int:
    """How many elements that are."""
    return prod(whole_shape(array))
