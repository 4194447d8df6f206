"""What a model will need, before the first step: bytes per rank by category, and a table of its units."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardrt import dtypes
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.protocol import Communicator
from shardrt.fsdp import buffers
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.setup import arranged, connect, lay_out, plan_inputs, prefetch_of, units_for
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module, stages_of
from shardrt.nn.storage import LocalStorage
from shardrt.optim.offload import SLOTS, slot_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank by category, on the device and on the host. str() of it is a table."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """All categories on the device together."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """All categories on the host together."""
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
    """Bytes per rank that training `model` takes, before anything is allocated. Collective.

    step: runs forward and backward of `model` as training will, without the optimizer. It is called once,
    on a device that computes nothing, under the model's own schedule; the most that it holds at once becomes
    the plan's activations. None leaves them out. It must not depend on the values of tensors: there are none.
    optimizer_states: arrays per parameter that the optimizer keeps: 2 for AdamW, 1 for SGD with momentum; 1.5
    for AdamW with exp_avg_dtype="bfloat16", whose first has half the bytes.
    no_sync: some backwards will run under no_sync, and full gradients of all units live at once; what `step`
    does counts as well, as do backwards with late= and `unshard`.

    `model` may be a part: the units that it is sharded with count as well. A model with stages is planned for
    those of this rank, without what links between ranks take (parallel/memory.py). Where ranks of a node
    share the memory of gathered units, each counts its part. Arrays below 32 KiB are not counted as
    activations on the CPU. Raises ValueError if `model` has no unit, or several without one around them all,
    and whatever the first forward would raise.
    """
    wholes = [whole_of("memory_plan", part) for part in stages_of(model) or [model]]
    units = [unit for whole in wholes for unit in whole]
    layouts = lay_out(units)
    ranks_of = connect(units)  # collective: before what may fail on one rank alone
    for whole in wholes:
        connect(whole)
    taken = None if step is None else run_dry(model, units, step)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    scratch: dict[Communicator, tuple[int, int]] = {}  # which stages have in common
    with _trained_as_asked(units):
        for whole in wholes:
            waits = taken is not None and not taken.accumulates.isdisjoint(whole)
            inputs = plan_inputs(whole, ranks_of, no_sync=no_sync or waits)
            own = {group: layouts[group] for unit in whole for group in unit.groups}
            specs = buffers.plan(whole, own, inputs)
            if taken is not None:
                buffers.have_slots(specs, taken.slots)
            _add_buffers(device, host, specs, ranks_of)
            for communicator, needed in buffers.scratch(own, ranks_of, inputs).items():
                scratch[communicator] = tuple(map(max, needed, scratch.get(communicator, (0, 0))))
        for on_device, on_host in scratch.values():
            _add(device, "scratch of communicators", on_device)
            _add(host, "scratch of communicators", on_host)
        _add_optimizer(device, host, layouts, optimizer_states)
    for parameter in model.parameters():
        if isinstance(parameter.storage, LocalStorage):
            nbytes = parameter.size * parameter.dtype.itemsize
            _add(device, "ignored parameters", nbytes)
            _add(device, "optimizer state", int(optimizer_states * nbytes) * parameter.requires_grad)
    if taken is not None:
        _add(device, "activations", taken.device_bytes)
        _add(host, "offloaded activations", taken.host_bytes)
    return MemoryPlan(device, host)


def run_dry(model: Module, units: list[Unit], step: Callable[[], Any]) -> Any:
    """What dry_run.py's Taken says of a step. The device without elements is imported where it is used."""
    from shardrt.fsdp.dry_run import dry_run

    return dry_run(model, units, step)


def _add_buffers(
    device: dict[str, int],
    host: dict[str, int],
    specs: buffers.Specs,
    ranks_of: dict[ParameterGroup, ProcessGroups],
) -> None:
    """What the units' buffers take, each once."""
    makers = {
        spec: None if spec.host else buffers.maker_of(role, ranks_of[group])
        for group, roles in specs.items()
        for role, spec in roles.items()
    }
    for spec, maker in makers.items():
        _add(host if spec.host else device, buffers.ROLES[spec.role], spec.nbytes(maker))


