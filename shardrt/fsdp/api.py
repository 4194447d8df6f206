"""fully_shard: marks a module as a unit of fully sharded data parallelism.

(Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023; the call is that of
PyTorch's FSDP2.) The model stays the same object with the same parameter names.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardrt import dtypes
from shardrt.comm import talk
from shardrt.comm.digits import Digits, meet, without
from shardrt.comm.mesh import DeviceMesh, default_mesh
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
from shardrt.nn.share import CUT, PARTIAL
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
    """Shard the parameters of `module` over the ranks of `mesh`, as one unit; gives `module` back.

    Call it on the parts first (each transformer block), then on the whole: a unit takes all parameters below
    it that no unit has yet. Each rank keeps 1/N of a unit; the whole is gathered before the unit's forward
    and backward and released after. Make the optimizer afterwards. Gradients are the mean over ranks (see
    set_gradient_divide_factor).

    module: one, or several that are gathered and reduced as one unit (a tied embedding and head).
    mesh: all ranks of the job on one axis if None; two axes are (copies, shards). A mesh of more axes is
        given in part: mesh["dp_shard"], mesh["dp_replicate", "dp_shard"]; never along "tp", "pp" or "ep",
        where ranks have other parts of the model. Units of one model are on the same ranks; their axes may
        differ, as those of mesh["dp_replicate", "dp_shard"] and mesh.flat("dp_replicate", "dp_shard").
    strategy: a ShardingStrategy or its name; FULL_SHARD if None, HYBRID_SHARD on a mesh with two axes,
        NO_SHARD on one that is called "dp_replicate".
    reshard_after_forward: release the parameters between forward and backward; None leaves it to the
        strategy, except that the outermost unit is kept, since backward needs it first.
    prefetch: how many units are gathered ahead of the one that computes: one number for the whole model, that
        of the outermost unit (1 if None).
    mp_policy, offload_policy: see those classes.
    ignored: modules and parameters that stay as they are: whole on each rank, and reduced by nobody.
    by_rank: some ranks may use it although none did in the first forward (an expert, an adapter of a rare
        language). It is gathered and reduced in every step, used or not. What all or some ranks use from the
        start needs no such word.

    Raises TypeError if `module` is not a Module, ValueError for settings that do not fit together, and
    RuntimeError for a parameter that an optimizer has already: it would go on updating the former array.
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
        told = f"must be True, False or None, got {reshard_after_forward!r}"
        raise TypeError(f"fully_shard: reshard_after_forward {told}")
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
            "gathered until the optimizer has changed them; take FULL_SHARD"
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
    """Raise ValueError unless its ranks have copies of the model, and its axes their order."""
    names, take = mesh.mesh_dim_names or (), 'take mesh["dp_shard"] or mesh["dp_replicate", "dp_shard"]'
    if len(mesh.shape) > 2:
        raise ValueError(f"fully_shard: mesh must have one axis or two, got shape {mesh.shape}: {take}")
    for name in names:
        if name in ("pp", "tp", "ep"):
            raise ValueError(
                f"fully_shard: along {name!r} of {mesh!r}, ranks have other parts of the model, whose "
                f"gradients must not be summed: {take}"
            )
    if names[1:] == ("dp_replicate",):
        raise ValueError(f"fully_shard: of the axes of {mesh!r} the first must be that of copies: {take}")


def _check_here(modules: list[Module]) -> None:
    """Raise ValueError for modules that no stage of this rank calls."""
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
    """The parameters of `modules` that no unit has and that are not ignored, each with its key."""
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
                    f"fully_shard: parameter {parameter.name!r} is {own}; what an optimizer updates is "
                    f"float32: make it that, with mp_policy=MixedPrecisionPolicy(param_dtype={own!r})"
                )
            types = settings.precision.types_of(below, own)
            tied = parameter.name if parameter.place is not None and parameter.place.tied else ""
            key = GroupKey(parameter.requires_grad, own, *types, *_axes(parameter, settings.mesh), tied)
            known = found.setdefault(id(parameter), (parameter, key))
            if known[1] != key:
                raise ValueError(
                    f"fully_shard: parameter {parameter.name!r} is tied between modules of which only some "
                    "are in mp_policy.full_precision; name the classes of all of them there, or of none"
                )
    return list(found.values())


