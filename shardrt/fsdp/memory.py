"""memory_plan and explain: bytes per rank by category before the first step, and a table of the units."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shardrt import dtypes
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.fsdp import buffers, composition, scratch
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.roles import ROLES
from shardrt.fsdp.setup import arranged, lay_out, plan_inputs, prefetch_of, process_groups_of, units_for
from shardrt.fsdp.unit import Unit, root_of
from shardrt.nn.module import Module, stages_of
from shardrt.nn.storage import LocalStorage
from shardrt.optim.offload import SLOTS, slot_bytes

__all__ = ["MemoryPlan", "connect", "memory_plan", "run_dry", "table", "whole_of"]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank by category, on the device and on the host. str() gives a table.

    Attributes:
        device: category -> bytes on the device.
        host: category -> bytes on the host.
    """

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """The sum of all categories on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """The sum of all categories on the host."""
        return sum(self.host.values())

    def __str__(self) -> str:
        rows = []
        for place, categories in (("device", self.device), ("host", self.host)):
            if categories:
                rows += [(place, name, _mb(nbytes)) for name, nbytes in categories.items()]
                rows.append((place, "together", _mb(sum(categories.values()))))
        return table(("place", "what", "MB per rank"), rows)


def memory_plan(
    model: Module,
    *,
    step: Callable[[], Any] | None = None,
    optimizer_states: float = 2,
    no_sync: bool = False,
) -> MemoryPlan:
    """Plan the bytes per rank that training `model` takes, before anything is allocated. Collective.

    `model` may be a part of a sharded model: all units that train with it count. A model with pipeline stages
    is planned for this rank's stages, without the buffers of links between ranks (parallel/memory.py). If the
    ranks of a node share the memory of gathered units, each rank counts its part. On the CPU, arrays below
    32 KiB do not count as activations.

    Args:
        model: a sharded model.
        step: function that runs forward and backward of `model` as training will, without the optimizer. It
            is called once, under the model's own schedule, on a device that computes nothing. The most bytes
            that it holds at once become the plan's activations. It must not depend on values of tensors: they
            have none. None: leave activations out.
        optimizer_states: arrays per parameter that the optimizer keeps: 2 for AdamW, 1 for SGD with momentum,
            1.5 for AdamW with exp_avg_dtype="bfloat16", whose first array has half the bytes.
        no_sync: some backwards will run under no_sync, so that full gradients of all units live at once. If
            `step` itself uses no_sync, deferred= or unshard, the plan includes that without this argument.

    Returns:
        The MemoryPlan.

    Raises:
        ValueError: if `model` has no unit, or several without a unit around them all.
        Exception: any error that the first forward would raise.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn
        >>> from shardrt.fsdp import fully_shard, memory_plan
        >>> model, x = fully_shard(nn.Linear(8, 2)), np.ones((4, 8), np.float32)
        >>> plan = memory_plan(model, step=lambda: model(x).sum().backward())
    """
    wholes = [whole_of("memory_plan", part) for part in stages_of(model) or [model]]
    units = [unit for whole in wholes for unit in whole]
    layouts = lay_out(units)
    ranks_of = connect(units)  # collective, so it comes before calls that may fail on one rank only
    for whole in wholes:
        connect(whole)
    taken = None if step is None else run_dry(model, units, step)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    needed: dict[Communicator, tuple[int, int]] = {}  # stages share communicators
    with _trained_as_asked(units):
        for whole in wholes:
            waits = taken is not None and not taken.own_slots.isdisjoint(whole)
            inputs = plan_inputs(whole, ranks_of, no_sync=no_sync or waits)
            planned = {group: layouts[group] for unit in whole for group in unit.groups}
            specs = buffers.plan(whole, planned, inputs)
            if taken is not None:
                _have_slots(specs, taken.slots)
            _add_buffers(device, host, specs, ranks_of)
            for communicator, nbytes in scratch.scratch(planned, ranks_of, inputs).items():
                needed[communicator] = tuple(map(max, nbytes, needed.get(communicator, (0, 0))))
        for on_device, on_host in needed.values():
            _add(device, "scratch of communicators", on_device)
            _add(host, "scratch of communicators", on_host)
        _add_optimizer(device, host, layouts, optimizer_states)
    for parameter in model.parameters():
        if isinstance(parameter.storage, LocalStorage):
            nbytes = parameter.size * parameter.dtype.itemsize
            _add(device, "ignored parameters", nbytes)
            if parameter.requires_grad:
                _add(device, "optimizer state", int(optimizer_states * nbytes))
    if taken is not None:
        _add(device, "activations", taken.device_bytes)
        _add(host, "offloaded activations", taken.host_bytes)
    return MemoryPlan(device, host)


def connect(units: list[Unit]) -> dict[ParameterGroup, ProcessGroups]:
    """Make all communicators that a model of these units needs.

    Collective.

    Returns:
        The process groups of each parameter group.
    """
    mesh = composition.active.mesh_of(units)
    for each in dict.fromkeys((mesh, *(unit.settings.mesh for unit in units))):
        each.communicator("control")
    if mesh.size > 1:
        mesh.communicator("used")
    return process_groups_of(units)


def _have_slots(specs: buffers.Specs, slots: dict[tuple[ParameterGroup, str], int]) -> None:
    """Raise the slot counts of specs to those that a step has needed: arenas grow during a step."""
    grown: dict[buffers.Spec, buffers.Spec] = {}
    for group, by_role in specs.items():
        for role, spec in by_role.items():
            if slots.get((group, role), 0) > spec.slots:
                by_role[role] = grown.setdefault(spec, replace(spec, slots=slots[group, role]))
            elif spec in grown:
                by_role[role] = grown[spec]


def run_dry(model: Module, units: list[Unit], step: Callable[[], Any]) -> Any:
    """dry_run.dry_run, whose simulated device is imported only here."""
    from shardrt.fsdp.dry_run import dry_run

    return dry_run(model, units, step)


def _add_buffers(
    device: dict[str, int],
    host: dict[str, int],
    specs: buffers.Specs,
    ranks_of: dict[ParameterGroup, ProcessGroups],
) -> None:
    """Add the bytes of the units' buffers, each buffer once."""
    makers = {
        spec: None if spec.host else ROLES[role].maker(ranks_of[group])
        for group, roles in specs.items()
        for role, spec in roles.items()
    }
    for spec, maker in makers.items():
        _add(host if spec.host else device, ROLES[spec.role].category, spec.nbytes(maker))


