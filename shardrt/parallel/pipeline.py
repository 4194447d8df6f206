"""Pipeline: the stages of a model on the ranks of one axis of the mesh, run by a table of actions.

(Huang et al., GPipe, 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, 2024.) What runs when is data: a Table, which
has been checked before anything runs. Here is what an action does: F, the forward of a stage for a
micro-batch; B, its backward; I and W, that in two halves, for the gradients of inputs and of weights. Links
carry activations to the next stage and gradients back, in streams of their own.

Each stage has its micro-batches in ascending order, so all tables give the same bits.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np

from shardrt import autograd, device, dtypes, fsdp, random
from shardrt.autograd import Function, Late
from shardrt.comm import talk
from shardrt.comm.links import Links
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import timeline
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.parallel.carrier import Carrier, action_told, flat, key_of, nested
from shardrt.parallel.schedules import schedule as schedule_of
from shardrt.parallel.stage import Stage, listed, pipeline_stages, sum_tied
from shardrt.parallel.table import Action, Table
from shardrt.parallel.whole import Piped
from shardrt.tensor import Tensor

Array = Any
Loss = Callable[[Any, Any], Tensor]


class Pipeline:
    """A model in stages, of which this rank has `stages`.

    model: as every rank builds it, with the same seed. mesh: the axis of the stages, mesh["pp"]. schedule: a
    name (schedules.py) or a Table. micro_batches: parts of a step's batch; one for each rank if None.
    stages_per_rank: None for what the schedule wants. cuts: the first piece of every stage but the first, by
    name or number; None: by `costs`. costs, batch: see pipeline_stages.

    Shard the stages afterwards, blocks first: fully_shard(stage, mesh=mesh["dp_shard"]). Their units are
    gathered once in a step and reduced once, unless the table has UNSHARD and RESHARD.

    Collective. Raises ValueError for a model that can't be cut so, and for a table that does not end, is for
    other numbers than those given beside it, or is another one on other ranks.
    """

    def __init__(
        self,
        model: Module,
        mesh: DeviceMesh,
        *,
        schedule: str | Table = "1F1B",
        micro_batches: int | None = None,
        stages_per_rank: int | None = None,
        cuts: Sequence[int | str] | None = None,
        costs: str | Sequence[float] = "parameters",
        batch: Any = None,
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"Pipeline: mesh must be a DeviceMesh, got {type(mesh).__name__}")
        if cuts is not None:
            cuts = listed("Pipeline: cuts must be pieces", cuts)
        if isinstance(schedule, str):
            count = mesh.size if micro_batches is None else micro_batches
            schedule = schedule_of(schedule, mesh.size, count, stages_per_rank)
        if not isinstance(schedule, Table):
            raise TypeError(f"Pipeline: schedule must be a name or a Table, got {type(schedule).__name__}")
        self.facts = schedule.check()
        _check_table(schedule, mesh, micro_batches, stages_per_rank, cuts)
        if differing := talk.agree(mesh.communicator("control"), str(schedule)):
            raise ValueError(f"Pipeline: ranks {differing} of {mesh!r} have another table than rank 0")
        self.model = model
        self.mesh = mesh
        self.table = schedule
        self.stages: list[Stage] = pipeline_stages(
            model,
            mesh,
            stages=schedule.stages if cuts is None else cuts,
            placement=schedule,
            costs=costs,
            batch=batch,
        )
        self.links = Links(mesh, self.facts.slots, slots=self.facts.slots)
        self._failed = self._summed = False  # a step has raised; gradients of an earlier one may be there
        self._alike = False  # all stages are known to be sharded, or none
        model.wrap_forward(Piped(self))
        self._forward_wrappers = list(model._forward_wrappers)  # which the stages have
        self._arguments = inspect.signature(model.forward)
        pieces = model.pieces()
        tied = {name for piece in pieces for name in _names(piece.tied)}
        self._of_one_piece = {name for piece in pieces for name in _names(piece.uses)} - tied

    def stage(self, number: int) -> Stage:
        """One of this rank's stages, by its number in the whole pipeline."""
        return next(stage for stage in self.stages if stage.number == number)

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, which computes losses."""
        return any(stage.last for stage in self.stages)

    def step(self, loss: Loss, batches: Sequence[Any]) -> None:
        """Forward and backward of all micro-batches. Gradients are then where `loss.backward()` leaves them.

        loss(model, batch): of one micro-batch; gradients are those of the sum of all. Every stage calls it,
        with something that is called like the model. Before the last stage it ends with that call: the next
        stage goes on from there. What follows the call runs on the last stage alone.

        Several steps before an update add up; inside of no_sync(model) nothing is reduced until the last.

        Collective over the ranks of all stages, which have as many batches, of the same shapes. Raises
        ValueError for another number than the table's, and where some stages are sharded alone; RuntimeError
        for a model with hooks of its own, and where an earlier step has raised.
        """
        if not callable(loss):
            raise TypeError(f"Pipeline.step: loss must be a function, got {type(loss).__name__}")
        batches = self.batches("Pipeline.step", batches)
        self._check()
        self._check_sums()
        self._keep_one_copy()
        if device.current().alone:  # a dry run (fsdp.memory_plan), whose gradients are forgotten
            from shardrt.parallel.memory import step_alone

            step_alone(self, loss, batches)
            return
        with self.using_links():
            Step(self, loss, batches).run()
        tied = (p for p in self.model.parameters() if p.place is not None and p.place.tied)
        if all(parameter.storage.reduced for parameter in tied):
            sum_tied(self.model)
            self._summed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without a backward: what the last stage gives, on every rank. Collective."""
        self._check()
        self.named(args, kwargs)
        output: list[Tensor] = []

        def forward(model: Any, batch: Any) -> Tensor:
            output.append(model(*args, **kwargs))  # the last stage's: before, the call does not come back
            return output[0]

        row = [Action("F", stage.number, 0) for stage in self.stages]
        with self.using_links():
            with autograd.no_grad():
                step = Step(self, forward, [(args, kwargs)], row, kind="whole")
                step.run()
            random.begin_call(max(talk.from_all(self.mesh.communicator("control"), step.used)))
            return self._everywhere(output[0] if output else None)

    @contextmanager
    def using_links(self) -> Iterator[None]:
        """Give the links up where a with block raises: others must not wait for what is not sent any more."""
        try:
            yield
        except BaseException:
            self.links.close()
            self._failed = True
            raise

    def batches(self, call: str, batches: Sequence[Any]) -> list[Any]:
        """The micro-batches of a step. Raises, naming the call, for another number of them, or no list."""
        batches = listed(f"{call}: batches must be a list of micro-batches", batches)
        if len(batches) != self.table.micro_batches:
            told = f"the table has {self.table.micro_batches} micro-batches, got {len(batches)}"
            raise ValueError(f"{call}: {told}")
        return batches

    def _keep_one_copy(self) -> None:
        """Of an earlier step's gradients that are summed already, one copy goes into the next sum."""
        trained = (p for p in self.model.parameters() if p.requires_grad and p.place is not None)
        others = {p.storage for p in trained if p.place.copies is not None and not p.place.owner}
        for storage in others if self._summed else ():
            gradient = storage.complete_gradient()
            if gradient is not None:
                gradient.fill(0)
        self._summed = False

    def _check(self) -> None:
        """Raise RuntimeError where forwards can't run, or would leave something out."""
        if self._failed and self.mesh.size > 1:
            raise RuntimeError(
                "Pipeline: an earlier step has raised on this rank, and others wait for what it has not "
                "sent; let all ranks end, and resume from a checkpoint"
            )
        if self.model._forward_hooks or self.model._forward_pre_hooks:
            raise RuntimeError(
                f"Pipeline: {type(self.model).__name__} has forward hooks, which no stage would call; "
                "register them on its modules"
            )
        if self.model._forward_wrappers != self._forward_wrappers:
            raise RuntimeError(
                f"Pipeline: {type(self.model).__name__} is recomputed or offloaded as a whole, of which "
                "stages know only what was said before they were made; say it of the stages"
            )
        if not self._alike:
            self._check_alike()

    def _check_alike(self) -> None:
        """Raise ValueError where nobody would reduce the gradients of some stages."""
        trained = [stage for stage in self.stages if any(p.requires_grad for p in stage.parameters())]
        alone = [stage.number for stage in trained if not units_below(stage)]
        told = talk.from_all(self.mesh.communicator("control"), [alone, len(alone) < len(trained)])
        alone = sorted(number for numbers, _ in told for number in numbers)
        if alone and any(sharded for _, sharded in told):
            raise ValueError(
                f"Pipeline: stage {alone[0]} is not sharded, and others are; call fully_shard on each stage"
            )
        self._alike = True

    def _check_sums(self) -> None:
        """Raise ValueError for late gradients where each micro-batch's have a place in a tree."""
        late = any(action.kind == "W" for row in self.table.ranks for action in row)
        if late and _by_tree(self.model):
            raise ValueError(
                "Pipeline: with set_world_invariant each micro-batch is reduced by itself, and this table "
                "puts weight gradients off; take GPipe, 1F1B or Interleaved1F1B"
            )

    def drawn(self) -> dict[str, int]:
        """How often modules that other stages may call, too, have drawn random numbers in this call."""
        return {name: count for name, count in random.uses().items() if name not in self._of_one_piece}

    def named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments of a call of the model, by name. Raises TypeError for what forward does not take."""
        try:
            return self._arguments.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(self.model).__name__}.forward: {error}") from None

    def _everywhere(self, output: Tensor | None) -> Tensor:
        """A tensor that the rank of the last stage has, on all ranks."""
        root = self.table.rank_of(self.table.stages - 1)
        control, here = self.mesh.communicator("control"), device.current()
        told = None if output is None else [list(output.shape), dtypes.name_of(output.dtype)]
        shape, dtype = talk.from_all(control, told)[root]
        array = here.empty(tuple(shape), np.dtype(dtype))
        if output is not None:
            here.copy(array, output.data)
        control.broadcast(array.reshape(-1), root=root, stream=here.current_stream, what="output")
        return Tensor(array)


def _check_table(
    table: Table,
    mesh: DeviceMesh,
    micro_batches: int | None,
    stages_per_rank: int | None,
    cuts: Sequence[int | str] | None,
) -> None:
    """Raise ValueError for a table that is for other numbers than those given."""
    given = {
        f"{mesh!r} has": ("ranks", len(table.ranks), mesh.size),
        "micro_batches says": ("micro-batches", table.micro_batches, micro_batches),
        "stages_per_rank makes": ("stages", table.stages, stages_per_rank and stages_per_rank * mesh.size),
        "cuts make": ("stages", table.stages, None if cuts is None else len(cuts) + 1),
    }
    for says, (what, found, wanted) in given.items():
        if wanted not in (None, found):
            raise ValueError(f"Pipeline: the table has {found} {what}, {says} {wanted}")


class Step:
    """One step on this rank: its row of the table, and what is in flight in each stage.

    row, carrier: others, to run it dry (memory.py), or for forwards alone. kind: see key_of. used: calls of
    the model that have used random numbers, as far as this rank knows.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        loss: Loss,
        batches: Sequence[Any],
        row: Sequence[Action] | None = None,
        carrier: Any = None,
        kind: str = "step",
    ) -> None:
        self._pipeline, self._loss, self._batches = pipeline, loss, batches
        self._row = pipeline.table.ranks[pipeline.mesh.rank] if row is None else row
        self._once = len(batches) == 1 and all(action.kind != "W" for action in self._row)
        self._keys = [key_of(pipeline.model, batch, kind) for batch in batches]
        kept = pipeline.facts.kept if row is None else None
        self._carrier = carrier or Carrier(pipeline.links, pipeline.table, pipeline.mesh.rank, kept)
        self._calls = self.used = random.calls()  # of the model in this step, before
        # With a tree, micro-batches are calls of several ranks at once, and told apart otherwise.
        self._tree = _by_tree(pipeline.model)
        self._calls_of_each = 0 if self._tree else 1
        self._sharded = {stage.number for stage in pipeline.stages if units_below(stage)}
        # By stage and micro-batch, from F to B or I:
        self._inputs: dict[tuple[int, int], StageInput] = {}
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}
        self._late: dict[tuple[int, int], Late] = {}  # from I to W

    def run(self) -> None:
        """Every action of the row, in order."""
        last = self._pipeline.table.stages - 1
        for kind, stage, micro_batch, _ in self._row:
            if kind == "F" and stage > 0:
                self._carrier.expect("F", stage - 1, micro_batch, self._keys[micro_batch])
            elif kind in ("B", "I") and stage < last:
                self._carrier.expect("B", stage + 1, micro_batch, self._keys[micro_batch])
        try:
            for action in self._row:
                told = action_told(action.kind, action.stage, action.micro_batch)
                self._pipeline.mesh.part("backward" if action.kind in "BIW" else "forward", told)
                with timeline.span("compute", told):
                    does = self._DOES[action.kind]  # of the class: bound ones would keep the step in a cycle
                    does(self, self._pipeline.stage(action.stage), action.micro_batch, action)
        finally:
            random.begin_turn(None)
        self._carrier.finish()
        random.begin_call(self._calls + (self._calls_of_each * len(self._batches) or 1))

    def _forward(self, stage: Stage, micro_batch: int, action: Action) -> None:
        inputs, drawn = (None, None) if stage.first else self._received(stage, micro_batch)
        random.begin_turn(micro_batch)
        number = self._calls + self._calls_of_each * micro_batch
        model = _AsModel(self._pipeline, stage, inputs, number, drawn)
        try:
            with self._reducing(stage, action):
                outputs = [self._loss(model, self._batches[micro_batch])]
            model.check(outputs[0])
        except _GoesOn as gone:
            outputs, form = flat(gone.output, stage.label)
            arrays = tuple(autograd.contiguous(tensor.data) for tensor in outputs)
            told = [form, self._pipeline.drawn()]
            self._carrier.send("F", stage.number, micro_batch, arrays, self._keys[micro_batch], told)
        self._outputs[stage.number, micro_batch] = outputs
        self.used = max(self.used, random.calls())

    def _received(self, stage: Stage, micro_batch: int) -> tuple[Any, dict[str, int]]:
        """What the stage before gives, on the tape; and what it tells of random numbers."""
        arrays, (form, drawn) = self._carrier.receive("F", stage.number - 1, micro_batch)
        key = self._keys[micro_batch]

        def deliver(gradients: tuple[Array, ...]) -> None:
            self._carrier.send("B", stage.number, micro_batch, gradients, key)

        tensors, self._inputs[stage.number, micro_batch] = StageInput.around(arrays, deliver)
        return nested(iter(tensors), form), drawn

    def _backward(self, stage: Stage, micro_batch: int, action: Action, late: Late | None = None) -> None:
        outputs = self._outputs.pop((stage.number, micro_batch))
        gradients = None
        if not stage.last:
            gradients, _ = self._carrier.receive("B", stage.number + 1, micro_batch)
            pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            outputs, gradients = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        if outputs:
            with self._reducing(stage, action):
                autograd.backward(outputs, gradients, late=late)
            if late is not None:
                self._late[stage.number, micro_batch] = late
        if not stage.first:
            self._inputs.pop((stage.number, micro_batch)).deliver()

    def _input_gradients(self, stage: Stage, micro_batch: int, action: Action) -> None:
        self._backward(stage, micro_batch, action, Late())

    def _weight_gradients(self, stage: Stage, micro_batch: int, action: Action) -> None:
        late = self._late.pop((stage.number, micro_batch), None)
        with self._reducing(stage, action):
            if late is not None:  # something of the stage is trained
                late.run()

    def _unshard(self, stage: Stage, *_: Any) -> None:
        if stage.number in self._sharded:
            fsdp.unshard(stage)

    def _reshard(self, stage: Stage, *_: Any) -> None:
        if stage.number in self._sharded:
            fsdp.reshard(stage)

    _DOES: ClassVar[dict[str, Callable]] = {
        "F": _forward,
        "B": _backward,
        "I": _input_gradients,
        "W": _weight_gradients,
        "UNSHARD": _unshard,
        "RESHARD": _reshard,
    }

    def _reducing(self, stage: Stage, action: Action) -> AbstractContextManager:
        """Gradients are reduced with the last action of the stage that adds to them; in a tree, with each.

        Forwards are told that backwards will not reduce, and so make memory for all gradients at once.
        """
        each = action.reduces or (action.kind == "F" and self._once) or self._tree
        return nullcontext() if each or stage.number not in self._sharded else fsdp.no_sync(stage)


