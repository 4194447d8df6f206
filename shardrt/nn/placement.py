"""Where parameters and modules are, once parallelize_module or pipeline_stages has spread a model over ranks.

Every rank of a pipeline has the whole tree of modules, with its names. It has no values of parameters that
only other ranks' stages use: such a parameter is absent. Parameters that two stages use are on the ranks of
both, as two copies, and belong to the first stage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.protocol import Communicator
from shardrt.device import Array
from shardrt.nn.extents import Extents
from shardrt.nn.module import Module, ModulePlacement
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage, Storage, Stored

__all__ = [
    "PipelinePlacement",
    "along_pipeline",
    "on_first",
    "owner_of",
    "pipeline_placement_of",
    "placement_of",
    "set_pipeline_placement",
    "update_placement",
]


@dataclass(frozen=True, eq=False)
class PipelinePlacement:
    """Which ranks of a pipeline have a parameter or a module.

    The stages that use it, in ascending order, and the rank of each on the one axis of `mesh`.

    Attributes:
        copies: of a parameter that two ranks have; None elsewhere, and on other ranks.
        twin: the later of two stages on one rank uses it (parallel/tied_replica.py).
    """

    mesh: DeviceMesh
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    copies: DeviceMesh | None = None
    twin: bool = False

    @property
    def here(self) -> bool:
        """Whether this rank has it."""
        return self.mesh.rank in self.ranks

    @property
    def owner(self) -> bool:
        """Whether it counts, and is saved, on this rank's part of the pipeline: it does on one."""
        return self.mesh.rank == self.ranks[0] and not self.twin

    @property
    def tied(self) -> bool:
        """Whether several stages use it."""
        return len(self.stages) > 1

    @property
    def axes(self) -> MeshLayout:
        """The layout of the root mesh along which ranks have other stages (comm/mesh_layout.py)."""
        return self.mesh.axes

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of those that have the same stages."""
        return not self.mesh.index_except(self.axes)

    @property
    def control(self) -> Communicator:
        """Over the ranks that have the other stages, for messages between hosts."""
        return self.mesh.communicator("control")

    @property
    def everyone(self) -> Communicator:
        """Over all ranks that train the model."""
        return self.mesh.root.communicator("control")

    @property
    def description(self) -> str:
        """For messages: the stage that has it, and the rank that this one would ask."""
        return f"on stage {self.stages[0]}, rank {int(self.mesh.ranks[self.ranks[0]])}"


@dataclass(frozen=True, eq=False)
class ParallelPlacement(ModulePlacement):
    """The facts that only parallelism itself asks for.

    Of an outermost module: `axis` and `styles`, which parallelize_module has given its modules. Of a module
    in a stage: `pipeline`, the ranks that run it.
    """

    axis: Any = None
    styles: Sequence[tuple[Any, Any]] = ()
    pipeline: PipelinePlacement | None = None


_NOWHERE = ParallelPlacement()


def placement_of(module: Module) -> ParallelPlacement:
    """`module.placement`, with all facts."""
    placement = module.placement
    return placement if isinstance(placement, ParallelPlacement) else _NOWHERE


def update_placement(module: Module, **facts: Any) -> None:
    """Give `module.placement` these facts, besides those that it has."""
    object.__setattr__(module, "placement", replace(placement_of(module), **facts))


def pipeline_placement_of(module: Module | None) -> PipelinePlacement | None:
    """The pipeline ranks that run this module; None for a model without stages."""
    while module is not None:
        if (found := placement_of(module).pipeline) is not None:
            return found
        module = module.parent
    return None


class RemoteStorage(Storage):
    """Takes the place of the values of a parameter that only other ranks have."""

    absent = True

    def __init__(self, parameter: Stored) -> None:
        self._parameter = parameter

    def owner(self, first: bool) -> bool:
        return False

    @property
    def shard(self) -> Array:
        return device.current().empty((0,), self._parameter.dtype)

    @property
    def gradient(self) -> None:
        return None

    def range_of(self, parameter: Stored) -> tuple[int, int]:
        return 0, 0

    def extents_of(self, parameter: Stored) -> Extents:
        return ()

    def full(self, parameter: Stored) -> NoReturn:
        raise RuntimeError(
            f"parameter {parameter.name!r} is {parameter.pipeline.description}, so it has no values here; "
            "use full_state_dict"
        )

    def assign(self, parameter: Stored, values: Any) -> NoReturn:
        self.full(parameter)

    def edge(self, parameter: Stored) -> NoReturn:
        self.full(parameter)

    def gradient_target(self, parameter: Stored) -> NoReturn:
        self.full(parameter)

    def zero_grad(self) -> None:
        """Do nothing: there is no gradient."""


def set_pipeline_placement(parameter: Parameter, place: PipelinePlacement) -> None:
    """Put `parameter` where `place` says: on other ranks it has no values from now on.

    A parameter is placed once.

    Raises:
        RuntimeError: which names the parameter, if it is sharded or has an optimizer.
    """
    if not isinstance(parameter.storage, LocalStorage) or parameter.storage.owned:
        done = "has an optimizer" if isinstance(parameter.storage, LocalStorage) else "is sharded"
        raise RuntimeError(
            f"parameter {parameter.name!r} {done} already; call pipeline_stages before fully_shard and "
            "before the optimizer is made"
        )
    parameter.pipeline = place
    if not place.here:
        parameter.storage = RemoteStorage(parameter)


def owner_of(parameter: Parameter, first: bool) -> bool:
    """Whether this rank saves what it holds of the parameter; see Storage.owner."""
    placement, place = parameter.placement, parameter.pipeline
    if not isinstance(parameter.storage, LocalStorage):
        return parameter.storage.owner(first)
    if placement is not None:
        return placement.owner(() if place is None else place.axes)
    return first if place is None else place.is_leader


def pipeline_of(parameters: Iterable[Parameter]) -> DeviceMesh | None:
    """PipelinePlacement.mesh, of a model with stages; None for other parameters."""
    return next((p.pipeline.mesh for p in parameters if p.pipeline is not None), None)


def along_pipeline(parameters: Iterable[Parameter]) -> Communicator | None:
    """PipelinePlacement.control, of a model with stages; None for other parameters."""
    mesh = pipeline_of(parameters)
    return None if mesh is None else mesh.communicator("control")


def on_first(
    place: PipelinePlacement | None, values: np.ndarray | None, shape: tuple[int, ...], dtype: Any
) -> np.ndarray | None:
    """On rank 0, `values` of the owner's leader; None elsewhere.

    Collective over the leaders of all stages.

    Args:
        values: a host array, or None on other ranks.
    """
    if place is None or not place.is_leader:
        return values if place is None else None
    owner, rank = place.ranks[0], place.mesh.rank
    if rank == owner == 0:
        return values
    here, wanted = device.current(), np.zeros(1, np.uint8)
    stream, control = here.current_stream, place.control
    if 0 in shape:
        return None if rank else np.empty(shape, dtype)
    if rank == owner:
        control.recv(wanted, peer=0, stream=stream)  # else a fast rank's arrays would pile up
        control.send(np.ascontiguousarray(values).reshape(-1), peer=0, stream=stream)
        here.wait_here()  # it has been read
    if rank != 0:
        return None
    found = np.empty(shape, dtype)
    control.send(wanted, peer=owner, stream=stream)
    control.recv(found.reshape(-1), peer=owner, stream=stream)
    here.wait_here()
    return found
