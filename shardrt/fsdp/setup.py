"""Builds the schedule of a model: finds its units, checks them, lays out memory, makes this rank's shards.

Runs once, when something first needs the parameters: the optimizer, the first forward, or a state dict. Only
then is it known which unit is the outermost, and so what every parameter is called.
"""

import zlib
from functools import partial

import numpy as np

from shardrt.comm import world as worlds
from shardrt.device.arena import Arena
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.schedule import GRADIENT_SLOTS, Schedule
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module


def unit_of(module: Module) -> Unit | None:
    """The unit that fully_shard made of this very module, if it did."""
    return getattr(module.boundary, "unit", None)


def build(unit: Unit) -> None:
    """Build the schedule of the outermost unit above `unit`, with all units below it.

    Raises ValueError for units that do not fit together (meshes, tied parameters, element types, more ranks
    than elements) or that differ between ranks; RuntimeError if a part was used before the whole was sharded.
    """
    root = _outermost(unit.module)
    units = [found for module in root.modules() if (found := unit_of(module)) is not None]
    _check(root, units)
    mesh = units[0].settings.mesh
    schedule = Schedule(mesh, units, units[0].settings.prefetch)
    layouts = {u: Layout.plan([(p.name, p.shape) for p in u.parameters], mesh.size) for u in units}
    _check_same_on_all_ranks(schedule, units, layouts)
    _compile_once(schedule)
    for u in units:
        u.reshard_after_forward = _reshards(u, is_root=u is units[0])
    _make_arenas(schedule, units, layouts)
    for u in units:
        _make_shard(schedule, u, layouts[u])
    # A rank may read another's shard as soon as it gathers: all must be filled.
    schedule.control.barrier(stream=schedule.compute)


def _compile_once(schedule: Schedule) -> None:
    """One rank of each node compiles the kernels; the others then find them in the cache."""
    world = worlds.current()
    if world.kind == "mpi":
        if world.local_rank == 0:
            schedule.device.warm_up()
        schedule.control.barrier(stream=schedule.compute)


def _outermost(module: Module) -> Module:
    found = module
    while (module := module.parent) is not None:
        if unit_of(module) is not None:
            found = module
    return found


def _reshards(unit: Unit, is_root: bool) -> bool:
    """The outermost unit stays gathered from forward to backward, which needs it at once, unless told."""
    asked = unit.settings.reshard_after_forward
    return asked if asked is not None else unit.settings.strategy.reshard_after_forward and not is_root


def _make_arenas(schedule: Schedule, units: list[Unit], layouts: dict[Unit, Layout]) -> None:
    """Memory for gathered parameters and for full gradients.

    Units that come and go one after the other share prefetch + 1 slots. A unit that stays gathered while
    others are (it contains them, or is kept for backward) has a slot of its own. Where the ranks of a node
    share memory, a gathered unit *is* its shards, side by side in one buffer, and every unit has that.
    """
    device, gather, reduce = schedule.device, schedule.gather, schedule.reduce
    passing = [u for u in units if u.parameters and u.reshard_after_forward and not _contains_units(u)]
    largest = max((layouts[u].total for u in passing), default=0)
    dtype = units[0].dtype
    pooled: dict[str, Arena] = {}
    if passing:
        make_gradient = partial(reduce.allocate, largest, dtype, shared=False)
        pooled["gradients"] = Arena(device, make_gradient, min(GRADIENT_SLOTS, len(passing)))
        if not gather.shares_memory:
            make_gathered = partial(gather.allocate, largest, dtype, shared=True)
            pooled["parameters"] = Arena(device, make_gathered, min(schedule.prefetch + 1, len(passing)))
    for u in units:
        total = layouts[u].total
        if u in passing and "parameters" in pooled:
            u.parameter_arena = pooled["parameters"]
        else:
            u.parameter_arena = Arena(device, partial(gather.allocate, total, dtype, shared=True), 1)
        if u in passing:
            u.gradient_arena = pooled["gradients"]
        elif u.trainable:
            u.gradient_arena = Arena(device, partial(reduce.allocate, total, dtype, shared=False), 1)


def _make_shard(schedule: Schedule, unit: Unit, layout: Layout) -> None:
    """This rank's part of the parameters: inside the gathered buffer where ranks share it, else apart."""
    unit.shard_in_slot = schedule.gather.shares_memory
    if unit.shard_in_slot:
        start, stop = layout.shard_range(schedule.rank)
        shard = unit.parameter_arena.slots[0].array[start:stop]
    else:
        shard = schedule.device.buffer(layout.shard_size, unit.dtype)
    reduced = schedule.device.buffer(layout.shard_size, unit.dtype) if unit.trainable else None
    unit.build(schedule, layout, shard, reduced)


def _contains_units(unit: Unit) -> bool:
    below = unit.module.modules()
    next(below)  # the module itself comes first
    return any(unit_of(module) is not None for module in below)


def _check(root: Module, units: list[Unit]) -> None:
    for u in units:
        if u.built:
            raise RuntimeError(
                f"fully_shard: unit {u.label} was used before the model around it was sharded; call "
                "fully_shard on the outermost module before the optimizer is made and the first forward runs"
            )
        if u.settings.mesh is not units[0].settings.mesh:
            raise ValueError(f"fully_shard: unit {u.label} has another mesh than {units[0].label}")
    dtypes = {u.dtype for u in units if u.parameters}
    if len(dtypes) > 1:
        raise ValueError(
            f"fully_shard: parameters of one model must have one dtype, found {sorted(map(str, dtypes))}"
        )
    elements, ranks = sum(p.size for u in units for p in u.parameters), units[0].settings.mesh.size
    if elements < ranks:
        raise ValueError(
            f"fully_shard: the model has {elements} parameter elements, too few for {ranks} ranks"
        )
    owners = {id(p): u for u in units for p in u.parameters}
    _check_reachable(root, [], owners)


def _check_reachable(module: Module, around: list[Unit], owners: dict[int, Unit]) -> None:
    """A parameter must belong to a unit that is gathered whenever the module that uses it runs."""
    unit = unit_of(module)
    around = [*around, unit] if unit is not None else around
    for name, parameter in module._parameters.items():
        owner = owners.get(id(parameter))
        if owner is not None and owner not in around:
            raise ValueError(
                f"fully_shard: parameter {parameter.name!r} of unit {owner.label} is tied to "
                f"{module.name + '.' + name!r}, outside that unit; leave both to a unit that contains them"
            )
    for child in module.children():
        _check_reachable(child, around, owners)


def _check_same_on_all_ranks(schedule: Schedule, units: list[Unit], layouts: dict[Unit, Layout]) -> None:
    """Ranks whose models, seeds or settings differ would exchange nonsense; say so instead."""
    described = [
        (
            u.label,
            layouts[u].entries,
            [p.seed for p in u.parameters],
            u.settings.strategy,
            u.settings.prefetch,
        )
        for u in units
    ]
    checksums = np.zeros(schedule.mesh.size, np.int64)
    checksums[schedule.rank] = zlib.crc32(repr(described).encode())
    schedule.control.all_gather(checksums, stream=schedule.compute)
    if (checksums != checksums[0]).any():
        differing = np.flatnonzero(checksums != checksums[0]).tolist()
        raise ValueError(
            f"fully_shard: ranks {differing} have another model, seed or sharding than rank 0 "
            f"(rank {schedule.rank}: {len(units)} units, seed {described[0][2][:1]})"
        )
