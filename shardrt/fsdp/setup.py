"""Builds the schedule of a model: finds its units, checks them, lays out memory, makes this rank's shards.

Runs once, when something first needs the parameters: the optimizer, the first forward, or a state dict. Only
then is it known which unit is the outermost, and with it the full name of every parameter.
"""

import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes
from shardrt.comm import talk
from shardrt.comm.digits import size_of, union, without
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.device import Device, host
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp import buffers, collectives
from shardrt.fsdp.boundary import UnitBoundary
from shardrt.fsdp.buffers import Facts, Spec, Specs
from shardrt.fsdp.group import GRADIENT_ROLES, ParameterGroup, Streams
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.process_groups import Axes, ProcessGroups, shape_of
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.unit import Unit, data_of
from shardrt.nn.module import Module, caller_of, stages_of
from shardrt.nn.moe import Router
from shardrt.nn.parameter import Parameter
from shardrt.nn.share import PARTIAL
from shardrt.nn.storage import LocalStorage, Rounded
from shardrt.recompute import Recomputation

Array = Any


def unit_of(module: Module) -> Unit | None:
    """The unit that fully_shard made of this very module, if it did."""
    boundary = module.around(UnitBoundary)
    return None if boundary is None else boundary.unit


def units_below(*modules: Module) -> list[Unit]:
    """The units of `modules` and below, and of stages, outer ones first, each once."""
    found = (unit_of(below) for module in modules for below in (*stages_of(module), *module.modules()))
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def units_for(call: str, module: Module) -> list[Unit]:
    """As units_below. Raises ValueError, naming the call, if there is none."""
    found = units_below(module)
    if not found:
        raise ValueError(f"{call}: {type(module).__name__} has no sharded unit; call fully_shard first")
    return found


def build(unit: Unit) -> None:
    """Build the schedule of the outermost unit above `unit`, with all units below it.

    Raises ValueError for units that do not fit together (meshes, tied parameters) or that differ between
    ranks; RuntimeError if a part was used before the whole was sharded.
    """
    units = arranged(unit)
    layouts = lay_out(units)
    schedule = Schedule(mesh_of(units), units, prefetch_of(units), _streams(units), make_gradient_slots)
    # First what ranks may differ in: what follows are collectives that would hang, or exchange nonsense.
    _check_same_on_all_ranks(schedule, units)
    data = units[0].settings.mesh
    for mesh in dict.fromkeys(unit.settings.mesh for unit in units):
        _check_same_values(
            mesh.communicator("control"), [u for u in units if u.settings.mesh is mesh], cut=True
        )
    if schedule.mesh is not data:
        _check_same_values(schedule.control, units, cut=False)
    _compile_once(schedule)
    ranks_of = process_groups_of(units)
    _check_sums(units[0], ranks_of.values())
    facts = facts_of(units, ranks_of)
    specs = buffers.plan(units, layouts, facts)
    # The arenas before the shards: where ranks share memory, a shard is a part of its arena's slot.
    for u in units:
        for group in u.groups:
            group.layout, group.ranks = layouts[group], ranks_of[group]
    _reserve(layouts, facts)
    _make_arenas(specs, facts.device, _AT_ONCE)
    for u in units:
        for group in u.groups:
            _make_shard(group, specs, facts)
        u.runs_under(schedule)
    # A rank may read another's shard as soon as it gathers: all must be filled.
    schedule.control.barrier(stream=schedule.streams.compute)


def connect(units: list[Unit]) -> dict[ParameterGroup, ProcessGroups]:
    """Make all communicators that a model of these units needs; gives those of the groups. Collective."""
    mesh = mesh_of(units)
    for each in dict.fromkeys((mesh, *(unit.settings.mesh for unit in units))):
        each.communicator("control")
    if mesh.size > 1:
        mesh.communicator("used")
    return process_groups_of(units)


def arranged(unit: Unit) -> list[Unit]:
    """The outermost unit above `unit` and all units below that, checked; each knows which contain it."""
    module = unit.modules[0]
    while module is not None:
        unit = unit_of(module) or unit
        module = caller_of(module)
    units = units_below(*unit.modules)
    _check(units)
    _arrange(units)
    return units