def whole_of(call: str, model: Module) -> list[Unit]:
    """All units that train with those of `model`.

    Raises:
        ValueError: unless one unit contains them all.
    """
    found = units_for(call, model)
    units = found[0].schedule.units if found[0].schedule is not None else arranged(found[0])
    apart = [unit for unit in found if unit not in units]
    if apart and len(stages_of(model)) > 1:
        raise ValueError(
            f"{call}: this rank has {len(stages_of(model))} pipeline stages; pass one of them, not the model"
        )
    if apart:
        raise ValueError(
            f"{call}: unit {apart[0].label} is not inside unit {root_of(units).label}; call fully_shard on "
            "the module around both as well"
        )
    return units


@contextmanager
def _trained_as_asked(units: list[Unit]) -> Iterator[None]:
    """Apply changes of requires_grad since the last forward inside a with block."""
    before = [(group, group.trained, group.finds_unused) for unit in units for group in unit.groups]
    for unit in units:
        for group in unit.groups:
            group.trained = group.to_train(bool(unit.pending))
            group.finds_unused = unit.choices.find_unused
    try:
        yield
    finally:
        for group, trained, finds_unused in before:
            group.trained, group.finds_unused = trained, finds_unused


def _add_optimizer(
    device: dict[str, int], host: dict[str, int], layouts: dict[ParameterGroup, Layout], states: float
) -> None:
    """Add the optimizer state of the units, and the staging slots for optimizer state on the host."""
    slot = 0
    for group, layout in layouts.items():
        if group.trainable and group.parameters[0].updated:
            itemsize = group.parameters[0].dtype.itemsize
            on_host = group.offloaded.optimizer_state
            _add(host if on_host else device, "optimizer state", int(states * layout.shard_size * itemsize))
            slot = max(slot, slot_bytes(layout.shard_size, itemsize, group.offloaded, states))
    _add(device, "staging of the optimizer", SLOTS * slot)


