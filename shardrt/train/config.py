"""Settings of a run: frozen dataclasses, filled from a TOML file; options.py has the command line.

Knows no model: a training script puts these sections and its model's own settings together in one dataclass.
The comment behind a field, or above it, is its help text.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from shardrt.activation_offload import offload_activations
from shardrt.faults.watchdog import Limits, check_limit
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.nn.layers import LayerNorm, RMSNorm
from shardrt.nn.lora import add_lora
from shardrt.nn.public import Module
from shardrt.optim import warmup_cosine, warmup_linear, warmup_stable_decay
from shardrt.parallel import check_diloco, check_warmup
from shardrt.parallel.schedules import SCHEDULES
from shardrt.recompute import checkpoint_blocks
from shardrt.train.trackers.protocol import TRACKERS
from shardrt.untrusted import read_regular

__all__ = ["SampleConfig", "check_numbers", "load", "plain", "read_toml"]

Settings = TypeVar("Settings")
_LARGEST = 1 << 20  # bytes of a TOML file


class Nonfinite(Enum):
    """What to do about gradients that are not finite."""

    stop = "stop"
    skip = "skip"


class Algorithm(Enum):
    """The algorithm that updates the weights."""

    adamw = "adamw"
    lion = "lion"
    adamw8bit = "adamw8bit"  # moments in 8 bits by blocks
    lion8bit = "lion8bit"
    adamw_bf16 = "adamw_bf16"  # moments in bfloat16, rounded at random
    lion_bf16 = "lion_bf16"
    muon = "muon"


class Folder(Enum):
    """The kind of checkpoint folder."""

    shared = "shared"  # the same on all hosts
    hosts = "hosts"  # each host has its own
    objects = "objects"  # the same on all, without a rename that happens at once: a bucket behind a mount


class AdjustLR(Enum):
    """How Muon's rate depends on a matrix's shape, by torch.optim.Muon's names."""

    match_rms_adamw = "match_rms_adamw"
    original = "original"


class Schedule(Enum):
    """How the learning rate falls after the warm-up."""

    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"


