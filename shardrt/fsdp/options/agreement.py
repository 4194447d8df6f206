"""Agreement: before a model is built, ranks compare their units, settings, types and initial values.

A rank that builds another model, or shards it in another way, would hang the others in some later collective.
The comparison names the ranks and the parameter instead.
"""

import zlib

from shardrt import device, dtypes
from shardrt.comm import objects
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.options.fixed_tree import micro_batches_of
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage
from shardrt.recompute import Recomputation

__all__ = ["compare_ranks", "compile_kernels", "compile_once", "is_recomputed"]


def is_recomputed(module: Module) -> bool:
    """Whether backward runs the forward of `module` again."""
    return module.around(Recomputation) is not None


def compare_ranks(schedule: Schedule, units: list[Unit]) -> None:
    """Raise ValueError on all ranks if they differ in what their collectives depend on. Collective."""
    _compare_units(schedule, units)
    _compare_types(schedule, units)
    data = schedule.root_unit.settings.mesh
    for mesh in dict.fromkeys(unit.settings.mesh for unit in units):
        _compare_values(mesh.communicator("control"), [u for u in units if u.settings.mesh is mesh], cut=True)
    if schedule.mesh is not data:
        _compare_values(schedule.control, units, cut=False)


def _compare_units(schedule: Schedule, units: list[Unit]) -> None:
    """Raise ValueError on all ranks if models, seeds or settings differ between ranks. Collective."""
    described = [
        (
            u.label,
            (u.settings.strategy, u.settings.by_rank),
            (u.reshard_after_forward, u.reshard_after_backward, u.choices.divide_factor, micro_batches_of(u)),
            (u.choices.find_unused, [sorted(group.trained) for group in u.groups]),
            [is_recomputed(module) for top in u.modules for module in top.modules()],
            u.settings.offloaded.parameters,
            u.settings.offloaded.gradients,
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


def _compare_types(schedule: Schedule, units: list[Unit]) -> None:
    """Raise ValueError on all ranks if they gather in different types. They may share memory. Collective."""
    kinds = sorted({group.key.param for u in units for group in u.groups} & {*dtypes.LOW})
    here = schedule.streams.device
    found = [f"{kind} as {here.gathered_dtype(kind).name}" for kind in kinds]
    if found and (differing := objects.differing_ranks(schedule.control, found)):
        raise ValueError(
            f"fully_shard: ranks {differing} gather parameters in other dtypes than rank 0 "
            f"(rank {schedule.mesh.rank}: {', '.join(found)}); have the extra bf16 installed for all ranks "
            "or none, on processors of one type"
        )


def compile_once(schedule: Schedule, units: list[Unit]) -> None:
    """Compile the kernels before the ranks of `schedule` compute. Collective."""
    compile_kernels(schedule.mesh, schedule.control)


def compile_kernels(mesh: DeviceMesh, control: Communicator) -> None:
    """Have one rank of each node compile the kernels: the others find them in the cache. Collective."""
    if mesh.world.kind == "mpi":
        if mesh.world.local_rank == 0:
            mesh.device.warm_up()
        control.barrier(stream=mesh.device.current_stream)


def _compare_values(control: Communicator, units: list[Unit], cut: bool) -> None:
    """Raise ValueError on all ranks if parameters have different values. No rank broadcasts them. Collective.

    Only values given before sharding are compared; manual_seed makes the same values on every rank.

    cut: include parameters whose modules are split. `control` then has ranks with the same part of them.
    """
    groups = [group for u in units for group in u.groups if cut or not group.key.split_axes]
    initial = [pair for group in groups for pair in zip(group.parameters, group.initial, strict=True)]
    made = bytes(storage.materialised for _, storage in initial)
    if objects.differing_ranks(
        control, made
    ):  # ranks differ in which values are made: compare all made on any rank
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
