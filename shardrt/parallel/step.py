"""A rank's work in a step of a pipeline: its row of the table, action by action.

F is the forward of a stage for a micro-batch; B its backward; I and W that in two halves, for the gradients
of inputs and of weights. Links carry activations to the next stage and gradients back, in their own streams.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

from shardrt import autograd, device, dtypes, fsdp, random
from shardrt.autograd import Function
from shardrt.comm import recording
from shardrt.comm.links import Links
from shardrt.comm.mesh import DeviceMesh
from shardrt.deferred_gradients import DeferredGradients
from shardrt.device import timeline
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.parallel.carrier import Carrier, action_label, flat, key_of, nested
from shardrt.parallel.stage import Stage, listed
from shardrt.parallel.table import Action, Table, TableStats
from shardrt.tensor import Tensor

Array = Any
Loss = Callable[[Any, Any], Any]  # of the model's output, and the micro-batch
Inputs = Callable[[Any], Mapping[str, Any] | tuple]  # of a micro-batch: the model's arguments


class Work(NamedTuple):
    """Micro-batches; the model's arguments by name for each; and the use of its output."""

    loss: Loss
    batches: Sequence[Any]
    arguments: Callable[[Any], dict[str, Any]]


class StagedModel:
    """A model in stages, of which this rank has `stages`: the fields of a Pipeline that a step needs.

    Args:
        facts: the result of Table.check.
    """

    def __init__(
        self, model: Module, mesh: DeviceMesh, table: Table, facts: TableStats, stages: Sequence[Stage]
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.table = table
        self.facts = facts
        self.stages: list[Stage] = list(stages)
        self.links = Links(mesh, facts.slots, slots=facts.slots)
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

    def work(self, call: str, loss: Loss, batches: Sequence[Any], inputs: Inputs | None) -> Work:
        """The work of a step.

        Args:
            inputs: None where the model is called with the micro-batch itself.

        Raises:
            TypeError: naming the call, for other than functions and a list.
        """
        for name, function in (("loss", loss), *([] if inputs is None else [("inputs", inputs)])):
            if not callable(function):
                raise TypeError(f"{call}: {name} must be a function, got {type(function).__name__}")
        batches = listed(f"{call}: batches must be a list of micro-batches", batches)
        for batch in batches if inputs is None else ():
            _check_inputs(f"{call}: without inputs=, a micro-batch is", batch)
        return Work(loss, batches, partial(self._arguments_for, call, inputs))

    def check_count(self, call: str, work: Work) -> None:
        """Raise ValueError unless the number of micro-batches is the table's."""
        if len(work.batches) != self.table.micro_batches:
            raise ValueError(
                f"{call}: the table has {self.table.micro_batches} micro-batches, got {len(work.batches)}"
            )

    def _arguments_for(self, call: str, inputs: Inputs | None, batch: Any) -> dict[str, Any]:
        given = batch if inputs is None else inputs(batch)
        if inputs is not None:
            _check_inputs(f"{call}: inputs gave", given)
        return self.arguments((), given) if isinstance(given, Mapping) else self.arguments(given, {})

    def drawn(self) -> dict[str, int]:
        """How often modules that other stages may call, too, have drawn random numbers in this call."""
        return {name: count for name, count in random.uses().items() if name not in self._of_one_piece}

    def arguments(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the model, by name. TypeError where forward does not take them."""
        try:
            return self._arguments.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(self.model).__name__}.forward: {error}") from None


def _check_inputs(found: str, given: Any) -> None:
    """Raise TypeError unless `given` can be the arguments of a model."""
    if not isinstance(given, tuple | Mapping):
        raise TypeError(
            f"{found} {type(given).__name__}; the model is called with a tuple, or a mapping from names"
        )


def _names(items: Iterable[Module | Parameter]) -> list[str]:
    """The names of all modules below."""
    return [module.name for item in items if isinstance(item, Module) for module in item.modules()]


class Step:
    """One step on this rank: its row of the table, and the micro-batches in flight in each stage.

    used: calls of the model that have used random numbers, as far as this rank knows.

    Args:
        row, carrier: others, to run it dry (memory.py), or for forwards alone.
        kind: see key_of.
    """

    def __init__(
        self,
        pipeline: StagedModel,
        work: Work,
        row: Sequence[Action] | None = None,
        carrier: Any = None,
        kind: str = "step",
    ) -> None:
        self._pipeline, self._work, batches = pipeline, work, work.batches
        self._row = pipeline.table.ranks[pipeline.mesh.rank] if row is None else row
        self._once = len(batches) == 1 and all(action.kind != "W" for action in self._row)
        self._keys = [key_of(pipeline.model, batch, kind) for batch in batches]
        kept = pipeline.facts.kept if row is None else None
        self._carrier = carrier or Carrier(pipeline.links, pipeline.table, pipeline.mesh.rank, kept)
        self._calls = self.used = random.calls()  # of the model in this step, before
        # With a tree, micro-batches are calls of several ranks at once; random.begin_turn distinguishes them.
        self._tree = by_tree(pipeline.model)
        self._calls_of_each = 0 if self._tree else 1
        self._sharded = {stage.number for stage in pipeline.stages if units_below(stage)}
        # By stage and micro-batch, from F to B or I:
        self._inputs: dict[tuple[int, int], StageInput] = {}
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}
        self._deferred: dict[tuple[int, int], DeferredGradients] = {}  # from I to W

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
                label = action_label(action.kind, action.stage, action.micro_batch)
                recording.part(self._pipeline.mesh, "backward" if action.kind in "BIW" else "forward", label)
                with timeline.span("compute", label):
                    does = self._DOES[action.kind]  # of the class: bound ones would keep the step in a cycle
                    does(self, self._pipeline.stage(action.stage), action.micro_batch, action)
        finally:
            random.begin_turn(None)
        self._carrier.finish()
        random.begin_call(self._calls + (self._calls_of_each * len(self._work.batches) or 1))

    def _forward(self, stage: Stage, micro_batch: int, action: Action) -> None:
        x, drawn = (None, None) if stage.first else self._received(stage, micro_batch)
        random.begin_turn(micro_batch)
        number, batch = self._calls + self._calls_of_each * micro_batch, self._work.batches[micro_batch]
        with self._reducing(stage, action):
            arguments = self._work.arguments(batch)
            output = stage(x, arguments, number=number, uses=drawn)
            outputs = [self._work.loss(output, batch)] if stage.last else []
        if stage.last:
            _check_loss(outputs[0])
        else:
            outputs, form = flat(output, stage.label)
            arrays = tuple(autograd.contiguous(tensor.data) for tensor in outputs)
            about = [form, self._pipeline.drawn()]
            self._carrier.send("F", stage.number, micro_batch, arrays, self._keys[micro_batch], about)
        self._outputs[stage.number, micro_batch] = outputs
        self.used = max(self.used, random.calls())

    def _received(self, stage: Stage, micro_batch: int) -> tuple[Any, dict[str, int]]:
        """The previous stage's output, on the tape; and the state of random numbers that it sent."""
        arrays, (form, drawn) = self._carrier.receive("F", stage.number - 1, micro_batch)
        key = self._keys[micro_batch]

        def deliver(gradients: tuple[Array, ...]) -> None:
            self._carrier.send("B", stage.number, micro_batch, gradients, key)

        tensors, self._inputs[stage.number, micro_batch] = StageInput.around(arrays, deliver)
        return nested(iter(tensors), form), drawn

    def _backward(
        self, stage: Stage, micro_batch: int, action: Action, deferred: DeferredGradients | None = None
    ) -> None:
        outputs = self._outputs.pop((stage.number, micro_batch))
        gradients = None
        if not stage.last:
            gradients, _ = self._carrier.receive("B", stage.number + 1, micro_batch)
            pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            outputs, gradients = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        if outputs:
            with self._reducing(stage, action):
                autograd.backward(outputs, gradients, deferred=deferred)
            if deferred is not None:
                self._deferred[stage.number, micro_batch] = deferred
        if not stage.first:
            self._inputs.pop((stage.number, micro_batch)).deliver()

    def _input_gradients(self, stage: Stage, micro_batch: int, action: Action) -> None:
        self._backward(stage, micro_batch, action, DeferredGradients())

    def _weight_gradients(self, stage: Stage, micro_batch: int, action: Action) -> None:
        deferred = self._deferred.pop((stage.number, micro_batch), None)
        with self._reducing(stage, action):
            if deferred is not None:  # something of the stage is trained
                deferred.flush()

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

        So is a forward: inside no_sync it makes memory for all gradients at once.
        """
        each = action.reduces or (action.kind == "F" and self._once) or self._tree
        return nullcontext() if each or stage.number not in self._sharded else fsdp.no_sync(stage)


def by_tree(module: Module) -> bool:
    """Whether gradients of micro-batches are added by one tree (fsdp.set_world_invariant)."""
    return any(unit.choices.micro_batches is not None for unit in units_below(module))


class StageInput(Function):
    """The message of the previous stage, on the tape.

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
        """Send them, if none have been sent; zeros where nothing used an array.

        Args:
            gradients: of the floats.
        """
        send, self._deliver = self._deliver, None
        if send is not None:
            given = iter(gradients)
            send(tuple(shape and _or_zeros(next(given, None), shape) for shape in self._shapes))


def _or_zeros(gradient: Array | None, shape: tuple) -> Array:
    return device.current().zeros(*shape) if gradient is None else gradient


def _check_loss(loss: Any) -> None:
    """Raise TypeError if the loss must have a backward and has none."""
    if autograd.is_grad_enabled() and not (isinstance(loss, Tensor) and loss.data.size == 1):
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"Pipeline.step: the loss function must return a scalar tensor, got {got}")
