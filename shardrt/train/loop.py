"""The training loop, top to bottom: forward and backward, update, report, checkpoint. It knows no model."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from math import ceil, fsum, inf, isfinite
from typing import Any

import numpy as np

from shardrt import device, nn, optim, random
from shardrt.autograd import no_grad
from shardrt.checkpoint import CheckpointError, NonfiniteWeights
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.device import timeline
from shardrt.fsdp import check_replicas, no_sync
from shardrt.tensor import Tensor
from shardrt.train import config as settings
from shardrt.train import outer
from shardrt.train.axes import counts, data_of
from shardrt.train.errors import DATA, describe_error
from shardrt.train.metrics import RunLog, exact_sum, over_ranks
from shardrt.train.pipelines import Shares, pipeline_of
from shardrt.train.prefetch import Prefetched
from shardrt.train.progress import Stopwatch, evaluation_line, expert_figures, step_line
from shardrt.train.recipe import Recipe
from shardrt.train.state import Job
from shardrt.train.stop import STOPPED, StopRequests
from shardrt.train.tasks import Task
from shardrt.train.trace import Trace
from shardrt.untrusted import say


def train(job: Job, first: int) -> None:
    """The loop, from step `first`.

    Exits with code 75, having saved, where it is asked to stop; with 65 where data can't be read.

    Raises:
        FloatingPointError: for a loss or gradients that are not finite.
    """
    recipe, steps, task = job.recipe, job.recipe.steps, job.task
    stopwatch = Stopwatch(steps, recipe.batch_size * task.per_sample, task.unit, job.ideal)
    stopwatch.restart(first)
    job.ranks.restart(first)
    trace = Trace(job.mesh, job.run.directory, recipe.report.traced)
    samples = Prefetched(lambda step: batches_of(recipe, job.mesh, task, step), first, steps, recipe.ahead)
    copies = Copies(job, first)
    stops = StopRequests(job.mesh, job.run.directory, recipe.checkpoint.stop_after)
    with closing(samples) as batches, stops as requests, job.run.screen.moving():
        job.run.screen.show("training", first, steps)  # the first step may wait for the compiler
        for step in range(first, steps):
            job.watch.step(step + 1)
            random.manual_seed(recipe.seed, step)
            lr = recipe.optimizer.lr_at(step, steps)
            for group in job.optimizer.param_groups:
                group["lr"] = recipe.optimizer.lr_of(group, lr)
            with trace.step(step + 1):
                losses = backward(recipe, task, job.model, next_of(batches), job.scaler, step)
                if not updates_first(recipe):
                    losses = [float(loss) for loss in losses]
                job.watch.phase("optimizer")
                with timeline.span("compute", "optimizer"):
                    norm = update(job, step + 1)
            if job.outer is not None:
                outer.step(job, step + 1)

            # Records of a step come before its checkpoint: a run that goes on from there has all of them.
            done = step + 1
            job.run.screen.show("training", done, steps)
            job.watch.phase("report")
            if done % recipe.report.log_interval == 0 or done in (1, steps):
                report(job, done, losses, norm, lr, stopwatch)
            nn.update_expert_bias(job.model)  # after the report, which shows this step's load
            if not isfinite(norm):  # no update can be left out that backward has made, nor one before it
                check_weights(job, done)
            if done % recipe.report.eval_interval == 0 or done == steps:
                evaluate(job, done, recipe.report.evaluated(last=done == steps))
                if done == recipe.report.eval_interval and done < steps:
                    task.preview(job.model, job.run)
                stopwatch.restart(done)
                job.ranks.restart(done)
            copies.check(done, now=saves(job, done) or done == steps)
            keep(job, done)
            if done < steps and (reason := requests.reason()):
                leave(job, done, reason)
    job.watch.phase("save")
    report_saved(job.run, job.checkpoints.wait)
    if first >= steps:  # a run that was finished before
        evaluate(job, steps, recipe.report.evaluated(last=True))
    check_weights(job, steps)


def batches_of(recipe: Recipe, mesh: DeviceMesh, task: Task, step: int) -> list[Any]:
    """This rank's micro-batches of a step."""
    data = data_of(mesh)
    found = (task.batch(samples) for samples in recipe.samples(step, data.rank, data.size))
    return [part_of(task, mesh, batch) for batch in found]


def part_of(task: Task, mesh: DeviceMesh, batch: Any) -> Any:
    """This rank's slice of a batch that ranks along "cp" have alike; else all of it."""
    return task.part(batch, mesh["cp"]) if "cp" in (mesh.mesh_dim_names or ()) else batch