def _names(items: Iterable[Module | Parameter]) -> list[str]:
    """Of all modules there."""
    return [module.name for item in items if isinstance(item, Module) for module in item.modules()]


def _by_tree(module: Module) -> bool:
    """Whether gradients of micro-batches are added by one tree (fsdp.set_world_invariant)."""
    return any(unit.choices.micro_batches is not None for unit in units_below(module))


class StageInput(Function):
    """What the stage before has sent, on the tape.

    It is the oldest node of the stage's forward, so when backward comes to it, its gradients are complete.
    """

    __slots__ = ("_deliver", "_shapes")

    @classmethod
    def around(
        cls, arrays: tuple[Array, ...], deliver: Callable[[tuple[Array | None, ...]], None]
    ) -> "tuple[tuple[Tensor, ...], StageInput]":
        """Tensors around the arrays, and the node, which calls `deliver` with a gradient of each float."""
        node = cls()
        node._deliver = deliver
        node.saved = node.edges = node.needs = ()
        node._shapes = [(a.shape, a.dtype) if dtypes.floating(a.dtype) else None for a in arrays]
        node.enter_tape()
        floats = (array for array, shape in zip(arrays, node._shapes, strict=True) if shape)
        wrapped = iter(node.wrap(tuple(floats), True))
        pairs = zip(arrays, node._shapes, strict=True)
        return tuple(next(wrapped) if shape else Tensor(array) for array, shape in pairs), node

    def backward(self, *dy: Array | None) -> tuple:
        self.deliver(dy)
        return ()

    def deliver(self, gradients: tuple[Array | None, ...] = ()) -> None:
        """Send them, if none have been sent; zeros where nothing used an array. gradients: of the floats."""
        send, self._deliver = self._deliver, None
        if send is not None:
            given = iter(gradients)
            send(tuple(shape and _or_zeros(next(given, None), shape) for shape in self._shapes))


