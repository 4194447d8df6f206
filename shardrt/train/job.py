"""A run from its recipe to the end of the loop: checks, model, memory plan, run directory."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardrt import dtypes, nn, optim, random
from shardrt.checkpoint import CheckpointError, CheckpointManager, read_manifest, save
from shardrt.comm import init_device_mesh
from shardrt.comm.differences import differences, differing
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object, broadcast_object
from shardrt.device.cpu import set_threads
from shardrt.faults import failure
from shardrt.faults.lock import LOCK
from shardrt.faults.watchdog import Watch
from shardrt.fsdp import (
    MemoryPlan,
    ReplicasDiffer,
    fully_shard,
    memory_plan,
    set_gradient_divide_factor,
    set_world_invariant,
)
from shardrt.fsdp.options.agreement import compile_kernels
from shardrt.fsdp.options.chunks import IN_CHUNKS
from shardrt.nn.parameter_placement import whole_size
from shardrt.optim import low_bit
from shardrt.parallel import (
    HubLost,
    LeftBehind,
    context_plan,
    expert_plan,
    most_rows,
    parallelize_module,
    set_tensor_invariant,
)
from shardrt.parallel.memory import pipeline_plan
from shardrt.parallel.muon_memory import muon_plan
from shardrt.parallel.styles import Style
from shardrt.train import config as settings
from shardrt.train import loop, outer, pipelines, trackers
from shardrt.train.axes import data_of, folded, shards_of, trained_together
from shardrt.train.errors import COPIES, DATA, DIFFERS, NONFINITE, USAGE, one_line
from shardrt.train.metrics import PIPELINE, RunLog, new_run_directory, over_ranks, resumed_run_directory
from shardrt.train.progress import Ranks, memory_mb, product_flops
from shardrt.train.recipe import Recipe
from shardrt.train.shared import check_shared
from shardrt.train.state import Job
from shardrt.train.tasks import Task
from shardrt.train.trace import check_timed
from shardrt.train.versions import own_version, surroundings, versions

__all__ = ["launch"]


def launch(recipe: Recipe) -> None:
    """One run, on every rank."""
    with one_line(USAGE, kinds=(RuntimeError,)):  # a world size that no launcher made, or no MPI
        mesh = init_device_mesh("auto", reduction=recipe.reduction, timeout=recipe.watchdog.set_up)
    with Watch(mesh, outer.limits_of(recipe)) as watch:
        run_on(mesh, recipe, watch)


def run_on(mesh: DeviceMesh, recipe: Recipe, watch: Watch) -> None:
    """One run, watched. All checks of the input come before the first write."""
    began = time.perf_counter()
    with one_line(DIFFERS, mesh):
        check_same(mesh, {"settings": settings.plain(recipe), **versions()})
    with one_line(USAGE, mesh):
        recipe = pipelines.resolved(recipe, mesh.size)
        table = pipelines.written(recipe)
    with one_line(DIFFERS, mesh):
        check_same(mesh, {"parallel.schedule": str(table), "micro_batches": recipe.micro_batches})
    with one_line(USAGE, mesh):
        mesh = with_axes(recipe, mesh)
    watch.record(mesh)
    if recipe.threads or recipe.on_any_ranks:
        set_threads(max(1, recipe.threads))
    with one_line(DATA, mesh):
        task = recipe.task()
    with one_line(DIFFERS, mesh):
        check_same(mesh, task.facts())
    with one_line(USAGE, mesh):
        check_timed(recipe.report.traced)
        model = sharded_model(recipe, mesh, task)
    with one_line(DATA, mesh):
        batches = loop.batches_of(recipe, mesh, task, 0)
    with one_line(USAGE, mesh):
        plan = planned_memory(recipe, mesh, task, model, batches)
        failure.describe_memory(lambda: f"memory as planned, per rank:\n{plan}")
        simulated = mesh.world.device is not None  # of such a run nothing is kept
        run = RunLog(None) if mesh.rank or simulated else run_log(recipe)

    with closing(run):
        compile_watched(mesh, run, watch)
        go(job_of(recipe, mesh, task, model, run, watch), plan, began)


def compile_watched(mesh: DeviceMesh, run: RunLog, watch: Watch) -> None:
    """Compile the CPU's kernels now, in a phase of the watchdog's own, and tell the reader. Collective.

    The units would do so later, when they are built.
    """
    if mesh.world.kind != "mpi" or mesh.device.name != "cpu":
        return
    watch.phase("compile")
    if mesh.world.local_rank == 0 and not mesh.device.kernels.compiled():
        run.say("compiling kernels for this machine, once: half a minute or more")
    compile_kernels(mesh, mesh.communicator("control"))
    watch.phase("set-up")


def go(job: Job, plan: MemoryPlan, began: float) -> None:
    """The rest of a run when it has its directory: resume, train, save, finish."""
    recipe, mesh, model, run, watch = job.recipe, job.mesh, job.model, job.run, job.watch
    if recipe.checkpoint.folder is not settings.Folder.hosts:
        with one_line(DATA, mesh):
            check_shared(mesh, run.directory)
    with one_line(DATA, mesh, kinds=(CheckpointError, HubLost)):
        first, lines = resume(job)  # before anything of a run that was there is changed
    if mesh.world.device is None:
        watch.keep(run.directory / "flight" if run.directory else None)
    with one_line(DATA, mesh):
        if run.directory:
            settings.dump(recipe, run.directory / "config.toml")
            if (pipeline := pipelines.pipeline_of(model)) is not None:
                pipeline.table.save(run.directory / PIPELINE)
        if recipe.resume:
            run.rewind(first, finished=first >= recipe.steps)
    run.track(recipe.trackers, settings.plain(recipe), first)
    introduce(job, plan)
    for line in lines:
        run.say(line)
    with (
        one_line(COPIES, mesh, kinds=(ReplicasDiffer,)),
        one_line(NONFINITE, mesh, kinds=(FloatingPointError,)),
    ):
        try:
            train(job, first)
        except (FloatingPointError, ReplicasDiffer):  # of all ranks; a save now would be from before
            loop.report_saved(run, job.checkpoints.wait)
            raise
    # Rank 0 gathers and writes; the others take part and need no directory.
    watch.phase("save")
    with one_line(DATA, mesh, kinds=(CheckpointError,)):
        if outer.saves_weights(job):
            save(run.directory / "checkpoint" if run.directory else "", model, step=recipe.steps)
    rows = rows_of_experts(job)  # before the sample, whose few tokens all ranks have alike
    watch.phase("sample")
    kept = rows | job.task.close(model, run)
    watch.phase("end")
    run.finish({"seconds": time.perf_counter() - began, **kept})
    if run.directory and run.directory.is_dir():
        left = sorted(
            f"{path.name}/" if path.is_dir() else path.name
            for path in run.directory.iterdir()
            if path.name != LOCK
        )
        run.say(f"wrote {run.directory}: {', '.join(left)}")
        run.say(f"see: shardrt report {run.directory}")


def train(job: Job, first: int) -> None:
    """The loop; again, from where the other hosts are, if they have left this one behind."""
    while True:
        try:
            return loop.train(job, first)
        except LeftBehind:
            first = outer.catch_up(job)


def rows_of_experts(job: Job) -> dict[str, float]:
    """{"most_rows": rows that a rank got, over those it sent}; {} without parallel.ep. Collective."""
    chosen = job.recipe.parallel
    if chosen.ep == 1:
        return {}
    (most,) = over_ranks(job.mesh, "max", max(most_rows(job.model).values(), default=0.0))
    limit = f"memory was planned for parallel.expert_rows {chosen.expert_rows:g}"
    job.run.say(f"experts: at most {most:.2f} times the rows in balance came to a rank; {limit}")
    return {"most_rows": most}


def check_same(mesh: DeviceMesh, what: dict[str, Any]) -> None:
    """Raise ValueError that names the fields and ranks unless all ranks have the same. Collective."""
    found = differences(all_gather_object(mesh.communicator("control"), what))
    if found:
        raise ValueError(f"ranks differ: {'; '.join(found[:5])}")


def with_axes(recipe: Recipe, mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of `mesh` along the recipe's axes; itself where it has those. Collective."""
    axes = recipe.axes(mesh.size)
    if len(axes) == 1:
        return mesh
    return init_device_mesh("auto", tuple(axes.values()), tuple(axes), reduction=recipe.reduction)