def _arrange(units: list[Unit]) -> None:
    """Tell every unit which units contain it, and until when its parameters stay gathered."""
    below = {unit: {id(m) for top in unit.modules for m in top.modules()} for unit in units}
    for unit in units:
        own = [id(module) for module in unit.modules]
        unit.ancestors = frozenset(
            other for other in units if other is not unit and any(i in below[other] for i in own)
        )
        rules = unit.settings.strategy.rules
        asked = unit.settings.reshard_after_forward
        # By default the outermost unit stays gathered from forward to backward, which needs it at once, and
        # those of a pipeline's stage until the optimizer has changed them: all micro-batches need them.
        staged = asked is None and any(parameter.place is not None for parameter in unit.parameters)
        kept = rules.keep_after_forward or unit is units[0] or staged
        unit.reshard_after_forward = not kept if asked is None else asked
        unit.reshard_after_backward = not (rules.keep_after_backward or staged)


def prefetch_of(units: list[Unit]) -> int:
    """How many units are gathered ahead."""
    return 1 if units[0].settings.prefetch is None else units[0].settings.prefetch


def lay_out(units: list[Unit]) -> dict[ParameterGroup, Layout]:
    """Where the parameters of every group lie."""
    layouts = {}
    for unit in units:
        for group in unit.groups:
            shards, copies = shape_of(*unit.settings.cut, group.key.partial)
            layouts[group] = Layout.plan([(p.name, p.shape) for p in group.parameters], shards, copies)
    return layouts


def mesh_of(units: list[Unit]) -> DeviceMesh:
    """All ranks that train the model: those with parts of the data, and with parts of its modules."""
    across, mesh = _across(units), units[0].settings.mesh
    return mesh.widened(across) if across else mesh


def _across(units: list[Unit]) -> Axes:
    """The axes of the mesh along which modules are cut."""
    shares = [parameter.share for unit in units for parameter in unit.parameters if parameter.share]
    return union(*{share.axes for share in shares})


def process_groups_of(units: list[Unit]) -> dict[ParameterGroup, ProcessGroups]:
    """The process groups of every group, the same object for those that are cut alike. Collective."""
    across, made, found = _across(units), {}, {}
    for group in (group for unit in units for group in unit.groups):
        cut = (*group.settings.cut, group.key.cut, group.key.partial)
        if cut not in made:
            made[cut] = ProcessGroups.of(*cut, across)
        found[group] = made[cut]
    return found


def facts_of(
    units: list[Unit],
    ranks_of: dict[ParameterGroup, ProcessGroups],
    no_sync: bool = False,
) -> Facts:
    """What the plan of the buffers depends on."""
    gathers = [ranks.gather for group, ranks in ranks_of.items() if group.settings.cut[1] != "none"]
    shared = all(gather.shares_memory for gather in gathers)
    tops = units[0].modules
    recomputed = [module for top in tops for module in top.modules() if module.around(Recomputation)]
    return Facts(
        device=units[0].settings.mesh.device,
        prefetch=prefetch_of(units),
        sharers=units[0].settings.mesh.world.local_size if shared else 0,
        together=max((len(units_below(module)) for module in recomputed), default=1),
        no_sync=no_sync or any(unit.accumulates for unit in units),
    )


def make_gradient_slots(units: list[Unit], accumulates: bool) -> None:
    """Allocate the slots for full gradients of all units of a schedule. Collective.

    When the first forward that needs them begins, not before: then it is known whether gradients are
    accumulated, which takes a slot for each group. If that changes later, or what is trained, they are made
    anew, with all else that reductions need.
    """
    _check_world_invariant(units)
    layouts = {group: group.layout for unit in units for group in unit.groups}
    facts = facts_of(units, process_groups_of(units), no_sync=accumulates)
    specs = buffers.plan(units, layouts, facts)
    anew = [role for role in GRADIENT_ROLES if role == "gradients" or not _fits(role, specs)]
    for group in layouts:
        for role in anew:
            group.arenas.pop(role, None)
        _make_sums(group, specs[group], facts)
    _reserve(layouts, facts)
    _make_arenas(specs, facts.device, anew)


def _reserve(layouts: dict[ParameterGroup, Layout], facts: Facts) -> None:
    """Have communicators take what they need for their own use."""
    if facts.device.alone:
        return
    needed = buffers.scratch(layouts, {group: group.ranks for group in layouts}, facts)
    for communicator, (on_device, on_host) in needed.items():
        communicator.reserve(on_device, on_host)