# Which runs have the same bits: those with the same number of ranks, or all.
Determinism = Enum("Determinism", ["per-world", "world-invariant"])


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights are updated: linear warm-up, then down to min_lr; no weight decay on biases and norms."""

    name: Algorithm = Algorithm.adamw  # lion: its rate is 3 to 10 times lower; muon: see adjust_lr_fn
    schedule: Schedule = Schedule.cosine  # from lr to min_lr; wsd: stays at lr, then a line in decay_steps
    decay_steps: int = 0  # the last steps, in which wsd decays; 0 for a tenth of all
    lr: float = 1e-3  # learning rate at its highest
    min_lr: float = 1e-4  # learning rate at the last step
    warmup_steps: int = 50  # steps of linear warm-up
    weight_decay: float = 0.1  # of weight matrices and embeddings
    betas: tuple[float, float] = (0.9, 0.95)  # decay of AdamW's two moments; Lion's two
    momentum: float = 0.95  # of Muon's hidden matrices; betas are those of its other parameters
    muon_lr: float = 0.0  # highest rate of these matrices, which falls as lr does; 0: lr
    # match_rms_adamw multiplies this by 0.2 sqrt(the matrix's longer side), so that AdamW's lr fits;
    # original by sqrt(max(1, rows / columns)).
    adjust_lr_fn: AdjustLR = AdjustLR.match_rms_adamw
    clip_norm: float = 1.0  # the global norm of the gradients is clipped to this; inf never clips
    clip_type: float = 2.0  # which norm: 1, 2, 3, ... or inf
    on_nonfinite: Nonfinite = Nonfinite.stop  # gradients that are nan or infinite: stop, or skip the update
    in_backward: bool = False  # update each unit as soon as its gradient is reduced; needs clip_norm = inf

    def __post_init__(self) -> None:
        _at_least("optimizer.lr", self.lr, 0)
        _at_least("optimizer.min_lr", self.min_lr, 0)
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        _at_least("optimizer.decay_steps", self.decay_steps, 0)
        if self.decay_steps and self.schedule is not Schedule.wsd:
            raise ValueError("optimizer.decay_steps needs optimizer.schedule = 'wsd'")
        _at_least("optimizer.weight_decay", self.weight_decay, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas}")
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm must be positive, got {self.clip_norm}; inf never clips")
        if not self.clip_type > 0:
            raise ValueError(f"optimizer.clip_type must be positive, got {self.clip_type}")
        if not (0.1 <= self.clip_type <= 16 or self.clip_type == inf):  # powers of others leave float64
            raise ValueError(f"optimizer.clip_type must be from 0.1 to 16, or inf, got {self.clip_type}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum must be in [0, 1), got {self.momentum}")
        _at_least("optimizer.muon_lr", self.muon_lr, 0)
        if self.muon_lr and not self.lr:
            raise ValueError("optimizer.muon_lr falls as optimizer.lr does, which must be above 0")
        if self.in_backward and self.name is Algorithm.muon:
            raise ValueError("optimizer.in_backward: muon updates after it; set optimizer.name = 'adamw'")
        if self.in_backward and self.clip_norm != inf:
            raise ValueError(
                "optimizer.in_backward updates before the norm is known; set optimizer.clip_norm to inf"
            )

    def lr_at(self, step: int, total_steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        shape = {"lr": self.lr, "min_lr": self.min_lr, "warmup_steps": self.warmup_steps}
        if self.schedule is Schedule.wsd:
            decay_steps = self.decay_steps or total_steps // 10
            return warmup_stable_decay(step, decay_steps=decay_steps, total_steps=total_steps, **shape)
        falling = warmup_cosine if self.schedule is Schedule.cosine else warmup_linear
        return falling(step, total_steps=total_steps, **shape)

    def lr_of(self, group: Mapping[str, Any], lr: float) -> float:
        """The learning rate of a parameter group in a step with this one, of lr_at."""
        if self.muon_lr and group.get("use_muon"):
            return lr * (self.muon_lr / self.lr)
        return lr


class Reduction(Enum):
    """The adder of sums over NCCL."""

    nccl = "nccl"
    tree = "tree"


@dataclass(frozen=True)
class FSDPConfig:
    """How the parameters are sharded, one unit for each block."""

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD  # which arrays stay gathered, and when
    blocks: int = 1  # neighbouring blocks that are one unit: fewer and larger messages, and more memory
    prefetch: int = 1  # units gathered ahead of the one that computes
    copies: int = 1  # of every shard, for the hybrid strategies: each is held by ranks / copies ranks
    # The adder of sums over NCCL: NCCL, or our kernels by a fixed tree, as world-invariant needs.
    reduction: Reduction = Reduction.nccl
    check_copies: int = 100  # steps from one comparison of copies to the next, and before saves; 0: never

    def __post_init__(self) -> None:
        _at_least("fsdp.blocks", self.blocks, 1)
        _at_least("fsdp.prefetch", self.prefetch, 0)
        _at_least("fsdp.copies", self.copies, 1)
        _at_least("fsdp.check_copies", self.check_copies, 0)
        hybrid = self.strategy.rules.shard_over == "last axis"
        if hybrid != (self.copies > 1):
            raise ValueError(
                f"fsdp.copies must be {'above 1 with' if hybrid else '1 without'} a hybrid strategy, got "
                f"{self.copies} with {self.strategy.name}"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks compute one part of a batch together, each with a part of the model."""

    tp: int = 1  # tensor parallelism: heads, hidden units and vocabulary are split over so many ranks
    sequence: bool = False  # with it, activations between layers are split along time: less memory
    # Bitwise identical at every tp up to this, a power of two: sums are made in so many parts; 0: not.
    tensor_invariant: int = 0
    cp: int = 1  # context parallelism: sequences are split along time over so many ranks, also in attention
    ep: int = 1  # expert parallelism: the experts of a layer are spread over so many of all ranks beside pp
    # Rows of experts, over those in balance, for which memory is planned where there is no capacity_factor.
    expert_rows: float = 2.0
    pp: int = 1  # pipeline parallelism: so many ranks have some of the layers each
    # Order of the pipeline's work: GPipe, 1F1B, Interleaved1F1B, ZB-H1, InterleavedZeroBubble, ZBVZeroBubble,
    # DualPipeV, or a file.csv with a table of one's own. It changes no bit.
    schedule: str = "1F1B"
    stages_per_rank: int = 0  # parts of the model on a rank of the pipeline; 0: 1, or 2 where one is no use
    micro_batches: int = 0  # another name of micro_batches; with neither, a pipeline takes 2 for each rank

    def __post_init__(self) -> None:
        leasts = {"tp": 1, "cp": 1, "ep": 1, "expert_rows": 1, "pp": 1}
        leasts |= {"stages_per_rank": 0, "micro_batches": 0, "tensor_invariant": 0}
        for name, least in leasts.items():
            _at_least(f"parallel.{name}", getattr(self, name), least)
        if self.sequence and self.tp == 1 and not self.tensor_invariant:
            raise ValueError("parallel.sequence needs parallel.tp above 1")
        if self.schedule_file is None and self.schedule_name not in _SCHEDULES:
            raise ValueError(
                f"parallel.schedule must be one of {', '.join(SCHEDULES)}, or a file.csv, got "
                f"{self.schedule!r}"
            )

    @property
    def together(self) -> int:
        """The number of ranks that have something of one part of the batch."""
        return self.pp * self.cp * self.tp

    @property
    def schedule_file(self) -> Path | None:
        """The file that has the table, if the schedule is one."""
        return Path(self.schedule) if self.schedule.endswith(".csv") else None

    @property
    def schedule_name(self) -> str:
        """In small letters, without the "Schedule" of PyTorch's classes."""
        return self.schedule.lower().removeprefix("schedule")