def _choose_float8(modules: list[Module], taken: set[int]) -> None:
    """Say of the weights of linear layers that they are multiplied in float8, where their sizes allow it."""
    layers = [below for module in modules for below in module.modules() if isinstance(below, Linear)]
    weights = [layer.weight for layer in layers if id(layer.weight) in taken]
    for weight in weights:
        weight.float8 = weight.in_parts is None and not any(size % MULTIPLE for size in weight.shape)
    others = [f"{weight.name} {weight.shape}" for weight in weights if not weight.float8]
    if others:
        told = f"sizes must be multiples of {MULTIPLE}, and set_tensor_invariant leaves none in float8"
        warnings.warn(f"float8: these stay in bfloat16: {', '.join(others)}; {told}", stacklevel=3)


def _axes(parameter: Parameter, mesh: DeviceMesh) -> tuple[Digits, Digits]:
    """(those along which it is cut already, those along which its gradients are to be added)."""
    share, place = parameter.share, parameter.place
    if place is not None and (place.mesh.root is not mesh.root or meet(place.axes, mesh.axes)):
        raise ValueError(
            f"fully_shard: parameter {parameter.name!r} is {place.description} of {place.mesh!r}; shard it "
            f"along other axes of the same mesh, not {mesh!r}"
        )
    if share is None:
        return (), ()
    # Along axes where gradients are parts of a sum they may be sharded: reducing them makes the sum.
    alike = () if share.kind == PARTIAL else share.axes
    if share.mesh.root is not mesh.root or meet(alike, mesh.axes):
        raise ValueError(
            f"fully_shard: parameter {parameter.name!r} is on {share.mesh!r} already; shard it along other "
            f'axes of the same mesh, as mesh["dp_shard"], not {mesh!r}'
        )
    partial = without(share.partial, mesh.axes) if share.partial else ()
    return share.axes if share.kind == CUT else (), partial


def register_forward_method(module: Module, name: str) -> None:
    """Make the method `name` of a sharded module an entry like forward: gathered around each call.

    Raises ValueError if `module` is not a unit, AttributeError if it has no such method.
    """
    if stages_of(module):
        told = f"{type(module).__name__} has stages, which a pipeline runs by forward alone"
        raise ValueError(f"register_forward_method: {told}")
    if unit_of(module) is None:
        raise ValueError(
            f"register_forward_method: {type(module).__name__} is not a unit; call fully_shard first"
        )
    object.__setattr__(module, name, module.entered_around(getattr(module, name)))


def units(module: Module) -> list[Unit]:
    """The units of `module` and below, outer ones first, built. Raises ValueError if there is none."""
    return built_units(module)


def set_gradient_divide_factor(module: Module, factor: float) -> None:
    """Divide the sum of the ranks' gradients by `factor` in all units of `module` (default: the world size).

    1 leaves the weighting to the loss: gradients are then those of the sum of all ranks' losses. The same on
    every rank: the call is collective once the model has been used; before that, its first use compares.
    Raises ValueError if `factor` is not positive or differs between ranks, or `module` has no unit.
    """
    if not factor > 0:
        raise ValueError(f"set_gradient_divide_factor: factor must be positive, got {factor}")
    found = units_for("set_gradient_divide_factor", module)
    for schedule in dict.fromkeys(unit.schedule for unit in found if unit.schedule is not None):
        if differing := talk.agree(schedule.control, float(factor)):
            raise ValueError(
                f"set_gradient_divide_factor: ranks {differing} give another factor than rank 0 (rank "
                f"{schedule.mesh.rank}: {factor})"
            )
    for unit in found:
        if unit.choices.micro_batches is not None and factor != 1:
            raise ValueError(
                f"set_gradient_divide_factor: factor {factor} would round each reduction; with "
                "set_world_invariant it is 1, and the loss of a micro-batch is divided instead"
            )
        unit.choices.divide_factor = float(factor)


@contextmanager
def no_sync(module: Module) -> Iterator[None]:
    """Backward inside the with block leaves its gradients where they are, unreduced; later ones add to them.

    For all micro-batches of a step but the last, whose backward outside the block reduces the sum. Saves
    the traffic of the reductions; costs memory for the full gradients of all units instead of two slots.
    Without it, each backward adds to the sharded gradients. Raises ValueError if `module` has no unit,
    RuntimeError with set_world_invariant.
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
