"""Plans the buffers of all groups before any is allocated: shards, slots, gradients.

`plan` gives a Spec for each role of each group. setup.py allocates exactly these buffers, and memory.py adds
them up. Groups share slots if their units are gathered one after the other. A unit that stays gathered while
other units are (it contains them, or is kept for backward) has a slot of its own.

Where the ranks of a node share memory, the ranks' shards lie next to each other and are the gathered buffer
of a unit. Every unit then has a buffer of its own. Ranks share 16-bit slots, too: each rank rounds its shard
into its part of the slot.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.comm.protocol import Communicator
from shardrt.device import Device
from shardrt.fsdp.gradient_path import PATHS, GradientPath
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.transfer import TRANSFERS
from shardrt.fsdp.unit import Unit
from shardrt.fsdp.whole_gradient import path_of

GRADIENT_SLOTS = 2  # backward fills one slot while the other is reduced


@dataclass(frozen=True, eq=False)
class Spec:
    """`slots` buffers of `count` elements each.

    role: the purpose, see roles.py.
    host: the buffers are in host memory.
    shared_by: number of ranks that share the buffers. nbytes counts one rank's part.
    """

    role: str
    count: int
    dtype: Any
    slots: int = 1
    host: bool = False
    shared_by: int = 1

    def nbytes(self, maker: Communicator | None) -> int:
        """Bytes per rank. maker: the communicator that allocates the buffers and may round their size up."""
        each = self.count * np.dtype(self.dtype).itemsize
        return (each if maker is None else maker.allocated(each)) * self.slots // self.shared_by


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of `plan` besides units and layouts."""

    device: Device
    prefetch: int
    node_ranks: int  # ranks of a node that share the memory of gathered units; 0 if ranks can't share memory
    together: int = 1  # the most units that a recomputed module gathers at once
    no_sync: bool = False  # gradients are accumulated before they are reduced


Specs = dict[ParameterGroup, dict[str, Spec]]
Layouts = dict[ParameterGroup, Layout]
# Of options: each adds the buffers that an option needs to the Specs of the groups that use it.
EXTRA_BUFFERS: list[Callable[[Specs, Layouts, list[ParameterGroup], PlanInputs], None]] = []


def plan(units: list[Unit], layouts: dict[ParameterGroup, Layout], inputs: PlanInputs) -> Specs:
    """ParameterGroup -> role -> Spec. Groups that share slots have the same Spec object."""
    groups = [group for unit in units for group in unit.groups]
    paths = {group: path_of(group, layouts[group]) for group in groups}
    specs: Specs = {group: {} for group in groups}
    for group in groups:
        _add_unshared(specs[group], paths[group], inputs)
    # A unit that contains other units is gathered while they run, so it can't share their slots.
    inner = [unit for unit in units if not contains_units(unit, units)]
    passing = [group for unit in inner if unit.reshard_after_forward for group in unit.groups]
    for members in alike(g for g in passing if "gathered" not in specs[g]):
        # One slot for the unit that computes and one for each prefetched unit. A recomputed module needs all
        # of its units at once.
        slots = max(inputs.prefetch + 1, inputs.together)
        shared_by = ranks_sharing(members[0], layouts[members[0]], inputs)
        count = max(layouts[g].total for g in members)
        share(specs, members, "gathered", count, gathered_dtype(members[0], inputs), slots, shared_by)
    filling = [group for unit in inner for group in unit.groups if group.trainable]
    for members in alike(g for g in filling if "gradients" not in specs[g]):
        count = max(paths[g].full for g in members)
        share(specs, members, "gradients", count, gradient_dtype(members[0], inputs), GRADIENT_SLOTS)
    inside = {(g.key, g.settings.shard_spec): specs[g]["gradients"] for g in filling}
    for group in (g for g in groups if g.trainable and "gradients" not in specs[g]):
        slot = inside.get((group.key, group.settings.shard_spec))
        if slot is not None and _fits_in(paths[group], slot.count, inputs):
            specs[group]["gradients"] = slot
    for group in groups:
        total, shared_by = layouts[group].total, ranks_sharing(group, layouts[group], inputs)
        spec = Spec("gathered", total, gathered_dtype(group, inputs), shared_by=shared_by)
        specs[group].setdefault("gathered", spec)
        if group.trainable:
            full = Spec("gradients", paths[group].full, gradient_dtype(group, inputs))
            specs[group].setdefault("gradients", full)
    for add in EXTRA_BUFFERS:
        add(specs, layouts, groups, inputs)
    return specs


