"""Trains a GPT on text as bytes, fully sharded over the ranks that mpirun starts (one rank without it).

    mpirun -n 2 python -m models.train --config models/configs/default.toml --optimizer.lr 1e-3

One loop, top to bottom. Leaves runs/NAME with config.toml, metrics.jsonl, loss.png and checkpoint/.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

import shardrt
from shardrt import device, nn, no_grad, optim
from shardrt import functional as F
from shardrt.checkpoint import CheckpointError, Checkpoints, read_manifest, save
from shardrt.comm import DeviceMesh, failure, init_device_mesh
from shardrt.comm.talk import differences, from_all
from shardrt.comm.watchdog import Watch
from shardrt.fsdp import (
    MemoryPlan,
    fully_shard,
    memory_plan,
    no_sync,
    set_gradient_divide_factor,
    set_world_invariant,
)
from shardrt.train import config as settings
from shardrt.train.data import IGNORED, VOCABULARY, Corpus, held_out_batches, load_corpus, training_batch
from shardrt.train.errors import DATA, DIFFERS, NONFINITE, USAGE, one_line
from shardrt.train.metrics import (
    BITS,
    RunLog,
    exact_sum,
    new_run_directory,
    over_ranks,
    resumed_run_directory,
)
from shardrt.train.progress import Stopwatch, evaluation_line, memory_mb, step_line
from shardrt.train.stop import STOPPED, StopRequests
from shardrt.train.versions import versions

from .generate import generate
from .gpt import GPT, GPTConfig

DEFAULT = Path(__file__).parent / "configs" / "default.toml"


@dataclass(frozen=True)
class Config:
    """Train a GPT, fully sharded, on text as bytes. Every option can stand in the TOML file as well."""

    name: str = ""  # of the folder in runs/; empty for date and time
    data: tuple[Path, ...] = ()  # text files; the sources of Python's own library if none
    seed: int = 0  # of the initial weights, the order of the samples, dropout and the generated text
    steps: int = 1000  # updates of the weights
    batch_size: int = 16  # windows of text per step, over all ranks
    resume: str = ""  # "auto": the newest whole checkpoint of run `name`; or the directory of a checkpoint
    micro_batches: int = 1  # parts of a step's batch that go through the model one after the other
    reduce_each: bool = False  # reduce after each part: more traffic, less memory than once at the end
    # per-world: the same bits at one number of ranks; world-invariant: at all, and micro_batches are those of
    # all ranks together.
    deterministic: settings.Determinism = settings.Determinism["per-world"]
    threads: int = 0  # of the CPU per rank; 0: this rank's share of the cores, but 1 with world-invariant
    model: GPTConfig = GPTConfig()
    optimizer: settings.OptimizerConfig = settings.OptimizerConfig()
    fsdp: settings.FSDPConfig = settings.FSDPConfig()
    precision: settings.PrecisionConfig = settings.PrecisionConfig()
    memory: settings.MemoryConfig = settings.MemoryConfig()
    checkpoint: settings.CheckpointConfig = settings.CheckpointConfig()
    watchdog: settings.WatchdogConfig = settings.WatchdogConfig()
    report: settings.ReportConfig = settings.ReportConfig()
    sample: settings.SampleConfig = settings.SampleConfig()

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.threads < 0:
            raise ValueError(f"threads must be at least 0, got {self.threads}")
        if self.invariant and self.optimizer.clip_type not in (1, 2, inf):
            raise ValueError(
                "optimizer.clip_type must be 1, 2 or inf with deterministic = 'world-invariant', got "
                f"{self.optimizer.clip_type}"
            )
        if self.reduce_each and self.invariant:
            raise ValueError("deterministic = 'world-invariant' reduces each part: leave reduce_each off")
        if self.reduce_each and self.micro_batches == 1:
            raise ValueError("reduce_each needs micro_batches above 1")
        if self.optimizer.in_backward:
            if self.precision.param is settings.Precision.float16:
                raise ValueError("optimizer.in_backward updates before the loss scale is known to be right")
            if self.reduce_each:
                raise ValueError("optimizer.in_backward needs one reduction per step: leave reduce_each off")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2^64, got {self.seed}")
        if self.model.vocab_size < VOCABULARY:
            raise ValueError(f"model.vocab_size must be at least {VOCABULARY}, got {self.model.vocab_size}")

    @property
    def invariant(self) -> bool:
        """Whether the number of ranks changes no bit."""
        return self.deterministic is settings.Determinism["world-invariant"]

    def parts(self, ranks: int) -> int:
        """Micro-batches of a step, over all ranks."""
        return self.micro_batches if self.invariant else ranks * self.micro_batches


def main(arguments: Sequence[str]) -> None:
    """One run, as the command line says."""
    with one_line(USAGE):
        config = settings.parse(Config, arguments, default=DEFAULT, program="models.train")
    launch(config)


@dataclass(frozen=True)
class Job:
    """All that a run is made of. Only rank 0's `run` prints and writes."""

    config: Config
    mesh: DeviceMesh
    corpus: Corpus
    model: GPT
    optimizer: optim.Optimizer
    scaler: optim.GradScaler
    checkpoints: Checkpoints
    run: RunLog
    watch: Watch


