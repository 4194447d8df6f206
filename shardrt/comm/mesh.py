"""A mesh of ranks: an array of them, whose slices along an axis are the groups that communicate.

The mesh makes communicators and knows what they are for by a role ("gather", "reduce", "control", "used"), so
that gathers never queue behind reductions. It does not say what is sharded along which axis.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from shardrt import device as devices
from shardrt.comm import talk
from shardrt.comm import world as worlds
from shardrt.comm.backends import DEVICE_KINDS, create, for_device
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, Stream, cuda
from shardrt.faults.deadline import within
from shardrt.faults.failure import HANG
from shardrt.faults.flight import Recorder, group_name


def init_device_mesh(
    device: str = "auto",
    shape: tuple[int, ...] | None = None,
    mesh_dim_names: tuple[str, ...] | None = None,
    *,
    communicator: str = "auto",
    wrap: Callable[[Communicator], Communicator] | None = None,
    timeout: float = 300.0,
) -> "DeviceMesh":
    """A mesh over all ranks. Collective.

    device: "auto", "cpu" or "cuda". shape: ranks per axis (default: one axis of all ranks). mesh_dim_names:
    a name per axis. communicator: the backend (see `comm.create` and `comm.for_device`). wrap: applied to
    every communicator that the mesh makes. The device becomes the current one of this thread; "auto" is a GPU
    where there is one. timeout: seconds in which all ranks must come here, or this one ends the job with exit
    code 124; 0: no limit. Raises ValueError where the shape does not hold exactly the ranks that run, or a
    communicator does not fit the device; RuntimeError where a GPU is asked for that can't be used.
    """
    launched = worlds.launch()
    if launched is None:  # nobody else has to come
        return _made(device, shape, mesh_dim_names, communicator, wrap)
    missing = (
        f"hang: rank {launched.rank} of {launched.size} has waited {timeout:g} s for all ranks to come to "
        f"init_device_mesh; those that have not still import, are stopped, or gone; the job ends with exit "
        f"code {HANG}"
    )
    with within(timeout, HANG, missing):
        return _made(device, shape, mesh_dim_names, communicator, wrap)


def _made(
    device: str,
    shape: tuple[int, ...] | None,
    mesh_dim_names: tuple[str, ...] | None,
    communicator: str,
    wrap: Callable[[Communicator], Communicator] | None,
) -> "DeviceMesh":
    world = worlds.current()
    place = _device(device, world.local_rank, communicator)
    shape = (world.size,) if shape is None else tuple(shape)
    _check(shape, mesh_dim_names, world.size)
    base = create(communicator)
    ranks = np.arange(base.size).reshape(shape)
    devices.set_current(place)
    return DeviceMesh(world, place, ranks, mesh_dim_names, base, wrap, communicator)


class DeviceMesh:
    """`ranks` as an array; this rank's `coordinate` in it; one communicator per role and axis."""

    def __init__(
        self,
        world: worlds.World,
        device: Device,
        ranks: np.ndarray,
        mesh_dim_names: tuple[str, ...] | None,
        base: Communicator,
        wrap: Callable[[Communicator], Communicator] | None = None,
        kind: str = "auto",
    ) -> None:
        self.world = world
        self._kind = kind
        self.device = device
        self.ranks = ranks
        self.mesh_dim_names = mesh_dim_names
        self.rank = base.rank
        self.size = base.size
        self.coordinate = tuple(int(i) for i in np.argwhere(ranks == base.rank)[0])
        self._wrap = wrap
        self._recorder: Recorder | None = None
        self._number = 1  # of the meshes that are recorded
        self._made: list[tuple[str, int | None, Communicator]] = []  # before they are wrapped
        self._communicators: dict[tuple[str, int | None], Communicator] = {}
        self._streams: dict[str, Stream] = {}
        self._bases: dict[int | None, Communicator] = {None: base}
        if ranks.ndim > 1:  # now, by everyone: later an axis's group can make communicators on its own
            for axis in range(ranks.ndim):
                self._bases[axis] = self._split(base, axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks per axis."""
        return self.ranks.shape

    def communicator(self, role: str, dim: int | str | None = None) -> Communicator:
        """The communicator for `role` over the ranks along axis `dim` (a number or name; None: all ranks).

        Made at the first call, which is collective over those ranks, and the same object from then on.
        """
        axis = self._axis(dim)
        if (role, axis) not in self._communicators:
            made = for_device(self._bases[axis].duplicate(), self.device, self._kind, role)
            made.recorder, made.recorded_as = self._recorder, self._name(role, axis)
            self._made.append((role, axis, made))
            self._communicators[role, axis] = self._wrap(made) if self._wrap else made
        return self._communicators[role, axis]

    def record(self, recorder: Recorder | None) -> None:
        """Have the calls of this mesh's communicators, and the parts of its steps, recorded; None ends it."""
        self._recorder = recorder
        if recorder is not None:
            recorder.meshes += 1
            self._number = recorder.meshes
        for role, axis, made in self._made:
            made.recorder, made.recorded_as = recorder, self._name(role, axis)

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, as JSON has it, for everyone. Collective."""
        return talk.from_first(self.communicator("control"), value)

    def _name(self, role: str, axis: int | None) -> str:
        """What the recorder calls a communicator, which no other communicator of this run is called."""
        place = tuple(slice(None) if axis in (None, a) else i for a, i in enumerate(self.coordinate))
        name = group_name(role, self.ranks[place].ravel().tolist(), self.size)
        return name if self._number == 1 else f"{name}~{self._number}"

    def part(self, phase: str) -> None:
        """Note that a part of a step begins, "forward" or "backward"."""
        if self._recorder is not None:
            self._recorder.part(phase)

    def stream(self, role: str) -> Stream:
        """The stream in which the communicators for `role` are used, by all models on this mesh.

        One for all: a communicator's calls must come in the order of the program, on every rank. That of
        "used" is a thread of the host on every device.
        """
        if role not in self._streams:
            place = devices.get("cpu") if role == "used" else self.device
            self._streams[role] = place.new_stream(role)
        return self._streams[role]

    def size_of(self, dim: int | str) -> int:
        """The number of ranks along one axis."""
        axis = self._axis(dim)
        return self.size if axis is None else self.shape[axis]

    def __repr__(self) -> str:
        names = f", {self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device.name!r}, {self.shape}{names}, rank {self.rank} of {self.size})"

    def _split(self, base: Communicator, axis: int) -> Communicator:
        """The ranks that differ from this one only along `axis`, in the axis's order."""
        others = self.coordinate[:axis] + self.coordinate[axis + 1 :]
        sizes = self.shape[:axis] + self.shape[axis + 1 :]
        return base.split(int(np.ravel_multi_index(others, sizes)), self.coordinate[axis])

    def _axis(self, dim: int | str | None) -> int | None:
        """The number of an axis; None for all ranks, which the only axis of a 1-D mesh means as well."""
        if isinstance(dim, str):
            if dim not in (self.mesh_dim_names or ()):
                raise ValueError(f"dim {dim!r} is not an axis of {self!r}")
            dim = self.mesh_dim_names.index(dim)
        if dim is not None and not 0 <= dim < self.ranks.ndim:
            raise ValueError(f"dim {dim} is not an axis of {self!r}")
        return None if self.ranks.ndim == 1 else dim


def _device(name: str, local_rank: int, communicator: str) -> Device:
    """The device called `name`; of several GPUs the one for this rank of the node."""
    if name == "auto":
        on_host = communicator not in ("auto", *DEVICE_KINDS)
        name = "cpu" if on_host or not cuda.count() else "cuda"
    if name == "cpu" and communicator in DEVICE_KINDS:
        raise ValueError(f"communicator: {communicator!r} is for GPUs, and the device is 'cpu'")
    if name == "cuda":
        name = f"cuda:{local_rank % max(1, cuda.count())}"
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
