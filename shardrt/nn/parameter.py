"""Parameter: a named variable whose values live in a storage, which may shard, gather and release them.

Constructing one allocates nothing. The storage makes the values when they are first needed, and only the
part that this rank holds. nn/public.py has the subclass that users construct: it knows the rule for initial
values, and has the operators of a Tensor.
"""

import weakref
from typing import Any, Protocol

import numpy as np

from shardrt.autograd import Edge, Fill, Variable
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.ranks import Mesh
from shardrt.device import Array
from shardrt.nn.extents import Extents
from shardrt.nn.storage import LocalStorage, Storage, read_only

__all__ = ["Parameter"]


class Named(Protocol):
    """The module that a parameter is in, as the parameter knows it."""

    name: str


class Placement(Protocol):
    """Which elements of a larger parameter this rank has, if its module was split over ranks.

    whole: the shape of the larger parameter.
    axes: axes of the root mesh along which the module was cut.
    cut_axes: those along which ranks have different elements.
    fixed_axes: those along which the parameter can't be sharded, too.
    partial: those along which each rank's gradient is one term of a sum.
    one_loss: those whose ranks make one loss together.
    own_data: the ranks along `axes` have different data.
    summed_apart: gradients are summed over other ranks than those of parameters without a placement.
    """

    mesh: Mesh
    whole: tuple[int, ...]
    axes: MeshLayout
    cut_axes: MeshLayout
    fixed_axes: MeshLayout
    partial: MeshLayout
    one_loss: MeshLayout
    own_data: bool
    summed_apart: bool

    def in_whole(self, extents: Extents) -> Extents: ...  # elements of `shape` as elements of the whole

    def storage(self, parameter: "Parameter", array: Array | None) -> LocalStorage: ...

    def joined(self, own: np.ndarray) -> np.ndarray | None: ...  # the whole, on the first rank; collective


class PipelineRanks(Protocol):
    """The ranks of a pipeline that have a parameter (nn/placement.py).

    axes: axes of the root mesh along which ranks have other parameters.
    tied: several stages use the parameter.
    description: stage and rank, for messages.
    """

    mesh: Mesh
    axes: MeshLayout
    tied: bool
    description: str


class Parameter(Variable):
    """A variable of a Module, with a name, a shape and a storage.

    `data` is the whole array. While the parameter is sharded, reading or writing it raises a RuntimeError
    that names the parameter; in the forward of its unit it can be read. `shard` and `grad` are the part that
    this rank holds: a 1-D array of a sharded parameter, the whole array of another one.

    Attributes:
        seed: part of what initial values depend on; ranks compare it.
        placement: set where the module is split over ranks, else None.
        pipeline: set where the model is in a pipeline, else None.
    """

    __slots__ = ("seed", "storage", "dtype", "placement", "pipeline", "_shape", "_owner", "_attribute")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, requires_grad: bool, seed: int) -> None:
        self._shape = shape
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.seed = seed
        self.node = None
        self.index = 0
        self.placement: Placement | None = None
        self.pipeline: PipelineRanks | None = None
        self._owner: weakref.ref[Named] | None = None
        self._attribute = ""
        self.storage: Storage = LocalStorage(self)

    # -- name and shape

    def belongs_to(self, module: Named, attribute: str) -> None:
        """Take the name `attribute` in `module`, unless there is a name already (a tied parameter's)."""
        if self._owner is None or self._owner() is None:
            self._owner, self._attribute = weakref.ref(module), attribute

    def leaves(self, module: Named, attribute: str) -> None:
        """Give up the name `attribute` in `module`, if that is its name."""
        if self._owner is not None and self._owner() is module and self._attribute == attribute:
            self._owner, self._attribute = None, ""

    @property
    def name(self) -> str:
        """The path from the outermost module: "blocks.0.norm1.weight"; "" before it is in a module."""
        owner = self._owner() if self._owner is not None else None
        above = "" if owner is None else owner.name
        return f"{above}.{self._attribute}" if above else self._attribute

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what this rank has, if the module was split."""
        return self._shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape with the parts that other ranks have, if the module was cut."""
        return self._shape if self.placement is None else self.placement.whole

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements of `shape`."""
        return int(np.prod(self._shape))

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype in which ops get the values."""
        return self.storage.value_dtype(self)

    # -- values

    @property
    def data(self) -> Array:
        """The whole array. Raises RuntimeError, which names the parameter, while it is sharded."""
        return self.storage.full(self)

    @data.setter
    def data(self, values: Any) -> None:
        self.storage.assign(self, values)

    def value(self) -> Array:
        """For ops that take arrays, not handles: a copy if the storage lends its memory only for a while.

        Such an op may save the array, or a view of it, beyond the time for which the unit is gathered.
        """
        return self.data if isinstance(self.storage, LocalStorage) else self.lent().copy()

    def lent(self) -> Array:
        return self.storage.lent(self)

    @property
    def gathered_as_bits(self) -> bool:
        """Whether `lent_bits` gives bits while the unit is gathered."""
        return self.storage.gathers_bits

    def lent_bits(self) -> Array:
        return self.storage.lent_bits(self)

    @property
    def absent(self) -> bool:
        """Whether only stages of other ranks use it, so that it has no values here."""
        return self.storage.absent

    @property
    def shard(self) -> Array:
        """The part that this rank holds: a 1-D view, possibly empty, to be read."""
        start, stop = self.storage.range_of(self)
        piece = self.storage.shard[start:stop]
        return piece if isinstance(self.storage, LocalStorage) else read_only(piece)

    def in_whole(self, extents: Extents) -> Extents:
        """The elements `extents`, counted in `shape`, as elements of the whole."""
        return extents if self.placement is None else self.placement.in_whole(extents)

    def fill(self, out: Array, extents: Extents, name: str | None = None) -> None:
        """Write the initial values of the elements `extents`, counted in `shape`, into 1-D `out`.

        name: the name that they depend on; None for the parameter's own.
        """
        raise NotImplementedError(f"{type(self).__name__} must define fill")

    def new_storage(self, array: Array | None = None) -> LocalStorage:
        """A storage for all that this rank has of the parameter, with these values or the initial ones."""
        return LocalStorage(self, array) if self.placement is None else self.placement.storage(self, array)

    # -- gradient

    @property
    def grad(self) -> Array | None:
        """The gradient of the part that this rank holds: in the parameter's shape if it is all, else 1-D."""
        gradient = self.storage.complete_gradient()
        if gradient is None or not self.storage.has_gradient(self):
            return None
        start, stop = self.storage.range_of(self)
        piece = gradient[start:stop]
        return piece.reshape(self._shape) if isinstance(self.storage, LocalStorage) else piece

    def edge(self) -> Edge:
        return self.storage.edge(self)

    def _gradient_target(self) -> tuple[Array, bool, Any]:
        return self.storage.gradient_target(self)

    def _put_rows(self, fill: Fill) -> Any:
        return self.storage.put_rows(self, fill)