def next_of(batches: Prefetched) -> list[Any]:
    """The next step's batches."""
    with timeline.span("compute", "data"):
        return next(read(batches))


def read(batches: Iterable[Any]) -> Iterator[Any]:
    """The same. A read error ends the job with one line: other ranks already compute."""
    batches = iter(batches)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (ValueError, OSError) as error:
            say(f"error: {describe_error(error)}", file=sys.stderr)
            sys.exit(DATA)
        yield batch


def backward(
    recipe: Recipe, task: Task, model: nn.Module, batches: list[Any], scaler: optim.GradScaler, step: int
) -> list[Tensor]:
    """Forward and backward of this rank's micro-batches; gives their shares of the mean loss, not yet read.

    The loss of a micro-batch is divided by the count over all samples of the step, on all ranks, so gradients
    add up to one large batch's, however it is split. Of a pipeline, the last stage's rank has them.
    """
    count = task.count(range(step * recipe.batch_size, (step + 1) * recipe.batch_size)) / recipe.diloco.hosts
    share, pipeline = Shares(task, scaler, count), pipeline_of(model)
    if pipeline is not None:
        pipeline.step(share, batches, inputs=task.inputs)
        return share.losses
    each = recipe.reduce_each or recipe.invariant
    for number, batch in enumerate(batches, start=1):
        with nullcontext() if each or number == len(batches) else no_sync(model):
            share(model(**task.inputs(batch)), batch).backward()
    return share.losses


def update(job: Job, done: int) -> float:
    """Clip the gradients and update the parameters; gives the norm before.

    A norm that is not finite, which all ranks see alike, leaves the update out, where loss scaling expects it
    or the settings say so; else a FloatingPointError names rank and parameter.
    """
    wanted, parameters = job.recipe.optimizer, list(job.model.parameters())
    job.scaler.unscale_(job.optimizer)
    if wanted.in_backward:  # they have been applied already
        norm = nn.utils.grad_norm(parameters, wanted.clip_type)
    elif job.scaler.is_enabled():
        norm = nn.utils.clip_grad_norm_(parameters, wanted.clip_norm, wanted.clip_type)
    elif job.outer is not None:
        return update_on_host(job, done, parameters)
    elif updates_first(job.recipe):
        return update_first(job, done, parameters)
    else:
        try:
            norm = nn.utils.clip_grad_norm_(
                parameters, wanted.clip_norm, wanted.clip_type, error_if_nonfinite=True
            )
        except nn.utils.NonfiniteNorm as error:
            message = f"step {done}: the norm of the gradients is {error.norm}"
            if wanted.on_nonfinite is settings.Nonfinite.stop:
                raise FloatingPointError(f"{message}: {culprit(job)}") from None
            job.run.say(f"{message}, so this update is skipped")
            job.optimizer.zero_grad()
            return error.norm
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad()
    return norm


def update_on_host(job: Job, done: int, parameters: list[nn.Parameter]) -> float:
    """As `update`, where hosts train apart: each has a norm of its own. Gives the largest one.

    All ranks learn whether all norms are finite, so they stop together, or a host skips its update alone.
    """
    wanted = job.recipe.optimizer
    own = nn.utils.clip_grad_norm_(parameters, wanted.clip_norm, wanted.clip_type)
    (norm,) = over_ranks(job.mesh, "max", own if isfinite(own) else inf)
    message = f"step {done}: the norm of the gradients is {norm}"
    if not isfinite(norm) and wanted.on_nonfinite is settings.Nonfinite.stop:
        raise FloatingPointError(f"{message}: {culprit(job)}")
    if isfinite(own):
        job.optimizer.step()
    if not isfinite(norm):
        job.run.say(f"{message} on a host, which skips this update")
    job.optimizer.zero_grad()
    return norm


def updates_first(recipe: Recipe) -> bool:
    """Whether the update may be launched before the norm is known, as a norm that is not finite ends the run.

    On a GPU, which then does not wait for the host in between.
    """
    wanted, scaled = recipe.optimizer, recipe.precision.param is settings.Precision.float16
    ends = wanted.on_nonfinite is settings.Nonfinite.stop and not (wanted.in_backward or scaled)
    plain = wanted.clip_type == 2 and not (recipe.invariant or recipe.memory.offload_gradients)
    return ends and plain and recipe.diloco.hosts == 1 and not device.current().in_host_memory


