"""fully_shard: marks a module as a unit of fully sharded data parallelism.

(Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023; the call is that of
PyTorch's FSDP2.) The model stays the same object with the same parameter names.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardrt import dtypes
from shardrt.comm import talk
from shardrt.comm.mesh import DeviceMesh, default_mesh
from shardrt.fsdp.boundary import UnitBoundary
from shardrt.fsdp.full import built_units
from shardrt.fsdp.group import GroupKey
from shardrt.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, Settings
from shardrt.fsdp.setup import build, unit_of, units_for
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import HostPlacement, LocalStorage
from shardrt.nn.vision import BatchNorm2d

Whole = TypeVar("Whole", bound=Module | Sequence[Module])


def fully_shard(
    module: Whole,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | None = None,
    prefetch: int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
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
        given in part: mesh["shard"], mesh["replicate", "shard"]. Units of one model are on the same ranks;
        their axes may differ, as those of mesh["replicate", "shard"] and mesh.flat("replicate", "shard").
    strategy: a ShardingStrategy or its name; FULL_SHARD if None, HYBRID_SHARD on a mesh with two axes.
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
    if len(mesh.shape) > 2:
        raise ValueError(
            f"fully_shard: mesh must have one axis or two, got shape {mesh.shape}; give it some of its axes, "
            'as mesh["shard"] or mesh["replicate", "shard"]'
        )
    chosen = ShardingStrategy.parse(strategy, len(mesh.shape))
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
        offload_policy.placement if offload_policy is not None else HostPlacement(),
        by_rank,
    )
    boundary = UnitBoundary(Unit(modules, _untaken(modules, settings, ignored), settings, build))
    for each in modules:
        each.run_inside(boundary)
    return module


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
            key = GroupKey(parameter.requires_grad, own, *types)
            known = found.setdefault(id(parameter), (parameter, key))
            if known[1] != key:
                raise ValueError(
                    f"fully_shard: parameter {parameter.name!r} is tied between modules of which only some "
                    "are in mp_policy.full_precision; name the classes of all of them there, or of none"
                )
    return list(found.values())


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


def set_find_unused_parameters(module: Module, find: bool = True) -> None:
    """Let a parameter that no rank used since zero_grad have no gradient, in all units of `module`.

    Otherwise such a parameter has the gradient 0 if anything of its unit was used, so AdamW decays and moves
    it. With it, its `grad` is None and optimizers leave it alone, as in PyTorch; if any rank used it, it has
    a gradient on every rank. Costs no collective: each reduction carries a number for each parameter. Full
    gradients are copied once more, into a buffer as long as the largest unit's, and who asks for a gradient,
    as an optimizer does, waits until it is reduced. Counts from the next forward on; call it on every rank.

    Raises ValueError if `module` has no unit, RuntimeError while there are gradients: call zero_grad before.
    """
    found = units_for("set_find_unused_parameters", module)
    if any(
        group.sum.reductions or group.open_gradient is not None for unit in found for group in unit.groups
    ):
        raise RuntimeError("set_find_unused_parameters: there are gradients; call zero_grad before")
    for unit in found:
        unit.choices.find_unused = find


def set_world_invariant(module: Module, micro_batches: int) -> None:
    """Train to the same bits on 1, 2, 4, ... ranks. Call it on the outermost module, after fully_shard.

    micro_batches: M, those of a step on all ranks together; a power of two, as is the number of ranks W.
    A step is M / W times forward and backward, rank r of W having micro-batch j W + r as its j-th, then the
    update and zero_grad. The gradients of the M micro-batches are added by one tree, whatever W is, so divide
    the loss of each by M, or by the tokens of the step; the divide factor is 1. Dropout masks are those of
    the micro-batch, norms are exact. docs/determinism.md says what else must be the same, and what it costs:
    log2(M / W) - 1 more sharded gradients, and a reduction of each micro-batch.

    Raises ValueError for numbers that don't fit, `module` without a unit, and batch norm, whose statistics
    depend on which samples one rank, or all ranks at one time, have. When the units are built, it is raised
    for gradients on the host and trained parameters that are ignored. RuntimeError if they are built already.
    """
    normed = next((path for path, part in module.named_modules() if isinstance(part, BatchNorm2d)), None)
    if normed is not None:
        raise ValueError(
            f"set_world_invariant: the statistics of batch norm ({normed}) depend on the number of ranks"
        )
    for unit in units_for("set_world_invariant", module):
        size = unit.settings.mesh.size
        for name, value in (("micro_batches", micro_batches), ("the number of ranks", size)):
            if value < 1 or value & (value - 1):
                raise ValueError(f"set_world_invariant: {name} must be a power of two, got {value}")
        if micro_batches < size:
            raise ValueError(
                f"set_world_invariant: micro_batches {micro_batches} are too few for {size} ranks"
            )
        if unit.schedule is not None:
            raise RuntimeError(
                "set_world_invariant: call it before the optimizer is made and the model is used"
            )
        unit.choices.micro_batches, unit.choices.divide_factor = micro_batches // size, 1.0


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


def register_forward_method(module: Module, name: str) -> None:
    """Make the method `name` of a sharded module an entry like forward: gathered around each call.

    Raises ValueError if `module` is not a unit, AttributeError if it has no such method.
    """
    if unit_of(module) is None:
        raise ValueError(
            f"register_forward_method: {type(module).__name__} is not a unit; call fully_shard first"
        )
    object.__setattr__(module, name, module.entered_around(getattr(module, name)))


def units(module: Module) -> list[Unit]:
    """The units of `module` and below, outer ones first, built. Raises ValueError if there is none."""
    return built_units(module)
