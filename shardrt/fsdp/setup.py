"""Builds the schedule of a model: finds its units, plans memory, makes this rank's shards.

Runs once, when the optimizer, the first forward or a state dict first needs the parameters. It can't run
earlier: until then more calls of fully_shard may follow. Now the outermost unit is known, and with it the
full name of every parameter.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from shardrt.comm.protocol import Communicator
from shardrt.device import Device
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp import buffers, composition
from shardrt.fsdp.boundary import unit_of
from shardrt.fsdp.buffers import PlanInputs, Spec, Specs
from shardrt.fsdp.checks import GROUP_CHECKS, RANK_CHECKS, check_mesh, check_options, check_reachable
from shardrt.fsdp.group import GroupMemory, ParameterGroup, UnbuiltGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.process_groups import ProcessGroups, shape_of
from shardrt.fsdp.roles import ROLES, gradient_roles
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.unit import Unit, root_of
from shardrt.fsdp.whole_gradient import path_of
from shardrt.nn.module import Module, caller_of, stages_of

__all__ = ["units_below"]

Array = Any
# Of options: called with layouts, process groups and inputs of a plan, before its buffers are allocated.
BEFORE_ALLOCATION: list[
    Callable[[dict[ParameterGroup, Layout], dict[ParameterGroup, ProcessGroups], PlanInputs], None]
] = []
# Of options: whether a module needs all of its units gathered at the same time, as a recomputed one does.
GATHERED_TOGETHER: list[Callable[[Module], bool]] = []


def units_below(*modules: Module) -> list[Unit]:
    """The units of `modules`, of their pipeline stages and of all modules below: outer first, each once."""
    found = (unit_of(below) for module in modules for below in (*stages_of(module), *module.modules()))
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def units_for(call: str, module: Module) -> list[Unit]:
    """units_below(module). Raises ValueError, which names the call, if there is none."""
    found = units_below(module)
    if not found:
        raise ValueError(f"{call}: {type(module).__name__} has no sharded unit; call fully_shard first")
    return found


def units(module: Module) -> list[Unit]:
    """The units of `module` and of all modules below it, outer units first. Builds the model. Collective.

    Raises:
        ValueError: if there is no unit.
    """
    found = units_for("units", module)
    for unit in found:
        unit.built()
    return found


def build(unit: Unit) -> None:
    """Build the schedule of the outermost unit above `unit`, with all units below it. Collective.

    Raises ValueError for units that do not fit together (meshes, tied parameters) or that differ between
    ranks. Raises RuntimeError if a unit was used before the model around it was sharded.
    """
    units = arranged(unit)
    layouts = lay_out(units)
    mesh = composition.active.mesh_of(units)
    schedule = Schedule(mesh, units, prefetch_of(units), _streams(units), make_gradient_slots)
    for check in RANK_CHECKS:
        check(schedule, units)
    ranks_of = process_groups_of(units)
    for check in GROUP_CHECKS:
        check(units, ranks_of.values())
    inputs = plan_inputs(units, ranks_of)
    specs = buffers.plan(units, layouts, inputs)
    for prepare in BEFORE_ALLOCATION:
        prepare(layouts, ranks_of, inputs)
    # Arenas come before shards: where ranks share memory, a shard is a part of its arena's slot.
    arenas = _make_arenas(
        specs, ranks_of, inputs.device, [name for name, role in ROLES.items() if role.built]
    )
    for u in units:
        built = [
            _built(group, layouts[group], ranks_of[group], arenas[group], specs, inputs) for group in u.groups
        ]
        u.runs_under(schedule, built)
    # Where ranks share memory, a gather reads the other ranks' shards: every rank must have filled its own.
    schedule.control.barrier(stream=schedule.streams.compute)


def arranged(unit: Unit) -> list[Unit]:
    """The outermost unit above `unit`, then all units below it, checked and with `ancestors` set."""
    module = unit.modules[0]
    while module is not None:
        unit = unit_of(module) or unit
        module = caller_of(module)
    units = units_below(*unit.modules)
    _check(units)
    _arrange(units)
    return units


def _arrange(units: list[Unit]) -> None:
    """Set for every unit which units contain it and how long its parameters stay gathered."""
    below = {unit: {id(m) for top in unit.modules for m in top.modules()} for unit in units}
    for unit in units:
        modules = [id(module) for module in unit.modules]
        unit.ancestors = frozenset(
            other for other in units if other is not unit and any(i in below[other] for i in modules)
        )
        rules = unit.settings.strategy.rules
        asked = unit.settings.reshard_after_forward
        # By default the outermost unit stays gathered from forward to backward: backward begins with it. The
        # units of a pipeline stage stay gathered until the optimizer step: every micro-batch uses them.
        staged = asked is None and any(parameter.pipeline is not None for parameter in unit.parameters)
        kept = rules.keep_after_forward or unit is root_of(units) or staged
        unit.reshard_after_forward = not kept if asked is None else asked
        unit.reshard_after_backward = not (rules.keep_after_backward or staged)


def prefetch_of(units: list[Unit]) -> int:
    """How many units are gathered ahead."""
    return 1 if root_of(units).settings.prefetch is None else root_of(units).settings.prefetch


def lay_out(units: list[Unit]) -> dict[ParameterGroup, Layout]:
    """Group -> where its parameters lie in the flat buffer."""
    layouts = {}
    for unit in units:
        for group in unit.groups:
            shards, copies = shape_of(*unit.settings.shard_spec, composition.active.terms(group.key.partial))
            layouts[group] = Layout.plan([(p.name, p.shape) for p in group.parameters], shards, copies)
    return layouts


def process_groups_of(units: list[Unit]) -> dict[ParameterGroup, ProcessGroups]:
    """Group -> its process groups; groups that are sharded alike have the same object. Collective."""
    made: dict[tuple, ProcessGroups] = {}
    found = {}
    for group in (group for unit in units for group in unit.groups):
        alike = (*group.settings.shard_spec, group.key.split_axes, group.key.partial)
        if alike not in made:
            made[alike] = composition.active.process_groups(units, *alike)
        found[group] = made[alike]
    return found


def plan_inputs(
    units: list[Unit], ranks_of: dict[ParameterGroup, ProcessGroups], no_sync: bool = False
) -> PlanInputs:
    """The inputs of buffers.plan besides the units and layouts."""
    gathers = [ranks.gather for group, ranks in ranks_of.items() if group.settings.shard_spec[1] != "none"]
    shared = all(gather.shares_memory for gather in gathers)
    tops = root_of(units).modules
    below = (module for top in tops for module in top.modules())
    at_once = [module for module in below if any(needed(module) for needed in GATHERED_TOGETHER)]
    return PlanInputs(
        device=root_of(units).settings.mesh.device,
        prefetch=prefetch_of(units),
        node_ranks=root_of(units).settings.mesh.world.local_size if shared else 0,
        together=max((len(units_below(module)) for module in at_once), default=1),
        no_sync=no_sync or any(unit.needs_own_slots for unit in units),
    )


def make_gradient_slots(units: list[Unit], own_slots: bool) -> None:
    """Allocate the slots for full gradients of all units of a schedule. Collective.

    The schedule calls this when the first forward that needs slots begins. Only then is it known whether
    gradients are accumulated, which takes a slot for each group. If that changes, or the set of trained
    parameters does, the schedule calls again, and all memory of reductions that no longer fits is replaced.
    """
    check_options(units)
    layouts = {group: group.layout for unit in units for group in unit.groups}
    ranks_of = {group: group.ranks for group in layouts}
    inputs = plan_inputs(units, ranks_of, no_sync=own_slots)
    specs = buffers.plan(units, layouts, inputs)
    replaced = [role for role in gradient_roles() if role == "gradients" or not _fits(role, specs)]
    for group in layouts:
        for role in replaced:
            group.arenas.pop(role, None)
        _make_sums(group, specs[group], inputs)
    for prepare in BEFORE_ALLOCATION:
        prepare(layouts, ranks_of, inputs)
    for group, arenas in _make_arenas(specs, ranks_of, inputs.device, replaced).items():
        group.arenas.update(arenas)


def _fits(role: str, specs: Specs) -> bool:
    wanted = {group: by_role[role].count for group, by_role in specs.items() if role in by_role}
    found = {group: group.arenas[role].slots[0].array.size for group in specs if role in group.arenas}
    return wanted == found


def _streams(units: list[Unit]) -> Streams:
    mesh = root_of(units).settings.mesh
    here, gather, reduce = mesh.device, mesh.stream("gather"), mesh.stream("reduce")
    upload = download = None
    if any(unit.settings.offloaded.parameters or unit.settings.offloaded.gradients for unit in units):
        upload, download = here.new_stream("upload"), here.new_stream("download")
    return Streams(here, here.current_stream, gather, reduce, upload or gather, download or reduce)


def _make_arenas(
    specs: Specs, ranks_of: dict[ParameterGroup, ProcessGroups], here: Device, roles: Iterable[str]
) -> dict[ParameterGroup, dict[str, Arena]]:
    """Map group to role to arena, for these roles; one arena for each Spec. Collective."""
    made: dict[Spec, Arena] = {}
    found: dict[ParameterGroup, dict[str, Arena]] = {group: {} for group in specs}
    for group, by_role in specs.items():
        for role, spec in by_role.items():
            if role in roles:
                if spec not in made:
                    made[spec] = _arena(group, ranks_of[group], role, spec, here)
                found[group][role] = made[spec]
    return found


def _arena(group: ParameterGroup, ranks: ProcessGroups, role: str, spec: Spec, here: Device) -> Arena:
    """Make the arena of a Spec. Collective where ranks share memory."""
    maker = ROLES[role].maker(ranks)
    if maker is None:
        allocate = partial(here.buffer, spec.count, spec.dtype)
    else:
        allocate = partial(_allocated, maker, spec, here, shared=spec.shared_by > 1)
    arena = Arena(here, allocate, spec.slots, name=ROLES[role].category)
    for slot in arena.slots:  # a gathered slot may be the shard
        here.set_tag(slot.array, ROLES[spec.role].category, group.label if spec.role == "shard" else "")
    return arena


def _allocated(maker: Communicator, spec: Spec, here: Device, *, shared: bool) -> Array:
    """A buffer from the communicator that sends it; on a dry-run device, which sends nothing, a plain one."""
    if here.dry_run:
        return here.buffer(spec.count, spec.dtype)
    return maker.allocate(spec.count, spec.dtype, shared=shared)


def _built(
    group: UnbuiltGroup,
    layout: Layout,
    ranks: ProcessGroups,
    arenas: dict[str, Arena],
    specs: Specs,
    inputs: PlanInputs,
) -> ParameterGroup:
    """The group with its memory. The shard is a part of the gathered slot if the plan has no Spec for it."""
    needed, gathered = specs[group], arenas["gathered"].slots[0].array
    part = gathered[slice(*layout.shard_range(ranks.rank))]
    shard_in_slot = "shard" not in needed
    memory = GroupMemory(
        layout,
        ranks,
        inputs.device,
        arenas,
        part if shard_in_slot else _buffer(group, ranks, needed["shard"], inputs),
        shard_in_slot=shard_in_slot,
        slot_shared=needed["gathered"].shared_by > 1,
        own_slot=sum(needed["gathered"] is roles["gathered"] for roles in specs.values()) == 1,
    )
    built = ParameterGroup(group, memory)
    _make_sums(built, needed, inputs)
    return built


def _make_sums(group: ParameterGroup, specs: dict[str, Spec], inputs: PlanInputs) -> None:
    """Allocate the sharded gradient and its counts of uses if they are missing; choose the gradient path."""
    summed = group.sharded_gradient
    if group.trainable and not summed.arrays:
        roles = ["reduced"] + ["partial"] * summed.partial_sums
        summed.arrays = [_buffer(group, group.ranks, specs[role], inputs) for role in roles]
        if buffers.summed_in_place(group, group.layout, inputs):
            made = inputs.device.new_event
            summed.slots = [Slot(array, made(), made()) for array in summed.arrays]
    if "used" in specs and summed.uses is None:
        summed.uses = _buffer(group, group.ranks, specs["used"], inputs)
    if group.trainable:
        group.gradient_path = path_of(group, group.layout, specs["gradients"].count)


def _buffer(
    group: ParameterGroup | UnbuiltGroup, ranks: ProcessGroups, spec: Spec, inputs: PlanInputs
) -> np.ndarray:
    maker = ROLES[spec.role].maker(ranks)
    if spec.host:
        array = group.settings.offload.host_buffer(inputs.device, spec.count, spec.dtype)
    elif maker is None:
        array = inputs.device.buffer(spec.count, spec.dtype)
    else:
        array = _allocated(maker, spec, inputs.device, shared=False)
    return inputs.device.set_tag(array, ROLES[spec.role].category, group.label)


def _check(units: list[Unit]) -> None:
    """Raise as `build` says if units can't train together; set the labels of their groups."""
    first = root_of(units)
    for u in units:
        if u.schedule is not None:
            raise RuntimeError(
                f"fully_shard: unit {u.label} was used before the model around it was sharded; call "
                "fully_shard on the outermost module before the optimizer is made and the first forward runs"
            )
        check_mesh(u, first)
        if u.settings.prefetch not in (None, prefetch_of(units)):
            raise ValueError(
                f"fully_shard: unit {u.label} has prefetch={u.settings.prefetch}, the outermost unit has "
                f"{prefetch_of(units)}; give all units of a model the same number"
            )
        for group in u.groups:
            group.label = group.tag = f"{u.label} ({group.key})" if len(u.groups) > 1 else u.label
            group.train(group.to_train(bool(u.pending)), u.choices.find_unused)
    check_options(units)
    owners = {id(p): u for u in units for p in u.parameters}
    for module in first.modules:
        check_reachable(module, [], owners)
