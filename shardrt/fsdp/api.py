"""fully_shard: marks a module as a unit of fully sharded data parallelism.

The model stays the same object with the same parameter names. The call is that of PyTorch's FSDP2. (Zhao et
al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023.)
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardrt import dtypes
from shardrt.comm import objects
from shardrt.comm.mesh import DeviceMesh, default_mesh
from shardrt.comm.mesh_layout import MeshLayout, overlap, without
from shardrt.fsdp.boundary import UnitBoundary, unit_of
from shardrt.fsdp.full import built_units
from shardrt.fsdp.group import GroupKey
from shardrt.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, Settings
from shardrt.fsdp.setup import build, units_for
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.fsdp.unit import Unit
from shardrt.functional.float8 import MULTIPLE
from shardrt.nn.layers import Linear
from shardrt.nn.module import Module, stages_of
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage

Whole = TypeVar("Whole", bound=Module | Sequence[Module])


def fully_shard(
    module: Whole,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | None = None,
    prefetch: int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored: Iterable[Module | Parameter] = (),
    by_rank: bool = False,
) -> Whole:
    """Shard the parameters of `module` over the ranks of `mesh`, as one unit.

    Call it on the parts first (each transformer block), then on the whole model. A unit takes all parameters
    of `module` that no other unit has yet. Each rank keeps 1/N of a unit. The unit is gathered before its
    forward and backward and released afterwards. Make the optimizer after the last call. Gradients are the
    mean over ranks (see set_gradient_divide_factor).

    Args:
        module: a module, or several that are gathered and reduced as one unit (a tied embedding and head).
        mesh: the ranks, on one axis, or on two axes (copies, shards). None: all ranks of the job on one axis.
            Pass a part of a mesh that has more axes: mesh["dp_shard"], mesh["dp_replicate", "dp_shard"]. The
            axes "tp", "pp" and "ep" must not be part of it: along them, ranks have other parts of the model.
            All units of a model must be on the same ranks. Their axes may differ:
            mesh["dp_replicate", "dp_shard"] and mesh.flat("dp_replicate", "dp_shard") fit together.
        strategy: a ShardingStrategy or its name. None: FULL_SHARD; HYBRID_SHARD on a mesh with two axes;
            NO_SHARD on a mesh with the one axis "dp_replicate".
        reshard_after_forward: release the parameters between forward and backward. None: as the strategy
            says, but the outermost unit stays gathered, since backward begins with it.
        prefetch: number of units that are gathered ahead of the unit that computes. It is one number for the
            whole model; None: the outermost unit's, whose default is 1.
        mp_policy: element types, see MixedPrecisionPolicy.
        offload_policy: parts that live in host memory, see CPUOffloadPolicy.
        ignored: modules and parameters that stay whole on each rank. Their gradients are not reduced.
        by_rank: ranks may use the unit later although no rank uses it in the first forward (an expert, an
            adapter of a rare language). The unit is then gathered and reduced in every step. A unit that some
            ranks use from the first forward on does not need the argument.

    Returns:
        `module`.

    Raises:
        TypeError: if `module`, `mesh` or `reshard_after_forward` has a wrong type.
        ValueError: for settings that do not fit together.
        RuntimeError: for a parameter that an optimizer has already: it would go on updating the old array.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block)
        >>> fully_shard(model)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3)
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    for each in modules:
        if not isinstance(each, Module):
            raise TypeError(
                "fully_shard: module must be a shardrt.nn.Module, or a list of some that become one unit; "
                f"got {type(each).__name__}"
            )
        if unit_of(each) is not None:
            raise ValueError(f"fully_shard: {each.name or type(each).__name__} is sharded already")
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty")
    if not isinstance(reshard_after_forward, bool | None):
        raise TypeError(
            f"fully_shard: reshard_after_forward must be True, False or None, got {reshard_after_forward!r}"
        )
    if not isinstance(mesh, DeviceMesh | None):
        raise TypeError(f"fully_shard: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"fully_shard: prefetch must be 0 or more, got {prefetch}")
    mesh = default_mesh() if mesh is None else mesh
    _check_axes(mesh)
    _check_here(modules)
    chosen = ShardingStrategy.parse(strategy, len(mesh.shape), mesh.mesh_dim_names)
    if reshard_after_forward and chosen.rules.keep_after_backward:
        raise ValueError(
            f"fully_shard: reshard_after_forward=True does not fit {chosen.name}, which keeps all parameters "
            "gathered until the optimizer has changed them; use FULL_SHARD"
        )
    settings = Settings(
        mesh,
        chosen,
        reshard_after_forward,
        prefetch,
        mp_policy or MixedPrecisionPolicy(),
        offload_policy or OffloadPolicy(),
        by_rank,
    )
    if settings.precision.float8 and (why := mesh.device.lacks_float8()):
        raise ValueError(f"fully_shard: mp_policy has float8=True, but {why}")
    taken = _untaken(modules, settings, ignored)
    if settings.precision.float8:
        _choose_float8(modules, {id(parameter) for parameter, key in taken if key.param == dtypes.bfloat16})
    boundary = UnitBoundary(Unit(modules, taken, settings, build))
    for each in modules:
        each.wrap_forward(boundary)
    return module


def _check_axes(mesh: DeviceMesh) -> None:
    """Raise ValueError unless the axes are (shards) or (copies, shards) of the same model."""
    names, remedy = mesh.mesh_dim_names or (), 'take mesh["dp_shard"] or mesh["dp_replicate", "dp_shard"]'
    if len(mesh.shape) > 2:
        raise ValueError(f"fully_shard: mesh must have one axis or two, got shape {mesh.shape}; {remedy}")
    for name in names:
        if name in ("pp", "tp", "ep"):
            raise ValueError(
                f"fully_shard: along {name!r} of {mesh!r}, ranks have other parts of the model, whose "
                f"gradients must not be summed; {remedy}"
            )
    if names[1:] == ("dp_replicate",):
        raise ValueError(f"fully_shard: the first axis of {mesh!r} must be 'dp_replicate'; {remedy}")


def _check_here(modules: list[Module]) -> None:
    """Raise ValueError for modules that belong to other pipeline stages than this rank's."""
    for each in modules:
        if stages_of(each):
            raise ValueError("fully_shard: the model has stages; call it on each of them instead")
        absent = next((parameter for parameter in each.parameters() if parameter.absent), None)
        if absent is not None:
            raise ValueError(
                f"fully_shard: parameter {absent.name!r} is {absent.place.description}; call it on the "
                "modules of this rank's stages"
            )


def _untaken(
    modules: list[Module], settings: Settings, ignored: Iterable[Module | Parameter]
) -> list[tuple[Parameter, GroupKey]]:
    """(parameter, key) of the parameters of `modules` that no unit has and that are not ignored."""
    skipped: set[int] = set()
    for item in ignored:
        for parameter in item.parameters() if isinstance(item, Module) else [item]:
            skipped.add(id(parameter))
            parameter.storage.ignored = True
    found: dict[int, tuple[Parameter, GroupKey]] = {}
    for below in (below for module in modules for below in module.modules()):
        for parameter in below._parameters.values():
            if id(parameter) in skipped or not isinstance(parameter.storage, LocalStorage):
                continue
            if parameter.storage.owned:
                raise RuntimeError(
                    f"fully_shard: parameter {parameter.name!r} already belongs to an optimizer; make the "
                    "optimizer after fully_shard"
                )
            own = parameter.dtype.name
            if own in dtypes.LOW:
                raise ValueError(
                    f"fully_shard: parameter {parameter.name!r} is {own}, but the optimizer updates float32; "
                    f"make it float32 and pass mp_policy=MixedPrecisionPolicy(param_dtype={own!r})"
                )
            types = settings.precision.types_of(below, own)
            tied = parameter.name if parameter.place is not None and parameter.place.tied else ""
            key = GroupKey(parameter.requires_grad, own, *types, *_axes(parameter, settings.mesh), tied)
            known = found.setdefault(id(parameter), (parameter, key))
            if known[1] != key:
                raise ValueError(
                    f"fully_shard: parameter {parameter.name!r} is tied between modules of which only some "
                    "are in mp_policy.full_precision; list the classes of all these modules there, or of none"
                )
    return list(found.values())


def _choose_float8(modules: list[Module], taken: set[int]) -> None:
    """Mark the weights of linear layers whose matmuls run in float8, if their sizes allow it."""
    layers = [below for module in modules for below in module.modules() if isinstance(below, Linear)]
    weights = [layer.weight for layer in layers if id(layer.weight) in taken]
    for weight in weights:
        weight.float8 = weight.in_parts is None and not any(size % MULTIPLE for size in weight.shape)
    others = [f"{weight.name} {weight.shape}" for weight in weights if not weight.float8]
    if others:
        warnings.warn(
            f"float8: these weights stay in bfloat16: {', '.join(others)}; sizes must be multiples of "
            f"{MULTIPLE}, and with set_tensor_invariant all weights stay in bfloat16",
            stacklevel=3,
        )


def _axes(parameter: Parameter, mesh: DeviceMesh) -> tuple[MeshLayout, MeshLayout]:
    """(axes along which the parameter was split before, axes along which its gradients must be added)."""
    placement, place = parameter.placement, parameter.place
    if place is not None and (place.mesh.root is not mesh.root or overlap(place.axes, mesh.axes)):
        raise ValueError(
            f"fully_shard: parameter {parameter.name!r} is {place.description} of {place.mesh!r}; shard it "
            f"along other axes of the same mesh, not {mesh!r}"
        )
    if placement is None:
        return (), ()
    if placement.mesh.root is not mesh.root or overlap(placement.fixed_axes, mesh.axes):
        raise ValueError(
            f"fully_shard: parameter {parameter.name!r} is on {placement.mesh!r} already; shard it along "
            f'other axes of the same mesh, as mesh["dp_shard"], not {mesh!r}'
        )
    partial = without(placement.partial, mesh.axes) if placement.partial else ()
    return placement.cut_axes, partial


def register_forward_method(module: Module, name: str) -> None:
    """Gather a unit around each call of one of its methods, as around forward.

    Args:
        module: a module that fully_shard has made a unit.
        name: name of the method.

    Raises:
        ValueError: if `module` is not a unit.
        AttributeError: if `module` has no such method.

    Example:
        >>> fully_shard(model)
        >>> register_forward_method(model, "generate")
    """
    if stages_of(module):
        raise ValueError(
            f"register_forward_method: {type(module).__name__} has stages, and a pipeline calls only forward"
        )
    if unit_of(module) is None:
        raise ValueError(
            f"register_forward_method: {type(module).__name__} is not a unit; call fully_shard first"
        )
    object.__setattr__(module, name, module.entered_around(getattr(module, name)))


def units(module: Module) -> list[Unit]:
    """The units of `module` and of all modules below it, outer units first. Builds the model. Collective.

    Raises:
        ValueError: if there is no unit.
    """
    return built_units(module)


def set_gradient_divide_factor(module: Module, factor: float) -> None:
    """Divide the sum of the ranks' gradients by `factor` in all units of `module`.

    The default is the number of ranks. With 1, gradients are those of the sum of all ranks' losses, and the
    loss decides their weights. Once the model has been used, the call is collective and compares the factors;
    before that, the first use of the model compares them.

    Args:
        module: a sharded module.
        factor: a positive number, the same on every rank.

    Raises:
        ValueError: if `factor` is not positive or differs between ranks, or `module` has no unit.

    Example:
        >>> set_gradient_divide_factor(model, tokens_of_all_ranks)  # with a loss that is a sum over tokens
    """
    if not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: factor must be positive, got {factor}")
    found = units_for("set_gradient_divide_factor", module)
    for schedule in dict.fromkeys(unit.schedule for unit in found if unit.schedule is not None):
        if differing := objects.differing_ranks(schedule.control, float(factor)):
            raise ValueError(
                f"set_gradient_divide_factor: ranks {differing} give another factor than rank 0 (rank "
                f"{schedule.mesh.rank}: {factor}); pass the same on every rank"
            )
    for unit in found:
        if unit.choices.micro_batches is not None and factor != 1:
            raise ValueError(
                f"set_gradient_divide_factor: factor {factor} would round each reduction; with "
                "set_world_invariant leave it at 1 and divide the loss of each micro-batch"
            )
        unit.choices.divide_factor = float(factor)


@contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Accumulate full gradients inside a with block, without reducing them.

    Use it for all micro-batches of a step but the last. The backward of the last one, outside the block,
    reduces the sum. This saves the traffic of the reductions. It costs memory for the full gradients of all
    units, instead of two slots. Without no_sync, each backward adds to the sharded gradients.

    Args:
        module: a sharded module.

    Raises:
        ValueError: if `module` has no unit.
        RuntimeError: with set_world_invariant.

    Example:
        >>> with no_sync(model):
        ...     for batch in micro_batches[:-1]:
        ...         loss_of(model, batch).backward()
        >>> loss_of(model, micro_batches[-1]).backward()
    """
    before = [(unit.choices, unit.choices.reduces) for unit in units_for("no_sync", module)]
    if any(choices.micro_batches is not None for choices, _ in before):
        raise RuntimeError(
            "no_sync: with set_world_invariant each backward reduces its gradients; leave no_sync out"
        )
    for choices, _ in before:
        choices.reduces = False
    try:
        yield
    finally:
        for choices, reduces in before:
            choices.reduces = reduces