def sharded_model(recipe: Recipe, mesh: DeviceMesh, task: Task) -> nn.Module:
    """The task's model with its units and one for the rest, of a pipeline those of this rank's stages.

    Nothing of it is in memory yet.
    """
    data, tp, together = data_of(mesh), recipe.parallel.tp, recipe.parallel.together
    if recipe.batch_size % recipe.parts(data.size):
        by = f"{data.size} ranks"
        if together > 1:
            by = f"{data.size} group{'s' if data.size > 1 else ''} of {together} ranks"
        if recipe.micro_batches > 1:
            by += f" and {recipe.micro_batches} micro-batches"
        raise ValueError(f"batch_size must divide equally among {by}, got {recipe.batch_size}")
    random.manual_seed(recipe.seed)
    model = task.model(trained_together(mesh))
    recipe.lora.prepare(model)
    parts = recipe.parallel.tensor_invariant
    plan = task.plan(model, sequence=recipe.parallel.sequence) if tp > 1 or parts else {}
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan)
    if parts:
        set_tensor_invariant(model, parts, plan=None if tp > 1 else plan)
    if recipe.parallel.cp > 1:
        parallelize_module(model, mesh["cp"], _along_time(recipe, task, model))
    experts = _spread_experts(recipe, mesh, model)
    units = task.units(model)
    outer.fragments_of(recipe, units)
    recipe.memory.prepare(units)
    piped = recipe.parallel.pp > 1
    ends = [] if piped else _ends(mesh, task, model)
    for top in pipelines.cut(recipe, mesh, model, data.size).stages if piped else [model]:
        below = {id(module) for module in top.modules()}
        shard(
            recipe,
            shards_of(mesh),
            top,
            [unit for unit in units if id(unit) in below],
            top is model or top.last,
            {module: mesh for module, mesh in experts.items() if id(module) in below},
            ends,
        )
    return model