def update_first(job: Job, done: int, parameters: list[nn.Parameter]) -> float:
    """As `update`, where `updates_first`. After a FloatingPointError the weights are not finite either."""
    here, clipped = device.current(), device.current().new_event()
    limit = job.recipe.optimizer.clip_norm
    on_device = nn.utils.clip_grad_norm_on_device_(parameters, limit, leave_nonfinite=True)
    here.current_stream.record(clipped)
    job.optimizer.step()
    job.mesh.stream("reduce").wait(clipped)  # losses and norm are there
    (norm,) = read_beside(job, [on_device])
    if not isfinite(norm):
        raise FloatingPointError(f"step {done}: the norm of the gradients is {norm}: {culprit(job)}")
    job.optimizer.zero_grad()
    return norm


def read_beside(job: Job, numbers: list[Tensor]) -> list[float]:
    """Read numbers in the stream of reductions, which has nothing to do until the next backward."""
    found: list[float] = []
    free = job.mesh.stream("reduce")
    free.submit(lambda: found.extend(float(number) for number in numbers))
    free.synchronize()
    return found


def culprit(job: Job) -> str:
    """The first parameter with a gradient that is not finite, and the ranks with that part. Collective."""
    here = device.current()
    found = [
        name
        for name, parameter in job.model.named_parameters()
        if parameter.grad is not None and not np.isfinite(here.to_numpy(parameter.grad)).all()
    ]
    return f"that of {first_of(job, found)}"


def first_of(job: Job, found: list[str]) -> str:
    """The first parameter that is in `found` on any rank, and those ranks; "" if none is. Collective."""
    everyone = all_gather_object(job.mesh.communicator("control"), found)
    order = [name for name, _ in job.model.named_parameters() if any(name in names for names in everyone)]
    if not order:
        return ""
    ranks = [rank for rank, names in enumerate(everyone) if order[0] in names]
    return f"{order[0]!r} first, in the part of rank {', '.join(map(str, ranks))}"


def report(job: Job, done: int, losses: list[Any], norm: float, lr: float, stopwatch: Stopwatch) -> None:
    """A line for the reader, and a record.

    Raises:
        FloatingPointError: for a loss that is not finite.
    """
    if updates_first(job.recipe):
        losses = read_beside(job, losses)
    losses = losses if counts(job.mesh, but="pp") else []
    mean_loss = exact_sum(job.mesh, losses) / job.recipe.diloco.hosts_here
    record = {"step": done, "loss": mean_loss, "norm": norm, "lr": lr, **job.ranks.read(done)}
    record |= expert_figures(job.mesh, nn.expert_load(job.model)) | stopwatch.read(done)
    job.run.say(step_line(record, job.recipe.steps, job.task.unit, job.run.screen.width))
    if not isfinite(mean_loss) and job.recipe.optimizer.on_nonfinite is settings.Nonfinite.stop:
        why = nonfinite_weights(job) or "lower optimizer.lr"
        raise FloatingPointError(f"step {done}: the loss is {mean_loss}; {why}")
    job.run.write("step", finite(record))


def finite(record: dict[str, float]) -> dict[str, float | None]:
    """With None for values that JSON lacks."""
    return {name: value if isfinite(value) else None for name, value in record.items()}


