"""Checks before a schedule is built: the units fit together, and all ranks have the same units."""

import zlib
from collections.abc import Callable, Iterable

from shardrt import device, dtypes
from shardrt.comm import objects
from shardrt.comm.mesh_layout import without
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.boundary import unit_of
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.unit import Unit, data_of
from shardrt.nn.module import Layer, Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage

# Checks of options. Each raises ValueError for units that the option does not support.
UNIT_CHECKS: list[Callable[[list[Unit]], None]] = []
GROUP_CHECKS: list[Callable[[list[Unit], Iterable[ProcessGroups]], None]] = []


def check_mesh(unit: Unit, first: Unit) -> None:
    """Raise ValueError unless the gradients of both units are summed over the same ranks."""
    own, theirs = unit.settings.mesh, first.settings.mesh
    if own.root is not theirs.root:
        raise ValueError(
            f"fully_shard: unit {unit.label} has another mesh than {first.label}; use parts of one mesh"
        )
    alike = own is theirs or sorted(own.ranks.ravel()) == sorted(theirs.ranks.ravel())
    for parameter in unit.parameters if unit is not first else ():
        placement = parameter.placement
        apart = placement is not None and placement.summed_apart
        if not (data_of(placement, own) == without(theirs.axes, placement.one_loss) if apart else alike):
            split = f" and {placement.mesh!r}" if apart else ""
            raise ValueError(
                f"fully_shard: unit {unit.label} is on {own!r}{split}, {first.label} on {theirs!r}; their "
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


def check_groups(units: list[Unit], ranks_of: dict[ParameterGroup, ProcessGroups]) -> None:
    """Run the options' checks of the units' process groups."""
    for check in GROUP_CHECKS:
        check(units, ranks_of.values())


def check_same_on_all_ranks(schedule: Schedule, units: list[Unit]) -> None:
    """Raise ValueError on all ranks if models, seeds or settings differ between ranks. Collective."""
    described = [
        (
            u.label,
            (u.settings.strategy, u.settings.by_rank),
            (u.reshard_after_forward, u.reshard_after_backward, u.choices.divide_factor, u.micro_batches),
            (u.choices.find_unused, [sorted(group.trained) for group in u.groups]),
            [module.wrapped_in(Layer.RECOMPUTATION) for top in u.modules for module in top.modules()],
            u.settings.placement.parameters,
            u.settings.placement.gradients,
            [(g.key, [(p.name, p.whole_shape, p.seed) for p in g.parameters]) for g in u.groups],
        )
        for u in units
    ]
    described.append((schedule.prefetch,))
    rank, differing = schedule.mesh.rank, objects.differing_ranks(schedule.control, described)
    if differing:
        seeds = sorted({p.seed for u in units for p in u.parameters})
        raise ValueError(
            f"fully_shard: ranks {differing} have another model, seed or sharding than rank 0 "
            f"(rank {rank}: {len(units)} units, seeds {seeds}); build and shard the same model on every rank"
        )


def check_same_types(schedule: Schedule, units: list[Unit]) -> None:
    """Raise ValueError on all ranks if they gather in different types. They may share memory. Collective."""
    kinds = sorted({group.key.param for u in units for group in u.groups} & {*dtypes.LOW})
    here = schedule.streams.device
    found = [f"{kind} as {here.gathered_dtype(kind).name}" for kind in kinds]
    if found and (differing := objects.differing_ranks(schedule.control, found)):
        raise ValueError(
            f"fully_shard: ranks {differing} gather parameters in other types than rank 0 "
            f"(rank {schedule.mesh.rank}: {', '.join(found)}); have the extra bf16 installed for all ranks "
            "or none, on processors of one type"
        )


def check_same_values(control: Communicator, units: list[Unit], cut: bool) -> None:
    """Raise ValueError on all ranks if parameters have different values. No rank broadcasts them. Collective.

    Only values given before sharding are compared; manual_seed makes the same values on every rank.

    cut: include parameters whose modules are split. `control` then has ranks with the same part of them.
    """
    groups = [group for u in units for group in u.groups if cut or not group.key.cut]
    initial = [pair for group in groups for pair in zip(group.parameters, group.initial, strict=True)]
    made = bytes(storage.materialised for _, storage in initial)
    if objects.differing_ranks(control, made):
        # The ranks have made different values. Compare all that any rank has made.
        made = bytes(map(max, *control.all_gather_bytes(made)))
    given = [place for place, there in enumerate(made) if there]
    checksums = [_checksum(*initial[place]) for place in given]
    if not given or not objects.differing_ranks(control, checksums):
        return
    everyone = objects.all_gather_object(control, checksums)
    for place, ranks in zip(given, zip(*everyone, strict=True), strict=True):
        if other := [rank for rank, checksum in enumerate(ranks) if checksum != ranks[0]]:
            raise ValueError(
                f"fully_shard: parameter {initial[place][0].name!r} has other values on rank {other[0]} than "
                "on rank 0; set the same values on every rank before sharding, or let manual_seed make them"
            )


def _checksum(parameter: Parameter, storage: LocalStorage) -> int:
    """The CRC-32 of a parameter's values; makes them if this rank has not yet."""
    values = device.current().empty((parameter.size,), parameter.dtype)
    storage.give(storage.extents_of(parameter), values)
    return zlib.crc32(device.current().to_numpy(values))
