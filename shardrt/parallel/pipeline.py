"""Pipeline: the stages of a model on the ranks of one axis of the mesh, run by a table of actions.

(Huang et al., GPipe, 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, 2024.) What runs when is data: a Table, which
has been checked before anything runs. Here is what an action does: F, the forward of a stage for a
micro-batch; B, its backward; I and W, that in two halves, for the gradients of inputs and of weights. Links
carry activations to the next stage and gradients back, in streams of their own.

Each stage has its micro-batches in ascending order, so all tables give the same bits.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes, fsdp, random
from shardrt.autograd import Function, Late
from shardrt.comm import talk
from shardrt.comm.links import Links
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import timeline
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.parallel.carrier import Carrier, action_told, flat, key_of, shapes_of
from shardrt.parallel.schedules import schedule as schedule_of
from shardrt.parallel.stage import Stage, pipeline_stages, sum_tied
from shardrt.parallel.table import Action, Table
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

    Collective. Raises ValueError for a model that can't be cut so, and for a table that does not end.
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
        if not isinstance(schedule, Table):
            schedule = schedule_of(schedule, mesh.size, micro_batches or mesh.size, stages_per_rank)
        if len(schedule.ranks) != mesh.size:
            raise ValueError(f"Pipeline: the table has {len(schedule.ranks)} ranks, {mesh!r} has {mesh.size}")
        self.facts = schedule.check()
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
        self._arguments = inspect.signature(model.forward)

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

        Collective over the ranks of all stages, which have as many batches, of the same shapes. Raises
        ValueError for another number than the table's.
        """
        if len(batches) != self.table.micro_batches:
            told = f"the table has {self.table.micro_batches} micro-batches, got {len(batches)}"
            raise ValueError(f"Pipeline.step: {told}")
        self._check_sums()
        try:
            Step(self, loss, batches).run()
        except BaseException:
            self.links.close()  # or others would wait for what this rank does not send any more
            raise
        sum_tied(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without a backward: what the last stage gives, on every rank. Collective."""
        carrier, key, x = self.carrier(), ("whole", shapes_of((args, kwargs))), None
        batch = self.named(args, kwargs)
        own = [stage for stage in self.stages if not stage.first]
        for stage in own:
            carrier.expect("F", stage.number - 1, 0, key)
        with autograd.no_grad():
            for stage in self.stages:
                x = None
                if not stage.first:
                    arrays, single = carrier.receive("F", stage.number - 1, 0)
                    x = Tensor(arrays[0]) if single else tuple(map(Tensor, arrays))
                x = stage(x, batch)
                if not stage.last:
                    tensors, single = flat(x, stage.label)
                    carrier.send("F", stage.number, 0, tuple(t.data for t in tensors), key, single)
        carrier.finish()
        return self._everywhere(x if self.last else None)

    def _check_sums(self) -> None:
        """Raise ValueError for late gradients where each micro-batch's have a place in a tree."""
        units = [unit for stage in self.stages for unit in units_below(stage)]
        late = any(action.kind == "W" for row in self.table.ranks for action in row)
        if late and any(unit.choices.micro_batches is not None for unit in units):
            raise ValueError(
                "Pipeline: with set_world_invariant each micro-batch is reduced by itself, and this table "
                "puts weight gradients off; take GPipe, 1F1B or Interleaved1F1B"
            )

    def carrier(self) -> Carrier:
        """For one step, or one forward."""
        return Carrier(self.links, self.table, self.mesh.rank)

    def named(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """The arguments of a call of the model, by name."""
        return self._arguments.bind(*args, **kwargs).arguments

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


class Step:
    """One step on this rank: its row of the table, and what is in flight in each stage.

    row, carrier: others, to rehearse it (memory.py).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        loss: Loss,
        batches: Sequence[Any],
        row: Sequence[Action] | None = None,
        carrier: Any = None,
    ) -> None:
        self._pipeline, self._loss, self._batches = pipeline, loss, batches
        self._row = pipeline.table.ranks[pipeline.mesh.rank] if row is None else row
        self._once = len(batches) == 1 and all(action.kind != "W" for action in self._row)
        self._keys = [key_of(batch) for batch in batches]
        self._carrier = carrier or pipeline.carrier()
        self._calls = random.calls()  # of the model in this step, before
        # By stage and micro-batch, from F to B or I:
        self._inputs: dict[tuple[int, int], StageInput] = {}
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}
        self._late: dict[tuple[int, int], Late] = {}  # from I to W
        self._does: dict[str, Callable] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradients,
            "W": self._weight_gradients,
            "UNSHARD": lambda stage, micro_batch, action: fsdp.unshard(stage),
            "RESHARD": lambda stage, micro_batch, action: fsdp.reshard(stage),
        }

    def run(self) -> None:
        """Every action of the row, in order."""
        last = self._pipeline.table.stages - 1
        for kind, stage, micro_batch, _ in self._row:
            if kind == "F" and stage > 0:
                self._carrier.expect("F", stage - 1, micro_batch, self._keys[micro_batch])
            elif kind in ("B", "I") and stage < last:
                self._carrier.expect("B", stage + 1, micro_batch, self._keys[micro_batch])
        for action in self._row:
            told = action_told(action.kind, action.stage, action.micro_batch)
            self._pipeline.mesh.part("backward" if action.kind in "BIW" else "forward", told)
            with timeline.span("compute", told):
                self._does[action.kind](self._pipeline.stage(action.stage), action.micro_batch, action)
        self._carrier.finish()
        random.begin_call(self._calls + len(self._batches))

    def _forward(self, stage: Stage, micro_batch: int, action: Action) -> None:
        inputs = None if stage.first else self._received(stage, micro_batch)
        begun = _Begun(self._pipeline, stage, inputs, self._calls + micro_batch)
        try:
            with self._reducing(stage, action):
                outputs = [self._loss(begun, self._batches[micro_batch])]
            if not begun.called:
                raise RuntimeError("Pipeline.step: the loss function has not called the model")
        except _GoesOn as gone:
            outputs, single = flat(gone.output, stage.label)
            arrays = tuple(autograd.contiguous(tensor.data) for tensor in outputs)
            self._carrier.send("F", stage.number, micro_batch, arrays, self._keys[micro_batch], single)
        self._outputs[stage.number, micro_batch] = outputs

    def _received(self, stage: Stage, micro_batch: int) -> Any:
        """What the stage before gives, on the tape."""
        arrays, single = self._carrier.receive("F", stage.number - 1, micro_batch)
        key = self._keys[micro_batch]

        def deliver(gradients: tuple[Array, ...]) -> None:
            self._carrier.send("B", stage.number, micro_batch, gradients, key)

        tensors, self._inputs[stage.number, micro_batch] = StageInput.around(arrays, deliver)
        return tensors[0] if single else tensors

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
        if not stage.first:
            self._inputs.pop((stage.number, micro_batch)).deliver()

    def _input_gradients(self, stage: Stage, micro_batch: int, action: Action) -> None:
        late = self._late[stage.number, micro_batch] = Late()
        self._backward(stage, micro_batch, action, late)

    def _weight_gradients(self, stage: Stage, micro_batch: int, action: Action) -> None:
        with self._reducing(stage, action):
            self._late.pop((stage.number, micro_batch)).run()

    def _reducing(self, stage: Stage, action: Action) -> AbstractContextManager:
        """Gradients are reduced with the last action of the stage that adds to them; in a tree, with each.

        Forwards are told that backwards will not reduce, and so make memory for all gradients at once.
        """
        units = units_below(stage)
        once = action.kind == "F" and self._once
        each = action.reduces or once or any(unit.choices.micro_batches is not None for unit in units)
        return nullcontext() if each or not units else fsdp.no_sync(stage)


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
        node.enter_tape()
        tensors = node.wrap(arrays, True)
        node._shapes = [(t.shape, t.dtype) if dtypes.floating(t.dtype) else None for t in tensors]
        pairs = zip(tensors, node._shapes, strict=True)
        return tuple(tensor if shape else Tensor(tensor.data) for tensor, shape in pairs), node

    def backward(self, *dy: Array | None) -> tuple:
        self.deliver(dy)
        return ()

    def deliver(self, gradients: tuple[Array | None, ...] = ()) -> None:
        """Send them, if none have been sent; zeros where nothing used an array."""
        send, self._deliver = self._deliver, None
        if send is None:
            return
        here = device.current()
        given = gradients or (None,) * len(self._shapes)
        pairs = zip(given, self._shapes, strict=True)
        send(
            tuple(here.zeros(*shape) if gradient is None and shape else gradient for gradient, shape in pairs)
        )


class _GoesOn(BaseException):
    """The call of a stage that is not the last: what it gives goes on, and the loss function does not."""

    def __init__(self, output: Any) -> None:
        super().__init__("a loss function has caught what ends it before the last stage")
        self.output = output


class _Begun:
    """What a loss function calls like the model: a stage, with what the stage before has sent."""

    def __init__(self, pipeline: Pipeline, stage: Stage, inputs: Any, number: int) -> None:
        self._pipeline, self._stage, self._inputs, self._number = pipeline, stage, inputs, number
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.called:
            raise RuntimeError(
                "Pipeline.step: the loss function calls the model twice; one stage is all it has"
            )
        self.called = True
        batch = self._pipeline.named(args, kwargs)
        output = self._stage(self._inputs, batch, number=self._number)
        if not self._stage.last:
            raise _GoesOn(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline.model, name)