def _add_unshared(roles: dict[str, Spec], path: GradientPath, inputs: PlanInputs) -> None:
    """Add the buffers that the group of `path` does not share with other groups."""
    group, layout = path.group, path.layout
    offloaded, dtype = group.offloaded, group.key.dtype
    if in_slot(group, layout, inputs):
        # The slot's own role is "shard": in memory plans it counts as sharded parameters.
        roles["gathered"] = Spec("shard", layout.total, dtype, shared_by=ranks_sharing(group, layout, inputs))
    else:
        roles["shard"] = Spec("shard", layout.shard_size, dtype, host=offloaded.parameters)
    computed = gathered_dtype(group, inputs)
    if layout.shards == 1 and not offloaded.parameters and computed.itemsize < np.dtype(dtype).itemsize:
        # An unsharded group: the 16-bit copy stays, and the optimizer writes it.
        roles["gathered"] = Spec("gathered", layout.total, computed)
    if group.trainable:
        roles["reduced"] = Spec("reduced", layout.shard_size, dtype, host=offloaded.gradients)
        partial = group.sharded_gradient.partial_sums
        if partial:
            roles["partial"] = Spec("partial", layout.shard_size, dtype, partial)
        # Full gradients that stay after backward need a slot that no other group uses.
        if inputs.no_sync or group.settings.strategy.rules.keep_gradient:
            roles["gradients"] = Spec("gradients", path.full, gradient_dtype(group, inputs))
        if group.finds_unused:
            roles["used"] = Spec("used", len(group.parameters), gradient_dtype(group, inputs))


def _fits_in(path: GradientPath, slot: int, inputs: PlanInputs) -> bool:
    """Whether the full gradients of `path` can use a slot of `slot` elements that other groups have."""
    if path.packs:
        return False
    args = path.group, path.layout, slot, inputs.device, inputs.no_sync
    return any(kind.fits_in(*args) for kind in PATHS)


def share(
    specs: Specs,
    members: list[ParameterGroup],
    role: str,
    count: int,
    dtype: Any,
    slots: int,
    shared_by: int = 1,
) -> None:
    """Give all `members` one Spec for a role, and no more slots than members."""
    spec = Spec(role, count, dtype, min(slots, len(members)), shared_by=shared_by)
    for group in members:
        specs[group][role] = spec


def alike(groups: Iterable[ParameterGroup]) -> list[list[ParameterGroup]]:
    """Lists of groups with the same key on the same ranks."""
    alike: dict[tuple, list[ParameterGroup]] = {}
    for group in groups:
        alike.setdefault((group.key, group.settings.shard_spec), []).append(group)
    return list(alike.values())


def in_slot(group: ParameterGroup, layout: Layout, inputs: PlanInputs) -> bool:
    """Whether the shard is a part of the gathered buffer, so that a gather copies nothing."""
    if np.dtype(group.key.dtype) != _compute(group, inputs):
        return False
    apart = any(kind.needs_separate_shard(group) for kind in TRANSFERS)
    return not apart and (inputs.node_ranks > 0 or layout.shards == 1)


def ranks_sharing(group: ParameterGroup, layout: Layout, inputs: PlanInputs) -> int:
    """Number of ranks that share the gathered slot. They can if each of them writes only its own part."""
    bits = group.key.param in dtypes.LOW and gathered_dtype(group, inputs).itemsize == 2
    own_part = bits or in_slot(group, layout, inputs)
    alone = not own_part or inputs.node_ranks == 0 or layout.shards == 1
    return 1 if alone else group.settings.shards_on_node(inputs.node_ranks)


def summed_in_place(group: ParameterGroup, layout: Layout, inputs: PlanInputs) -> bool:
    """Whether backward may write full gradients into the sharded gradient: same length, type and device."""
    exact = group.key.reduce not in dtypes.LOW and np.dtype(group.key.dtype) == gradient_dtype(group, inputs)
    return layout.shards == 1 and exact and not group.offloaded.gradients


def gathered_dtype(group: ParameterGroup, inputs: PlanInputs) -> np.dtype:
    """The dtype of a gathered slot, which the device chooses."""
    return inputs.device.gathered_dtype(group.key.param)


def _compute(group: ParameterGroup, inputs: PlanInputs) -> np.dtype:
    return inputs.device.compute_dtype(group.key.param)


def gradient_dtype(group: ParameterGroup, inputs: PlanInputs) -> np.dtype:
    """The type of full gradients: float32 even if ops compute in 16 bits."""
    return dtypes.exact(_compute(group, inputs))


def contains_units(unit: Unit, units: list[Unit]) -> bool:
    """Whether `unit` contains another unit."""
    return any(unit in other.ancestors for other in units)