def _fits(role: str, specs: Specs) -> bool:
    """Whether the arenas of this role are those that the plan wants."""
    wanted = {group: by_role[role].count for group, by_role in specs.items() if role in by_role}
    found = {group: group.arenas[role].slots[0].array.size for group in specs if role in group.arenas}
    return wanted == found


_AT_ONCE = ("gathered", "wire", "reduce_wire", "upload", "download")  # shards have no arena


def _streams(units: list[Unit]) -> Streams:
    mesh = units[0].settings.mesh
    here, gather, reduce = mesh.device, mesh.stream("gather"), mesh.stream("reduce")
    upload = download = None
    if any(unit.settings.placement.parameters or unit.settings.placement.gradients for unit in units):
        upload, download = here.new_stream("upload"), here.new_stream("download")
    return Streams(here, here.current_stream, gather, reduce, upload or gather, download or reduce)


def _compile_once(schedule: Schedule) -> None:
    """One rank of each node compiles the kernels; the others then find them in the cache."""
    world = schedule.mesh.world
    if world.kind == "mpi":
        if world.local_rank == 0:
            schedule.streams.device.warm_up()
        schedule.control.barrier(stream=schedule.streams.compute)


def _make_arenas(specs: Specs, here: Device, roles: Iterable[str]) -> None:
    """The arenas of these roles, one for each Spec. Collective."""
    made: dict[Spec, Arena] = {}
    for group, by_role in specs.items():
        for role, spec in by_role.items():
            if role in roles:
                if spec not in made:
                    made[spec] = _arena(group, role, spec, here)
                group.arenas[role] = made[spec]


def _arena(group: ParameterGroup, role: str, spec: Spec, here: Device) -> Arena:
    """The arena of a Spec. Collective where ranks share memory."""
    maker = buffers.maker_of(role, group.ranks)
    if maker is None:
        allocate = partial(here.buffer, spec.count, spec.dtype)
    else:
        shared = role in ("gathered", "wire") and spec.role == "shard" and group.ranks.size > 1
        allocate = partial(_allocated, maker, spec, here, shared=shared)
    arena = Arena(here, allocate, spec.slots, name=buffers.ROLES[role])
    for slot in arena.slots:  # a gathered slot may be the shard
        here.called(slot.array, buffers.ROLES[spec.role])
    return arena


def _allocated(maker: Communicator, spec: Spec, here: Device, *, shared: bool) -> Array:
    """A buffer by who sends it; on a device that is alone nothing is sent."""
    if here.alone:
        return here.buffer(spec.count, spec.dtype)
    return maker.allocate(spec.count, spec.dtype, shared=shared)


def _make_shard(group: ParameterGroup, specs: Specs, facts: Facts) -> None:
    """This rank's part of the parameters: inside the gathered buffer where ranks share it, else apart."""
    own = specs[group]
    start, stop = group.layout.shard_range(group.ranks.rank)
    in_slot = group.arenas["gathered"].slots[0].array[start:stop]
    group.shard_in_slot = "shard" not in own
    group.take_over(facts.device, in_slot if group.shard_in_slot else _buffer(group, own["shard"], facts))
    if buffers.keeps_rounded(group, specs):
        group.rounded = Rounded(in_slot, group.key.param)
    group.transfer = collectives.transfer_of(group)
    _make_sums(group, own, facts)


def _make_sums(group: ParameterGroup, specs: dict[str, Spec], facts: Facts) -> None:
    """Memory for the sharded gradient, where there is none yet, and what belongs to it."""
    if group.trainable and not group.sum.buffers:
        group.sum.buffers = [_buffer(group, specs["reduced"], facts)]
        if "partial" in specs:
            more = range(specs["partial"].slots)
            group.sum.buffers += [_buffer(group, specs["partial"], facts) for _ in more]
        if buffers.summed_in_place(group, group.layout, facts):
            made = facts.device.new_event
            group.sum.slots = [Slot(array, made(), made()) for array in group.sum.buffers]
    if "used" in specs and group.sum.uses is None:
        group.sum.uses = _buffer(group, specs["used"], facts)
    group.rows = buffers.rows_of(group, group.layout)


def _buffer(group: ParameterGroup, spec: Spec, facts: Facts) -> np.ndarray:
    maker = buffers.maker_of(spec.role, group.ranks)
    if spec.host:
        array = host.buffer(facts.device, spec.count, spec.dtype, group.placement.directory)
    elif maker is None:
        array = facts.device.buffer(spec.count, spec.dtype)
    else:
        array = _allocated(maker, spec, facts.device, shared=False)
    return facts.device.called(array, buffers.ROLES[spec.role])


