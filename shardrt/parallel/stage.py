"""pipeline_stages: splits a model into the stages of a pipeline. Each rank along an axis has some of them.

Every rank builds the whole model, which allocates nothing. It keeps the modules that its stages use, under
their names, so initial values, dropout masks and checkpoints are those of the whole model. Parameters of
other stages have no values here (nn/placement.py). Ranks of different stages build, gather and reduce their
units independently.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from shardrt import device, random
from shardrt.comm import objects
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import overlap
from shardrt.comm.protocol import Communicator
from shardrt.nn.containers import ModuleList
from shardrt.nn.module import WrapperOrder, label_of, stages_of
from shardrt.nn.moe import Router
from shardrt.nn.parameter_placement import whole_size
from shardrt.nn.pieces import Piece
from shardrt.nn.placement import PipelinePlacement, placement_of, set_pipeline_placement, update_placement
from shardrt.nn.public import Module, Parameter
from shardrt.parallel.axis import batch_of
from shardrt.parallel.cut import balanced, loop, vee
from shardrt.parallel.tied_replica import TiedReplica, gradient_of, with_tied_replicas
from shardrt.parallel.times import piece_times

PLACEMENTS = {"loop": loop, "V": vee}


class Stage(Module):
    """Consecutive pieces of a model. A stage holds their modules under their names in the model.

    stage(x, batch) is the pieces' output for x, the output of the stage before (None for the first stage).
    batch: the arguments of the model's forward by name. number=k: this is the model's call k of the step,
    from 0, as a micro-batch is; then dropout draws what it draws where the model is called as one. uses=: how
    often modules that several stages call have drawn in the stages before (random.uses).
    fully_shard, wrap and other calls for a model's units work on a stage too.

    `number` of `count` stages, `first`, `last`; `pieces`; `blocks`, of the model's ModuleLists.
    """

    def __init__(self, model: Module, number: int, count: int, pieces: Sequence[Piece]) -> None:
        super().__init__()
        update_placement(self, label=f"stage {number}", between_stages=(True, number < count - 1))
        object.__setattr__(self, "model", model)  # not a child: the stage would hold the whole model
        self.number, self.count, self.pieces = number, count, list(pieces)
        self.tied_replicas: list[
            TiedReplica
        ] = []  # of parameters that an earlier stage of this rank also uses
        self.blocks: list[Module] = []
        for item in {id(item): item for piece in pieces for item in (*piece.uses, *piece.tied)}.values():
            self._take(item)
        for wrapper in model._forward_wrappers:
            self.wrap_forward(wrapper)

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.number == self.count - 1

    @property
    def label(self) -> str:
        """For messages."""
        return label_of(self)

    @property
    def batch_block(self) -> random.Block | None:
        return self.model.batch_block

    def __call__(
        self,
        x: Any,
        batch: Mapping[str, Any],
        *,
        number: int | None = None,
        uses: Mapping[str, int] | None = None,
    ) -> Any:
        if number is not None:
            random.begin_call(number, uses)
        self.refresh()
        return super().__call__(x, batch)

    def refresh(self) -> None:
        """Copy the owner's current values to its replicas. Each call of the stage begins with it.

        Also before something gathers it. Collective over the ranks of this stage where it was written.
        """
        for twin in self.tied_replicas:
            twin.refresh()

    def forward(self, x: Any, batch: Mapping[str, Any]) -> Any:
        for piece in self.pieces:
            x = piece.run(x, batch)
        return x

    def __deepcopy__(self, memo: dict) -> "Stage":
        raise TypeError(
            f"copy.deepcopy: {self.label} is part of a model on several ranks and can't be copied"
        )

    def _take(self, item: Module | Parameter) -> None:
        """Hold a module at its path in the model, below modules that do nothing."""
        *above, own = item.name.split(".")
        holder: Module = self
        for name in above:
            holder = holder._modules.setdefault(name, Module())
        if isinstance(item, Parameter):
            holder._parameters[own] = item
            return
        holder._modules[own] = item
        update_placement(item, stage=weakref.ref(self))
        if isinstance(item.parent, ModuleList):
            self.blocks.append(item)


def pipeline_stages(
    model: Module,
    mesh: DeviceMesh,
    *,
    stages: int | Sequence[int | str] | None = None,
    placement: Any = "loop",
    costs: str | Sequence[float] = "parameters",
    batch: Mapping[str, Any] | None = None,
) -> list[Stage]:
    """Split `model` into stages along the one axis of `mesh`, a slice such as mesh["pp"]; gives this rank's.

    The model gives its pieces by a method pieces() (nn.Piece); a stage is some neighbours of them. Call it
    after parallelize_module and add_lora, and before fully_shard, which each rank then calls for its own
    stages and their blocks, over other axes of the same mesh. The model stays the one that optimizers,
    clipping, checkpoints and files are given: model.parameters() are all, on every rank. Collective.

    stages: how many, one for each rank if None; or where each but the first begins, names or numbers of
        pieces: ["blocks.2", "blocks.4"].
    placement: the rank of each stage: "loop" (0, 1, 0, 1), "V" (0, 1, 1, 0), a list, a mapping from stage to
        rank, or an object with a method rank_of(stage).
    costs: of each piece, by which the stages are balanced: "parameters", how many it has; numbers; or "time",
        measured now, on rank 0, with `batch`, a micro-batch: the arguments of the model's forward by name.

    Raises TypeError for other than a Module and a DeviceMesh, and without pieces(); ValueError for more
    stages than pieces, a stage without pieces, a rank without a stage, costs that do not fit, a parameter
    that is in no piece, or in two stages though no piece says that it is tied, a mesh of several axes, a
    module that is cut or balanced along `mesh`, ranks that have another model, seed or cut; RuntimeError for
    a model that is sharded, has an optimizer, or stages already.
    """
    pieces = _pieces(model, mesh)
    _check_apart(model, mesh)
    begins = _begins(model, mesh, pieces, stages, costs, batch)
    ranks = _ranks(placement, len(begins), mesh.size)
    used = _used(model, pieces, begins)
    root = mesh.root
    _check_same_on_all_ranks(root.communicator("control"), model, begins, ranks)
    mesh.communicator("control")
    root.allow_divergence(mesh.axes)
    places = _places(mesh, ranks, used)
    for parameter in model.parameters():
        set_pipeline_placement(parameter, places[used[id(parameter)]])
    own = []
    for number, (start, stop) in enumerate(zip(begins, [*begins[1:], len(pieces)], strict=True)):
        for module in (module for piece in pieces[start:stop] for module in piece.modules()):
            if placement_of(module).pipeline is None:
                update_placement(module, pipeline=places[number,])
        if ranks[number] == mesh.rank:
            again = _again(pieces[start:stop], number, ranks)
            seen = with_tied_replicas(model, again).pieces() if again else pieces
            own.append(Stage(model, number, len(begins), seen[start:stop]))
            own[-1].tied_replicas = again
    update_placement(model, stages=tuple(map(weakref.ref, own)))
    if len(begins) > 1:
        model.wrap_forward(_Refusing())
    _place_batch(model, mesh)
    return own


class _Refusing:
    """Refuses the forward of a model that has stages."""

    layer, every_entry = WrapperOrder.STAGES, False

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{type(module).__name__} has stages, of which this rank runs "
            f"{', '.join(str(stage.number) for stage in stages_of(module))}: call these, one after the other"
        )


def sum_tied(model: Module) -> None:
    """Add up the gradients of each parameter that two stages use, on the ranks of both.

    Call it once in a step, after all backwards and before clipping and the update. The copies are then
    bitwise identical. Collective over the ranks of these stages that hold the same shard; nothing where no
    parameter is tied. The sum is the first stage's gradient plus the last's. Both stages must shard the
    parameter alike.

    Raises:
        RuntimeError: if a trained parameter has no gradient.
    """
    for twin in (
        twin for stage in stages_of(model) for twin in stage.tied_replicas if twin.own.requires_grad
    ):
        twin.add_gradient()
    tied = [p for p in model.parameters() if p.pipeline is not None and p.pipeline.copies is not None]
    for parameter in {p.storage: p for p in tied if p.requires_grad}.values():
        gradient = gradient_of(parameter)
        here = device.of(gradient) is device.current()
        communicator = parameter.pipeline.copies.communicator("tied" if here else "control")
        held = ", ".join(f"{runs.first} to {runs.stop}" for runs in parameter.extents[:2])
        tag = f"{parameter.name}, elements {held}"  # ranks compare it: they must hold the same
        communicator.all_reduce(gradient, op="sum", stream=device.current().current_stream, tag=tag)


def _pieces(model: Module, mesh: DeviceMesh) -> list[Piece]:
    if not isinstance(model, Module):
        raise TypeError(f"pipeline_stages: model must be a shardrt.nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"pipeline_stages: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if len(mesh.shape) > 1:
        raise ValueError(f'pipeline_stages: mesh must have one axis, as mesh["pp"]; got {mesh!r}')
    if model.parent is not None:
        raise ValueError(f"pipeline_stages: call it on the outermost module, not on {model.name!r} alone")
    if any(parameter.pipeline is not None for parameter in model.parameters()):
        raise RuntimeError("pipeline_stages: the model has stages already; call it once")
    give = getattr(type(model), "pieces", None)
    if give is None:
        raise TypeError(
            f"pipeline_stages: {type(model).__name__} has no method pieces(), which gives its nn.Pieces"
        )
    return list(give(model))


def _check_apart(model: Module, mesh: DeviceMesh) -> None:
    """Raise ValueError if a module would wait for ranks along `mesh`: those ranks have other stages."""
    for module in model.modules():
        meshes = [p.placement.mesh for p in module._parameters.values() if p.placement is not None]
        if isinstance(module, Router) and module.balance_mesh is not None:
            meshes.append(module.balance_mesh)
        for other in meshes:
            if other.root is mesh.root and overlap(other.axes, mesh.axes):
                raise ValueError(
                    f"pipeline_stages: {module.name!r} is split along {other!r}, which overlaps the stages' "
                    "axis: use axes for it that come after the pipeline's"
                )


def _begins(
    model: Module,
    mesh: DeviceMesh,
    pieces: list[Piece],
    stages: int | Sequence[int | str] | None,
    costs: str | Sequence[float],
    batch: Mapping[str, Any] | None,
) -> list[int]:
    """The number of the first piece of each stage."""
    names = [piece.name for piece in pieces]
    stages = mesh.size if stages is None else stages
    if not isinstance(stages, Integral):
        return _by_hand(names, listed("pipeline_stages: stages must be a number, or pieces", stages))
    if not 1 <= stages <= len(pieces):
        raise ValueError(
            f"pipeline_stages: {stages} stages need at least {stages} pieces, the model has {len(pieces)}"
        )
    if costs == "parameters":
        costs = [sum(map(whole_size, piece.parameters())) for piece in pieces]
    elif costs == "time":
        if batch is None:
            raise ValueError("pipeline_stages: costs='time' needs a micro-batch to measure; pass it as batch")
        _check_batch(model, batch)
        costs = objects.broadcast_object(mesh.root.communicator("control"), piece_times(model, batch))
    elif isinstance(costs, str):
        raise ValueError(f"pipeline_stages: costs must be 'parameters', 'time' or numbers, got {costs!r}")
    costs = listed("pipeline_stages: costs must be 'parameters', 'time' or numbers", costs)
    if not all(isinstance(cost, Real) for cost in costs):
        raise TypeError(f"pipeline_stages: costs must be numbers, got {costs}")
    costs = [float(cost) for cost in costs]
    if len(costs) != len(pieces):
        raise ValueError(
            f"pipeline_stages: costs must have {len(pieces)} numbers, one for each of {', '.join(names)}; "
            f"got {len(costs)}"
        )
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"pipeline_stages: costs must be finite and at least 0, got {costs}")
    return balanced(costs, stages)


def listed(must: str, value: Any) -> list:
    """The items of a collection, as a list.

    Raises:
        TypeError: with this message for other types.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{must}, got {value!r:.60}")
    return list(value)


