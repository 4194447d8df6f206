"""fully_shard: marks a module as a unit of fully sharded data parallelism.

The model stays the same object with the same parameter names. The call is modelled on PyTorch's FSDP2. (Zhao
et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023.)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from shardrt import dtypes
from shardrt.comm import ranks
from shardrt.comm.ranks import Mesh
from shardrt.fsdp import composition, policy
from shardrt.fsdp.boundary import UnitBoundary, unit_of
from shardrt.fsdp.group import GroupKey
from shardrt.fsdp.policy import OffloadPolicy, Precision, Settings
from shardrt.fsdp.setup import build
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage

Whole = TypeVar("Whole", bound=Module | Sequence[Module])
Keyed = list[tuple[Parameter, GroupKey]]  # parameters, each with the key of its group

# Of options: called with the modules, settings and parameters of each unit before it is made. They raise
# ValueError for settings that do not fit.
PREPARATIONS: list[Callable[[list[Module], Settings, Keyed], None]] = []


def fully_shard(
    module: Whole,
    *,
    mesh: Mesh | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | None = None,
    prefetch: int | None = None,
    mp_policy: Precision | None = None,
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
        TypeError: if `module`, `mesh`, `reshard_after_forward` or a policy has a wrong type.
        ValueError: for settings that do not fit together.
        RuntimeError: for a parameter that an optimizer has already: it would go on updating the old array.

    Example:
        >>> from shardrt import fsdp, nn, optim
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> for layer in model:
        ...     _ = fsdp.fully_shard(layer)
        >>> optimizer = optim.AdamW(fsdp.fully_shard(model).parameters(), lr=1e-3)
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    for each in modules:
        if not isinstance(each, Module):
            raise TypeError(
                "fully_shard: module must be a shardrt.nn.Module, or a list of some that become one unit; "
                f"got {type(each).__name__}"
            )
        if unit_of(each) is not None:
            raise ValueError(
                f"fully_shard: {each.name or type(each).__name__} is sharded already; call it once"
            )
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty")
    if len({*map(id, modules)}) < len(modules):
        raise ValueError("fully_shard: the list names one module twice")
    if not isinstance(reshard_after_forward, bool | None):
        raise TypeError(
            f"fully_shard: reshard_after_forward must be True, False or None, got {reshard_after_forward!r}"
        )
    if not isinstance(mesh, Mesh | None):
        raise TypeError(f"fully_shard: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    policies = (("mp_policy", mp_policy, Precision), ("offload_policy", offload_policy, OffloadPolicy))
    for name, given, kind in policies:
        if not isinstance(given, kind | None):
            raise TypeError(
                f"fully_shard: {name} must be an instance of {kind.__name__}, got {type(given).__name__}"
            )
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"fully_shard: prefetch must be 0 or more, got {prefetch}")
    mesh = ranks.default_mesh() if mesh is None else mesh
    _check_axes(mesh)
    composition.active.check(modules, mesh)
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
        mp_policy or policy.default_precision(),
        offload_policy or OffloadPolicy(),
        by_rank,
    )
    taken = _untaken(modules, settings, ignored)
    for prepare in PREPARATIONS:
        prepare(modules, settings, taken)
    boundary = UnitBoundary(Unit(modules, taken, settings, build))
    for each in modules:
        each.wrap_forward(boundary)
    return module


def _check_axes(mesh: Mesh) -> None:
    """Raise ValueError unless the axes are (shards) or (copies, shards) of the same model."""
    names, remedy = mesh.mesh_dim_names or (), composition.REMEDY
    if len(mesh.shape) > 2:
        raise ValueError(f"fully_shard: mesh must have one axis or two, got shape {mesh.shape}; {remedy}")
    if names[1:] == ("dp_replicate",):
        raise ValueError(f"fully_shard: the first axis of {mesh!r} must be 'dp_replicate'; {remedy}")


def _untaken(modules: list[Module], settings: Settings, ignored: Iterable[Module | Parameter]) -> Keyed:
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
            dtype = parameter.dtype.name
            if dtype in dtypes.LOW:
                raise ValueError(
                    f"fully_shard: parameter {parameter.name!r} is {dtype}, but the optimizer updates "
                    f"float32; make it float32 and pass mp_policy=MixedPrecisionPolicy(param_dtype={dtype!r})"
                )
            types = settings.precision.types_of(below, dtype)
            split = composition.active.split_of(parameter, settings.mesh)
            key = GroupKey(parameter.requires_grad, dtype, *types, *split)
            known = found.setdefault(id(parameter), (parameter, key))
            if known[1] != key:
                raise ValueError(
                    f"fully_shard: parameter {parameter.name!r} is tied between modules of which only some "
                    "are in mp_policy.full_precision; list the classes of all these modules there, or of none"
                )
    return list(found.values())
