"""What each feature costs: the same model with one setting changed, by turns in one run, as a ratio of times.

Every variant is a model of its own that starts from the same weights and sees the same tokens. In each round
all take one step, so noise meets all alike; a ratio is taken within a round and the median is reported. What
is held is what memory_plan says. Where other work takes the cores, the processors' time (of all threads of a
rank) says more than the clock. The loss of the last round is printed too: variants that change no number
must agree to the last digit.

    mpirun -n 2 python -m bench.features --layers 6 --dim 384 --heads 6 --steps 10
    python -m bench.features                    # one rank: what sharding itself costs
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import workload as w
from bench.command_line import Parser
from bench.figures import show
from bench.training import gathered, model_of
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.activation_offload import offload_activations
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
    no_sync,
    set_world_invariant,
)
from shardrt.fsdp.memory import table
from shardrt.recompute import checkpoint_blocks
from shardrt.train.errors import USAGE, one_line

BASE = "FULL_SHARD"


@dataclass(frozen=True)
class Variant:
    """One setting. `settings`: of fully_shard, None for a model that is not sharded."""

    name: str
    settings: dict[str, Any] | None = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] = lambda model: None
    micro_batches: int = 1
    accumulate: Callable[[nn.Module], Any] = lambda model: nullcontext()
    in_backward: bool = False
    clip: bool = False
    invariant: bool = False  # set_world_invariant


def variants(spill: str) -> list[Variant]:
    """All of them; the first is what the others are compared with."""
    offloads = {
        "parameters on the host": CPUOffloadPolicy(gradients=False, optimizer_state=False),
        "gradients on the host": CPUOffloadPolicy(parameters=False, optimizer_state=False),
        "optimizer state on the host": CPUOffloadPolicy(parameters=False, gradients=False),
        "all on the host": CPUOffloadPolicy(),
        "all on the host, updated there": CPUOffloadPolicy(step="host"),
        "all in files": CPUOffloadPolicy(directory=spill),
    }
    precisions = {
        "bfloat16": MixedPrecisionPolicy("bfloat16"),
        "bfloat16, reduced in float32": MixedPrecisionPolicy("bfloat16", "float32"),
    }
    return [
        Variant(BASE),
        Variant("not sharded", None),
        *(Variant(name, {"strategy": name}) for name in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP")),
        Variant("prefetch 0", {"prefetch": 0}),
        Variant("prefetch 2", {"prefetch": 2}),
        *(Variant(name, {"mp_policy": policy}) for name, policy in precisions.items()),
        *(Variant(name, {"offload_policy": policy}) for name, policy in offloads.items()),
        Variant("update in backward", in_backward=True),
        Variant("clipping", clip=True),
        Variant("recompute", prepare=lambda model: checkpoint_blocks(model.blocks)),
        Variant("recompute all but matmul", prepare=lambda m: checkpoint_blocks(m.blocks, policy="matmul")),
        Variant("activations on the host", prepare=_offload_blocks),
        Variant("2 micro-batches", micro_batches=2),
        Variant("2 micro-batches, no_sync", micro_batches=2, accumulate=no_sync),
        Variant("4 micro-batches, clipping", micro_batches=4, clip=True),
        Variant("4 micro-batches, clipping, no_sync", micro_batches=4, clip=True, accumulate=no_sync),
        Variant("4 micro-batches, clipping, world-invariant", micro_batches=4, clip=True, invariant=True),
    ]


def _offload_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        offload_activations(block)


class Contestant:
    """A variant with its model and optimizer."""

    def __init__(self, variant: Variant, workload: w.Job, mesh: DeviceMesh) -> None:
        shardrt.manual_seed(0)
        self.variant = variant
        self.model = model_of(workload)
        variant.prepare(self.model)
        if variant.settings is not None:
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh, **variant.settings)
        self.added = mesh.size if variant.invariant else 1  # gradients that are added, not averaged
        if variant.invariant:
            set_world_invariant(self.model, mesh.size * variant.micro_batches)
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.loss = 0.0

    def start(self, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Make the plan, then the optimizer."""
        self.plan = None
        if self.variant.settings is not None:
            self.plan = memory_plan(self.model, step=lambda: self.backward(tokens, targets))
        self.optimizer = optim.AdamW(
            self.model.parameters(),
            lr=w.LEARNING_RATE,
            weight_decay=w.WEIGHT_DECAY,
            in_backward=self.variant.in_backward,
        )

    def backward(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Forward and backward of one step; gives the mean loss."""
        parts = list(_parts(tokens, targets, self.variant.micro_batches))
        total = 0.0
        for index, (x, y) in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else self.variant.accumulate(self.model):
                loss = F.cross_entropy(self.model(x), y, inplace=True) * (1 / (len(parts) * self.added))
                loss.backward()
            total += loss.item() * self.added
        return total

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> None:
        """One step, timed."""
        start, processor_start = time.perf_counter(), time.process_time()
        self.loss = self.backward(tokens, targets)
        if self.variant.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.processor_seconds.append(time.process_time() - processor_start)


def _parts(tokens: np.ndarray, targets: np.ndarray, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for x, y in zip(np.array_split(tokens, count), np.array_split(targets, count), strict=True):
        yield np.ascontiguousarray(x), np.ascontiguousarray(y)


def main() -> None:
    parser = Parser(prog="python -m bench.features", description="What each feature costs.")
    w.add_arguments(parser)
    parser.add_argument("--communicator", default="auto", metavar="NAME", help="shm, mpi, ... (auto)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these variants beside FULL_SHARD")
    with one_line(USAGE):
        options = parser.parse_args()
        model_of(w.workload_of(options))  # may be nonsense
        mesh = init_device_mesh("auto", communicator=options.communicator)
    with tempfile.TemporaryDirectory() as spill:
        chosen = [v for v in variants(spill) if not options.only or v.name in (BASE, *options.only)]
        results = run(chosen, options, mesh)
    if mesh.rank == 0:
        result = {"world_size": mesh.size, "workload": w.workload_of(options).facts(), "variants": results}
        show(result, [as_table(results)], options)


def run(chosen: list[Variant], options: argparse.Namespace, mesh: DeviceMesh) -> list[dict]:
    """A row for each variant. Collective."""
    workload = w.workload_of(options)
    contestants = [Contestant(variant, workload, mesh) for variant in chosen]
    for contestant in contestants:
        contestant.start(*workload.batch_of(0, mesh.rank))
    for step in range(options.warmup + options.steps):
        batch = workload.batch_of(step, mesh.rank)
        order = contestants if step % 2 else contestants[::-1]
        for contestant in order:
            contestant.step(*batch)
    rows = []
    for contestant in contestants:
        seconds = gathered(contestant.seconds[options.warmup :], mesh).max(axis=0)  # the slowest rank's
        processor = gathered(contestant.processor_seconds[options.warmup :], mesh).mean(axis=0)
        loss = gathered([contestant.loss], mesh).mean()
        rows.append((contestant, seconds, processor, float(loss)))
    _, base, processor_base, _ = rows[0]
    return [
        {
            "variant": contestant.variant.name,
            "step_ms": round(1e3 * statistics.median(seconds), 2),
            "time_ratio": round(statistics.median(seconds / base), 4),
            "processor_ratio": round(statistics.median(processor / processor_base), 4),
            "device_mb": contestant.plan and round(contestant.plan.device_bytes / 1e6, 1),
            "host_mb": contestant.plan and round(contestant.plan.host_bytes / 1e6, 1),
            "loss": loss,
        }
        for contestant, seconds, processor, loss in rows
    ]


def as_table(results: list[dict]) -> str:
    """For a reader."""
    rows = [
        (
            row["variant"],
            f"{row['step_ms']:.1f}",
            f"{row['time_ratio']:.3f}",
            f"{row['processor_ratio']:.3f}",
            "" if row["device_mb"] is None else f"{row['device_mb']:.1f}",
            "" if row["host_mb"] is None else f"{row['host_mb']:.1f}",
            f"{row['loss']:.8f}",
        )
        for row in results
    ]
    return table(
        ("variant", "ms per step", "of FULL_SHARD", "processor", "device MB", "host MB", "loss"), rows
    )


if __name__ == "__main__":
    main()