_SCHEDULES = [name.lower() for name in SCHEDULES]


class Precision(Enum):
    """Types of numbers."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


# Quantisation's words and the command's, which are DeepSpeed's.
_QUANTISED = {
    "gather_bits": "quantized_weights",
    "reduce_bits": "quantized_gradients",
    "block must": "quantized_block must",
    "secondary": "hpz_partition_size",
    "None": "0",
}


@dataclass(frozen=True)
class PrecisionConfig:
    """The type of parameters in ops, and of gradients in messages; the updated weights stay float32."""

    param: Precision = Precision.float32  # parameters are gathered and computed in; float16 scales the loss
    reduce: Precision = Precision.float32  # gradients are sent in
    norms_in_float32: bool = True  # layer norms keep float32 parameters
    quantized_weights: int = 0  # bits of gathered parameters between hosts: 8, or 4 in blocks; 0: as param
    quantized_gradients: int = 0  # bits of a gradient between hosts: 8; 0: as reduce
    quantized_block: int = 0  # numbers that share a scale; 0: 256 with 8 bits, 32 with 4
    hpz_partition_size: int = 0  # adjacent ranks of a host that keep quantized weights for backward; 0: none
    host_size: int = 0  # adjacent ranks that make a host; 0: as many as the launcher started on one
    error_feedback: bool = False  # with quantized_gradients: add what rounding lost to the next gradient

    def __post_init__(self) -> None:
        if self.hpz_partition_size and self.host_size not in (0, self.hpz_partition_size):
            raise ValueError(
                f"precision.hpz_partition_size is {self.hpz_partition_size} and precision.host_size "
                f"{self.host_size}: give one of them"
            )
        try:
            self.quantised  # noqa: B018 (it checks)
        except ValueError as error:
            message = str(error).removeprefix("Quantisation: ")
            for theirs, ours in _QUANTISED.items():
                message = message.replace(theirs, ours)
            raise ValueError(f"precision.{message}") from None

    @property
    def quantised(self) -> Quantisation | None:
        """For MixedPrecisionPolicy; None if nothing is quantised."""
        copy = self.hpz_partition_size
        if not (self.quantized_weights or self.quantized_gradients or self.error_feedback or copy):
            return None
        return Quantisation(
            self.quantized_weights or None,
            self.quantized_gradients or None,
            self.quantized_block or None,
            copy or self.host_size or None,
            secondary=copy != 0,
            error_feedback=self.error_feedback,
        )

    def policy(self, *, block: bool, outermost: bool = False) -> MixedPrecisionPolicy | None:
        """The same for fully_shard; None if all is float32. The outermost unit gives float32 logits.

        block: for a block; units around blocks have embeddings and the head, for which 4 bits become 8.
        """
        if self.param is self.reduce is Precision.float32 and self.quantised is None:
            return None
        kept = (LayerNorm, RMSNorm) if self.norms_in_float32 else ()
        quantised = self.quantised
        if not block and quantised is not None and quantised.gather_bits == 4:
            quantised = replace(quantised, gather_bits=8)
        output = "float32" if outermost else None
        return MixedPrecisionPolicy(
            self.param.value,
            self.reduce.value,
            output,
            full_precision=kept,
            quantised=quantised,
        )


class Recompute(Enum):
    """What a recomputed block keeps for backward: its inputs, or results too."""

    none = "none"
    full = "full"
    matmul = "matmul"


class Update(Enum):
    """Where parameters on the host are updated."""

    device = "device"
    host = "host"


@dataclass(frozen=True)
class MemoryConfig:
    """Options that save memory, and cost time. All results are bitwise identical to those without them."""

    recompute: Recompute = Recompute.none  # blocks in backward: full keeps their inputs, matmul results too
    recompute_every: int = 1  # only each k-th block
    offload_activations: bool = False  # the blocks' saved arrays wait on the host
    offload_parameters: bool = False  # the shards wait on the host
    offload_gradients: bool = False  # the sharded gradients wait on the host
    offload_optimizer: bool = False  # the optimizer's state waits on the host
    update_on: Update = Update.device  # host: update there, where all three are
    directory: Path | None = None  # for files, instead of host memory, with offloaded optimizer state

    def __post_init__(self) -> None:
        _at_least("memory.recompute_every", self.recompute_every, 1)
        if self.update_on is Update.host and not all(self._on_host):
            raise ValueError(
                "memory.update_on = 'host' needs offload_parameters, offload_gradients and offload_optimizer"
            )
        if self.directory is not None and self.policy is None:
            raise ValueError(
                "memory.directory needs offload_parameters, offload_gradients or offload_optimizer"
            )

    @property
    def _on_host(self) -> tuple[bool, bool, bool]:
        return self.offload_parameters, self.offload_gradients, self.offload_optimizer

    @property
    def policy(self) -> CPUOffloadPolicy | None:
        """The same for fully_shard; None if nothing is on the host."""
        if not any(self._on_host):
            return None
        return CPUOffloadPolicy(*self._on_host, step=self.update_on.value, directory=self.directory)

    def prepare(self, blocks: Sequence[Module]) -> None:
        """Attach recomputation and the offload of activations to `blocks`."""
        if self.recompute is not Recompute.none:
            checkpoint_blocks(blocks, every=self.recompute_every, policy=self.recompute.value)
        for block in blocks if self.offload_activations else ():
            offload_activations(block)


@dataclass(frozen=True)
class DiLoCoConfig:
    """Hosts that train apart, and average what they learned every sync_every steps."""

    hosts: int = 1  # groups of ranks that train apart, each with its part of the batch; 1: all train together
    sync_every: int = 50  # steps from one outer step to the next of the same parameters
    warmup_steps: int = 0  # steps at the beginning in which that is warmup_every instead
    warmup_every: int = 10
    lr: float = 0.7  # of the outer SGD
    momentum: float = 0.3  # of the outer SGD; the paper has 0.9, for hundreds of outer steps
    nesterov: bool = True  # with the look-ahead of Nesterov's momentum
    fragments: int = 1  # parts of the model, of every k-th block, that are exchanged in turn
    fragment_sync_delay: int = 0  # steps that hosts compute while they exchange a fragment
    fragment_update_alpha: float = 0.0  # weight of a host's own parameters where it takes the outer ones
    should_quantize: bool = False  # send 4 bits for each element
    hub: str = ""  # HOST:PORT of `shardrt hub`, where each host is a job of its own; "": all are in this job
    host: int = 0  # this job's number among the hosts, from 0, with a hub

    def __post_init__(self) -> None:
        _at_least("diloco.hosts", self.hosts, 1)
        if not 0 <= self.host < self.hosts:
            raise ValueError(f"diloco.host must be below diloco.hosts, {self.hosts}, got {self.host}")
        if self.hub and self.hosts == 1:
            raise ValueError("diloco.hub is for diloco.hosts above 1")
        try:
            check_diloco(
                self.sync_every,
                self.fragments,
                self.lr,
                self.momentum,
                self.fragment_sync_delay,
                self.fragment_update_alpha,
            )
            check_warmup(self.warmup_steps, self.warmup_every, self.fragments, self.fragment_sync_delay)
        except ValueError as error:
            raise ValueError(f"diloco: {str(error).partition(': ')[2]}") from None

    @property
    def jobs(self) -> int:
        """Jobs that train together: one, or with a hub one for each host."""
        return self.hosts if self.hub else 1

    @property
    def hosts_here(self) -> int:
        """Hosts that are part of this job."""
        return self.hosts // self.jobs


@dataclass(frozen=True)
class LoRAConfig:
    """Trainable low-rank matrices next to frozen layers, instead of all weights (docs/howto/lora.md)."""

    rank: int = 0  # of the matrices; 0 trains all weights
    alpha: float = 0.0  # their outputs are scaled by alpha / rank; 0 for 2 * rank
    dropout: float = 0.0  # of their inputs
    targets: tuple[str, ...] = ("*",)  # patterns for the paths of the layers that get one
    adapter: Path | None = None  # a folder of PEFT's whose matrices and settings it begins with

    def __post_init__(self) -> None:
        if self.adapter is not None and replace(self, adapter=None) != LoRAConfig():
            raise ValueError("lora.adapter brings rank, alpha, dropout and targets: leave these out")
        _at_least("lora.rank", self.rank, 0)
        _at_least("lora.alpha", self.alpha, 0)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be in [0, 1), got {self.dropout}")

    def prepare(self, model: Module) -> None:
        """Freeze `model` and give it new adapters, if there are to be any."""
        if self.rank:
            how = {"targets": self.targets, "dropout": self.dropout}
            add_lora(model, self.rank, alpha=self.alpha or None, **how)


@dataclass(frozen=True)
class CheckpointConfig:
    """The contents and the times of checkpoints, in steps."""

    every: int = 0  # steps from one checkpoint to the next, and one at the end; 0 for none
    keep_last: int = 3  # the newest ones that stay
    keep_every: int = 0  # multiples of this step stay for ever; 0 for none
    in_background: bool = True  # write while training goes on; needs 12 bytes per element of this rank
    folder: Folder = Folder.shared  # or hosts: one each; objects: a bucket behind a mount
    stop_after: float = 0  # minutes, after which the run saves and exits with code 75; 0 for no limit

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 0)
        _at_least("checkpoint.keep_last", self.keep_last, 1)
        _at_least("checkpoint.keep_every", self.keep_every, 0)
        _at_least("checkpoint.stop_after", self.stop_after, 0)


@dataclass(frozen=True)
class WatchdogConfig:
    """How long a run may make no progress before it is ended with exit code 124; in seconds, 0 for ever."""

    limit: float = 30  # in a step, or 20 median steps if that is more
    set_up: float = 300  # before the first step, and in the first two
    save: float = 600  # while a checkpoint is written
    evaluation: float = 300  # in evaluations, while text is generated, and at the end
    exit: float = 30  # in Python's and MPI's shutdown after the program
    outer: float = 600  # while hosts exchange outer gradients (DiLoCo)

    def __post_init__(self) -> None:
        for field in fields(self):
            check_limit(f"watchdog.{field.name}", getattr(self, field.name))

    @property
    def limits(self) -> Limits:
        """The same for Watch."""
        return Limits(self.limit, self.set_up, self.save, self.evaluation, exit=self.exit, outer=self.outer)


@dataclass(frozen=True)
class ReportConfig:
    """The printed figures and those in metrics.jsonl, and their times, in steps."""

    log_interval: int = 10  # steps from one progress line to the next
    eval_interval: int = 100  # steps from one evaluation to the next
    eval_samples: int = 128  # held-out samples for these
    final_samples: int = 0  # held-out samples for the last evaluation; 0: all
    trace: str = ""  # steps FIRST:LAST, counted from 1, of which a trace is kept; or one step
    trackers: tuple[str, ...] = ()  # trackio, wandb, mlflow, tensorboard, or your own package.module:Class

    def __post_init__(self) -> None:
        for name in ("log_interval", "eval_interval", "eval_samples"):
            _at_least(f"report.{name}", getattr(self, name), 1)
        _at_least("report.final_samples", self.final_samples, 0)
        if self.trace and not self.traced:
            raise ValueError(f"report.trace must be FIRST:LAST, steps from 1 on, got {self.trace!r}")
        for name in self.trackers:
            module, _, made = name.partition(":")
            own = all(map(str.isidentifier, (*module.split("."), made)))
            if name not in TRACKERS and not own:
                known = f"one of {', '.join(TRACKERS)}, or package.module:Class"
                raise ValueError(f"report.trackers must be {known}, got {name!r}")

    def evaluated(self, *, last: bool) -> int | None:
        """How many held-out samples an evaluation takes; None: all."""
        return (self.final_samples or None) if last else self.eval_samples

    @property
    def traced(self) -> range:
        """The steps of `trace`; empty if there are none."""
        first, _, last = self.trace.partition(":")
        if not first.isdecimal() or not (last or first).isdecimal() or self.trace.endswith(":"):
            return range(0)
        return range(int(first), int(last or first) + 1) if int(first) else range(0)


@dataclass(frozen=True)
class SampleConfig:
    """The text that is generated at the end, and a shorter one early."""

    prompt: str = "import "  # the beginning of the text
    length: int = 300  # bytes to generate; 0 for none
    first: int = 0  # bytes to generate after the first evaluation; 0 for none
    temperature: float = 0.8  # 0 always takes the likeliest byte
    top_k: int = 40  # draw from this many likeliest bytes; 0 for all
    past_end: bool = False  # go on behind a token that ends a text

    def __post_init__(self) -> None:
        for field in ("length", "first", "temperature", "top_k"):
            _at_least(f"sample.{field}", getattr(self, field), 0)
        if not self.prompt:
            raise ValueError("sample.prompt must hold at least one byte")


def load(kind: type[Settings], path: Path | None, *, size: str | None = None) -> Settings:
    """Settings of dataclass `kind` from a TOML file; missing settings keep their defaults.

    path: None for an empty file.

    Where `kind` has SIZES, the key "size", or `size` in its place, names one; [model] overrides it.

    Raises ValueError that names the file and the key which is unknown or has a wrong value; OSError.
    """
    table = {} if path is None else read_toml(path)
    try:
        named = getattr(kind, "SIZES", {}).get(size or table.get("size"))
        if named is not None:
            table["model"] = plain(named) | table.get("model", {})
        return built(kind, table)
    except (ValueError, TypeError) as error:
        raise ValueError(str(error) if path is None else f"{path}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises ValueError that names it if it is not TOML, OSError."""
    data = read_regular(path, _LARGEST)
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:  # TOMLDecodeError, or bytes that are not UTF-8
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: the tables are nested too deeply") from None