def _ends(mesh: DeviceMesh, task: Task, model: nn.Module) -> list[list[nn.Module]]:
    """The ends of a model without stages that are units of their own, as torchtitan has them.

    These are an embedding and a head whose gradients, of 32 MiB or more, would be sent with the root's, whole
    and last of all. On a device that makes the root's gradients in chunks they are sent as they come.
    """
    if shards_of(mesh).size == 1 or mesh.device.matmul_ignores_place():
        return []
    ends = task.ends(model)
    size = sum(parameter.size for modules in ends for each in modules for parameter in each.parameters())
    return ends if 4 * size >= IN_CHUNKS else []


def _spread_experts(recipe: Recipe, mesh: DeviceMesh, model: nn.Module) -> dict[nn.Module, DeviceMesh]:
    """Experts on parallel.ep ranks, or beside parallel.tp: each such module, and the ranks to shard it over.

    Their balance is that of a micro-batch on all ranks, but where micro-batches are what sums are made of.
    Raises ValueError in the words of the command line.
    """
    for module in model.modules():
        if isinstance(module, nn.TopKRouter) and not recipe.invariant:
            module.balance_along(trained_together(mesh))
    chosen, experts = recipe.parallel, [m for m in model.modules() if isinstance(m, nn.Experts)]
    if chosen.ep == 1 and (chosen.tp == 1 or not experts or recipe.fsdp.copies > 1):
        return {}
    try:
        fold = folded(mesh, chosen.ep)  # of one rank along "ep": experts are sharded over "tp" as well
        parallelize_module(model, fold["ep"], expert_plan(model, chosen.expert_rows))
    except (TypeError, ValueError) as error:
        raise ValueError(f"parallel.ep: {error}") from None
    return dict.fromkeys(experts, fold["efsdp"])


def _along_time(recipe: Recipe, task: Task, model: nn.Module) -> Mapping[str, Style]:
    """The plan for parallel.cp. Raises ValueError in the words of the command line."""
    try:
        plan = context_plan(model)
    except TypeError as error:
        raise ValueError(f"parallel.cp: {error}") from None
    chunks = 2 * recipe.parallel.cp
    if task.per_sample % chunks:
        raise ValueError(
            f"parallel.cp: with {recipe.parallel.cp} ranks a sample must have a multiple of {chunks} "
            f"{task.unit}s, got {task.per_sample}"
        )
    return plan


