"""Checks before a schedule is built: whether its units fit together, and the lists of options' checks."""

from collections.abc import Callable, Iterable

from shardrt.fsdp import composition
from shardrt.fsdp.boundary import unit_of
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module

# Checks of options. Each raises ValueError for units that the option does not support.
UNIT_CHECKS: list[Callable[[list[Unit]], None]] = []
GROUP_CHECKS: list[Callable[[list[Unit], Iterable[ProcessGroups]], None]] = []
# Compare ranks before the first gather: if they differ, later collectives would hang or exchange wrong data.
RANK_CHECKS: list[Callable[[Schedule, list[Unit]], None]] = []


def check_mesh(unit: Unit, first: Unit) -> None:
    """Raise ValueError unless the gradients of both units are summed over the same ranks."""
    mesh, others = unit.settings.mesh, first.settings.mesh
    if mesh.root is not others.root:
        raise ValueError(
            f"fully_shard: unit {unit.label} has another mesh than {first.label}; use parts of one mesh"
        )
    split = None if unit is first else composition.active.mismatch(unit, first)
    if split is not None:
        raise ValueError(
            f"fully_shard: unit {unit.label} is on {mesh!r}{split}, {first.label} on {others!r}; their "
            "gradients would be summed over other ranks; take axes of the mesh that together have the "
            "same ranks"
        )


def check_reachable(module: Module, around: list[Unit], owners: dict[int, Unit]) -> None:
    """Raise ValueError if a module uses a parameter whose unit is not gathered whenever the module runs."""
    unit = unit_of(module)
    around = [*around, unit] if unit is not None else around
    for name, parameter in module._parameters.items():
        owner = owners.get(id(parameter))
        if owner is not None and owner not in around:
            raise ValueError(
                f"fully_shard: parameter {parameter.name!r} of unit {owner.label} is tied to "
                f"{module.name + '.' + name!r}, outside that unit; leave both to a unit that contains both, "
                "or make both modules one unit: fully_shard([first, second])"
            )
    for child in module.children():
        check_reachable(child, around, owners)


def check_options(units: list[Unit]) -> None:
    """Run the options' checks of a model's units."""
    for check in UNIT_CHECKS:
        check(units)
