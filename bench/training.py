"""shardrt's contestant: a model of a workload, sharded or not, and its training step, phase by phase."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from models.vit import ViT, ViTConfig
from shardrt import Tensor, nn, optim
from shardrt import functional as F
from shardrt.comm import DeviceMesh
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.parallel import Pipeline, parallelize_module
from shardrt.recompute import checkpoint_blocks

from . import workload as w

UNSHARDED = "NONE"
TENSOR = {"TP": False, "TP_SP": True}  # modules cut over all ranks; whether the sequence is, too
SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV")  # the last two have two stages per rank
LOW = "-bf16"  # behind the name of a strategy that shards: parameters in bfloat16, gradients sent in float32
PIPELINE = {f"PP_{schedule}": schedule for schedule in SCHEDULES}


@dataclass(frozen=True)
class Stamps:
    """When a step began and when each of its phases ended, in seconds of time.perf_counter()."""

    begin: float
    forward: float
    backward: float
    optimizer: float
    end: float

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.end - self.begin


class Training:
    """A model and its optimizer; begins with the same weights wherever the workload is the same.

    strategy: a ShardingStrategy's name, also with LOW behind it, or UNSHARDED: each rank then trains a model
    of its own; or one of TENSOR or PIPELINE. micro_batches: of a pipeline's step.
    recompute: backward recomputes the activations of each block.
    """

    def __init__(
        self,
        workload: w.Job,
        mesh: DeviceMesh,
        strategy: str,
        *,
        prefetch: int = 1,
        clip: float | None = None,
        loss_chunk: int = 0,
        model: nn.Module | None = None,
        micro_batches: int = 8,
        recompute: bool = False,
    ) -> None:
        shardrt.manual_seed(0)
        self.workload, self.mesh, self.clip = workload, mesh, clip
        self.model = model_of(workload, loss_chunk) if model is None else model
        if recompute:
            checkpoint_blocks(self.model.blocks)
        self.strategy = strategy
        self.pipeline: Pipeline | None = None
        if strategy in PIPELINE:
            self.pipeline = pipeline_of(self.model, workload, mesh, PIPELINE[strategy], micro_batches)
        elif strategy in TENSOR:
            parallelize_module(self.model, mesh, plan_of(self.model, sequence_parallel=TENSOR[strategy]))
        elif strategy != UNSHARDED:
            dtype = "bfloat16" if strategy.endswith(LOW) else "float32"
            shard(self.model, mesh, dtype, strategy=strategy.removesuffix(LOW), prefetch=prefetch)
        self.optimizer: optim.AdamW | None = None
        self.losses: list[float] = []

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """What this rank trains on: its own part, or that of all ranks where these share a model."""
        if self.strategy in TENSOR or self.strategy in PIPELINE:
            return self.workload.batch_of_all(step, self.mesh.size)
        return self.workload.batch_of(step, self.mesh.rank)

    def step(self, inputs: np.ndarray, targets: np.ndarray) -> Stamps:
        """Train on one batch; the first step makes the optimizer."""
        if self.optimizer is None:
            parameters = self.model.parameters()
            self.optimizer = optim.AdamW(parameters, lr=w.LEARNING_RATE, weight_decay=w.WEIGHT_DECAY)
        begin = time.perf_counter()
        if self.pipeline is not None:
            forward, micro_losses = begin, piped(self.pipeline, inputs, targets)
        else:
            loss = loss_of(self.model, inputs, targets)
            forward, micro_losses = time.perf_counter(), [loss]
            loss.backward()
        backward = time.perf_counter()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        updated = time.perf_counter()
        self.losses.append(sum(each.item() for each in micro_losses))
        return Stamps(begin, forward, backward, updated, time.perf_counter())


def shard(model: nn.Module, mesh: DeviceMesh, dtype: str, **options: Any) -> None:
    """Each block and what is left of the model. dtype: of parameters in use; gradients travel in float32."""
    policy = MixedPrecisionPolicy() if dtype == "float32" else MixedPrecisionPolicy(dtype, "float32")
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, **options)


def pipeline_of(
    model: nn.Module, workload: w.Job, mesh: DeviceMesh, schedule: str, micro_batches: int
) -> Pipeline:
    """Stages of `model` on the ranks of `mesh`. Raises ValueError where its batches don't divide."""
    rows = mesh.size * workload.batch
    if rows % micro_batches:
        raise ValueError(
            f"--micro-batches must divide the {rows} rows of {mesh.size} ranks, got {micro_batches}"
        )
    one = batches_of(*workload.batch_of_all(0, mesh.size), micro_batches)[0]
    return Pipeline(
        model,
        mesh,
        schedule=schedule,
        micro_batches=micro_batches,
        batch=named(model, *one),
    )


def batches_of(inputs: np.ndarray, targets: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """So many micro-batches."""
    return list(zip(np.split(inputs, count), np.split(targets, count), strict=True))


def piped(pipeline: Pipeline, inputs: np.ndarray, targets: np.ndarray) -> list[Tensor]:
    """Gradients of the mean loss; gives its parts, one of each micro-batch, where the last stage is."""
    model, count, found = pipeline.model, pipeline.table.micro_batches, []

    def loss(output: Tensor, batch: tuple[np.ndarray, np.ndarray]) -> Tensor:
        found.append(loss_from(model, output, batch[1]) * (1 / count))
        return found[-1]

    pipeline.step(loss, batches_of(inputs, targets, count), inputs=lambda batch: named(model, *batch))
    return [each.detach() for each in found]


def named(model: nn.Module, inputs: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """The arguments of `model` by name."""
    return {"images": inputs} if isinstance(model, ViT) else {"tokens": inputs, "targets": targets}


def model_of(workload: w.Job, loss_chunk: int = 0) -> nn.Module:
    """The model of models/. Raises ValueError for numbers that don't fit together."""
    if isinstance(workload, w.ViTWorkload):
        if loss_chunk:
            raise ValueError("--loss-chunk is for language models")
        return ViT(
            ViTConfig(
                n_layer=workload.layers,
                n_head=workload.heads,
                n_embd=workload.dim,
                n_hidden=workload.hidden,
                image_size=workload.image,
                patch_size=workload.patch,
                classes=workload.classes,
            )
        )
    shape = {
        "n_layer": workload.layers,
        "n_head": workload.heads,
        "n_embd": workload.dim,
        "block_size": workload.seq,
        "vocab_size": workload.vocab,
        "loss_chunk": loss_chunk,
    }
    if isinstance(workload, w.LlamaWorkload):
        return Llama(LlamaConfig(**shape, n_kv_head=workload.kv_heads, n_hidden=workload.hidden))
    return GPT(GPTConfig(**shape))


def loss_of(model: nn.Module, inputs: np.ndarray, targets: np.ndarray) -> Tensor:
    """The mean cross-entropy."""
    return loss_from(model, model(**named(model, inputs, targets)), targets)


def loss_from(model: nn.Module, output: Tensor, targets: np.ndarray) -> Tensor:
    """The mean cross-entropy of what a model gives that has been called with targets where it takes them."""
    return F.cross_entropy(output, targets, inplace=True) if isinstance(model, ViT) else output
