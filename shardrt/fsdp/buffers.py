"""Plans all memory of a model except activations, before any of it is allocated.

`plan` gives a Spec for each role of each group. setup.py allocates exactly these buffers, and memory.py adds
them up. Groups share slots if their units are gathered one after the other. A unit that stays gathered while
other units are (it contains them, or is kept for backward) has a slot of its own.

Where the ranks of a node share memory, the ranks' shards lie next to each other and are the gathered buffer
of a unit. Every unit then has a buffer of its own. Ranks share 16-bit slots, too: each rank rounds its shard
into its part of the slot.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.comm.protocol import Communicator
from shardrt.device import Device
from shardrt.fsdp.gradient_path import PATHS
from shardrt.fsdp.group import GRADIENT_ROLES, ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.unit import Unit
from shardrt.fsdp.whole_gradient import path_of

GRADIENT_SLOTS = 2  # backward fills one slot while the other is reduced
STAGING_SLOTS = 2  # one slot is copied while the other is used


@dataclass(frozen=True, eq=False)
class Spec:
    """`slots` buffers of `count` elements each.

    role: the purpose, see ROLES.
    host: the buffers are in host memory.
    sharers: number of ranks that share the buffers. nbytes counts one rank's part.
    """

    role: str
    count: int
    dtype: Any
    slots: int = 1
    host: bool = False
    sharers: int = 1

    def nbytes(self, maker: Communicator | None) -> int:
        """Bytes per rank. maker: the communicator that allocates the buffers and may round their size up."""
        each = self.count * np.dtype(self.dtype).itemsize
        return (each if maker is None else maker.allocated(each)) * self.slots // self.sharers


ROLES = {
    "shard": "sharded parameters",
    "reduced": "sharded gradients",
    "partial": "partial sums of gradients",
    "gathered": "gathered parameters",
    "gradients": "full gradients",
    "wire": "16-bit parameters on the way",
    "reduce_wire": "16-bit gradients on the way",
    "packed": "packed gradients on the way",
    "used": "which parameters were used",
    "upload": "staging from the host",
    "download": "staging to the host",
}


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of `plan` besides units and layouts."""

    device: Device
    prefetch: int
    sharers: int  # ranks of a node that share the memory of gathered units; 0 if ranks can't share memory
    together: int = 1  # the most units that a recomputed module gathers at once
    no_sync: bool = False  # gradients are accumulated before they are reduced


Specs = dict[ParameterGroup, dict[str, Spec]]


def plan(units: list[Unit], layouts: dict[ParameterGroup, Layout], inputs: PlanInputs) -> Specs:
    """ParameterGroup -> role -> Spec. Groups that share slots have the same Spec object."""
    groups = [group for unit in units for group in unit.groups]
    specs: Specs = {group: {} for group in groups}
    for group in groups:
        _own(group, layouts[group], specs[group], inputs)
    # A unit that contains other units is gathered while they run, so it can't share their slots.
    inner = [unit for unit in units if not contains_units(unit, units)]
    passing = [group for unit in inner if unit.reshard_after_forward for group in unit.groups]
    for members in _alike(g for g in passing if "gathered" not in specs[g]):
        # One slot for the unit that computes and one for each prefetched unit. A recomputed module needs all
        # of its units at once.
        slots = min(max(inputs.prefetch + 1, inputs.together), len(members))
        sharers = sharers_of(members[0], layouts[members[0]], inputs)
        _share(specs, layouts, members, "gathered", _gathered(members[0], inputs), slots, sharers)
    filling = [group for unit in inner for group in unit.groups if group.trainable]
    for members in _alike(g for g in filling if "gradients" not in specs[g]):
        _share(
            specs,
            layouts,
            members,
            "gradients",
            _gradient(members[0], inputs),
            min(GRADIENT_SLOTS, len(members)),
        )
    inside = {(g.key, g.settings.cut): specs[g]["gradients"] for g in filling}
    for group in (g for g in groups if g.trainable and "gradients" not in specs[g]):
        slot = inside.get((group.key, group.settings.cut))
        if slot is not None and _fits_in(group, layouts[group], slot.count, inputs):
            specs[group]["gradients"] = slot
    for group in groups:
        total, sharers = layouts[group].total, sharers_of(group, layouts[group], inputs)
        own = Spec("gathered", total, _gathered(group, inputs), sharers=sharers)
        specs[group].setdefault("gathered", own)
        if group.trainable:
            total = _length("gradients", group, layouts[group])
            specs[group].setdefault("gradients", Spec("gradients", total, _gradient(group, inputs)))
    _transit(specs, layouts, groups, inputs)
    return specs


