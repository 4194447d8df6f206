"""The pipeline of a run: the number of its micro-batches, its table, and its losses."""

from dataclasses import dataclass, replace
from typing import Any

from shardrt import optim
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp.memory import MemoryPlan
from shardrt.fsdp.memory import table as columns
from shardrt.nn.public import Module
from shardrt.parallel.pipeline import Pipeline
from shardrt.parallel.schedules import schedule
from shardrt.parallel.table import Table
from shardrt.parallel.whole import pipeline_of
from shardrt.tensor import Tensor
from shardrt.train.recipe import Recipe
from shardrt.train.tasks import Task
from shardrt.untrusted import read_regular

__all__ = ["Shares", "cut", "described", "pipeline_of", "resolved", "written"]

_COLUMNS = 8  # of a table on the screen
_LARGEST = 1 << 24  # bytes of a file with a table
_TWO_STAGES = ("interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


def resolved(recipe: Recipe, ranks: int) -> Recipe:
    """With the number of micro-batches that parallel.micro_batches, the table or the pipeline's size say.

    Raises:
        ValueError: for ranks that can't be shared, and a table for other numbers.
        OSError: if the file system fails.
    """
    chosen = recipe.parallel
    recipe.axes(ranks)
    data = ranks // chosen.together
    given = chosen.micro_batches or (recipe.micro_batches if recipe.micro_batches > 1 else 0)
    if chosen.pp > 1 and not given:
        table = written(recipe)
        each = 2 * chosen.pp if table is None else table.micro_batches
        given = each * data if recipe.invariant else each
    return replace(recipe, micro_batches=given or 1)


def written(recipe: Recipe) -> Table | None:
    """The table in the file that parallel.schedule names; None for the name of a schedule, and no pipeline.

    Raises:
        ValueError: in one line.
        OSError: if the file system fails.
    """
    path = recipe.parallel.schedule_file
    if path is None or recipe.parallel.pp == 1:
        return None
    read_regular(path, _LARGEST)
    return Table.load(path)


def cut(recipe: Recipe, mesh: DeviceMesh, model: Module, data_ranks: int) -> Pipeline:
    """The pipeline of `model`, which goes through it from now on.

    Collective.

    Raises:
        ValueError: in the command line's terms, for impossible settings.
    """
    chosen = recipe.parallel
    table = written(recipe) or _made(recipe, model, data_ranks)
    each = recipe.parts(data_ranks) // data_ranks
    message = f"parallel.schedule {chosen.schedule}"
    if len(table.ranks) != chosen.pp:
        raise ValueError(f"{message} is a table for {len(table.ranks)} ranks, but parallel.pp is {chosen.pp}")
    if table.micro_batches != each:
        raise ValueError(
            f"{message} is a table for {table.micro_batches} micro-batches, but a rank has {each}"
        )
    if chosen.stages_per_rank and table.stages != chosen.stages_per_rank * chosen.pp:
        raise ValueError(
            f"{message} is a table for {table.stages} stages, not {chosen.stages_per_rank} for each of "
            f"{chosen.pp} ranks"
        )
    _check_pieces(model, table.stages)
    try:
        table.check()
    except ValueError as error:
        raise ValueError(f"{message}: {error}") from None
    if recipe.invariant and any(action.kind == "W" for row in table.ranks for action in row):
        raise ValueError(
            f"deterministic = 'world-invariant' reduces each micro-batch at once, but {message} defers "
            "weight gradients; use GPipe, 1F1B or Interleaved1F1B"
        )
    pipeline = Pipeline(model, mesh["pp"], schedule=table)
    tied = next(
        (p.name for p in model.parameters() if p.pipeline is not None and p.pipeline.tied),
        None,
    )
    if recipe.optimizer.in_backward and tied is not None:
        raise ValueError(
            f"optimizer.in_backward would update {tied!r} before its gradients of two stages are added; "
            "leave it off, or untie it"
        )
    return pipeline


def _made(recipe: Recipe, model: Module, data_ranks: int) -> Table:
    """The table of the schedule that has been named."""
    chosen, each = recipe.parallel, recipe.parts(data_ranks) // data_ranks
    stages = chosen.stages_per_rank or 1 + (chosen.schedule_name in _TWO_STAGES)
    _check_pieces(model, stages * chosen.pp)  # first: a table of far too many takes long to make
    try:
        return schedule(chosen.schedule, chosen.pp, each, stages)
    except ValueError as error:
        raise ValueError(f"parallel.schedule: {error}") from None


def _check_pieces(model: Module, stages: int) -> None:
    kind = type(model).__name__
    if not hasattr(model, "pieces"):
        raise ValueError(f"parallel.pp: a {kind} has no method pieces(), which stages need")
    names = [piece.name for piece in model.pieces()]
    if stages > len(names):
        raise ValueError(
            f"parallel.pp: {stages} stages can't be made of the {len(names)} pieces of a {kind}: "
            f"{names[0]}, {len(names) - 2} blocks and {names[-1]}"
        )


@dataclass(frozen=True)
class Described:
    """The report of a pipeline, on every rank.

    Attributes:
        plan: of the rank that takes most memory.
    """

    facts: dict[str, Any]  # for the log
    lines: list[str]
    plan: MemoryPlan
    memory: str


def described(recipe: Recipe, mesh: DeviceMesh, pipeline: Pipeline, plan: MemoryPlan) -> Described:
    """Collective.

    Args:
        plan: of this rank.
    """
    own = {s.number: f"{s.pieces[0].name} to {s.pieces[-1].name}" for s in pipeline.stages}
    everyone = all_gather_object(mesh.communicator("control"), [own, plan.device, plan.host])
    together = len(everyone) // len(pipeline.table.ranks)  # the first axis is the pipeline's
    plans, pieces = {}, {}
    for rank in range(len(pipeline.table.ranks)):
        ranks = everyone[rank * together : (rank + 1) * together]
        plans[rank] = max((MemoryPlan(*given[1:]) for given in ranks), key=_bytes)
        pieces |= {int(stage): name for stage, name in ranks[0][0].items()}
    table, replay = pipeline.table, pipeline.table.replay()
    facts = {
        "schedule": recipe.parallel.schedule,
        "stages": [pieces[stage] for stage in range(table.stages)],
        "micro_batches": table.micro_batches,
        "bubble": replay.bubble / replay.makespan,
    }
    lines = [
        f"{facts['schedule']}: {table.micro_batches} micro-batches through {table.stages} stages, idle for "
        f"{100 * facts['bubble']:.0f} % where forward takes half of backward: {' | '.join(facts['stages'])}"
    ]
    most = max(plans.values(), key=_bytes)
    shown = plans if len(plans) <= _COLUMNS else {r: plan for r, plan in plans.items() if plan is most}
    heads = [f"stage{'s' if len(s) > 1 else ''} {','.join(map(str, s))}" for s in map(table.stages_of, shown)]
    return Described(facts, lines, most, _memory(heads, list(shown.values())))


def _bytes(plan: MemoryPlan) -> int:
    return plan.device_bytes + plan.host_bytes


def _memory(heads: list[str], plans: list[MemoryPlan]) -> str:
    """A table of megabytes, with a column for each plan."""
    rows = []
    for place in ("device", "host"):
        each = [getattr(plan, place) for plan in plans]
        for what in dict.fromkeys(what for categories in each for what in categories):
            rows.append((place, what, *(f"{c.get(what, 0) / 1e6:.1f}" for c in each)))
        if any(each):
            rows.append((place, "together", *(f"{sum(c.values()) / 1e6:.1f}" for c in each)))
    return columns(("place", "what, in MB", *heads), rows)


class Shares:
    """The loss function of a step: of each micro-batch its share of the mean loss."""

    def __init__(self, task: Task, scaler: optim.GradScaler, count: int) -> None:
        self._task, self._scaler, self._factor = task, scaler, 1 / max(1, count)
        self.losses: list[Tensor] = []  # that this rank has computed

    def __call__(self, output: Any, batch: Any) -> Tensor:
        loss = self._task.loss(output, batch) * self._factor
        self.losses.append(Tensor(loss.data))  # without its graph
        return self._scaler.scale(loss)