def shard(
    recipe: Recipe,
    data: DeviceMesh,
    top: nn.Module,
    units: list[nn.Module],
    outermost: bool,
    experts: Mapping[nn.Module, DeviceMesh],
    ends: list[list[nn.Module]],
) -> None:
    """Make `top`, a model or a stage, a unit, and `units`, the blocks in it: fsdp.blocks of them one each.

    Args:
        outermost: it gives the loss.
        experts: modules that are units of their own, over other ranks.
        ends: units around the blocks, which stay gathered from forward to backward, as the root does.
    """
    chosen = {
        "strategy": recipe.fsdp.strategy,
        "prefetch": recipe.fsdp.prefetch,
        "offload_policy": recipe.memory.policy,
    }
    policy, around = (recipe.precision.policy(block=block) for block in (True, False))
    blocks = recipe.fsdp.blocks
    together = [units[first : first + blocks] for first in range(0, len(units), blocks)]
    for unit, mesh in (*experts.items(), *((unit, data) for unit in together)):
        fully_shard(unit, mesh=mesh, mp_policy=policy, **chosen)
    uncast = around and replace(around, cast_forward_inputs=False)  # as the root: no bit changes
    for modules in ends:
        fully_shard(modules, mesh=data, mp_policy=uncast, reshard_after_forward=False, **chosen)
    fully_shard(top, mesh=data, mp_policy=recipe.precision.policy(block=False, outermost=outermost), **chosen)
    set_gradient_divide_factor(top, 1.0)  # the loss is divided by the count of all ranks instead
    if recipe.invariant:
        set_world_invariant(top, recipe.micro_batches)


# With the bytes of its state per element, without scales.
_KINDS: dict[settings.Algorithm, tuple[type[optim.Optimizer], float]] = {
    settings.Algorithm.adamw: (optim.AdamW, 8),
    settings.Algorithm.lion: (optim.Lion, 4),
    settings.Algorithm.muon: (optim.Muon, 8),  # of hidden matrices 4: see muon_plan
    settings.Algorithm.adamw8bit: (low_bit.AdamW8bit, 2),
    settings.Algorithm.lion8bit: (low_bit.Lion8bit, 1),
    settings.Algorithm.adamw_bf16: (low_bit.AdamWBF16, 4),
    settings.Algorithm.lion_bf16: (low_bit.LionBF16, 2),
}


def optimizer_of(recipe: Recipe, model: nn.Module) -> optim.Optimizer:
    """Makes this rank's shards, their gradients and the optimizer's state."""
    wanted = recipe.optimizer
    if wanted.name is settings.Algorithm.muon:
        groups = optim.muon_groups(model, wanted.weight_decay)
        how = {"momentum": wanted.momentum, "adjust_lr_fn": wanted.adjust_lr_fn.value}
        return optim.Muon(groups, lr=wanted.lr, betas=wanted.betas, **how)
    groups = optim.decay_groups(model, wanted.weight_decay)
    return _KINDS[wanted.name][0](groups, lr=wanted.lr, betas=wanted.betas, in_backward=wanted.in_backward)


def planned_memory(
    recipe: Recipe, mesh: DeviceMesh, task: Task, model: nn.Module, batches: list[Any]
) -> MemoryPlan:
    """The memory that training will take, from a dry run of one step's micro-batches.

    Without their activations in a simulated world, whose steps are recorded anyway.
    """
    kind, nbytes = _KINDS[recipe.optimizer.name]
    plan = _planned(recipe, mesh, task, model, batches, nbytes / 4)
    if kind is optim.Muon:
        hidden = [p for group in optim.muon_groups(model, 0.0) if group["use_muon"] for p in group["params"]]
        return muon_plan(plan, model, hidden)
    if issubclass(kind, low_bit.EightBit):
        return low_bit.with_scales(plan, on_host=recipe.memory.update_on is settings.Update.host)
    return plan


