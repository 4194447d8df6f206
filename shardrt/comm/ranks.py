"""Mesh: an array of ranks with named axes. The ranks of a slice along some axes communicate with each other.

With ranks [[0, 1], [2, 3]] and axes ("replicate", "shard"), rank 2 is in these slices:
mesh["shard"] is [2, 3], where it is rank 0; mesh["replicate"] is [0, 2], where it is rank 1.

A mesh makes one communicator for each role ("gather", "reduce", "copies", "control", "used"), so that gathers
never queue behind reductions. It does not know what is sharded along which axis. mesh.py has DeviceMesh, the
mesh that users make, with flat and folded axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from shardrt.comm import world as worlds
from shardrt.comm.backends import for_device
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, Stream


@dataclass(eq=False)
class MeshState:
    """The state that a root mesh shares with all its slices.

    on_new_communicator: init_device_mesh(wrap=...), called with each new communicator; its result is unused.
    folded: layout of each axis that a fold made, by name (see mesh.py).
    """

    world: worlds.World
    device: Device
    kind: str
    reduction: str
    on_new_communicator: Callable[[Communicator], Any] | None
    root: "Mesh" = field(init=False)
    folded: dict[str, Any] = field(default_factory=dict)
    communicators: dict[tuple[str, tuple[int, ...]], Communicator] = field(default_factory=dict)
    observers: list[Callable[[Communicator, str, tuple[int, ...]], None]] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)

    def new_communicator(self, host: Communicator, role: str) -> Communicator:
        """A communicator for arrays of the device over the ranks of `host`, which it owns. Collective."""
        made = for_device(host, self.device, self.kind, role, self.reduction)
        if self.on_new_communicator is not None:
            self.on_new_communicator(made)
        return made


class Mesh:
    """`ranks` of the run as an array with named axes; this rank is number `rank` of `size` in it.

    `mesh["shard"]` and `mesh["replicate", "shard"]` are this rank's slices along these axes; a slice is
    a mesh, too. A mesh and its slices share communicators and streams; `root` is the mesh of all ranks.
    """

    def __init__(
        self,
        state: MeshState,
        ranks: np.ndarray,
        base: Communicator,
        mesh_dim_names: tuple[str, ...] | None,
        axes: "Sequence[Mesh] | None" = None,
    ) -> None:
        """`base`: a communicator over `ranks`, in this order. `axes`: the slice along each axis, if known."""
        self._state = state
        self._base = base
        self.ranks, self._members = ranks, tuple(ranks.ravel().tolist())
        self.mesh_dim_names = mesh_dim_names
        self.rank = base.rank
        self.size = base.size
        self.coordinate = tuple(int(i) for i in np.unravel_index(base.rank, ranks.shape))
        self._slices: dict[Any, Any] = {}
        if axes is None:  # all ranks split here; later the ranks of one slice need no other ranks
            axes = [self._split((axis,)) for axis in range(ranks.ndim)] if ranks.ndim > 1 else [self]
        self._axes = axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks per axis."""
        return self.ranks.shape

    @property
    def root(self) -> Self:
        """The mesh of all ranks, of which this mesh is a slice or which it is."""
        return self._state.root

    @property
    def device(self) -> Device:
        """Where the ranks compute."""
        return self._state.device

    @property
    def world(self) -> worlds.World:
        """All ranks of the run: processes or threads, and how many of them run on this host."""
        return self._state.world

    def axis(self, dim: int | str) -> Self:
        """The slice along one axis, a number or name."""
        return self._axes[self._axis_index(dim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> Self:
        """This rank's slice along these axes, in this order; the same object at each call.

        The first slice along several axes, but not all, is collective over this mesh, or over one pipeline
        stage after `allow_divergence`. Raises ValueError.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        axes = tuple(self._axis_index(name) for name in names)
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(f"{names} must be one axis or several of {self!r}, each once")
        if axes == tuple(range(len(self.shape))):
            return self
        if len(axes) == 1:
            return self._axes[axes[0]]
        if axes not in self._slices:
            self._slices[axes] = self._make_slice(axes)
        return self._slices[axes]

    def _make_slice(self, axes: tuple[int, ...]) -> Self:
        """This rank's slice along several axes. DeviceMesh lets fewer ranks take part."""
        return self._split(axes)

    def _indices(self, ranks: np.ndarray) -> list[int]:
        """Indices of ranks in this mesh: [2, 0] for ranks [6, 4] in a mesh of ranks [4, 5, 6, 7]."""
        own = self.ranks.ravel()
        order = np.argsort(own)
        return order[np.searchsorted(own, ranks.ravel(), sorter=order)].tolist()

    def _split(self, axes: tuple[int, ...]) -> Self:
        """Split this mesh into slices along some of its axes. Returns this rank's slice. Collective."""
        others = [axis for axis in range(len(self.shape)) if axis not in axes]
        fixed = [self.coordinate[axis] for axis in others]  # the same for all ranks of the slice
        ranks = self.ranks.transpose(*others, *axes)[tuple(fixed)]
        color = np.ravel_multi_index(fixed, [self.shape[axis] for axis in others]) if others else 0
        base = self._base.among(self._indices(ranks), int(color))
        names = tuple(self.mesh_dim_names[axis] for axis in axes) if self.mesh_dim_names else None
        known = [self._axes[axis] for axis in axes] if len(axes) > 1 else None
        return type(self)(self._state, ranks, base, names, known)

    def communicator(self, role: str, dim: int | str | None = None) -> Communicator:
        """The communicator for `role` over the ranks along axis `dim` (a number or name; None: all ranks).

        The first call makes it and is collective over those ranks. Later calls return the same object.
        """
        if dim is not None:
            return self.axis(dim).communicator(role)
        state, ranks = self._state, self._members
        if (role, ranks) not in state.communicators:
            state.communicators[role, ranks] = made = state.new_communicator(self._base.duplicate(), role)
            for function in state.observers:
                function(made, role, ranks)
        return state.communicators[role, ranks]

    def stream(self, role: str) -> Stream:
        """The stream of all communicators for `role`, for all models on the root mesh and its slices.

        They share one stream because each rank must make their calls in the same order.
        """
        streams = self._state.streams
        if role not in streams:
            device = self.device.host if role == "used" else self.device
            streams[role] = device.new_stream(role)
        return streams[role]

    def size_of(self, dim: int | str) -> int:
        """The number of ranks along one axis."""
        return self.shape[self._axis_index(dim)]

    def rank_of(self, dim: int | str) -> int:
        """This rank's index along one axis."""
        return self.coordinate[self._axis_index(dim)]

    def __repr__(self) -> str:
        names = f", {self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device.name!r}, {self.shape}{names}, rank {self.rank} of {self.size})"

    def _axis_index(self, dim: int | str) -> int:
        names = self.mesh_dim_names or ()
        if isinstance(dim, str) and dim in names:
            return names.index(dim)
        if isinstance(dim, int) and 0 <= dim < self.ranks.ndim:
            return dim
        raise ValueError(f"dim {dim!r} is not an axis of {self!r}{self._hint(dim)}")

    def _hint(self, dim: Any) -> str:
        if self.mesh_dim_names is None and isinstance(dim, str):
            return "; its axes have no names: pass mesh_dim_names to init_device_mesh"
        if dim in (self.root.mesh_dim_names or ()):
            return f"; its root {self.root!r} has this axis: slice mesh.root"
        return ""


default_mesh: Callable[[], Mesh] | None = None  # makes one axis of all ranks; set by shardrt/_backends.py