def explain(model: Module) -> str:
    """A table of the units of `model`: their parameters, how they are cut, the order of prefetching.

    The column "MB per rank" has the size of the parameters that this rank holds. "computed" is the type in
    which matmuls take the parameters: "float32 of bfloat16" if the device has no bfloat16 matmuls, float8 if
    mp_policy asks for it. "gathered" is the unit at whose start the gather is issued, by the present plan.
    The plan is the order of declaration until the first forward has recorded another. If axes of the mesh are
    joined, folded, or split modules, the table names the axes and the ranks that hold the other parts.

    Args:
        model: a sharded model, or a part of one.

    Returns:
        The table as text.

    Raises:
        ValueError: if `model` has no unit.
    """
    units = whole_of("explain", model)
    layouts = lay_out(units)
    planned = root_of(units).schedule.plan.order if root_of(units).schedule is not None else units
    order = {unit: place for place, unit in reversed(list(enumerate(planned)))}
    rows = []
    for unit in units:
        for group in unit.groups or [None]:
            rows.append(_row(unit, group, layouts, order, prefetch_of(units), planned))
    return table(
        (
            "unit",
            "parameters",
            "MB per rank",
            "strategy",
            "kept",
            "computed",
            "reduced",
            "on host",
            "gathered",
        ),
        rows,
    )


def _row(unit: Any, group: Any, layouts: dict, order: dict, prefetch: int, planned: list) -> tuple[str, ...]:
    place = order.get(unit)
    before = planned[max(0, place - prefetch)] if place else None
    if place is None:
        when = "not used"
    else:
        when = f"with {before.label}" if before else "at its start"
    if not unit.reshard_after_backward:
        kept = "always"
    else:
        kept = "" if unit.reshard_after_forward else "to backward"
    if group is None:
        return unit.label, "0", "0.0", unit.settings.strategy.name, kept, "", "", "", when
    on_host = group.offloaded
    words = [
        word
        for word, on in (
            ("parameters", on_host.parameters),
            ("gradients", on_host.gradients and group.trainable),
            ("optimizer", on_host.optimizer_state and group.trainable),
        )
        if on
    ]
    return (
        unit.label,
        f"{sum(p.size for p in group.parameters):,}" + _frozen(group),
        _mb(layouts[group].shard_size * group.parameters[0].dtype.itemsize),
        unit.settings.strategy.name + _joined_axes(group) + _before(group),
        kept,
        _computed(group),
        group.key.reduce if group.trainable else "",
        " ".join(words),
        when,
    )


def _computed(group: ParameterGroup) -> str:
    """The type in which matmuls take the parameters, and the shorter type to which they are rounded first."""
    param = group.key.param
    if any(parameter.float8 for parameter in group.parameters):
        return f"float8 of {param}"
    taken = group.settings.mesh.device.gathered_dtype(param)
    return param if taken.itemsize == dtypes.storage(param).itemsize else f"{taken.name} of {param}"


def _joined_axes(group: ParameterGroup) -> str:
    """The ranks that the group is sharded over, if its last axis is a joined or folded one, else ""."""
    mesh = group.settings.mesh
    name, axes = (mesh.mesh_dim_names or ("",))[-1], mesh.root.mesh_dim_names or ()
    return f" on {name} {_ranks(mesh.axis(-1 % len(mesh.shape)))}" if name and name not in axes else ""


def _before(group: ParameterGroup) -> str:
    """The other axes of the mesh along which the parameters were split or their gradients are summed."""
    mesh, placement, text = group.settings.mesh, group.parameters[0].placement, ""
    if group.key.split_axes:
        names = placement.mesh.mesh_dim_names or mesh.names_of(placement.axes)
        text += f", cut on {names[0]} {_ranks(placement.mesh)}"
    return text + "".join(f", summed on {name}" for name in mesh.names_of(group.key.partial))


def _ranks(mesh: DeviceMesh) -> str:
    """The global ranks of a mesh with one axis, shortened if there are many."""
    ranks = mesh.ranks.ravel().tolist()
    if len(ranks) > _FEW:
        ranks = [*ranks[: _FEW - 1], "...", ranks[-1]]
    return f"({' '.join(map(str, ranks))})"


_FEW = 8  # the most ranks that a cell lists


def _frozen(group: ParameterGroup) -> str:
    trained = [parameter.requires_grad for parameter in group.parameters]
    if all(trained):
        return ""
    return " partly frozen" if any(trained) else " frozen"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A text table. Each column is as wide as its widest cell; columns of numbers are right-aligned."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    numeric = [all(_number(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").isdigit()


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def _add(sums: dict[str, int], name: str, nbytes: int) -> None:
    if nbytes:
        sums[name] = sums.get(name, 0) + nbytes