def _planned(
    recipe: Recipe, mesh: DeviceMesh, task: Task, model: nn.Module, batches: list[Any], states: float
) -> MemoryPlan:
    """planned_memory; states: the optimizer's arrays of float32, as long as the shards."""
    if mesh.world.device is not None:
        return memory_plan(model, optimizer_states=states)
    unscaled = optim.GradScaler(enabled=False)
    pipeline = pipelines.pipeline_of(model)
    if pipeline is not None:
        shares = pipelines.Shares(task, unscaled, count=1)
        return pipeline_plan(pipeline, shares, batches, inputs=task.inputs, optimizer_states=states)
    plan = memory_plan(
        model, optimizer_states=states, step=lambda: loop.backward(recipe, task, model, batches, unscaled, 0)
    )
    shard = plan.device.get("optimizer state", 0) // states
    return replace(plan, device=plan.device | outer.planned(recipe, shard))


def run_log(recipe: Recipe) -> RunLog:
    """Rank 0's log, in a new directory, or in the directory of the resumed run."""
    trackers.check(recipe.trackers)  # before a directory is made
    if recipe.resume == "auto":
        directory = resumed_run_directory(recipe.name)
        if (directory / "checkpoint").exists() and not (directory / "checkpoints").exists():
            raise ValueError(
                f"{directory} is finished and has no checkpoint to resume from: pass another --name"
            )
        return RunLog(directory, resumed=True)
    if recipe.resume:
        read_manifest(Path(recipe.resume))  # before a directory is made
    return RunLog(new_run_directory(recipe.name))


def job_of(recipe: Recipe, mesh: DeviceMesh, task: Task, model: nn.Module, run: RunLog, watch: Watch) -> Job:
    """The run's optimizer, loss scale and checkpoints, with everything that they work on."""
    optimizer = optimizer_of(recipe, model)
    scaler = optim.GradScaler(enabled=recipe.precision.param is settings.Precision.float16)
    kept: dict[str, Any] = {
        "keep_last": recipe.checkpoint.keep_last,
        "keep_every": recipe.checkpoint.keep_every,
    }
    kept["kind"] = recipe.checkpoint.folder.value
    folder = (run.directory or Path()) / "checkpoints"  # rank 0's counts
    if recipe.checkpoint.folder is settings.Folder.hosts:  # all look at that place, each on its host
        folder = Path(broadcast_object(mesh.communicator("control"), str(folder)))
    with one_line(DATA, mesh, kinds=(HubLost,)):
        hosts = outer.outer_of(recipe, mesh, task, model, optimizer, watch)
    if hosts is None:
        checkpoints = CheckpointManager(folder, model, optimizer, mesh, **kept)
    else:
        folder = outer.folder_of(recipe, mesh, folder)
        checkpoints = CheckpointManager(folder, model, hosts, shards_of(mesh), **kept)
    ranks = Ranks(mesh, lambda: sum(watch.recorder.inside.values()))
    origin = {"config": settings.plain(recipe), "data": task.facts(), "versions": versions()}
    simulated = mesh.world.device is not None  # where nothing can be measured
    operations = 0 if simulated else recipe.batch_size * task.flops(model)
    ideal = operations / over_ranks(mesh, "sum", product_flops())[0] if operations else 0.0
    parts = (recipe, mesh, task, model, optimizer, scaler, checkpoints, run, watch, ranks, origin)
    return Job(*parts, hosts, ideal)


def resume(job: Job) -> tuple[int, list[str]]:
    """(the step to go on from: 0, or that of the restored checkpoint; a message for the reader).

    Raises:
        CheckpointError: having removed the run's directory if it is a new one.
    """
    wanted = job.recipe.resume
    if not wanted:
        return outer.together(job, 0, {})[0], []
    try:
        step, extra = job.checkpoints.restore(None if wanted == "auto" else wanted)
        step, extra = outer.together(job, step, extra)
        _restore_scale(job.scaler, extra.get("scaler"))
    except CheckpointError:
        if wanted != "auto":
            job.run.discard()
        raise
    message = [f"resumed from step {step}" if step else "no checkpoint yet: from the beginning"]
    if step and "config" not in extra:
        message.append("the checkpoint comes from another program: its settings are not compared with these")
    elif changed := changes(extra, job.origin) if step else []:
        message.append(f"warning: not the run that was saved: {'; '.join(changed[:8])}")
    return step, message


