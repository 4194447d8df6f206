"""fully_shard: marks a module as a unit of fully sharded data parallelism.

(Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023; the call is that of
PyTorch's FSDP2.) The model stays the same object with the same parameter names.
"""

from functools import cache
from typing import Any

from shardrt.autograd import Variable
from shardrt.comm import world as worlds
from shardrt.comm.mesh import DeviceMesh, init_device_mesh
from shardrt.comm.world import World
from shardrt.fsdp.setup import unit_of
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.fsdp.unit import Settings, Unit
from shardrt.nn.module import Module


def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: bool | None = None,
    prefetch: int = 1,
) -> Module:
    """Shard the parameters of `module` over the ranks of `mesh`, as one unit; gives `module` back.

    Call it on the parts first (each transformer block), then on the whole: a unit takes all parameters below
    it that no unit has yet. Each rank keeps 1/N of a unit; the whole is gathered before the unit's forward
    and backward and released after. Make the optimizer afterwards. Gradients are the mean over ranks (see
    set_gradient_divide_factor).

    mesh: one axis of ranks; all ranks of the job if None.
    strategy: a ShardingStrategy or its name.
    reshard_after_forward: release the parameters between forward and backward; None leaves it to the
        strategy, except that the outermost unit is kept, since backward needs it first.
    prefetch: how many units are gathered ahead of the one that computes; the outermost unit's counts.

    Raises TypeError if `module` is no Module, ValueError for an unknown strategy, a negative prefetch, a
    module that is a unit already or a mesh with more than one axis.
    """
    if not isinstance(module, Module):
        raise TypeError(f"fully_shard: module must be a shardrt.nn.Module, got {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError(f"fully_shard: {module.name or type(module).__name__} is sharded already")
    if prefetch < 0:
        raise ValueError(f"fully_shard: prefetch must be 0 or more, got {prefetch}")
    mesh = _default_mesh() if mesh is None else mesh
    if len(mesh.shape) != 1:
        raise ValueError(f"fully_shard: mesh must have one axis, got shape {mesh.shape}")
    taken = {id(p) for below in module.modules() if (u := unit_of(below)) for p in u.parameters}
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in taken]
    settings = Settings(mesh, ShardingStrategy.parse(strategy), reshard_after_forward, prefetch)
    module.boundary = UnitBoundary(Unit(module, parameters, settings))
    return module


@cache
def _mesh_of(world: World) -> DeviceMesh:
    return init_device_mesh("auto")


def _default_mesh() -> DeviceMesh:
    """One axis of all ranks; the same object for every unit of this rank."""
    return _mesh_of(worlds.current())


def set_gradient_divide_factor(module: Module, factor: float) -> None:
    """Divide the sum of the ranks' gradients by `factor` in all units of `module` (default: the world size).

    1 leaves the weighting to the loss, which then is the sum over ranks of what each rank calls backward on.
    Raises ValueError if `factor` is not positive or `module` has no unit.
    """
    if not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: factor must be positive, got {factor}")
    for unit in units(module):
        unit.divide_factor = float(factor)


def units(module: Module) -> list[Unit]:
    """The units of `module` and below, outer ones first, built. Raises ValueError if there is none."""
    found = [unit for below in module.modules() if (unit := unit_of(below)) is not None]
    if not found:
        raise ValueError(f"{type(module).__name__} has no sharded unit; call fully_shard first")
    for unit in found:
        unit.schedule  # noqa: B018  builds it
    return found


class UnitBoundary:
    """What fully_shard attaches to a module: tells the schedule when its forward begins and ends."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def enter(self) -> None:
        self.unit.schedule.enter(self.unit)

    def leave(self, output: Any) -> Any:
        tensors: list[Variable] = []
        _collect(output, tensors)
        marked = iter(self.unit.schedule.leave(self.unit, tensors))
        return _replaced(output, marked)

    def abandon(self) -> None:
        self.unit.schedule.abandon()


def _collect(output: Any, tensors: list[Variable]) -> None:
    """The tensors in a nest of tuples, lists and dicts, in order."""
    if isinstance(output, Variable):
        tensors.append(output)
    elif isinstance(output, tuple | list):
        for item in output:
            _collect(item, tensors)
    elif isinstance(output, dict):
        for item in output.values():
            _collect(item, tensors)


def _replaced(output: Any, tensors: Any) -> Any:
    """The same nest with its tensors replaced, one by one, by `tensors`."""
    if isinstance(output, Variable):
        return next(tensors)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_replaced(item, tensors) for item in output))
    if isinstance(output, tuple | list):
        return type(output)(_replaced(item, tensors) for item in output)
    if isinstance(output, dict):
        return {key: _replaced(item, tensors) for key, item in output.items()}
    return output
