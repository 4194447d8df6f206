"""Simulated steps beside published ones, and what simulating costs.

    python -m bench.simulated            # rows that others have published
    python -m bench.simulated cost       # Llama 405B on 16,384 ranks, 8B on 128: seconds and memory

Other stacks have other kernels, and the machines are data sheets. So each source, stack and machine has one
factor, from its first row; the others test what is simulated: sizes, ranks, links. Nothing here was measured
on a GPU by us.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from models.llama import SIZES, Llama, LlamaConfig
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device.program import Program
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.recompute import checkpoint_blocks
from shardrt.simulate.machine import Link, Machine
from shardrt.simulate.report import Report, report
from shardrt.simulate.script import record_of

LLAMA2 = LlamaConfig(32, 32, 32, 4096, 11008, 4096, 32000, tied=False)
MODELS = {
    "8B": SIZES["llama-3.1-8b"],
    "70B": replace(SIZES["llama-3.1-8b"], n_layer=80, n_head=64, n_embd=8192, n_hidden=28672),
    "405B": replace(SIZES["llama-3.1-8b"], n_layer=126, n_head=128, n_embd=16384, n_hidden=53248),
    "Llama 2 7B": LLAMA2,
    "Llama 2 13B": replace(LLAMA2, n_layer=40, n_head=40, n_kv_head=40, n_embd=5120, n_hidden=13824),
    "Llama 2 34B": replace(LLAMA2, n_layer=48, n_head=64, n_kv_head=8, n_embd=8192, n_hidden=22016),
    "Llama 2 70B": replace(LLAMA2, n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, n_hidden=28672),
}


@dataclass(frozen=True)
class Training:
    """How a model is trained. again: what is recomputed: "", "matmul" (all but products), "full", "half"."""

    model: str
    ranks: int
    batch: int
    length: int
    again: str = ""
    strategy: str = "FULL_SHARD"
    micro_batches: int = 1
    reduced: str = "float32"
    loss_chunk: int = 0

    def run(self) -> None:
        """Two steps on the current world; gathers and computes in bfloat16."""
        shape = {}
        if self.strategy.startswith("HYBRID"):
            shape = {"shape": (self.ranks // 8, 8), "mesh_dim_names": ("replicate", "shard")}
        mesh = init_device_mesh("auto", **shape)
        model = Llama(replace(MODELS[self.model], loss_chunk=self.loss_chunk))
        if self.again:
            policy = "matmul" if self.again == "matmul" else "full"
            checkpoint_blocks(model.blocks, every=2 if self.again == "half" else 1, policy=policy)
        how = {"mp_policy": MixedPrecisionPolicy("bfloat16", self.reduced), "strategy": self.strategy}
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, **how)
        optimizer = optim.AdamW(model.parameters(), lr=1e-4)
        tokens = np.zeros((self.batch, self.length), np.int64)
        for _ in range(2):
            for _ in range(self.micro_batches):
                model(tokens, tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def simulated(training: Training, machine: Machine, steps: int = 2) -> tuple[Report, list[Program]]:
    """A step of it on a machine."""
    programs = record_of(training.run, training.ranks, steps=steps, local_size=machine.ranks_per_node)
    return report(programs, machine), programs


@dataclass(frozen=True)
class Source:
    """Rows of one publication that share stack and machine: (training, tokens per second and GPU)."""

    name: str
    machine: Machine
    rows: Sequence[tuple[Training, float]]
    assumed: Sequence[str] = field(default=())


def sources() -> list[Source]:
    """See each publication; what it does not say is `assumed`."""
    a100, h100 = Machine.load("a100-8"), Machine.load("h100-8")
    slow = replace(h100, device=replace(h100.device, bandwidth=2.4e12))
    h200 = replace(h100, device=replace(h100.device, bandwidth=4.8e12), ranks_per_node=4)
    titan = partial(Training, "8B", batch=2, length=8192, again="matmul")
    every_node = "the network's figure is a node's, not a GPU's"
    vela, vela2 = (
        replace(m, network=Link(m.network.latency, gigabits * 1e9 / 8 / 8))
        for m, gigabits in ((a100, 400), (h100, 800))
    )
    seven = Training("Llama 2 7B", 0, 2, 4096, strategy="HYBRID_SHARD", reduced="bfloat16")
    larger = [replace(seven, model=f"Llama 2 {n}", again="half", strategy="FULL_SHARD") for n in _FMS]

    def fms(ranks: int, published: Sequence[float]) -> list[tuple[Training, float]]:
        each = [replace(training, ranks=ranks) for training in (seven, *larger)]
        return list(zip(each, published, strict=True))

    per_op = ["its recomputation per op is ours of all but products and attention"]
    half = [every_node, "its selective recomputation is that of every second block"]
    kempner = partial(Training, "8B", batch=4, length=4096, again="full", micro_batches=2)
    return [
        Source("torchtitan 2024-12, H100 500 W", slow, [(titan(8), 5762), (titan(128), 5605)], per_op),
        Source("the same, compiled", slow, [(titan(8), 6667), (titan(128), 6514)], per_op),
        Source(
            "torchtitan 2024, A100",
            a100,
            [
                (Training("8B", 64, 1, 8192, "matmul"), 2973),
                (Training("70B", 64, 1, 8192, "full"), 331),
            ],
            per_op,
        ),
        Source("fms-fsdp, A100, compiled", vela, fms(128, (4550, 2150, 820, 410)), half),
        Source("fms-fsdp, H100, compiled", vela2, fms(96, (9600, 4850, 1830, 890)), half),
        Source(
            "KempnerForge, H200, compiled",
            h200,
            [
                (kempner(1, strategy="NO_SHARD"), 10471),
                (kempner(2), 18728 / 2),
                (kempner(4), 38983 / 4),
            ],
            ["the rows are of one node of 4"],
        ),
    ]


_FMS = ("13B", "34B", "70B")


def compare() -> None:
    """Print each row: published, simulated, and with the factor of its source."""
    found: dict[Any, float] = {}
    errors = []
    print(f"{'':34}{'tokens/s and GPU':>18}{'simulated':>11}{'factor':>8}{'with it':>9}{'error':>8}")
    for source in sources():
        print(f"{source.name} ({'; '.join(source.assumed)})")
        factor = 0.0
        for training, published in source.rows:
            key = training, source.machine.device.bandwidth, source.machine.network.bandwidth
            if key not in found:
                told, _ = simulated(training, source.machine)
                found[key] = told.tokens_per_s / told.ranks * training.batch * training.length
                found[key] *= training.micro_batches / (told.tokens / told.ranks)
            given = not factor
            factor = factor or published / found[key]
            error = factor * found[key] / published - 1
            errors += [] if given else [abs(error)]
            row = f"  {training.model}, {training.strategy}, {training.ranks} ranks"
            fitted = factor * found[key]
            shown = "       -" if given else f"{100 * error:+7.1f}%"
            print(f"{row:34}{published:18,.0f}{found[key]:11,.0f}{factor:8.3f}{fitted:9,.0f}{shown}")
    errors.sort()
    print(
        f"{len(errors)} rows: median {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %"
    )


def cost() -> None:
    """Print what two large models cost to simulate: one step, from the call to the report."""
    for training in (
        Training("8B", 128, 1, 8192, "full", loss_chunk=2048),
        Training("405B", 16384, 1, 8192, "full", loss_chunk=2048),
    ):
        began = time.perf_counter(), time.process_time()
        told, programs = simulated(training, Machine.load("h100-8"), steps=1)
        took, busy = time.perf_counter() - began[0], time.process_time() - began[1]
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(
            f"{training.model} on {training.ranks:,} ranks: {took:.2f} s ({busy:.2f} of the processor), "
            f"at most {most:.0f} MB, {len(programs[0].items):,} items; a step of {told.ms:,.0f} ms, MFU "
            f"{100 * told.mfu:.1f} %"
        )


def main(arguments: Sequence[str]) -> int:
    """Compare, or tell the cost; gives the exit code."""
    parser = argparse.ArgumentParser(prog="bench.simulated", description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("rows", "cost"), default="rows")
    {"rows": compare, "cost": cost}[parser.parse_args(arguments).what]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
