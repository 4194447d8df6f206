"""DeviceMesh: the mesh that users make by `init_device_mesh`. `flat` joins its axes, `fold` makes other axes.

ranks.py has slices and communicators: FSDP needs nothing else.
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
from shardrt.comm.ranks import Mesh, MeshState
from shardrt.device import Device

__all__ = ["DeviceMesh", "default_mesh"]


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

    Args:
        device: "auto", "cpu" or "cuda", or a Device. "auto" is a GPU if there is one. A simulated world
            uses its own device instead. The device becomes the current one of this thread.
        shape: ranks per axis (default: one axis of all ranks).
        mesh_dim_names: a name per axis.
        communicator: the backend (see `comm.create` and `comm.for_device`).
        reduction: how NCCL sums over ranks. "nccl": by NCCL's own algorithm. "tree": by a fixed tree over
            ranks, bitwise identical to all other backends. docs/explanation/gpu.md says what each promises.
        wrap: called with each communicator that the mesh makes, to intercept its calls, such as
            CollectiveCounter.
        timeout: if not all ranks come here in so many seconds, this rank ends the job with exit code 124.
            0: no limit.

    Raises:
        ValueError: if the shape does not hold exactly the ranks that run, the communicator does not fit the
            device, or the reduction is unknown.
        RuntimeError: if the GPU asked for can't be used.

    Example:
        >>> from shardrt.comm import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh["dp"].size, mesh.rank
        (1, 0)
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
        state = MeshState(world, place, communicator, reduction, wrap)
        state.root = DeviceMesh(state, np.arange(base.size).reshape(shape), base, mesh_dim_names)
        return state.root


@cache
def _default(world: worlds.World) -> "DeviceMesh":
    return init_device_mesh("auto")


def default_mesh() -> "DeviceMesh":
    """A mesh with one axis of all ranks. Each call returns the same object; the first call is collective."""
    return _default(worlds.current())


class DeviceMesh(Mesh):
    """`ranks` of the run as an array with named axes; this rank is number `rank` of `size` in it.

    `mesh["shard"]` and `mesh["replicate", "shard"]` are this rank's slices along these axes; a slice is
    a mesh, too. `flat` makes one axis of several axes, `fold` makes other axes of the same ranks. All of
    these meshes share communicators and streams; `root` is the mesh of all ranks.
    """

    _within: "DeviceMesh | None" = None  # the slice of root that makes slices after allow_divergence

    @cached_property
    def axes(self) -> MeshLayout:
        """The layout of this mesh in `root` (mesh_layout.py).

        Raises:
            ValueError: if the ranks are no slice of `root` or of a fold of `root`.
        """
        found = layout_of(self.ranks)
        if found is None:
            raise ValueError(f"{self!r} is not made of axes of {self.root!r} or of a fold of it")
        return found

    def along(self, *axes: MeshLayout) -> "DeviceMesh":
        """The mesh of the ranks of `root` that differ from this rank only along `axes`, the first outermost.

        The first call for several axes is collective over `root`, or over a part of it after
        `allow_divergence`.
        """
        root, wanted = self.root, tuple(mesh_layout.union(each) for each in axes)
        numbers = [root._numbers_in(each) for each in wanted]
        if None not in numbers:
            return root[tuple(number for each in numbers for number in each)]
        if wanted not in root._slices:
            root._slices[wanted] = root._with_layout(wanted)
        return root._slices[wanted]

    def _numbers_in(self, axes: MeshLayout) -> tuple[int, ...] | None:
        """Indices of this mesh's axes with the layout `axes` together; None if only a fold has such axes."""
        own = [number for number, size in enumerate(self.shape) if size > 1]
        inside = tuple(number for number in own if mesh_layout.union(self._axes[number].axes, axes) == axes)
        return inside if prod(self.shape[number] for number in inside) == mesh_layout.size_of(axes) else None

    def index_except(self, *axes: MeshLayout) -> int:
        """This rank's index among the ranks of `root` that have the same indices along `axes`."""
        return mesh_layout.index_in(
            mesh_layout.without(self.root.axes, mesh_layout.union(*axes)), self.root.rank
        )

    def union(self, axes: MeshLayout) -> "DeviceMesh":
        """The mesh along this mesh's axes and `axes`; this mesh itself if it has `axes` already."""
        wanted = mesh_layout.union(self.axes, axes)
        return self if wanted == self.axes else self.along(wanted)

    def flat(self, *names: str) -> "DeviceMesh":
        """Join axes to one axis: mesh.flat("dp", "cp") has the axis "dp_cp". Without names: join all axes.

        Collective if mesh[names] is.
        """
        names = names or tuple(self.mesh_dim_names or ())
        part = self[names] if names else self
        if len(part.shape) == 1:
            return part
        return self._made("flat", names, part, (part.size,), ("_".join(names),) if names else None)

    def fold(
        self, name: str, size: int, *, over: tuple[str, ...] | None = None, rest: str = "efsdp"
    ) -> "DeviceMesh":
        """Arrange the ranks of the axes `over` in two other axes: `rest`, and `name` with `size` neighbours.

        mesh.fold("ep", 2, over="dp") of 4 ranks [0, 1, 2, 3] along "dp" is [[0, 1], [2, 3]]. For experts:
        rank 2 is in the slice [2, 3] along "ep", over which experts are spread. The ranks [0, 2] along
        "efsdp" have the same experts and shard them. The first call is collective over this mesh.

        Args:
            over: adjacent axes, the outermost first; None: all.

        Raises:
            ValueError: if `size` does not divide the ranks or cuts across an axis, if `over` has unknown or
                non-adjacent axes, or if `name` and `rest` are equal.
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
        self._state.folded |= {each: made[each].axes for each in (rest, name)}
        return made

    def among(self, places: Sequence[int]) -> "DeviceMesh | None":
        """The mesh of the ranks with these indices in this mesh of one axis; None on other ranks.

        Collective over this mesh.
        """
        inside = self.rank in places
        base = self._base.among(places, 0) if inside else self._base.split(None, 0)
        if base is None:
            return None
        return DeviceMesh(self._state, self.ranks[list(places)], base, self.mesh_dim_names)

    def allow_divergence(self, axes: MeshLayout) -> None:
        """Let ranks of `root` that differ along `axes`, such as pipeline stages, make different slices.

        From now on only ranks with the same indices along `axes` make a slice together. Collective over
        `root`.
        """
        root = self.root
        self.device.allow_divergence(axes)
        others = [
            number for number, each in enumerate(root._axes) if not mesh_layout.overlap(each.axes, axes)
        ]
        if axes and others:
            root._within = root[tuple(others)]

    def names_of(self, axes: MeshLayout) -> list[str]:
        """Names of the axes of `root`, or of a fold, with this layout. An axis without name has its index."""
        root = self.root
        own = {
            name: root._axes[n].axes for n, name in enumerate(root.mesh_dim_names or range(len(root.shape)))
        }
        named = [*own.items(), *self._state.folded.items()]
        exact = [str(name) for name, each in named if each == axes and each]
        return exact[:1] or [str(name) for name, each in own.items() if mesh_layout.overlap(each, axes)]

    @contextmanager
    def on(self, device: Device) -> Iterator[None]:
        """Inside a with block, the root mesh and all its slices use another device, with other streams."""
        state = self._state
        before = state.device, state.streams
        state.device, state.streams = device, {}
        try:
            yield
        finally:
            state.device, state.streams = before

    def communicators(self) -> Iterator[tuple[Communicator, str, tuple[int, ...]]]:
        """(communicator, role, ranks of the root) of each communicator of the root mesh and its slices."""
        for (role, ranks), made in self._state.communicators.items():
            yield made, role, ranks

    def attach(self, function: Callable[[Communicator, str, tuple[int, ...]], None]) -> None:
        """Call function(communicator, role, ranks) for each communicator that `communicator` makes later."""
        self._state.observers.append(function)

    def close(self) -> None:
        """Close all communicators of the root mesh and its slices. No model may use them again. Collective.

        A program that makes many meshes on GPUs calls this. Otherwise each NCCL communicator keeps its GPU
        memory until the program ends.
        """
        state = self._state
        for stream in (self.device.current_stream, *state.streams.values()):
            stream.synchronize()
        for communicator in state.communicators.values():
            communicator.close()
        state.communicators.clear()

    def _make_slice(self, axes: tuple[int, ...]) -> "DeviceMesh":
        """Split `_within`, if it has all these axes: then ranks of other stages need not take part."""
        within = self._within
        if within is None or any(self._axes[axis] not in within._axes for axis in axes):
            return self._split(axes)
        return within._split(tuple(within._axes.index(self._axes[axis]) for axis in axes))

    def _with_layout(self, axes: tuple[MeshLayout, ...]) -> "DeviceMesh":
        """As `along`, a mesh with one axis. Collective over `_within` if it has all these axes."""
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
        base = within._base.among(within._indices(row), int(colors[self.rank]))
        return type(self)(self._state, row, base, None)

    def pair(self, source: int, to: int) -> tuple[Communicator, Communicator] | None:
        """Communicators of two ranks: one for device arrays, one for host arrays. None on other ranks.

        `source` is rank 0 of both. Each call makes new communicators (see links.py). Collective.
        """
        inside, state = self.rank in (source, to), self._state
        host = self._base.among((source, to), 0) if inside else self._base.split(None, 0)
        if host is None:
            return None
        made = state.new_communicator(host.duplicate(), "link")
        host.role = "shapes"
        return made, host

    def _check_fold(self, name: str, size: int, part: "DeviceMesh", rest: str) -> None:
        """Raise ValueError unless the ranks of `part` are adjacent, and `size` cuts across no other axis."""
        if name == rest:
            raise ValueError(f"fold: {name!r} and the rest of {part!r} must have different names")
        steps = np.unique(np.diff(part.ranks.ravel()))
        if steps.size > 1 or len(part.axes) > 1 or (steps < 0).any():
            raise ValueError(f"fold: the axes of {part!r} must be neighbours in {self!r}, in their order")
        inner = size * int(steps[0]) if steps.size else 1
        for each in self.root._axes:
            for counts, following in each.axes:
                if counts < inner < following and (inner % counts or following % inner):
                    raise ValueError(
                        f"fold: {size} ranks along {name!r} split an axis of {each!r} unevenly; take a size "
                        "that is made of whole axes, the last ones first, and a divisor of the next"
                    )

    def _made(
        self,
        how: str,
        given: tuple,
        part: "DeviceMesh",
        shape: tuple[int, ...],
        names: tuple[str, ...] | None,
    ) -> "DeviceMesh":
        """The ranks of `part` in another shape. Equal `how` and `given` give the same object."""
        if (how, given) not in self._slices:
            made = DeviceMesh(self._state, part.ranks.reshape(shape), part._base, names)
            self._slices[how, given] = made
        return self._slices[how, given]


def _device(given: str | Device, world: worlds.World, communicator: str) -> Device:
    """The given device, or the device of that name. Of several GPUs it is the GPU for this local rank."""
    if isinstance(given, Device) or world.device is not None:
        return given if isinstance(given, Device) else world.device
    name = given
    if name == "auto":
        on_host = communicator not in ("auto", *CARRIERS)
        name = next((kind for kind, found in devices.KINDS.items() if not on_host and found.count()), "cpu")
    if name == "cpu" and communicator in CARRIERS:
        raise ValueError(f"communicator: {communicator!r} needs a GPU, but the device is 'cpu'")
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


def layout_of(ranks: np.ndarray) -> MeshLayout | None:
    """The layout of a set of ranks; None if strides and sizes do not describe it."""
    left = np.sort(ranks, axis=None)
    first, left = int(left[0]), left - left[0]
    found: MeshLayout = ()
    while left.size > 1:
        stride = int(left[1])
        size = np.argmin(left == np.arange(left.size) * stride) or left.size  # the multiples of the stride
        end = stride * int(size)
        each = np.arange(size) * stride
        whole = left.size % size == 0 and (left.reshape(-1, size) % end == each).all()
        if not whole or first % end // stride:
            return None
        found, left = ((stride, end), *found), left[::size]
    return found