def have_slots(specs: Specs, slots: dict[tuple[ParameterGroup, str], int]) -> None:
    """Raise the slot counts of specs to those that a step has needed: arenas grow during a step."""
    grown: dict[Spec, Spec] = {}
    for group, by_role in specs.items():
        for role, spec in by_role.items():
            if slots.get((group, role), 0) > spec.slots:
                by_role[role] = grown.setdefault(spec, replace(spec, slots=slots[group, role]))
            elif spec in grown:
                by_role[role] = grown[spec]


def maker_of(role: str, ranks: ProcessGroups) -> Communicator | None:
    """The communicator that sends, and so allocates, the buffers of a role; None: the device allocates."""
    if role in ("gathered", "wire"):
        return ranks.gather
    if role in ("reduced", "partial") and ranks.size == 1:
        return ranks.copies  # backward may write full gradients there, and `copies` sends them from there
    return ranks.reducer if role in ("gradients", "packed", "reduce_wire") else None


@dataclass(frozen=True)
class Call:
    """A collective of a step.

    by: the communicator. nbytes, output: bytes of the buffer and of the output. own: `by` made the buffer.
    """

    by: Communicator
    name: str
    nbytes: int
    output: int = 0
    own: bool = True


def calls_of(
    group: ParameterGroup, layout: Layout, ranks: ProcessGroups, inputs: PlanInputs
) -> Iterator[Call]:
    """The collectives that collectives.py calls for the group in a step."""
    if ranks.size > 1:
        yield Call(ranks.gather, "all_gather", layout.total * dtypes.storage(group.key.param).itemsize)
    if not group.trainable:
        return
    path, exact = path_of(group, layout), _gradient(group, inputs).itemsize
    low = group.key.reduce in dtypes.LOW
    sent = path.sent * (dtypes.storage(group.key.reduce).itemsize if low else exact)
    own = path.kept * exact
    if ranks.size > 1 or ranks.copies is None:
        yield Call(ranks.reduce, "reduce_scatter", sent, own)
        sent = own
    if ranks.copies is not None:
        here = ranks.reducer is ranks.copies
        yield Call(ranks.copies, "reduce_scatter", sent, own // ranks.copies.size, here)
        yield Call(ranks.copies, "all_gather", own, own=here)


def scratch(
    layouts: dict[ParameterGroup, Layout], ranks_of: dict[ParameterGroup, ProcessGroups], inputs: PlanInputs
) -> dict[Communicator, tuple[int, int]]:
    """communicator -> bytes of scratch memory (on the device, on the host) that its calls need."""
    most: dict[Communicator, tuple[int, int]] = {}
    for group, layout in layouts.items():
        for call in calls_of(group, layout, ranks_of[group], inputs):
            needed = call.by.scratch(call.name, call.nbytes, call.output, own=call.own)
            most[call.by] = tuple(map(max, needed, most.get(call.by, (0, 0))))
    return most


def _own(group: ParameterGroup, layout: Layout, roles: dict[str, Spec], inputs: PlanInputs) -> None:
    """Add the buffers that a group does not share with other groups."""
    place, dtype = group.placement, group.key.dtype
    if in_slot(group, layout, inputs):
        roles["gathered"] = Spec("shard", layout.total, dtype, sharers=sharers_of(group, layout, inputs))
    else:
        roles["shard"] = Spec("shard", layout.shard_size, dtype, host=place.parameters)
    computed = _gathered(group, inputs)
    if layout.shards == 1 and not place.parameters and computed.itemsize < np.dtype(dtype).itemsize:
        # An unsharded group: the 16-bit copy stays, and the optimizer writes it.
        roles["gathered"] = Spec("gathered", layout.total, computed)
    if group.trainable:
        roles["reduced"] = Spec("reduced", layout.shard_size, dtype, host=place.gradients)
        partial = group.sharded_gradient.partial_sums
        if partial:
            roles["partial"] = Spec("partial", layout.shard_size, dtype, partial)
        # Full gradients that stay after backward need a slot that no other group uses.
        if inputs.no_sync or group.settings.strategy.rules.keep_gradient:
            total = _length("gradients", group, layout)
            roles["gradients"] = Spec("gradients", total, _gradient(group, inputs))
        if group.finds_unused:
            roles["used"] = Spec("used", len(group.parameters), _gradient(group, inputs))


def _fits_in(group: ParameterGroup, layout: Layout, slot: int, inputs: PlanInputs) -> bool:
    """Whether the group's full gradients can use a slot of `slot` elements that other groups have."""
    if path_of(group, layout).packs:
        return False
    return any(path.fits_in(group, layout, slot, inputs.device, inputs.no_sync) for path in PATHS)


def _length(role: str, group: ParameterGroup, layout: Layout) -> int:
    """Elements of a buffer that serves this group only."""
    if role in ("upload", "download"):
        return layout.shard_size
    if role not in GRADIENT_ROLES:
        return layout.total
    path = path_of(group, layout)
    return path.full if role == "gradients" else path.sent


def _transit(
    specs: Specs, layouts: dict[ParameterGroup, Layout], groups: list[ParameterGroup], inputs: PlanInputs
) -> None:
    """Add the buffers that data passes through: one or two slots for all groups that are alike."""
    low = [g for g in groups if g.key.param in dtypes.LOW and layouts[g].shards > 1]
    for members in _alike(g for g in low if _gathered(g, inputs).itemsize > 2):
        _share(specs, layouts, members, "wire", dtypes.storage(members[0].key.param), 1)
    low = [g for g in groups if g.trainable and g.key.reduce in dtypes.LOW]
    for members in _alike(low):
        _share(specs, layouts, members, "reduce_wire", dtypes.storage(members[0].key.reduce), 1)
    packed = [g for g in groups if g.trainable and path_of(g, layouts[g]).packs and g not in low]
    for members in _alike(packed):
        _share(specs, layouts, members, "packed", _gradient(members[0], inputs), 1)
    for members in _alike(g for g in groups if g.placement.parameters and g.key.param in dtypes.LOW):
        _share(specs, layouts, members, "upload", members[0].key.dtype, STAGING_SLOTS)
    for members in _alike(g for g in groups if g.placement.gradients and g.trainable):
        _share(specs, layouts, members, "download", members[0].key.dtype, STAGING_SLOTS)


def _share(
    specs: Specs,
    layouts: dict[ParameterGroup, Layout],
    members: list[ParameterGroup],
    role: str,
    dtype: Any,
    slots: int,
    sharers: int = 1,
) -> None:
    """Give all `members` one Spec, long enough for the largest of them."""
    count = max(_length(role, group, layouts[group]) for group in members)
    if role == "reduce_wire":  # its length depends on the gradient path, and so on the group's slot
        count = max(path_of(g, layouts[g], specs[g]["gradients"].count).sent for g in members)
    spec = Spec(role, count, dtype, min(slots, len(members)), sharers=sharers)
    for group in members:
        specs[group][role] = spec


def _alike(groups: Iterable[ParameterGroup]) -> list[list[ParameterGroup]]:
    """Lists of groups with the same key and cut."""
    alike: dict[tuple, list[ParameterGroup]] = {}
    for group in groups:
        alike.setdefault((group.key, group.settings.cut), []).append(group)
    return list(alike.values())


def in_slot(group: ParameterGroup, layout: Layout, inputs: PlanInputs) -> bool:
    """Whether the shard is a part of the gathered buffer, so that a gather copies nothing."""
    same_type = np.dtype(group.key.dtype) == _compute(group, inputs) and group.key.param not in dtypes.LOW
    return same_type and not group.placement.parameters and (inputs.sharers > 0 or layout.shards == 1)


def sharers_of(group: ParameterGroup, layout: Layout, inputs: PlanInputs) -> int:
    """Number of ranks that share the gathered slot. They can if each of them writes only its own part."""
    bits = group.key.param in dtypes.LOW and _gathered(group, inputs).itemsize == 2
    own_part = bits or in_slot(group, layout, inputs)
    return min(layout.shards, max(1, inputs.sharers)) if own_part else 1


def keeps_copy(group: ParameterGroup, specs: Specs) -> bool:
    """Whether this rank's part of the gathered slot keeps the 16-bit shard between gathers.

    That needs a slot that no other group uses, and rounding straight into the slot.
    """
    gathered = specs[group]["gathered"]
    alone = sum(gathered is roles["gathered"] for roles in specs.values()) == 1
    rounds = group.key.param in dtypes.LOW and not group.placement.parameters
    return alone and rounds and "wire" not in specs[group]


def summed_in_place(group: ParameterGroup, layout: Layout, inputs: PlanInputs) -> bool:
    """Whether backward may write full gradients into the sharded gradient: same length, type and device."""
    exact = group.key.reduce not in dtypes.LOW and np.dtype(group.key.dtype) == _gradient(group, inputs)
    return layout.shards == 1 and exact and not group.placement.gradients


def _gathered(group: ParameterGroup, inputs: PlanInputs) -> np.dtype:
    return inputs.device.gathered_dtype(group.key.param)


def _compute(group: ParameterGroup, inputs: PlanInputs) -> np.dtype:
    return inputs.device.compute_dtype(group.key.param)


def _gradient(group: ParameterGroup, inputs: PlanInputs) -> np.dtype:
    """The type of full gradients: float32 even if ops compute in 16 bits."""
    return dtypes.exact(_compute(group, inputs))


def contains_units(unit: Unit, units: list[Unit]) -> bool:
    """Whether `unit` contains another unit."""
    return any(unit in other.ancestors for other in units)
