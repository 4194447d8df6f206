"""parallelize_module: splits the modules of a model over the ranks of an axis, as a plan says."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from shardrt.comm import objects
from shardrt.comm.mesh import DeviceMesh
from shardrt.nn.moe import MoE
from shardrt.nn.parameter_placement import REPLICATE, SHARD, ParameterPlacement, set_placement
from shardrt.nn.placement import update_placement
from shardrt.nn.public import Module
from shardrt.parallel.axis import Alone, Axis, batch_of
from shardrt.parallel.context import ContextParallel, lay_out_sequences
from shardrt.parallel.conversion import Deciding
from shardrt.parallel.experts import ExpertParallel, spread_experts
from shardrt.parallel.styles import SequenceParallel, Style
from shardrt.parallel.tokens import TokenParallel

M = TypeVar("M", bound=Module)


def parallelize_module(model: M, mesh: DeviceMesh, plan: Mapping[str, Style]) -> M:
    """Split modules of `model` along the one axis of `mesh`, a slice such as mesh["tp"]; gives `model` back.

    Every rank of the axis computes with the same batch, and has the same activations between the modules that
    are split, or with SequenceParallel its slice of their time. (With ExpertParallel each rank has its own
    tokens, and modules that the plan does not name are left to fully_shard.) Parameters keep their names;
    `shape` is the shape on this rank, `whole_shape` the whole. Initial values, masks of dropout and
    checkpoints are the whole model's. Call it on the outermost module, before fully_shard, which shards
    the rest over other axes of the same mesh, before weights are loaded and the optimizer is made.
    Collective.

    Modules without a style are the same on all ranks. On an axis of one rank nothing is changed.

    Args:
        plan: path -> style; "*" in a path stands for any one name: "blocks.*.mlp.up".

    Raises:
        ValueError: for a path that names no module, a module that is named twice, a model that has a plan
            already, a parameter that is tied to a module that is not split, sizes or heads that the ranks do
            not divide, a mesh of several axes, ranks that have another model, seed or plan.
        TypeError: for a module that a style does not fit.
        RuntimeError: for a parameter that is sharded, has values or an optimizer, or a stage.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.comm import init_device_mesh
        >>> from shardrt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> mesh = init_device_mesh("cpu", mesh_dim_names=("tp",))
        >>> _ = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    """
    if not isinstance(model, Module):
        raise TypeError(f"parallelize_module: model must be a shardrt.nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"parallelize_module: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if any(parameter.pipeline is not None for parameter in model.parameters()):
        raise RuntimeError(
            "parallelize_module: the model has pipeline stages; call it before pipeline_stages"
        )
    if model.parent is not None:
        raise ValueError(f"parallelize_module: call it on the outermost module, not on {model.name!r} alone")
    if len(mesh.shape) > 1:
        raise ValueError(f'parallelize_module: mesh must have one axis, as mesh["tp"]; got {mesh!r}')
    chosen = chosen_by(model, plan, "parallelize_module")
    kinds = [kind for kind in _WITH_A_PLAN_OF_ITS_OWN if any(isinstance(s, kind) for s in plan.values())]
    cut = _WITH_A_PLAN_OF_ITS_OWN[kinds[0]] if kinds else _cut_modules
    if mesh.size > 1:
        cut(model, mesh, chosen)
        _check_tied(model, mesh, {module for module, _ in chosen})
        _check_same_on_all_ranks(model, mesh, chosen)
    elif cut is _cut_modules:
        update_placement(model, axis=Alone(in_sequence(plan.values())), styles=chosen)
    return model


def _cut_modules(model: Module, mesh: DeviceMesh, chosen: list[tuple[Module, Style]]) -> None:
    """parallelize_module for columns, rows, words and modules in between: tensor parallelism."""
    for parameter in model.parameters():
        if parameter.placement is not None and not parameter.placement.own_data:
            raise ValueError(
                f"parallelize_module: {parameter.name!r} is on {parameter.placement.mesh!r} already; give "
                "one plan for the whole model"
            )
    _check_tokens(model, mesh, chosen)
    batch = batch_of(model, mesh.root)
    batch.same += mesh.axes
    axis = Axis(mesh, in_sequence(style for _, style in chosen), batch)
    here = {module for module, _ in chosen}
    routed = (m for m in model.modules() if isinstance(m, MoE) and m not in here)
    if axis.sequence and (left := next(routed, None)) is not None:
        raise ValueError(
            f"parallelize_module: {left.name!r} would route only a part of each sequence, and its gradients "
            "would not be summed; with SequenceParallel give it TokenParallel()"
        )
    for role in ("tensor", "control"):
        mesh.communicator(role)
    mesh.root.communicator("control")
    for module, style in chosen:
        style.apply(module, axis)
    for parameter in model.parameters():
        if parameter.placement is None:
            set_placement(parameter, ParameterPlacement.of_all(REPLICATE, mesh, parameter.shape))
    model.wrap_forward(Deciding(axis))
    update_placement(model, axis=axis, styles=chosen)


def _check_tokens(model: Module, mesh: DeviceMesh, chosen: list[tuple[Module, Style]]) -> None:
    """Raise ValueError for a style inside of a TokenParallel, and for experts on ranks outside of one."""
    inside = {
        below: module
        for module, style in chosen
        if isinstance(style, TokenParallel)
        for below in module.modules()
    }
    for module, style in chosen:
        if inside.get(module, module) is not module:
            raise ValueError(
                f"parallelize_module: {module.name!r} can't have {type(style).__name__}: it is in "
                f"{inside[module].name!r}, of whose tokens each rank has a part by TokenParallel"
            )
    for module in model.modules():
        if module not in inside and any(p.placement is not None for p in module._parameters.values()):
            raise ValueError(
                f"parallelize_module: experts of {module.name!r} are on several ranks, and those of {mesh!r} "
                "have the same tokens: give the nn.MoE around them TokenParallel()"
            )


_WITH_A_PLAN_OF_ITS_OWN = {ContextParallel: lay_out_sequences, ExpertParallel: spread_experts}


def _check_same_on_all_ranks(model: Module, mesh: DeviceMesh, chosen: list[tuple[Module, Style]]) -> None:
    """Raise ValueError for ranks whose model, seed or plan differs: they would not train one model."""
    described: list = [(module.name, type(style).__name__) for module, style in chosen]
    described += [
        (p.name, p.whole_shape, p.seed, p.placement and p.placement.kind) for p in model.parameters()
    ]
    if differing := objects.differing_ranks(mesh.communicator("control"), described):
        raise ValueError(
            f"parallelize_module: ranks {differing} of {mesh!r} have another model, seed or plan than rank 0"
        )


def in_sequence(styles: Iterable[Style]) -> bool:
    """Whether activations between modules are split along time."""
    return any(isinstance(style, SequenceParallel) for style in styles)


def chosen_by(model: Module, plan: Mapping[str, Style], call: str) -> list[tuple[Module, Style]]:
    """The modules that the plan names, in its order, each with its style. Raises as parallelize_module."""
    found: dict[Module, tuple[str, Style]] = {}
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise TypeError(
                f"{call}: {pattern!r} must map to a style, such as ColwiseParallel(), got {style!r}"
            )
        named = list(_named(modules, pattern))
        if not named:
            raise ValueError(f"{call}: {pattern!r} names no module of {type(model).__name__}")
        for path, module in named:
            if not style.fits(module):
                raise TypeError(
                    f"{call}: {path!r} is a {type(module).__name__}; {type(style).__name__} is for "
                    f"{style.wanted}"
                )
            if module in found:
                raise ValueError(
                    f"{call}: {found[module][0]!r} and {pattern!r} both match {path!r}; one pattern must "
                    "match a module"
                )
            found[module] = pattern, style
    return [(module, style) for module, (_, style) in found.items()]


def _check_tied(model: Module, mesh: DeviceMesh, chosen: set[Module]) -> None:
    """Raise ValueError where a module that is not split along `mesh` has a parameter that is."""
    for path, module in model.named_modules():
        for parameter in module._parameters.values() if module not in chosen else ():
            placement = parameter.placement
            if placement is not None and placement.kind == SHARD and placement.mesh is mesh:
                raise ValueError(
                    f"parallelize_module: parameter {parameter.name!r} is split and tied to {path!r}, which "
                    "the plan does not name"
                )


def _named(modules: Mapping[str, Module], pattern: str) -> Iterator[tuple[str, Module]]:
    if not set("*?[").intersection(pattern):
        yield from ((path, modules[path]) for path in [pattern] if path in modules)
        return
    wanted = pattern.split(".")
    for path, module in modules.items():
        names = path.split(".")
        if len(names) == len(wanted) and all(map(fnmatchcase, names, wanted)):
            yield path, module
