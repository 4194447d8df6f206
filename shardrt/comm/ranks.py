"""Mesh: an array of ranks, whose slices along axes are the groups that communicate.

A mesh makes communicators and knows what they are for by a role ("gather", "reduce", "control", "used"), so
that gathers never queue behind reductions. It does not say what is sharded along which axis. mesh.py has
DeviceMesh, the mesh that users make, whose axes can also be joined and folded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from shardrt.comm import world as worlds
from shardrt.comm.backends import for_device
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, Stream


@dataclass(eq=False)
class Family:
    """What a mesh and all its sub-meshes have in common."""

    world: worlds.World
    device: Device
    kind: str
    reduction: str
    wrap: Callable[[Communicator], Any] | None
    root: "Mesh" = field(init=False)
    folded: dict[str, Any] = field(default_factory=dict)  # axes of folds, by name: see mesh.py
    communicators: dict[tuple[str, tuple[int, ...]], Communicator] = field(default_factory=dict)
    attached: list[Callable[[Communicator, str, tuple[int, ...]], None]] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)

    def carrier(self, host: Communicator, role: str) -> Communicator:
        """What carries the device's arrays over the ranks of `host`, which it takes over. Collective."""
        made = for_device(host, self.device, self.kind, role, self.reduction)
        if self.wrap is not None:
            self.wrap(made)
        return made