def _check_batch(model: Module, batch: Any) -> None:
    """Raise TypeError for values that are not the arguments of a model's forward by name."""
    if not isinstance(batch, Mapping):
        got = type(batch).__name__
        raise TypeError(f"pipeline_stages: batch must be the arguments of forward by name, got {got}")
    try:
        inspect.signature(model.forward).bind(**batch)
    except TypeError as error:
        raise TypeError(f"pipeline_stages: batch: {type(model).__name__}.forward: {error}") from None


def _by_hand(names: list[str], cuts: Sequence[int | str]) -> list[int]:
    begins = [0]
    for cut in cuts:
        if cut not in names and not (isinstance(cut, int) and 0 <= cut < len(names)):
            raise ValueError(f"pipeline_stages: cuts must name pieces ({', '.join(names)}), got {cut!r}")
        begins.append(names.index(cut) if cut in names else cut)
        if begins[-1] <= begins[-2]:
            raise ValueError(
                f"pipeline_stages: stage {len(begins) - 2} would have no piece: it begins with "
                f"{names[begins[-2]]!r} and the next with {names[begins[-1]]!r}"
            )
    return begins


def _ranks(placement: Any, stages: int, size: int) -> list[int]:
    """The rank of each stage."""
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            known = ", ".join(map(repr, PLACEMENTS))
            raise ValueError(f"pipeline_stages: unknown placement {placement!r}; known: {known}")
        placement = PLACEMENTS[placement](stages, size)
    rank_of = getattr(placement, "rank_of", None) or getattr(placement, "__getitem__", None)
    try:
        ranks = [int(rank_of(stage)) for stage in range(stages)]
    except (LookupError, TypeError):
        raise ValueError(
            f"pipeline_stages: placement must give the rank of each of {stages} stages"
        ) from None
    if wrong := [rank for rank in ranks if not 0 <= rank < size]:
        raise ValueError(
            f"pipeline_stages: placement names rank {wrong[0]}, but the axis has ranks 0 to {size - 1}"
        )
    if idle := [rank for rank in range(size) if rank not in ranks]:
        raise ValueError(f"pipeline_stages: rank {idle[0]} of the axis has none of the {stages} stages")
    return ranks


