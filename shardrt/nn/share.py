"""Share: what a rank has of a parameter where modules themselves are cut along an axis of the mesh.

A parameter's `shape` is that of what this rank has: all that ops, layouts and optimizers see. The share says
what that is of the whole, which initial values, loading, checkpoints and files go by.
"""

from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from shardrt import autograd, device
from shardrt.autograd import WRITTEN
from shardrt.comm.digits import Digits, without
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.nn.collect import collected
from shardrt.nn.parameter import Parameter
from shardrt.nn.runs import Part, run, spans
from shardrt.nn.runs import cut as cut_of
from shardrt.nn.storage import LocalStorage

Array = Any
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
    def cut_axes(self) -> Digits:
        """Axes along which each rank has elements of its own."""
        return self.axes if self.kind == CUT else ()

    @property
    def fixed_axes(self) -> Digits:
        """Axes along which it can't be sharded. It can where the reduction makes the sum of gradients."""
        return () if self.kind == PARTIAL else self.axes

    @property
    def summed_apart(self) -> bool:
        """Whether its gradients are summed over other ranks than those of parameters without a share."""
        return self.own_data or self.kind == PARTIAL

    @property
    def one_loss(self) -> Digits:
        """Axes whose ranks make one loss together: gradients along these are not divided by their number."""
        return self.beside if self.own_data else self.axes

    @property
    def partial(self) -> Digits:
        """Axes along which each rank's gradient is one term of a sum that is still to be made."""
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

    def storage(self, parameter: Parameter, array: Array | None = None) -> "ShareStorage":
        """A storage for the share: of these values, or of the initial ones."""
        return ShareStorage(parameter, array)

    def joined(self, own: np.ndarray) -> np.ndarray | None:
        """The whole, of a parameter or of optimizer state, from what the ranks have: host arrays.

        If the parameter is cut, the call is collective over the axis, and gives None on all but the axis's
        first rank. Otherwise it gives `own`.
        """
        return collected(self.communicator, own, self.whole, self.parts) if self.kind == CUT else own


class ShareStorage(LocalStorage):
    """All that this rank has of a parameter that other ranks hold or train as well."""

    def __init__(self, parameter: Parameter, array: Array | None = None) -> None:
        super().__init__(parameter, array)
        # backward -> this rank's term of the gradient that it adds, while it runs (Share.partial). The term
        # of a backward that has raised differs between ranks, and goes with that backward.
        self._partial: WeakKeyDictionary[autograd.Backward, Array] = WeakKeyDictionary()
        share = parameter.share
        if share is not None:  # a twin may have none
            self.holders = share.mesh if share.kind == CUT else None
            self.communicator = share.communicator if share.kind == CUT else None
            self.everyone = share.mesh.root.communicator("control")

    def gradient_target(self, parameter: Parameter) -> tuple[Array, bool, Any]:
        run = autograd.running()
        if run is None or parameter.share is None or not parameter.share.partial:
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
        communicator = self._parameter.share.summing.communicator("tensor")
        communicator.all_reduce(gradient.reshape(-1), stream=stream, what=self._parameter.name)
        if self._gradient is not None:
            gradient += self._gradient
        self._gradient = gradient

    def zero_grad(self) -> None:
        super().zero_grad()
        self._partial.clear()


def take_share(parameter: Parameter, share: Share) -> None:
    """Make `parameter` what `share` says of it: its `shape` is this rank's from now on.

    Call it before the parameter has values, and once; a parameter that all ranks have alike may still be cut.

    Raises:
        ValueError: names the parameter, for a second cut.
        RuntimeError: names the parameter, if it has values, or is sharded.
    """
    described = f"parameter {parameter.name!r}"
    if parameter.place is not None:
        raise RuntimeError(
            f"{described} is {parameter.place.description}; call parallelize_module before pipeline_stages"
        )
    known, storage = parameter.share, parameter.storage
    if known is not None and (known.kind == CUT or not (share.own_data or share.mesh is known.mesh)):
        raise ValueError(f"{described} is cut already, {known.whole} into {known.shape}")
    if not isinstance(storage, LocalStorage):
        raise RuntimeError(f"{described} is sharded already; call parallelize_module before fully_shard")
    if storage.materialised:
        raise RuntimeError(
            f"{described} has values already; call parallelize_module before the model is used or loaded"
        )
    if storage.owned:
        raise RuntimeError(f"{described} has an optimizer already; call parallelize_module before")
    parameter.share, parameter._shape = share, share.shape
    parameter.storage = parameter.new_storage()


def joined(share: Share | None, own: np.ndarray) -> np.ndarray | None:
    """share.joined(own); `own` if the parameter has no share."""
    return own if share is None else share.joined(own)


def whole_shape(array: Any) -> tuple[int, ...]:
    """Of a parameter, whatever this rank has of it; of another array its shape."""
    return getattr(array, "whole_shape", array.shape)


def whole_size(array: Any) -> int:
    """How many elements that are."""
    return prod(whole_shape(array))