class Mesh:
    """`ranks` of the run as an array with named axes; this rank is number `rank` of `size` in it.

    `mesh["shard"]` and `mesh["replicate", "shard"]` are the slices of it, along these axes, that this rank is
    in: meshes themselves. All of them share communicators and streams; `root` is the mesh of all ranks.
    """

    def __init__(
        self,
        family: Family,
        ranks: np.ndarray,
        base: Communicator,
        mesh_dim_names: tuple[str, ...] | None,
        axes: "Sequence[Mesh] | None" = None,
    ) -> None:
        """`base`: over `ranks`, in their order. `axes`: the sub-mesh of each, if there are several."""
        self._family = family
        self._base = base
        self.ranks = ranks
        self.mesh_dim_names = mesh_dim_names
        self.rank = base.rank
        self.size = base.size
        self.coordinate = tuple(int(i) for i in np.unravel_index(base.rank, ranks.shape))
        self._parts: dict[Any, Any] = {}
        if axes is None:  # now, by everyone: later an axis's group can make communicators on its own
            axes = [self._along((axis,)) for axis in range(ranks.ndim)] if ranks.ndim > 1 else [self]
        self._axes = axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks per axis."""
        return self.ranks.shape

    @property
    def root(self) -> Self:
        """The mesh of all ranks that this one was taken from; itself where it is that."""
        return self._family.root

    @property
    def device(self) -> Device:
        """Where the ranks compute."""
        return self._family.device

    @property
    def world(self) -> worlds.World:
        """What the ranks are, processes or threads, and how many of them this host has."""
        return self._family.world

    def axis(self, dim: int | str) -> Self:
        """The sub-mesh along one of its axes, a number or name."""
        return self._axes[self._number(dim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> Self:
        """The ranks that differ from this one only along these axes, in this order; always the same object.

        Of several axes but not all: collective over this mesh at the first time, or over what has come apart.
        Raises ValueError.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        axes = tuple(self._number(name) for name in names)
        if not axes or len(set(axes)) < len(axes):
            raise ValueError(f"{names} must be one axis or several of {self!r}, each once")
        if axes == tuple(range(len(self.shape))):
            return self
        if len(axes) == 1:
            return self._axes[axes[0]]
        if axes not in self._parts:
            self._parts[axes] = self._slice(axes)
        return self._parts[axes]

    def _slice(self, axes: tuple[int, ...]) -> Self:
        """As _along, made by as few ranks as can."""
        return self._along(axes)

    def _places(self, ranks: np.ndarray) -> list[int]:
        """Where ranks of the world are in this mesh."""
        own = self.ranks.ravel()
        order = np.argsort(own)
        return order[np.searchsorted(own, ranks.ravel(), sorter=order)].tolist()

    def _along(self, axes: tuple[int, ...]) -> Self:
        """The sub-mesh of this rank along some of the axes. Collective."""
        others = [axis for axis in range(len(self.shape)) if axis not in axes]
        place = [self.coordinate[axis] for axis in others]
        rows = self.ranks.transpose(*others, *axes)[tuple(place)]
        color = np.ravel_multi_index(place, [self.shape[axis] for axis in others]) if others else 0
        base = self._base.among(self._places(rows), int(color))
        names = tuple(self.mesh_dim_names[axis] for axis in axes) if self.mesh_dim_names else None
        known = [self._axes[axis] for axis in axes] if len(axes) > 1 else None
        return type(self)(self._family, rows, base, names, known)

    def communicator(self, role: str, dim: int | str | None = None) -> Communicator:
        """The communicator for `role` over the ranks along axis `dim` (a number or name; None: all ranks).

        Made at the first call, which is collective over those ranks, and the same object from then on.
        """
        if dim is not None:
            return self.axis(dim).communicator(role)
        family, ranks = self._family, tuple(self.ranks.ravel().tolist())
        if (role, ranks) not in family.communicators:
            family.communicators[role, ranks] = made = family.carrier(self._base.duplicate(), role)
            for function in family.attached:
                function(made, role, ranks)
        return family.communicators[role, ranks]

    def made(self) -> Iterator[tuple[Communicator, str, tuple[int, ...]]]:
        """(communicator, role, ranks of the root) of every communicator of this family of meshes."""
        for (role, ranks), made in self._family.communicators.items():
            yield made, role, ranks

    def attach(self, function: Callable[[Communicator, str, tuple[int, ...]], None]) -> None:
        """Call function(communicator, role, ranks) for each communicator that this family makes later."""
        self._family.attached.append(function)

    def stream(self, role: str) -> Stream:
        """The stream in which the communicators for `role` are used, by all models on this family of meshes.

        One for all: a communicator's calls must come in the order of the program, on every rank. That of
        "used" is a thread of the host on every device.
        """
        streams = self._family.streams
        if role not in streams:
            place = self.device.host if role == "used" else self.device
            streams[role] = place.new_stream(role)
        return streams[role]

    def close(self) -> None:
        """Close the communicators of this family of meshes, which no model may use from now on. Collective.

        A program that makes many meshes on GPUs calls it: a communicator of NCCL that is not closed keeps its
        memory on the GPU until the program ends.
        """
        family = self._family
        for stream in (self.device.current_stream, *family.streams.values()):
            stream.synchronize()
        for communicator in family.communicators.values():
            communicator.close()
        family.communicators.clear()

    def size_of(self, dim: int | str) -> int:
        """The number of ranks along one axis."""
        return self.shape[self._number(dim)]

    def rank_of(self, dim: int | str) -> int:
        """This rank's number along one axis."""
        return self.coordinate[self._number(dim)]

    def __repr__(self) -> str:
        names = f", {self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device.name!r}, {self.shape}{names}, rank {self.rank} of {self.size})"

    def _number(self, dim: int | str) -> int:
        """That of an axis."""
        names = self.mesh_dim_names or ()
        if isinstance(dim, str) and dim in names:
            return names.index(dim)
        if isinstance(dim, int) and 0 <= dim < self.ranks.ndim:
            return dim
        raise ValueError(f"dim {dim!r} is not an axis of {self!r}{self._where(dim)}")

    def _where(self, dim: Any) -> str:
        """How the axis that was asked for can be had."""
        if self.mesh_dim_names is None and isinstance(dim, str):
            return ", whose axes have no names: init_device_mesh(..., mesh_dim_names=...) gives them"
        if dim in (self.root.mesh_dim_names or ()):
            return f"; it is one of {self.root!r}, of which this is a part: take it from there"
        return ""


default_mesh: Callable[[], Mesh] | None = None  # gives one axis of all ranks; shardrt/_backends.py names it