def launch(config: Config) -> None:
    """One run, on every rank."""
    with one_line(USAGE, kinds=(RuntimeError,)):  # a world size that no launcher made, or no MPI
        mesh = init_device_mesh("auto")
    with Watch(mesh, config.watchdog.limits) as watch:
        run_on(mesh, config, watch)


def run_on(mesh: DeviceMesh, config: Config, watch: Watch) -> None:
    """One run, watched. What can be wrong with the input is found before anything is written."""
    began = time.perf_counter()
    with one_line(DIFFERS, mesh):
        check_same(mesh, {"settings": settings.plain(config), "shardrt": shardrt.__version__, **versions()})
    with one_line(USAGE, mesh):
        mesh = init_device_mesh("auto", config.fsdp.shape(mesh.size)) if config.fsdp.copies > 1 else mesh
    watch.record(mesh)
    if config.threads or config.invariant:
        shardrt.set_threads(max(1, config.threads))
    with one_line(DATA, mesh):
        corpus = load_corpus(config.data, block_size=config.model.block_size)
    with one_line(DIFFERS, mesh):
        check_same(mesh, {"sha256 of the data": corpus.sha256})
    with one_line(USAGE, mesh):
        model = sharded_model(config, mesh)
        plan = planned_memory(config, mesh, model, corpus)
        failure.describe_memory(lambda: f"memory as planned, per rank:\n{plan}")
        run = run_log(config) if mesh.rank == 0 else RunLog(None)

    watch.keep(run.directory / "flight" if run.directory else None)
    gzip = corpus.gzip_bits_per_byte()
    if run.directory:
        settings.dump(config, run.directory / "config.toml")
    introduce(run, config, mesh, model, corpus, plan, gzip)
    job = job_of(config, mesh, corpus, model, run, watch)
    with one_line(DATA, mesh, kinds=(CheckpointError,)):
        first = resume(job)
    with one_line(NONFINITE, mesh, kinds=(FloatingPointError,)):
        held_out = train(job, first)
    run.say(f"held-out text: {held_out:.3f} bits per byte; gzip -9 needs {gzip:.3f}")
    # Rank 0 gathers and writes; the others take part and need no directory.
    watch.phase("save")
    save(run.directory / "checkpoint" if run.directory else "", model, step=config.steps)
    watch.phase("sample")
    sample = generate(model, config.sample, block_size=config.model.block_size, seed=config.seed)
    text = sample.decode(errors="replace")
    run.say(f"--- sample ---\n{text}\n--------------")
    watch.phase("end")
    run.finish({"seconds": time.perf_counter() - began, "sample": text})
    run.say(f"wrote {run.directory}: config.toml, metrics.jsonl, loss.png, checkpoint/")


def check_same(mesh: DeviceMesh, what: dict[str, Any]) -> None:
    """Raise ValueError that names the fields and ranks unless all ranks have the same. Collective."""
    told = differences(from_all(mesh.communicator("control"), what))
    if told:
        raise ValueError(f"ranks differ: {'; '.join(told[:5])}")


def sharded_model(config: Config, mesh: DeviceMesh) -> GPT:
    """A GPT with one unit per block and one for the rest. Nothing of it is in memory yet."""
    if config.batch_size % config.parts(mesh.size):
        parts = f" and {config.micro_batches} micro-batches" * (config.micro_batches > 1)
        sharers = f"{mesh.size} ranks{parts}"
        raise ValueError(f"batch_size {config.batch_size} cannot be shared equally by {sharers}")
    shardrt.manual_seed(config.seed)
    model = GPT(config.model)
    config.memory.prepare(model.blocks)
    chosen = {
        "mesh": mesh,
        "strategy": config.fsdp.strategy,
        "prefetch": config.fsdp.prefetch,
        "offload_policy": config.memory.policy,
    }
    for block in model.blocks:
        fully_shard(block, mp_policy=config.precision.policy(outermost=False), **chosen)
    fully_shard(model, mp_policy=config.precision.policy(outermost=True), **chosen)
    set_gradient_divide_factor(model, 1.0)  # the loss is divided by the tokens of all ranks instead
    if config.invariant:
        set_world_invariant(model, config.micro_batches)
    return model


