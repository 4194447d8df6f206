"""DeviceMesh: the mesh that users make, by `init_device_mesh`. Its axes can be joined and folded.

ranks.py has its slices and communicators, which are all that FSDP needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np

from shardrt import device as devices
from shardrt.comm import mesh_layout
from shardrt.comm import world as worlds
from shardrt.comm.backends import CARRIERS, create, reductions
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Family, Mesh
from shardrt.device import Device


def init_device_mesh(
    device: str | Device = "auto",
    shape: tuple[int, ...] | None = None,
    mesh_dim_names: tuple[str, ...] | None = None,
    *,
    communicator: str = "auto",
    reduction: str = "nccl",
    wrap: Callable[[Communicator], Any] | None = None,
    timeout: float = 300.0,
) -> "DeviceMesh":
    """A mesh over all ranks. Collective.

    device: "auto", "cpu" or "cuda", or a Device. shape: ranks per axis (default: one axis of all ranks).
    mesh_dim_names: a name per axis. communicator: the backend (see `comm.create` and `comm.for_device`).
    reduction: how sums over ranks are made where NCCL carries them: "nccl", by NCCL itself, or "tree", by the
    fixed tree over ranks with which all other backends have the same bits (docs/gpu.md says what each
    promises). wrap: called with every communicator that the mesh makes, to intercept its calls, such as
    CollectiveCounter. The device becomes the current one of this thread; "auto" is a GPU where there is
    one; a simulated world has its own, whatever is named. timeout: seconds in which all ranks must come here,
    or this one ends the job with exit code 124; 0: no limit. Raises ValueError where the shape does not hold
    exactly the ranks that run, a communicator does not fit the device, or a reduction is unknown;
    RuntimeError where a GPU is asked for that can't be used.
    """
    if reduction not in reductions():
        raise ValueError(f"reduction: {reduction!r} is unknown; known are {', '.join(reductions())}")
    with worlds.launcher.meeting(timeout):
        world = worlds.current()
        place = _device(device, world, communicator)
        shape = tuple(shape or world.shape or (world.size,))
        _check(shape, mesh_dim_names, world.size)
        base = create(communicator)
        devices.set_current(place)
        family = Family(world, place, communicator, reduction, wrap)
        family.root = DeviceMesh(family, np.arange(base.size).reshape(shape), base, mesh_dim_names)
        return family.root


@cache
def _default(world: worlds.World) -> "DeviceMesh":
    return init_device_mesh("auto")


def default_mesh() -> "DeviceMesh":
    """One axis of all ranks; the same object at every call of this rank. The first is collective."""
    return _default(worlds.current())


class DeviceMesh(Mesh):
    """`ranks` of the run as an array with named axes; this rank is number `rank` of `size` in it.

    `mesh["shard"]` and `mesh["replicate", "shard"]` are the slices of it, along these axes, that this rank is
    in: meshes themselves. `flat` makes one axis of several, `fold` other axes of the same ranks. All of them
    share communicators and streams; `root` is the mesh of all ranks.
    """

    _within: "DeviceMesh | None" = None  # the mesh that makes slices, once ranks have come apart

    @cached_property
    def axes(self) -> MeshLayout:
        """The layout of this mesh in `root` (mesh_layout.py); a fold has one as well.

        Raises ValueError for ranks that are no slice of `root` or of a fold of it.
        """
        found = mesh_layout.layout_of(self.ranks)
        if found is None:
            raise ValueError(f"{self!r} does not lie along axes of {self.root!r}, or of a fold of it")
        return found

    def along(self, *axes: MeshLayout) -> "DeviceMesh":
        """The ranks of `root` that differ from this one along these axes alone, the first ones outermost.

        Collective over `root` at the first time for several, or over what has come apart.
        """
        root, wanted = self.root, tuple(mesh_layout.union(each) for each in axes)
        numbers = [root._numbers_in(each) for each in wanted]
        if None not in numbers:
            return root[tuple(number for each in numbers for number in each)]
        if wanted not in root._parts:
            root._parts[wanted] = root._with_layout(wanted)
        return root._parts[wanted]

    def _numbers_in(self, axes: MeshLayout) -> tuple[int, ...] | None:
        """The numbers of the mesh's own axes that these are; None where they are those of a fold alone."""
        own = [number for number, size in enumerate(self.shape) if size > 1]
        inside = tuple(number for number in own if mesh_layout.union(self._axes[number].axes, axes) == axes)
        return inside if prod(self.shape[number] for number in inside) == mesh_layout.size_of(axes) else None

    def index_except(self, *axes: MeshLayout) -> int:
        """This rank's number among those of `root` that differ from it along all but these axes."""
        return mesh_layout.index_in(
            mesh_layout.without(self.root.axes, mesh_layout.union(*axes)), self.root.rank
        )

    def union(self, axes: MeshLayout) -> "DeviceMesh":
        """`along` its own axes and these; itself where it has them already."""
        wanted = mesh_layout.union(self.axes, axes)
        return self if wanted == self.axes else self.along(wanted)

    def flat(self, *names: str) -> "DeviceMesh":
        """One axis of several, which is called after all of them: flat("dp", "cp") has the axis "dp_cp".

        Without names, of all axes. Collective where mesh[names] is.
        """
        names = names or tuple(self.mesh_dim_names or ())
        part = self[names] if names else self
        if len(part.shape) == 1:
            return part
        return self._made("flat", names, part, (part.size,), ("_".join(names),) if names else None)

    def fold(
        self, name: str, size: int, *, over: tuple[str, ...] | None = None, rest: str = "efsdp"
    ) -> "DeviceMesh":
        """The ranks of the axes `over` as two other axes: neighbours along `name`, which has `size`; `rest`.

        over: neighbouring axes, the outermost first; all if None. For experts: they are spread over `name`,
        and each one's ranks are the axis `rest`. The two are meshes of one axis of the same `root`, to cut
        modules along, shard them over, and so on. Collective over this mesh at the first time. Raises
        ValueError where `size` does not divide the ranks or cuts across an axis, where axes are unknown or no
        neighbours, and for one name twice.
        """
        over = (over,) if isinstance(over, str) else over and tuple(over)
        part = self if over is None else self[over]
        if size < 1 or part.size % size:
            raise ValueError(
                f"fold: {name!r} has size {size}, which does not divide the {part.size} ranks of "
                f"{over or part}"
            )
        self._check_fold(name, size, part, rest)
        made = self._made("fold", (name, size, over, rest), part, (part.size // size, size), (rest, name))
        self._family.folded |= {each: made[each].axes for each in (rest, name)}
        return made

    def among(self, places: Sequence[int]) -> "DeviceMesh | None":
        """The ranks at these places of this mesh, which has one axis; None for others. Collective over it."""
        inside = self.rank in places
        base = self._base.among(places, 0) if inside else self._base.split(None, 0)
        if base is None:
            return None
        return DeviceMesh(self._family, self.ranks[list(places)], base, self.mesh_dim_names)

    def allow_divergence(self, axes: MeshLayout) -> None:
        """Let ranks of `root` that differ along these axes make its other slices without each other.

        They need not make the same ones from now on. Collective over `root`.
        """
        root = self.root
        self.device.allow_divergence(axes)
        others = [
            number for number, each in enumerate(root._axes) if not mesh_layout.overlap(each.axes, axes)
        ]
        if axes and others:
            root._within = root[tuple(others)]

    def names_of(self, axes: MeshLayout) -> list[str]:
        """What axes of `root`, or of a fold, are called; those without a name have their number."""
        root = self.root
        own = {
            name: root._axes[n].axes for n, name in enumerate(root.mesh_dim_names or range(len(root.shape)))
        }
        named = [*own.items(), *self._family.folded.items()]
        exact = [str(name) for name, each in named if each == axes and each]
        return exact[:1] or [str(name) for name, each in own.items() if mesh_layout.overlap(each, axes)]

    @contextmanager
    def on(self, device: Device) -> Iterator[None]:
        """Inside a with block, this whole family of meshes is on another device, in other streams."""
        family = self._family
        before = family.device, family.streams
        family.device, family.streams = device, {}
        try:
            yield
        finally:
            family.device, family.streams = before

    def _slice(self, axes: tuple[int, ...]) -> "DeviceMesh":
        within = self._within
        if within is None or any(self._axes[axis] not in within._axes for axis in axes):
            return self._along(axes)
        return within._along(tuple(within._axes.index(self._axes[axis]) for axis in axes))

    def _with_layout(self, axes: tuple[MeshLayout, ...]) -> "DeviceMesh":
        """As `along`, of the mesh of all ranks: one axis, made by as few ranks as can. Collective."""
        wanted, ranks = mesh_layout.union(*axes), self.ranks.ravel()
        within = (
            self if self._within is None or mesh_layout.without(wanted, self._within.axes) else self._within
        )
        colors = mesh_layout.index_in(mesh_layout.without(self.axes, wanted), ranks)
        keys = ranks * 0
        for each in axes:
            keys = keys * mesh_layout.size_of(each) + mesh_layout.index_in(each, ranks)
        row = ranks[colors == colors[self.rank]]
        row = row[np.argsort(keys[row])]
        base = within._base.among(within._places(row), int(colors[self.rank]))
        return type(self)(self._family, row, base, None)

    def pair(self, source: int, to: int) -> tuple[Communicator, Communicator] | None:
        """Communicators of two ranks, for arrays of the device and of the host; None on the others.

        `source` is their rank 0. Collective; others at each call, which nobody else uses (comm/links.py).
        """
        inside, family = self.rank in (source, to), self._family
        host = self._base.among((source, to), 0) if inside else self._base.split(None, 0)
        if host is None:
            return None
        made = family.carrier(host.duplicate(), "link")
        host.role = "shapes"
        return made, host

    def _check_fold(self, name: str, size: int, part: "DeviceMesh", rest: str) -> None:
        """Raise ValueError unless the ranks of `part` follow one another, and no other axis is cut across."""
        if name == rest:
            raise ValueError(f"fold: {name!r} and the rest of {part!r} must have two names")
        steps = np.unique(np.diff(part.ranks.ravel()))
        if steps.size > 1 or len(part.axes) > 1 or (steps < 0).any():
            raise ValueError(f"fold: the axes of {part!r} must be neighbours in {self!r}, in their order")
        inner = size * int(steps[0]) if steps.size else 1
        for each in self.root._axes:
            for counts, following in each.axes:
                if counts < inner < following and (inner % counts or following % inner):
                    raise ValueError(
                        f"fold: {size} ranks along {name!r} cut across {each!r}; take a size that is made of "
                        "whole axes, the last ones first, and a divisor of the next"
                    )

    def _made(
        self,
        how: str,
        given: tuple,
        part: "DeviceMesh",
        shape: tuple[int, ...],
        names: tuple[str, ...] | None,
    ) -> "DeviceMesh":
        """The ranks of `part` in another shape; the same object each time."""
        if (how, given) not in self._parts:
            made = DeviceMesh(self._family, part.ranks.reshape(shape), part._base, names)
            self._parts[how, given] = made
        return self._parts[how, given]


def _device(given: str | Device, world: worlds.World, communicator: str) -> Device:
    """The device that is given, or called so; of several GPUs the one for this rank of the node."""
    if isinstance(given, Device) or world.device is not None:
        return given if isinstance(given, Device) else world.device
    name = given
    if name == "auto":
        on_host = communicator not in ("auto", *CARRIERS)
        name = next((kind for kind, found in devices.KINDS.items() if not on_host and found.count()), "cpu")
    if name == "cpu" and communicator in CARRIERS:
        raise ValueError(f"communicator: {communicator!r} is for GPUs, and the device is 'cpu'")
    if name in devices.KINDS:
        name = f"{name}:{world.local_rank % max(1, devices.KINDS[name].count())}"
    return devices.get(name)


def _check(shape: tuple[int, ...], names: tuple[str, ...] | None, size: int) -> None:
    if prod(shape) != size or min(shape, default=0) < 1:
        running = "1 rank is" if size == 1 else f"{size} ranks are"
        raise ValueError(
            f"shape {shape} needs {prod(shape)} ranks, but {running} running: "
            f"launch with `mpirun -n {prod(shape)} python ...`"
        )
    if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
        raise ValueError(f"mesh_dim_names {names} must be one name for each axis of shape {shape}")
