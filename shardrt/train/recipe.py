"""Recipe: all settings of a run except those of one kind of model and data, which subclasses add."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.train import config as settings
from shardrt.train.tasks import Task

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """A run. Every setting can also stand in the TOML file."""

    architecture: str = ""  # of the trained model; it decides which other settings there are
    size: str = ""  # of the model by its name, as gpt2-xl; settings in [model] override it
    name: str = ""  # of the folder in runs/; empty for date and time
    data: tuple[Path, ...] = ()  # to train on; empty: data that need no download
    seed: int = 0  # of the initial weights, the order of the samples, dropout and generated text
    steps: int = 1000  # updates of the weights
    batch_size: int = 16  # samples per step, over all ranks
    resume: str = ""  # "auto": the newest whole checkpoint of run `name`; or the directory of a checkpoint
    micro_batches: int = 1  # parts of a step's batch that go through the model in sequence
    reduce_each: bool = False  # reduce after each part: more traffic, less memory than once at the end
    # per-world: bitwise identical at one number of ranks; world-invariant: at 1, 2, 4, ...; micro_batches are
    # those of all ranks together.
    deterministic: settings.Determinism = settings.Determinism["per-world"]
    threads: int = 0  # of the CPU per rank; 0: its share of the cores, but 1 where ranks change no bit
    ahead: int = 2  # steps whose batches are made ahead, in a thread
    tensorboard: bool = False  # the same as report.trackers with tensorboard: runs/NAME/tensorboard
    optimizer: settings.OptimizerConfig = settings.OptimizerConfig()
    fsdp: settings.FSDPConfig = settings.FSDPConfig()
    parallel: settings.ParallelConfig = settings.ParallelConfig()
    diloco: settings.DiLoCoConfig = settings.DiLoCoConfig()
    precision: settings.PrecisionConfig = settings.PrecisionConfig()
    memory: settings.MemoryConfig = settings.MemoryConfig()
    lora: settings.LoRAConfig = settings.LoRAConfig()
    checkpoint: settings.CheckpointConfig = settings.CheckpointConfig()
    watchdog: settings.WatchdogConfig = settings.WatchdogConfig()
    report: settings.ReportConfig = settings.ReportConfig()

    ARCHITECTURE: ClassVar[str] = ""
    SIZES: ClassVar[dict[str, Any]] = {}  # the model's settings by name
    # Where less than 2^31 is beyond all use already, and would keep a machine busy before any message.
    MOST: ClassVar[dict[str, float]] = {
        "seed": 2**64 - 1,
        "batch_size": 2**20,
        "threads": 2**12,
        "model__n_layer": 2**14,
        "parallel__stages_per_rank": 2**10,
        "sample__length": 2**20,
    }

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batches", "ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.architecture not in ("", self.ARCHITECTURE):
            raise ValueError(
                f"architecture must be {self.ARCHITECTURE!r} for this recipe, got {self.architecture!r}"
            )
        if self.size and self.size not in self.SIZES:
            raise ValueError(f"size must be one of {', '.join(self.SIZES)}, got {self.size!r}")
        if self.threads < 0:
            raise ValueError(f"threads must be at least 0, got {self.threads}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2^64, got {self.seed}")
        if self.report.trace and self.report.traced[-1] > self.steps:
            raise ValueError(f"report.trace must end by the last step, {self.steps}, got {self.report.trace}")
        self._check_reductions()
        self._check_quantised()
        self._check_pipeline()
        self._check_diloco()
        settings.check_numbers(self, **self.MOST)

    def _check_reductions(self) -> None:
        if self.invariant and self.optimizer.clip_type not in (1, 2, inf):
            raise ValueError(
                "optimizer.clip_type must be 1, 2 or inf with deterministic = 'world-invariant', got "
                f"{self.optimizer.clip_type}"
            )
        if self.parallel.sequence and self.invariant and not self.parallel.tensor_invariant:
            raise ValueError(
                "deterministic = 'world-invariant' adds up by a tree over micro-batches alone: leave "
                "parallel.sequence off, or set parallel.tensor_invariant"
            )
        if self.parallel.ep > 1 and self.fsdp.copies > 1:
            raise ValueError("parallel.ep: experts on several ranks have no copies: leave fsdp.copies at 1")
        if self.reduce_each and self.invariant:
            raise ValueError("deterministic = 'world-invariant' reduces each part: leave reduce_each off")
        if self.reduce_each and self.micro_batches == 1:
            raise ValueError("reduce_each needs micro_batches above 1")
        if self.optimizer.in_backward:
            if self.precision.param is settings.Precision.float16:
                raise ValueError("optimizer.in_backward updates before the loss scale is known to be right")
            if self.reduce_each:
                raise ValueError("optimizer.in_backward needs one reduction per step: leave reduce_each off")

    def _check_quantised(self) -> None:
        if self.precision.quantised is None:
            return
        if self.fsdp.strategy is ShardingStrategy.NO_SHARD:
            raise ValueError(
                "precision.quantized_*: NO_SHARD keeps whole parameters on each rank: use FULL_SHARD, or "
                "HYBRID_SHARD with fsdp.copies = the number of hosts"
            )
        if self.invariant:
            raise ValueError(
                "precision.quantized_*: blocks depend on the number of ranks: leave deterministic = "
                "'world-invariant' out"
            )
        if self.memory.offload_parameters:
            raise ValueError("precision.quantized_*: leave memory.offload_parameters off")
        if self.precision.error_feedback and self.precision.param is settings.Precision.float16:
            raise ValueError(
                "precision.error_feedback: errors have the scale of their step's loss: use param = 'bfloat16'"
            )

    def _check_pipeline(self) -> None:
        other = self.parallel.micro_batches
        if other and self.micro_batches not in (1, other):
            raise ValueError(
                f"micro_batches is {self.micro_batches} and parallel.micro_batches {other}: they are one "
                "number"
            )
        if self.parallel.pp > 1 and self.reduce_each:
            raise ValueError("reduce_each: a pipeline reduces once per step, so leave it off")

    def _check_diloco(self) -> None:
        if self.diloco.hosts == 1:
            return
        parallel, memory = self.parallel, self.memory
        beside = {f"parallel.{name}": getattr(parallel, name) for name in ("tp", "cp", "ep", "pp")}
        beside["fsdp.copies"] = self.fsdp.copies
        wrong = [f"{name} at 1" for name, size in beside.items() if size > 1]
        if self.on_any_ranks:
            wrong.append("deterministic and parallel.tensor_invariant at their defaults")
        if self.precision.param is settings.Precision.float16:
            wrong.append("precision.param at float32 or bfloat16")
        if memory.offload_parameters or memory.offload_gradients or memory.offload_optimizer:
            wrong.append("memory.offload_* off")
        if self.optimizer.in_backward:
            wrong.append("optimizer.in_backward off")
        if wrong:
            raise ValueError(f"diloco.hosts above 1 trains hosts apart: leave {', '.join(wrong)}")
        after = self.steps - self.diloco.warmup_steps
        if after % self.diloco.sync_every:
            of = f"{after} steps" + " after diloco.warmup_steps" * bool(self.diloco.warmup_steps)
            raise ValueError(f"diloco.sync_every must divide the {of}, got {self.diloco.sync_every}")

    def task(self) -> Task:
        """The task of this recipe. Reads data. Raises ValueError, OSError for bad data."""
        raise NotImplementedError(f"{type(self).__name__}.task")

    def resolved(self) -> "Recipe":
        """With settings that depend on the data. Reads headers of data. Raises ValueError, OSError."""
        return self

    def warnings(self) -> list[str]:
        """Lines about settings that are allowed, and probably not meant."""
        warmup = self.optimizer.warmup_steps
        if warmup <= self.steps:
            return []
        message = f"warning: optimizer.warmup_steps is {warmup}, of {self.steps} steps"
        return [f"{message}: lr never reaches {self.optimizer.lr}"]

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names of all trackers, each once."""
        asked = (*self.report.trackers, *(("tensorboard",) if self.tensorboard else ()))
        return tuple(dict.fromkeys(asked))

    @property
    def invariant(self) -> bool:
        """Whether results are bitwise identical at any number of ranks with parts of the batch."""
        return self.deterministic is settings.Determinism["world-invariant"]

    @property
    def on_any_ranks(self) -> bool:
        """Whether a number of ranks, along some axis, changes no bit."""
        return self.invariant or self.parallel.tensor_invariant > 0

    @property
    def reduction(self) -> str:
        """init_device_mesh's."""
        return "tree" if self.on_any_ranks else self.fsdp.reduction.value

    def axes(self, ranks: int) -> dict[str, int]:
        """The mesh's axes, and the ranks along each. Raises ValueError where they can't share `ranks`."""
        chosen, copies, together = self.parallel, self.fsdp.copies, self.parallel.together
        sizes = {"parallel.pp": chosen.pp, "parallel.cp": chosen.cp, "parallel.tp": chosen.tp}
        if ranks % together:
            named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise ValueError(f"{named}: the number of ranks must be a multiple of {together}, got {ranks}")
        data, hosts = ranks // together, self.diloco.hosts_here
        if data % hosts:
            raise ValueError(f"diloco.hosts must divide the {ranks} ranks, got {hosts}")
        data //= hosts
        if data % copies:
            groups = f"{data} groups of {together}" if together > 1 else f"{ranks}"
            raise ValueError(f"fsdp.copies must divide the {groups} ranks, got {copies}")
        if ranks // chosen.pp % chosen.ep:
            each = ranks // chosen.pp
            shared = f"{each} rank{'s' if each > 1 else ''}"
            if chosen.pp > 1:
                shared += " of each stage"
            raise ValueError(f"parallel.ep must divide the {shared}, got {chosen.ep}")
        found = {"diloco": hosts, "pp": chosen.pp, "dp_replicate": copies, "dp_shard": data // copies}
        found |= {"cp": chosen.cp, "tp": chosen.tp}
        return {name: size for name, size in found.items() if size > 1 or name == "dp_shard"}

    def parts(self, ranks: int) -> int:
        """Micro-batches of a step, over all ranks of all jobs that have parts of the batch; `ranks` here."""
        return self.micro_batches if self.invariant else ranks * self.diloco.jobs * self.micro_batches

    def samples(self, step: int, rank: int, ranks: int) -> list[range]:
        """The samples of each micro-batch that `rank`, of the job's with parts of the batch, has in a step.

        In each round the one of its rank: so the ranks together have the micro-batches of one rank.
        """
        parts = self.parts(ranks)
        share, first = self.batch_size // parts, step * self.batch_size
        if self.diloco.hub:
            rank, ranks = rank + self.diloco.host * ranks, ranks * self.diloco.jobs
        return [range(first + part * share, first + (part + 1) * share) for part in range(rank, parts, ranks)]