def whole_of(call: str, model: Module) -> list[Unit]:
    """All units that train with those of `model`. Raises ValueError unless there is one around them all."""
    found = units_for(call, model)
    units = found[0].schedule.units if found[0].schedule is not None else arranged(found[0])
    apart = [unit for unit in found if unit not in units]
    if apart and len(stages_of(model)) > 1:
        raise ValueError(f"{call}: this rank has {len(stages_of(model))} stages; give it one of them")
    if apart:
        raise ValueError(
            f"{call}: unit {apart[0].label} is not inside {units[0].label}; call fully_shard on the module "
            "around both as well"
        )
    return units


@contextmanager
def _trained_as_asked(units: list[Unit]) -> Iterator[None]:
    """Inside a with block, what was frozen or unfrozen since the last forward counts."""
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
    """What the optimizer keeps for the units, and the slots through which it updates what is on the host."""
    slot = 0
    for group, layout in layouts.items():
        if group.trainable and group.parameters[0].updated:
            itemsize = group.parameters[0].dtype.itemsize
            on_host = group.placement.optimizer_state
            _add(host if on_host else device, "optimizer state", int(states * layout.shard_size * itemsize))
            slot = max(slot, slot_bytes(layout.shard_size, itemsize, group.placement, states))
    _add(device, "staging of the optimizer", SLOTS * slot)


def explain(model: Module) -> str:
    """A table of the units of `model`: what they hold, how they are cut, in which order they are prefetched.

    MB: of the parameters that this rank holds. computed: the type in which matmuls take them: float32 of
    bfloat16 where the device has no matmuls of bfloat16, float8 where mp_policy has it. gathered: the unit at
    whose start the gather is issued, by the present plan, which is the order of declaration until the first
    forward has recorded another. Where axes of the mesh are joined, folded, or cut modules, their names stand
    there, and which ranks have the other parts beside this one's. Raises ValueError if `model` has no unit.
    """
    units = whole_of("explain", model)
    layouts = lay_out(units)
    planned = units[0].schedule.plan.order if units[0].schedule is not None else units
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
    when = "not used" if place is None else "at its start" if not before else f"with {before.label}"
    kept = (
        "always" if not unit.reshard_after_backward else "" if unit.reshard_after_forward else "to backward"
    )
    if group is None:
        return unit.label, "0", "0.0", unit.settings.strategy.name, kept, "", "", "", when
    on_host = group.placement
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
    """The type in which matmuls take its parameters, and the shorter one to which these are rounded first."""
    param = group.key.param
    if any(parameter.float8 for parameter in group.parameters):
        return f"float8 of {param}"
    taken = group.settings.mesh.device.gathered_dtype(param)
    return param if taken.itemsize == dtypes.storage(param).itemsize else f"{taken.name} of {param}"


def _joined_axes(group: ParameterGroup) -> str:
    """The ranks that it is cut over, where these lie along other axes than those of the mesh."""
    mesh = group.settings.mesh
    name, axes = (mesh.mesh_dim_names or ("",))[-1], mesh.root.mesh_dim_names or ()
    return f" on {name} {_ranks(mesh.axis(-1 % len(mesh.shape)))}" if name and name not in axes else ""


def _before(group: ParameterGroup) -> str:
    """Along which other axes of the mesh the parameters were cut, or what they give is summed."""
    mesh, share, told = group.settings.mesh, group.parameters[0].share, ""
    if group.key.cut:
        told += f", cut on {(share.mesh.mesh_dim_names or mesh.names_of(share.axes))[0]} {_ranks(share.mesh)}"
    return told + "".join(f", summed on {name}" for name in mesh.names_of(group.key.partial))


def _ranks(mesh: DeviceMesh) -> str:
    """Those of a mesh of one axis, by their numbers in all."""
    ranks = mesh.ranks.ravel().tolist()
    return f"({' '.join(map(str, ranks if len(ranks) <= _FEW else [*ranks[: _FEW - 1], '...', ranks[-1]]))})"


_FEW = 8  # ranks that a table names


def _frozen(group: ParameterGroup) -> str:
    trained = [parameter.requires_grad for parameter in group.parameters]
    return "" if all(trained) else " partly frozen" if any(trained) else " frozen"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as what is in them; numbers to the right."""
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