def optimizer_of(config: Config, model: GPT) -> optim.Optimizer:
    """AdamW. Makes this rank's shards, their gradients and the optimizer's state."""
    groups = optim.decay_groups(model, config.optimizer.weight_decay)
    wanted = config.optimizer
    return optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, in_backward=wanted.in_backward)


def planned_memory(config: Config, mesh: DeviceMesh, model: GPT, corpus: Corpus) -> MemoryPlan:
    """What training will take, learnt without taking it."""
    batches, unscaled = batches_of(config, corpus, mesh, step=0), optim.GradScaler(enabled=False)
    return memory_plan(model, step=lambda: backward(config, model, batches, unscaled))


def run_log(config: Config) -> RunLog:
    """Rank 0's, in a directory of its own, or that of the run that is resumed."""
    if config.resume == "auto":
        return RunLog(resumed_run_directory(config.name), resumed=True)
    if config.resume:
        read_manifest(Path(config.resume))  # before a directory is made
    return RunLog(new_run_directory(config.name))


def job_of(config: Config, mesh: DeviceMesh, corpus: Corpus, model: GPT, run: RunLog, watch: Watch) -> Job:
    """The run's optimizer, loss scale and checkpoints, with everything that they work on."""
    optimizer = optimizer_of(config, model)
    scaler = optim.GradScaler(enabled=config.precision.param is settings.Precision.float16)
    kept = {"keep_last": config.checkpoint.keep_last, "keep_every": config.checkpoint.keep_every}
    folder = (run.directory or Path()) / "checkpoints"  # rank 0's counts
    return Job(
        config,
        mesh,
        corpus,
        model,
        optimizer,
        scaler,
        Checkpoints(folder, model, optimizer, mesh, **kept),
        run,
        watch,
    )


def resume(job: Job) -> int:
    """The step to go on from: 0, or that of the checkpoint that was restored."""
    wanted = job.config.resume
    if not wanted:
        return 0
    step, extra = job.checkpoints.restore(None if wanted == "auto" else wanted)
    if extra.get("scaler") and job.scaler.is_enabled():
        job.scaler.load_state_dict(extra["scaler"])
    changed = changed_bits(extra.get("config", {}), settings.plain(job.config))
    if step and changed:
        job.run.say(f"warning: not the bits of a run that was not resumed: {changed}")
    job.run.rewind(step)
    job.run.say(f"resumed from step {step}" if step else "no checkpoint yet: from the beginning")
    return step


def changed_bits(saved: dict[str, Any], own: dict[str, Any]) -> str:
    """Settings that change what world-invariant runs compute, and how; "" if none or neither run is one."""
    if "world-invariant" not in (saved.get("deterministic"), own["deterministic"]):
        return ""
    names = ("deterministic", "micro_batches", "threads", "batch_size")
    return ", ".join(f"{n} was {saved.get(n)}, is {own[n]}" for n in names if saved.get(n) != own[n])


def introduce(
    run: RunLog,
    config: Config,
    mesh: DeviceMesh,
    model: GPT,
    corpus: Corpus,
    plan: MemoryPlan,
    gzip: float,
) -> None:
    """What is trained, on what, and where it goes: for the reader, and in metrics.jsonl."""
    parameters = sum(parameter.size for parameter in model.parameters())
    shape = f"{config.model.n_layer} x {config.model.n_embd}, T {config.model.block_size}"
    run.say(
        f"shardrt {shardrt.__version__}: GPT {shape}, {parameters / 1e6:.2f} M parameters, "
        f"{config.fsdp.strategy.name} over {mesh.size} rank{'s' * (mesh.size > 1)}"
    )
    run.say(
        f"data: {corpus.source}, {corpus.train.size} bytes to train on and {corpus.held_out.size} held out "
        f"(gzip -9: {gzip:.3f} bits per byte), sha256 {corpus.sha256[:12]}"
    )
    run.say(f"memory as planned, per rank:\n{plan}")
    run.say(f"run: {run.directory}")
    run.write(
        "run",
        {
            "shardrt": shardrt.__version__,
            "parameters": parameters,
            "ranks": mesh.size,
            "data": corpus.source,
            "sha256": corpus.sha256,
            "train_bytes": corpus.train.size,
            "held_out_bytes": corpus.held_out.size,
            "gzip_bits_per_byte": gzip,
            "device_bytes": plan.device,
            "host_bytes": plan.host,
        },
    )