def dump(settings: Any, path: Path) -> None:
    """Write the settings as TOML; `load` of the file gives them back."""
    import tomli_w

    path.write_text(tomli_w.dumps(plain(settings)), encoding="utf-8")


def built(kind: Any, table: dict[str, Any], prefix: str = "", start: Any = None) -> Any:
    """A dataclass from a table of TOML's types; keys that are absent are as in `start`, or the defaults.

    Raises ValueError that names the key.
    """
    hints = get_type_hints(kind)
    starts = {
        field.name: field.default if start is None else getattr(start, field.name) for field in fields(kind)
    }
    for key in table:
        if key not in starts:
            raise ValueError(f"unknown key {prefix + key!r}; known: {', '.join(starts)}")
    given = {
        key: _converted(sole_type(hints[key]), value, prefix + key, starts[key])
        for key, value in table.items()
    }
    try:
        return kind(**given) if start is None else replace(start, **given)
    except ValueError as error:
        error.section = getattr(error, "section", prefix.rstrip("."))  # the model does not know its name
        raise


def _converted(kind: Any, value: Any, key: str, start: Any) -> Any:
    """A TOML value as the type of its field. Raises ValueError that names the key."""
    if is_dataclass(kind) and isinstance(value, dict):
        return built(kind, value, key + ".", start if is_dataclass(start) else None)
    if get_origin(kind) is tuple and isinstance(value, list):
        inner = get_args(kind)
        kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
        if len(kinds) == len(value):
            return tuple(_converted(k, v, key, None) for k, v in zip(kinds, value, strict=True))
    if is_enum(kind) and isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) in (int, float):
        return _float(value, key)
    if type(value) is kind:
        return value
    raise ValueError(f"{key} must be {_described(kind)}, got {value!r}")