def _used(model: Module, pieces: list[Piece], begins: list[int]) -> dict[int, tuple[int, ...]]:
    """Map the id of a parameter to the stages that use it, checked."""
    used: dict[int, tuple[int, ...]] = {}
    for number, piece in enumerate(pieces):
        stage = sum(begin <= number for begin in begins) - 1
        tied = {id(parameter) for parameter in piece.tied_parameters()}
        for parameter in piece.parameters():
            before, described = used.get(id(parameter), ()), f"pipeline_stages: parameter {parameter.name!r}"
            used[id(parameter)] = stages = before if stage in before else (*before, stage)
            if len(stages) > 1 and id(parameter) not in tied:
                raise ValueError(
                    f"{described} is used on stages {before[-1]} and {stage}, but piece {piece.name!r} does "
                    "not name it as tied"
                )
            if len(stages) > 2:
                on = ", ".join(map(str, stages))
                raise ValueError(
                    f"{described} is tied between stages {on}; at most two stages can share a parameter"
                )
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            raise ValueError(f"pipeline_stages: parameter {name!r} is in no piece of {type(model).__name__}")
    return used


def _check_same_on_all_ranks(
    control: Communicator, model: Module, begins: list[int], ranks: list[int]
) -> None:
    """Raise ValueError if the stages of all ranks are not stages of one model."""
    described = [(p.name, p.whole_shape, p.seed, p.requires_grad) for p in model.parameters()]
    if differing := objects.differing_ranks(control, (described, begins, ranks)):
        raise ValueError(
            f"pipeline_stages: ranks {differing} have another model, seed or cuts than rank 0; pass the "
            "same on all"
        )