def _check(units: list[Unit]) -> None:
    """Raise for units that cannot train together; see build."""
    first = units[0]
    for u in units:
        if u.schedule is not None:
            raise RuntimeError(
                f"fully_shard: unit {u.label} was used before the model around it was sharded; call "
                "fully_shard on the outermost module before the optimizer is made and the first forward runs"
            )
        _check_mesh(u, first)
        if u.settings.prefetch not in (None, prefetch_of(units)):
            raise ValueError(
                f"fully_shard: unit {u.label} has prefetch={u.settings.prefetch}, the outermost one "
                f"{prefetch_of(units)}; it is one number for the whole model"
            )
        for group in u.groups:
            alike = f" ({group.key})"
            group.label = group.called = u.label + alike * (len(u.groups) > 1)
            group.train(group.to_train(bool(u.pending)), u.choices.find_unused)
    _check_world_invariant(units)
    owners = {id(p): u for u in units for p in u.parameters}
    for module in first.modules:
        _check_reachable(module, [], owners)


def _check_mesh(unit: Unit, first: Unit) -> None:
    """Raise unless both are on the same ranks, over all of which their gradients are then summed."""
    own, theirs = unit.settings.mesh, first.settings.mesh
    if own.root is not theirs.root:
        raise ValueError(f"fully_shard: unit {unit.label} has another mesh than {first.label}")
    alike = own is theirs or sorted(own.ranks.ravel()) == sorted(theirs.ranks.ravel())
    for parameter in unit.parameters if unit is not first else ():
        share = parameter.share
        apart = share is not None and (share.own_data or share.kind == PARTIAL)
        if not (data_of(share, own) == without(theirs.axes, share.one_loss) if apart else alike):
            beside = f" beside {share.mesh!r}" if apart else ""
            raise ValueError(
                f"fully_shard: unit {unit.label} is on {own!r}{beside}, {first.label} on {theirs!r}; "
                "gradients would be summed over other ranks: take axes of the mesh that together have the "
                "same ranks"
            )


def _check_world_invariant(units: list[Unit]) -> None:
    """All units add up by one tree, or none does; with a tree, every gradient belongs to a unit."""
    first = units[0]
    for u in units:
        if u.micro_batches != first.micro_batches:
            raise ValueError(
                f"set_world_invariant: unit {u.label} has micro_batches {u.micro_batches}, {first.label} "
                f"{first.micro_batches}; call it on the outermost module, after fully_shard"
            )
        if u.micro_batches is not None and u.settings.placement.gradients:
            raise ValueError(
                f"set_world_invariant: unit {u.label} has its gradients on the host, where they are not "
                "added up by a tree; give CPUOffloadPolicy(gradients=False)"
            )
        if u.micro_batches is not None and any(p.share and p.share.partial for p in u.parameters):
            raise ValueError(
                f"set_world_invariant: gradients of unit {u.label} are summed over another axis as well, and "
                "not by the tree of micro-batches; leave adapters and TokenParallel out, and with "
                "SequenceParallel call set_tensor_invariant"
            )
        if u.micro_batches is not None:
            _check_experts(u, first)
        trained = {group.key.dtype for group in u.groups if group.trainable}
        if u.micro_batches is not None and trained - {"float32"}:
            raise ValueError(f"set_world_invariant: trained parameters of unit {u.label} must be float32")
    parameters = [p for module in first.modules for p in module.parameters() if p.requires_grad]
    alone = [p for p in parameters if isinstance(p.storage, LocalStorage)]
    if first.micro_batches is not None and alone:
        raise ValueError(
            f"set_world_invariant: parameter {alone[0].name!r} is ignored, so its gradient is each rank's "
            "own; freeze it, or let it be sharded"
        )