def _restore_scale(scaler: optim.GradScaler, state: Any) -> None:
    """Raises CheckpointError for a state that no scaler has: the file is forged, or another program's."""
    if state and scaler.is_enabled():
        try:
            scaler.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(f"the loss scale of the checkpoint can't be used: {error}") from None


def changes(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Settings of the checkpoint's run that differ here and change numbers, if only by rounding."""
    return [
        f"{name} was {before}, is {now}"
        for part in own
        for name, (before, now) in differing([each.get(part, {}) for each in (saved, own)])
        if name.partition(".")[0] not in _HARMLESS
    ]


_HARMLESS = (
    "name",
    "steps",
    "resume",
    "ahead",
    "export",
    "sample",
    "fsdp",
    "memory",
    "checkpoint",
    "watchdog",
    "report",
    "data",
)


def over_axes(recipe: Recipe, ranks: int) -> str:
    """How the model lies over the ranks: FULL_SHARD over 4 ranks x tp 2."""
    pp, tp, cp = recipe.parallel.pp, recipe.parallel.tp, recipe.parallel.cp
    shards = ranks // (pp * tp * recipe.diloco.hosts_here)
    message = f"{recipe.fsdp.strategy.name} over {shards} rank{'s' if shards > 1 else ''}"
    if recipe.diloco.hosts > 1:
        message += f" on each of {recipe.diloco.hosts} hosts (DiLoCo)"
    if cp > 1:
        message += f", sequences over cp {cp}"
    if tp > 1:
        message += f" x tp {tp}"
    if recipe.parallel.sequence:
        message += " with sequence parallelism"
    if pp > 1:
        message += f" x pp {pp}"
    if recipe.parallel.ep > 1:
        message += f", experts over {recipe.parallel.ep} ranks"
    return message


def _precision(recipe: Recipe, mesh: DeviceMesh) -> tuple[str, ...]:
    """A line where the device can't multiply in the type that the user asks for."""
    param = recipe.precision.param.value
    if param not in dtypes.LOW or mesh.device.gathered_dtype(param).itemsize == 2:
        return ()
    return (f"{param}: no matmuls of it on this device; they are float32, of parameters rounded to {param}",)


def introduce(job: Job, plan: MemoryPlan) -> None:
    """The model, the data and the destination of a run: for the reader, and in metrics.jsonl."""
    run, recipe, mesh, task, model = job.run, job.recipe, job.mesh, job.task, job.model
    parameters = sum(map(whole_size, model.parameters()))
    trained = sum(whole_size(parameter) for parameter in model.parameters() if parameter.requires_grad)
    first, *more = task.introduction()
    adapters = f" ({trained / 1e6:.2f} M of them trained)" if trained < parameters else ""
    run.screen.explain(
        f"shardrt {own_version()}: {first}, {parameters / 1e6:.2f} M parameters{adapters}, "
        f"{over_axes(recipe, mesh.size)}"
    )
    pipeline, facts, memory = pipelines.pipeline_of(model), {}, str(plan)
    if pipeline is not None:
        piped = pipelines.described(recipe, mesh, pipeline, plan)
        plan, memory, facts = piped.plan, piped.memory, {"pipeline": piped.facts}
        more += piped.lines
    for line in (*more, *_precision(recipe, mesh)):
        run.screen.explain(line)
    run.say(f"memory as planned, per rank:\n{memory}")
    run.say(f"run: {run.directory}")
    run.write(
        "run",
        {
            "shardrt": own_version(),
            "architecture": recipe.ARCHITECTURE,
            "parameters": parameters,
            "trained_parameters": trained,
            "steps": recipe.steps,
            "ranks": mesh.size,
            "axes": recipe.axes(mesh.size) | ({"ep": recipe.parallel.ep} if recipe.parallel.ep > 1 else {}),
            "unit": task.unit,
            **facts,
            **job.origin["data"],
            "device_bytes": plan.device,
            "host_bytes": plan.host,
            "memory_mb_before": memory_mb(),
            "began": time.time(),
            "environment": {**job.origin["versions"], **surroundings(mesh)},
        },
    )