def _places(
    mesh: DeviceMesh, ranks: list[int], used: dict[int, tuple[int, ...]]
) -> dict[tuple[int, ...], PipelinePlacement]:
    """The ranks of each stage, and of each set of stages that share parameters. Collective over `mesh`."""
    alone = {(stage,): PipelinePlacement(mesh, (stage,), (rank,)) for stage, rank in enumerate(ranks)}
    tied = {}
    for stages in sorted({stages for stages in used.values() if len(stages) > 1}):
        pair = tuple(ranks[stage] for stage in stages)
        tied[stages] = PipelinePlacement(mesh, stages, pair, mesh.among(pair) if len({*pair}) > 1 else None)
    return alone | tied


def _again(pieces: list[Piece], number: int, ranks: list[int]) -> list[TiedReplica]:
    """Replicas of the parameters that an earlier stage on the rank of stage `number` also uses."""
    tied = {id(p): p for piece in pieces for p in piece.tied_parameters()}.values()
    return [
        TiedReplica(p) for p in tied if p.pipeline.stages[0] < number and p.pipeline.ranks[0] == ranks[number]
    ]


def _place_batch(model: Module, mesh: DeviceMesh) -> None:
    """Register for dropout that ranks of all stages have the same part of the batch."""
    batch_of(model, mesh.root).same += mesh.axes
