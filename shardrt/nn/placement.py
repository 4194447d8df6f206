"""Where parameters and modules are, once parallelize_module or pipeline_stages has spread a model over ranks.

Every rank of a pipeline has the whole tree of modules, with its names. Of what only other ranks' stages use
it has no values: such a parameter is absent. What two stages use is on the ranks of both, as two copies, and
belongs to the first.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm.digits import Digits
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator


@dataclass(frozen=True, eq=False)
class PipelinePlacement:
    """Which ranks of a pipeline have a parameter or a module.

    The stages that use it, in ascending order, and the rank of each on the one axis of `mesh`.

    copies: of what two ranks have, these two; None elsewhere, and on other ranks. twin: it is what the later
    of two stages on one rank uses (parallel/twin.py).
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
    def axes(self) -> Digits:
        """Along what of the root mesh ranks have other stages (comm/digits.py)."""
        return self.mesh.axes

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of those that have the same stages."""
        return not self.mesh.number_but(self.axes)

    @property
    def control(self) -> Communicator:
        """Over the ranks that have the other stages beside this one's, for what hosts tell each other."""
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
class ModulePlacement:
    """What parallelism has made of one module. It holds modules by weak references.

    Of an outermost module: `axis` and `styles`, which parallelize_module has given its modules; `stages`,
    which this rank runs in its place. Of a module in a stage: `pipeline`, the ranks that run it; `stage`,
    which calls it, if this rank has that stage. Of a stage: `label`, for messages; `inner_ends`, whether its
    first argument and its output lie inside of the model, between two stages.
    """

    axis: Any = None
    styles: Sequence[tuple[Any, Any]] = ()
    stages: tuple[weakref.ref, ...] = ()
    pipeline: PipelinePlacement | None = None
    stage: weakref.ref | None = None
    label: str = ""
    inner_ends: tuple[bool, bool] = (False, False)


def on_first(
    place: PipelinePlacement | None, values: np.ndarray | None, shape: tuple[int, ...], dtype: Any
) -> np.ndarray | None:
    """On rank 0, `values` of the owner's leader; None elsewhere.

    Collective over the leaders of all stages. values: a host array, or None on other ranks.
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