def train(job: Job, first: int) -> float:
    """The loop, from step `first`; gives the bits per byte of the held-out text at its end.

    Exits with code 75, having saved, where it is asked to stop. Raises FloatingPointError for a loss or
    gradients that are no numbers.
    """
    config, steps = job.config, job.config.steps
    stopwatch = Stopwatch(steps, tokens_per_step=config.batch_size * config.model.block_size)
    stopwatch.restart(first)
    with StopRequests(job.mesh, job.run.directory, config.checkpoint.stop_after) as requests:
        for step in range(first, steps):
            job.watch.step(step + 1)
            shardrt.manual_seed(config.seed, step)
            lr = config.optimizer.lr_at(step, steps)
            for group in job.optimizer.param_groups:
                group["lr"] = lr
            batches = batches_of(config, job.corpus, job.mesh, step)
            losses = backward(config, job.model, batches, job.scaler)
            job.watch.phase("optimizer")
            norm = update(job, step + 1)

            done = step + 1
            job.watch.phase("report")
            keep(job, done)
            if done % config.report.log_interval == 0 or done in (first + 1, steps):
                report(job, done, losses, norm, lr, stopwatch)
            if done % config.report.eval_interval == 0 or done == steps:
                windows = config.report.eval_windows if done < steps else None
                record = evaluated(job, done, windows)
                stopwatch.restart(done)
            if done < steps and (reason := requests.reason()):
                leave(job, done, reason)
    job.watch.phase("save")
    tell_saved(job.run, job.checkpoints.settle)
    if first >= steps:  # a run that was finished before
        record = evaluated(job, steps, None)
    return record["held_out_bits_per_byte"]


def update(job: Job, done: int) -> float:
    """Clip the gradients and update the parameters; gives the norm before.

    A norm that is not finite, which all ranks see alike, leaves the update out, where loss scaling expects it
    or the settings say so; else a FloatingPointError names rank and parameter.
    """
    wanted, parameters = job.config.optimizer, list(job.model.parameters())
    job.scaler.unscale_(job.optimizer)
    if wanted.in_backward:  # they have been applied already
        norm = nn.utils.grad_norm(parameters, wanted.clip_type)
    elif job.scaler.is_enabled():
        norm = nn.utils.clip_grad_norm_(parameters, wanted.clip_norm, wanted.clip_type)
    else:
        try:
            norm = nn.utils.clip_grad_norm_(
                parameters, wanted.clip_norm, wanted.clip_type, error_if_nonfinite=True
            )
        except RuntimeError:  # nothing has been changed
            norm = nn.utils.grad_norm(parameters, wanted.clip_type)
            told = f"step {done}: the norm of the gradients is {norm}"
            if wanted.on_nonfinite is settings.Nonfinite.stop:
                raise FloatingPointError(f"{told}: {culprit(job)}") from None
            job.run.say(f"{told}, so this update is skipped")
            job.optimizer.zero_grad()
            return norm
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad()
    return norm


def culprit(job: Job) -> str:
    """The first parameter, and the ranks, whose part of its gradient is no number. Collective."""
    here = device.current()
    found = [
        name
        for name, parameter in job.model.named_parameters()
        if parameter.grad is not None and not np.isfinite(here.to_numpy(parameter.grad)).all()
    ]
    everyone = from_all(job.mesh.communicator("control"), found)
    first = next(name for name, _ in job.model.named_parameters() if any(name in names for names in everyone))
    ranks = [rank for rank, names in enumerate(everyone) if first in names]
    return f"that of {first!r} first, in the part of rank {', '.join(map(str, ranks))}"


def report(job: Job, done: int, losses: list[float], norm: float, lr: float, stopwatch: Stopwatch) -> None:
    """A line for the reader, and a record. Raises FloatingPointError for a loss that is no number."""
    mean_loss = exact_sum(job.mesh, losses)
    (memory,) = over_ranks(job.mesh, "max", memory_mb())
    record = {"step": done, "loss": mean_loss, "norm": norm, "lr": lr, "memory_mb": memory}
    record |= stopwatch.read(done)
    job.run.say(step_line(record, job.config.steps))
    if not isfinite(mean_loss) and job.config.optimizer.on_nonfinite is settings.Nonfinite.stop:
        raise FloatingPointError(f"step {done}: the loss is {mean_loss}; lower optimizer.lr")
    kept = {
        name: value if isfinite(value) else None for name, value in record.items()
    }  # JSON has no infinity
    job.run.write("step", kept)