def evaluate(job: Job, done: int, limit: int | None) -> None:
    """Say and write figures on `limit` held-out samples, or all, if there are any; ranks share them."""
    job.watch.phase("eval")
    recipe, mesh, task, data = job.recipe, job.mesh, job.task, data_of(job.mesh)
    pipeline = pipeline_of(job.model)
    # Through a pipeline as in training: for messages of that size there is memory.
    in_parts = recipe.invariant or pipeline is not None
    share = recipe.batch_size // (recipe.parts(data.size) if in_parts else data.size)
    found: list[dict[str, tuple[float, float]]] = []
    total = -(-task.held_out_samples(limit) // (share * data.size))
    job.model.eval()
    with no_grad():
        held_out = task.held_out(share, limit, data.rank, data.size)
        batches = read(part_of(task, mesh, batch) for batch in held_out)
        while some := list(islice(batches, pipeline.table.micro_batches if pipeline else 1)):
            job.run.screen.show("evaluating, batches", len(found), total, lines=True)
            if pipeline is None:
                found.append(task.measure(job.model(**task.inputs(some[0])), some[0]))
            else:  # only the rank of the last stage has them
                found += pipeline.evaluate(task.measure, some, inputs=task.inputs) or [{} for _ in some]
    job.model.train()
    if not found:
        return
    names = list(found[0])
    if pipeline:
        names = next(filter(None, all_gather_object(mesh.communicator("control"), names)))
    figures = {}
    for name in names:
        own = [each[name] for each in found if each] if counts(mesh, but="pp") else []
        (count,) = over_ranks(mesh, "sum", fsum(each for _, each in own))
        figures[name] = exact_sum(mesh, [value for value, _ in own]) / max(1, count)
    record = {"step": done} | task.evaluation(figures)
    job.run.say(evaluation_line(record, recipe.steps))
    job.run.write("evaluation", finite(record))
    if not all(map(isfinite, record.values())):
        check_weights(job, done)


def keep(job: Job, done: int) -> None:
    """Publish a checkpoint that was written; begin one where it is due. A failure does not end the run."""
    chosen = job.recipe.checkpoint
    due = saves(job, done)
    if due:
        job.run.flush()
    if due or job.checkpoints.under_way:
        job.watch.phase("save")
    # One that was begun before and fails now is no reason not to begin the next.
    report_saved(job.run, job.checkpoints.wait if due else job.checkpoints.tick)
    if due:
        save = job.checkpoints.start if chosen.in_background else job.checkpoints.save
        report_saved(job.run, save, done, extra_of(job))


def saves(job: Job, done: int) -> bool:
    """Whether a checkpoint is due after step `done`."""
    every = job.recipe.checkpoint.every
    return bool(every) and (done % every == 0 or done == job.recipe.steps)


class Copies:
    """Compares the ranks' copies of shards every fsdp.check_copies steps or later, in 0.1 % of the time."""

    def __init__(self, job: Job, first: int) -> None:
        self._job, self._every = job, job.recipe.fsdp.check_copies
        self._next = first + self._every
        self._since = first, time.perf_counter()

    def check(self, done: int, now: bool) -> None:
        """After step `done`, if it is time or `now`. Raises ReplicasDiffer. Collective."""
        if not self._every or not (now or done >= self._next):
            return
        began = time.perf_counter()
        check_replicas(self._job.model, self._job.optimizer)
        ended = time.perf_counter()
        step, at = self._since
        (wait,) = over_ranks(self._job.mesh, "max", 1000 * (ended - began) * (done - step) / (ended - at))
        self._next = done + max(self._every, ceil(wait))
        self._since = done, ended


def extra_of(job: Job) -> dict[str, Any]:
    """The contents of a checkpoint next to parameters and the optimizer's state."""
    return {"scaler": job.scaler.state_dict(), **outer.saved(job), **job.origin}


def check_weights(job: Job, done: int) -> None:
    """Raise FloatingPointError, naming parameter and ranks, if trained weights are not finite. Collective."""
    if message := nonfinite_weights(job):
        raise FloatingPointError(f"step {done}: {message}")


def nonfinite_weights(job: Job) -> str:
    """Which parameter and ranks have trained weights that are not finite; "" if none. Collective."""
    here, found = device.current(), []
    for name, parameter in job.model.named_parameters():
        values = here.to_numpy(parameter.shard)
        if parameter.requires_grad and values.size and not np.isfinite([values.min(), values.max()]).all():
            found.append(name)
    message = first_of(job, found)
    return message and f"weights are nan or infinite: {message}"


def report_saved(run: RunLog, function: Callable, *args: Any) -> None:
    """Call something that may give the directory of a checkpoint, or fail to write one; say so.

    Raises:
        FloatingPointError: for weights that are not finite: no later checkpoint will have better ones.
    """
    try:
        path = function(*args)
        if path is not None:
            run.say(f"saved {path}")
    except NonfiniteWeights as error:
        raise FloatingPointError(str(error)) from None
    except CheckpointError as error:
        run.say(f"warning: {error}")


def leave(job: Job, done: int, reason: str) -> None:
    """Save, and exit with a code that says so; where saving fails, with the error."""
    job.watch.phase("save")
    report_saved(job.run, job.checkpoints.wait)
    if job.checkpoints.last_saved != done:
        try:
            job.run.say(f"saved {job.checkpoints.save(done, extra_of(job))}")
        except NonfiniteWeights as error:
            raise FloatingPointError(str(error)) from None
    job.run.say(f"stopped by {reason} after step {done}; resume with --resume auto")
    job.run.close("stopped")
    sys.exit(STOPPED)