def _check_experts(unit: Unit, first: Unit) -> None:
    """With a tree of micro-batches, their ranks add up what is the beginning of it."""
    for group in unit.groups:
        apart = [p.share.mesh.ranks for p in group.parameters if p.share is not None and p.share.own_data]
        places = np.searchsorted(first.settings.mesh.ranks.ravel(), apart[0].ravel()) if apart else ()
        if (np.diff(places) != 1).any():
            raise ValueError(
                f"set_world_invariant: ranks with experts of unit {unit.label} are no neighbours among those "
                "of the data; take an axis of mesh.fold"
            )
        if apart and group.key.reduce in dtypes.LOW:
            raise ValueError(
                f"set_world_invariant: gradients of the experts of unit {unit.label} are added before they "
                'are rounded to 16 bits; give MixedPrecisionPolicy(reduce_dtype="float32")'
            )
    data, alone = first.settings.mesh.axes, sharing_of(first.modules[0])
    for router in (m for top in unit.modules for m in top.modules() if isinstance(m, Router)):
        along = () if router.balance_mesh is None else router.balance_mesh.axes
        if size_of(along) > size_of(without(along, data)) * alone:
            raise ValueError(
                "set_world_invariant: nn.balance_over makes a balance loss of the micro-batches that all "
                "ranks have at one time; leave it out"
            )


def sharing_of(module: Module) -> int:
    """How many ranks of the data have parts of the same samples."""
    with autograd.enable_grad():
        block = module.batch_block
    return 1 if block is None else block.together


def _check_sums(first: Unit, used: Iterable[ProcessGroups]) -> None:
    """Sums that are part of one tree must be made by it."""
    reducers = [made for ranks in used for made in (ranks.reduce, ranks.copies) if made]
    if first.micro_batches is not None and any(made.reduction != "tree" for made in reducers):
        raise ValueError(
            "set_world_invariant: NCCL adds in an order that depends on the number of ranks; make the mesh "
            "by init_device_mesh(..., reduction='tree')"
        )


def _check_reachable(module: Module, around: list[Unit], owners: dict[int, Unit]) -> None:
    """A parameter must belong to a unit that is gathered whenever the module that uses it runs."""
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
        _check_reachable(child, around, owners)


def _check_same_on_all_ranks(schedule: Schedule, units: list[Unit]) -> None:
    """Ranks whose models, seeds or settings differ would exchange nonsense; say so instead."""
    described = [
        (
            u.label,
            (u.settings.strategy, u.settings.by_rank),
            (u.reshard_after_forward, u.reshard_after_backward, u.choices.divide_factor, u.micro_batches),
            (u.choices.find_unused, [sorted(group.trained) for group in u.groups]),
            [module.around(Recomputation) is not None for top in u.modules for module in top.modules()],
            u.settings.placement.parameters,
            u.settings.placement.gradients,
            [(g.key, [(p.name, p.whole_shape, p.seed) for p in g.parameters]) for g in u.groups],
        )
        for u in units
    ]
    described.append((schedule.prefetch,))
    rank, differing = schedule.mesh.rank, talk.agree(schedule.control, described)
    if differing:
        seeds = sorted({p.seed for u in units for p in u.parameters})
        raise ValueError(
            f"fully_shard: ranks {differing} have another model, seed or sharding than rank 0 "
            f"(rank {rank}: {len(units)} units, seeds {seeds})"
        )


def _check_same_values(control: Communicator, units: list[Unit], cut: bool) -> None:
    """Values given before sharding must be the same on every rank: nobody broadcasts them.

    cut: also of parameters whose modules are cut; then over ranks that have the same part of them.
    """
    groups = [group for u in units for group in u.groups if cut or not group.key.cut]
    initial = [pair for group in groups for pair in group.initial()]
    made = bytes(storage.materialised for _, storage in initial)
    if talk.agree(control, made):  # they differ: now each rank needs all the others'
        made = bytes(map(max, *control.talk(made)))
    given = [place for place, there in enumerate(made) if there]
    checksums = [_checksum(*initial[place]) for place in given]
    if not given or not talk.agree(control, checksums):
        return
    everyone = talk.from_all(control, checksums)
    for place, ranks in zip(given, zip(*everyone, strict=True), strict=True):
        if other := [rank for rank, checksum in enumerate(ranks) if checksum != ranks[0]]:
            raise ValueError(
                f"fully_shard: parameter {initial[place][0].name!r} has other values on rank {other[0]} than "
                "on rank 0; give every rank the same before sharding, or let manual_seed make them"
            )


def _checksum(parameter: Parameter, storage: LocalStorage) -> int:
    """Of the parameter's values, which may not have been made on this rank yet."""
    values = device.current().empty((parameter.size,), parameter.dtype)
    storage.give(storage.part_of(parameter), values)
    return zlib.crc32(device.current().to_numpy(values))
