"""Pipeline: the stages of a model on the ranks of one axis of the mesh, run by a table of actions.

(Huang et al., GPipe, 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, 2024.) A Table says which
action runs when; it is checked before anything runs. step.py runs the actions.

Each stage runs its micro-batches in ascending order, so all tables give bitwise identical results.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes, random
from shardrt.comm import objects
from shardrt.comm.mesh import DeviceMesh
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.parallel.memory import step_alone
from shardrt.parallel.schedules import schedule as schedule_of
from shardrt.parallel.stage import listed, pipeline_stages, sum_tied
from shardrt.parallel.step import Inputs, Loss, StagedModel, Step, Work, by_tree
from shardrt.parallel.table import Action, Table
from shardrt.parallel.whole import Piped
from shardrt.tensor import Tensor

__all__ = ["Pipeline"]


class Pipeline(StagedModel):
    """A model in stages, of which this rank has `stages`.

    Shard the stages afterwards, blocks first: fully_shard(stage, mesh=mesh["dp_shard"]). Their units are
    gathered once in a step and reduced once, unless the table has UNSHARD and RESHARD.

    Collective.

    Args:
        model: as every rank builds it, with the same seed.
        mesh: the axis of the stages, mesh["pp"].
        schedule: a name (schedules.py) or a Table.
        micro_batches: parts of a step's batch; one for each rank if None.
        stages_per_rank: None for what the schedule wants.
        cuts: the first piece of every stage but the first, by name or number; None: by `costs`.
        costs, batch: see pipeline_stages.

    Raises:
        ValueError: for a model that can't be split so, and for a table that does not end, has other numbers
            than the other arguments say, or differs between ranks.
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
        facts = schedule.check()
        _check_table(schedule, mesh, micro_batches, stages_per_rank, cuts)
        if differing := objects.differing_ranks(mesh.communicator("control"), str(schedule)):
            raise ValueError(
                f"Pipeline: ranks {differing} of {mesh!r} passed another schedule than rank 0; pass the "
                "same on every rank"
            )
        stages = pipeline_stages(
            model,
            mesh,
            stages=schedule.stages if cuts is None else cuts,
            placement=schedule,
            costs=costs,
            batch=batch,
        )
        super().__init__(model, mesh, schedule, facts, stages)
        self._failed = self._summed = False  # a step has raised; an earlier step has summed tied gradients
        self._alike = False  # all stages are known to be sharded, or none
        model.wrap_forward(Piped(self))
        self._forward_wrappers = list(model._forward_wrappers)  # which the stages have

    def step(self, loss: Loss, batches: Sequence[Any], *, inputs: Inputs | None = None) -> None:
        """Forward and backward of all micro-batches.

        Gradients are then where `loss.backward()` leaves them.

        loss(output, batch): of one micro-batch, from what the model gives for it, on the last stage alone;
        gradients are of the sum of all. inputs(batch): the arguments of the model, a mapping from
        names or a tuple, on every stage; None: the micro-batch is such a mapping or tuple. Without a pipeline
        the same two functions make loss(model(**inputs(batch)), batch).

        Several steps before an update add up; inside of no_sync(model) nothing is reduced until the last.

        Collective over the ranks of all stages, which have as many batches, of the same shapes.

        Raises:
            ValueError: for another number than the table's, and where some stages are sharded alone.
            RuntimeError: for a model with hooks of its own, and where an earlier step has raised.
        """
        work = self.work("Pipeline.step", loss, batches, inputs)
        self.check_count("Pipeline.step", work)
        self._check()
        self._check_sums()
        self._keep_one_copy()
        if device.current().dry_run:  # a dry run (fsdp.memory_plan), whose gradients are forgotten
            step_alone(self, work)
            return
        with self.using_links():
            Step(self, work).run()
        tied = (p for p in self.model.parameters() if p.pipeline is not None and p.pipeline.tied)
        if all(parameter.storage.reduced for parameter in tied):
            sum_tied(self.model)
            self._summed = True

    def evaluate(
        self, measure: Callable[[Any, Any], Any], batches: Sequence[Any], *, inputs: Inputs | None = None
    ) -> list[Any]:
        """The result of measure(output, batch) for each micro-batch, on the last stage's rank; [] elsewhere.

        Forwards alone, without a backward, of any number of micro-batches. Collective.

        Args:
            inputs: as for `step`.
        """
        found: list[Any] = []
        work = self.work("Pipeline.evaluate", lambda *of: found.append(measure(*of)), batches, inputs)
        self._check()
        numbers = range(len(work.batches))
        row = [Action("F", stage.number, number) for stage in self.stages for number in numbers]
        with self.using_links(), autograd.no_grad():
            Step(self, work, row).run()
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without a backward: the last stage's output, on every rank. Collective."""
        self._check()
        given = self.arguments(args, kwargs)
        outputs: list[Tensor] = []
        row = [Action("F", stage.number, 0) for stage in self.stages]
        work = Work(lambda output, _: outputs.append(output), [given], lambda given: given)
        with self.using_links():
            with autograd.no_grad():
                step = Step(self, work, row, kind="whole")
                step.run()
            random.begin_call(max(objects.all_gather_object(self.mesh.communicator("control"), step.used)))
            return self._everywhere(outputs[0] if outputs else None)

    @contextmanager
    def using_links(self) -> Iterator[None]:
        """Close the links if a with block raises: other ranks must not wait for lost messages."""
        try:
            yield
        except BaseException:
            self.links.close()
            self._failed = True
            raise

    def _keep_one_copy(self) -> None:
        """Keep one copy of tied gradients that an earlier step has summed: the next sum adds the copies."""
        trained = (p for p in self.model.parameters() if p.requires_grad and p.pipeline is not None)
        others = {p.storage for p in trained if p.pipeline.copies is not None and not p.pipeline.owner}
        for storage in others if self._summed else ():
            gradient = storage.complete_gradient()
            if gradient is not None:
                gradient.fill(0)
        self._summed = False

    def _check(self) -> None:
        """Raise RuntimeError if forwards can't run, or would leave something out."""
        if self._failed and self.mesh.size > 1:
            raise RuntimeError(
                "Pipeline: an earlier step raised on this rank, and other ranks wait for messages it did not "
                "send; end all ranks, and resume from a checkpoint"
            )
        if self.model._forward_hooks or self.model._forward_pre_hooks:
            raise RuntimeError(
                f"Pipeline: {type(self.model).__name__} has forward hooks, which no stage would call; "
                "register them on its modules"
            )
        if self.model._forward_wrappers != self._forward_wrappers:
            raise RuntimeError(
                f"Pipeline: {type(self.model).__name__} is recomputed or offloaded as a whole, after its "
                "stages were made; apply recomputation and offload to the stages, or before pipeline_stages"
            )
        if not self._alike:
            self._check_alike()

    def _check_alike(self) -> None:
        """Raise ValueError if only some stages are sharded: gradients of the others would not be reduced."""
        trained = [stage for stage in self.stages if any(p.requires_grad for p in stage.parameters())]
        alone = [stage.number for stage in trained if not units_below(stage)]
        found = objects.all_gather_object(
            self.mesh.communicator("control"), [alone, len(alone) < len(trained)]
        )
        alone = sorted(number for numbers, _ in found for number in numbers)
        if alone and any(sharded for _, sharded in found):
            raise ValueError(
                f"Pipeline: stage {alone[0]} is not sharded, but others are; call fully_shard on each stage"
            )
        self._alike = True

    def _check_sums(self) -> None:
        """Raise ValueError if the table defers gradients that a fixed tree sums by micro-batch."""
        late = any(action.kind == "W" for row in self.table.ranks for action in row)
        if late and by_tree(self.model):
            raise ValueError(
                "Pipeline: with set_world_invariant each micro-batch is reduced by itself, and this table "
                "defers weight gradients; use GPipe, 1F1B or Interleaved1F1B"
            )

    def _everywhere(self, output: Tensor | None) -> Tensor:
        """Broadcast a tensor from the rank of the last stage."""
        root = self.table.rank_of(self.table.stages - 1)
        control, here = self.mesh.communicator("control"), device.current()
        form = None if output is None else [list(output.shape), dtypes.name_of(output.dtype)]
        shape, dtype = objects.all_gather_object(control, form)[root]
        array = here.empty(tuple(shape), np.dtype(dtype))
        if output is not None:
            here.copy(array, output.data)
        control.broadcast(array.reshape(-1), root=root, stream=here.current_stream, tag="output")
        return Tensor(array)


def _check_table(
    table: Table,
    mesh: DeviceMesh,
    micro_batches: int | None,
    stages_per_rank: int | None,
    cuts: Sequence[int | str] | None,
) -> None:
    """Raise ValueError if the table does not fit the numbers of stages, ranks and micro-batches."""
    given = {
        f"{mesh!r} has": ("ranks", len(table.ranks), mesh.size),
        "micro_batches says": ("micro-batches", table.micro_batches, micro_batches),
        "stages_per_rank makes": ("stages", table.stages, stages_per_rank and stages_per_rank * mesh.size),
        "cuts make": ("stages", table.stages, None if cuts is None else len(cuts) + 1),
    }
    for says, (what, found, wanted) in given.items():
        if wanted not in (None, found):
            raise ValueError(f"Pipeline: the table has {found} {what}, {says} {wanted}")