def evaluated(job: Job, done: int, windows: int | None) -> dict:
    """Evaluate, and say and write the result."""
    job.watch.phase("eval")
    record = {"step": done} | evaluate(job.config, job.mesh, job.model, job.corpus, windows)
    job.run.say(evaluation_line(record, job.config.steps))
    job.run.write("evaluation", record)
    return record


def keep(job: Job, done: int) -> None:
    """Publish a checkpoint that was written; begin one where it is due. A failure does not end the run."""
    chosen = job.config.checkpoint
    due = chosen.every and (done % chosen.every == 0 or done == job.config.steps)
    if due or job.checkpoints.under_way:
        job.watch.phase("save")
    tell_saved(job.run, job.checkpoints.tick)
    if due:
        save = job.checkpoints.start if chosen.in_background else job.checkpoints.save
        tell_saved(job.run, save, done, extra_of(job))


def extra_of(job: Job) -> dict[str, Any]:
    """What a checkpoint holds beside parameters and the optimizer's state."""
    return {"scaler": job.scaler.state_dict(), "config": settings.plain(job.config)}


def tell_saved(run: RunLog, function: Callable, *args: Any) -> None:
    """Call something that may give the directory of a checkpoint, or fail to write one; say so."""
    try:
        path = function(*args)
        if path is not None:
            run.say(f"saved {path}")
    except CheckpointError as error:
        run.say(f"warning: {error}")


def leave(job: Job, done: int, reason: str) -> None:
    """Save, and exit with a code that says so; where saving fails, with the error."""
    job.watch.phase("save")
    tell_saved(job.run, job.checkpoints.settle)
    if job.checkpoints.last_saved != done:
        job.run.say(f"saved {job.checkpoints.save(done, extra_of(job))}")
    job.run.say(f"stopped by {reason} after step {done}; go on with --resume auto")
    job.run.close()
    sys.exit(STOPPED)


Batch = tuple[np.ndarray, np.ndarray]  # tokens and targets, each (rows, block_size)


def batches_of(config: Config, corpus: Corpus, mesh: DeviceMesh, step: int) -> list[Batch]:
    """This rank's micro-batches of a step: neighbours, or at each turn the one of its rank."""
    parts, each = config.parts(mesh.size), config.micro_batches
    own = range(mesh.rank, parts, mesh.size) if config.invariant else range(parts)[mesh.rank * each :][:each]
    shape = config.batch_size // parts, config.model.block_size
    return [training_batch(corpus.train, step * parts + part, *shape, seed=config.seed) for part in own]


def backward(config: Config, model: GPT, batches: list[Batch], scaler: optim.GradScaler) -> list[float]:
    """Forward and backward of this rank's micro-batches; gives their shares of the mean loss.

    The loss of a micro-batch is divided by the tokens of the whole step, on all ranks: so gradients add up to
    that of one large batch, however it is cut. (All windows are full, so the number is known.)
    """
    count = config.batch_size * config.model.block_size
    each = config.reduce_each or config.invariant
    losses = []
    for number, (tokens, targets) in enumerate(batches, start=1):
        with nullcontext() if each or number == len(batches) else no_sync(model):
            loss = F.cross_entropy(model(tokens), targets, reduction="sum") * (1 / count)
            scaler.scale(loss).backward()
        losses.append(float(loss))
    return losses


def evaluate(config: Config, mesh: DeviceMesh, model: GPT, corpus: Corpus, windows: int | None) -> dict:
    """Mean loss over `windows` windows of the held-out text (None: all of it), shared among the ranks."""
    batches = held_out_batches(
        corpus.held_out,
        config.batch_size // (config.parts(mesh.size) if config.invariant else mesh.size),
        config.model.block_size,
        windows=windows,
        rank=mesh.rank,
        size=mesh.size,
    )
    losses, count = [], 0
    model.eval()
    with no_grad():
        for tokens, targets in batches:
            loss = F.cross_entropy(model(tokens), targets, ignore_index=IGNORED, reduction="sum")
            losses.append(float(loss))
            count += int((targets != IGNORED).sum())
    model.train()
    (count,) = over_ranks(mesh, "sum", count)
    loss = exact_sum(mesh, losses) / count
    return {"held_out_loss": loss, "held_out_bits_per_byte": loss * BITS, "held_out_bytes": int(count)}


if __name__ == "__main__":
    main(sys.argv[1:])