def _or_zeros(gradient: Array | None, shape: tuple) -> Array:
    return device.current().zeros(*shape) if gradient is None else gradient


class _GoesOn(BaseException):
    """The call of a stage that is not the last: what it gives goes on, and the loss function does not."""

    def __init__(self, output: Any) -> None:
        super().__init__("a loss function has caught what ends it before the last stage")
        self.output = output


class _AsModel:
    """What a loss function calls like the model: a stage, with what the stage before has sent."""

    def __init__(
        self, pipeline: Pipeline, stage: Stage, inputs: Any, number: int, drawn: dict[str, int] | None
    ) -> None:
        self._pipeline, self._stage, self._inputs = pipeline, stage, inputs
        self._number, self._drawn = number, drawn
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.called:
            raise RuntimeError(
                "Pipeline.step: the loss function calls the model twice; one stage is all it has"
            )
        self.called = True
        batch = self._pipeline.named(args, kwargs)
        output = self._stage(self._inputs, batch, number=self._number, uses=self._drawn)
        if not self._stage.last:
            raise _GoesOn(output)
        return output

    def check(self, loss: Any) -> None:
        """Raise RuntimeError or TypeError unless the loss function was right to end, and to give `loss`."""
        if not self.called:
            raise RuntimeError("Pipeline.step: the loss function has not called the model")
        if not self._stage.last:
            raise RuntimeError(
                "Pipeline.step: the loss function has caught what ends it before the last stage, where it "
                "calls the model; let it pass: `except Exception` does"
            )
        if not autograd.is_grad_enabled():
            return  # figures of an evaluation, whatever they are
        if not isinstance(loss, Tensor) or loss.data.size != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"Pipeline.step: the loss function must give a tensor of one number, got {got}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline.model, name)