def _float(value: float, key: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{key} is too large: {len(str(value))} digits") from None


def _described(kind: Any) -> str:
    if is_enum(kind):
        return f"one of {', '.join(kind.__members__)}"
    return getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)


def is_enum(kind: Any) -> bool:
    """Whether a field of this type is one of a few names."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def sole_type(kind: Any) -> Any:
    """The type of a field without None; None stands for settings that a file leaves out."""
    return next(k for k in get_args(kind) if k is not NoneType) if isinstance(kind, UnionType) else kind


def plain(value: Any) -> Any:
    """Settings in the types of TOML and JSON. None is left out."""
    if is_dataclass(value):
        found = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return {name: each for name, each in found.items() if each is not None}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value


def check_numbers(settings: Any, **most: float) -> None:
    """Raise ValueError for a number that no run means: too large to count to, or nan.

    most: for settings that may not be as large as others, "__" in place of the dot. inf is for norms alone.
    """
    for name, value in _numbers(plain(settings)):
        limit = most.get(name.replace(".", "__"), _MOST)
        if not abs(value) <= limit and not (value == inf and name in _INFINITE):
            raise ValueError(f"{name} must be at most {limit}, got {value}")


_MOST = 2**31 - 1
_INFINITE = ("optimizer.clip_norm", "optimizer.clip_type")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif type(value) in (int, float):
        yield name, value


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
