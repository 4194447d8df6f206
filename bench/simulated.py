"""Simulated steps beside published ones, and what simulating costs.

    python -m bench.simulated            # rows that others have published
    python -m bench.simulated cost       # Llama 405B on 16,384 ranks, 8B on 128: seconds and memory
    python -m bench.simulated plan       # 20 plans of an 8B on 64: seconds

Other stacks have other kernels, and the machines are data sheets. So each source, stack and machine has one
factor of how fast kernels are, from its first row; the others test what is simulated: sizes, ranks, links.
Nothing here was measured on a GPU by us.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from models import train
from models.llama import SIZES, Llama, LlamaConfig
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device.program import Collective, Program
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.recompute import checkpoint
from shardrt.simulate import step
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Link, Machine
from shardrt.simulate.plan import search
from shardrt.simulate.report import Report, report
from shardrt.simulate.script import record_of
from shardrt.simulate.space import Candidate, candidates
from shardrt.simulate.step import Simulated

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
    """How a model is trained.

    again: what is recomputed, "", "matmul" (all but products and attention) or "full". part: of how many of
    the blocks all is.
    """

    model: str
    ranks: int
    batch: int
    length: int
    again: str = ""
    part: float = 0.0
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
            count = len(model.blocks)
            whole = {n for n in range(count) if int((n + 1) * self.part) > int(n * self.part)}
            for number, block in enumerate(model.blocks):
                if number in whole or self.again == "matmul":
                    checkpoint(block, "full" if number in whole else "matmul")
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

    def recorded(self, machine: Machine, steps: int = 2) -> list[Program]:
        """What a rank of such a machine issues.

        Other stacks add copies in the type in which they reduce shards, and shardrt in float32: so for
        bfloat16 half as many bytes are sent between nodes as shardrt sends.
        """
        programs = record_of(self.run, self.ranks, steps=steps, local_size=machine.ranks_per_node)
        if self.reduced == "bfloat16":
            for program in programs:
                copies = {name for name, group in program.groups.items() if _apart(group.ranks)}
                for index, item in enumerate(program.items):
                    if isinstance(item, Collective) and item.stream == "reduce" and item.group in copies:
                        program.items[index] = replace(item, nbytes=item.nbytes // 2)
        return programs


def _apart(ranks: Sequence[int]) -> bool:
    return len(ranks) > 1 and ranks[1] - ranks[0] > 1


def simulated(training: Training, machine: Machine, steps: int = 2) -> tuple[Report, list[Program]]:
    """A step of it on a machine."""
    programs = training.recorded(machine, steps)
    return report(programs, machine), programs


@dataclass(frozen=True)
class Source:
    """Rows of one publication that share stack and machine: (training, tokens per second and GPU).

    among: the machine as it is for fewer ranks, by how many.
    """

    name: str
    machine: Machine
    rows: Sequence[tuple[Training, float]]
    assumed: Sequence[str] = field(default=())
    among: Mapping[int, Machine] = field(default_factory=dict)


_OF_THE_LINE = 0.97  # what NCCL makes of a network link, as in the machines' files


def sources() -> list[Source]:
    """See each publication; what it does not say is `assumed`."""
    a100, h100 = Machine.load("a100-8"), Machine.load("h100-8")
    slow = replace(h100, device=replace(h100.device, bandwidth=2.4e12))
    h200 = replace(h100, device=replace(h100.device, bandwidth=4.8e12), ranks_per_node=4, switch=None)
    titan = partial(Training, "8B", batch=2, length=8192, again="matmul", part=_every_second("8B", 8192))
    every_node = "the network's figure is a node's, not a GPU's"
    vela, vela2 = (
        replace(m, network=Link(m.network.latency, gigabits * 1e9 / 8 / 8 * _OF_THE_LINE))
        for m, gigabits in ((a100, 400), (h100, 800))
    )
    seven = Training("Llama 2 7B", 0, 2, 4096, strategy="HYBRID_SHARD", reduced="bfloat16")

    def fms(ranks: int, *published: tuple[float, float]) -> list[tuple[Training, float]]:
        """(tokens per second and GPU, HFU) of each size: the first is a hybrid that recomputes nothing."""
        peak = (a100 if ranks == 128 else h100).device.flops["bfloat16"]
        rows = []
        for size, (tokens, hfu) in zip(("7B", "13B", "34B", "70B"), published, strict=True):
            training = replace(seven, model=f"Llama 2 {size}", ranks=ranks)
            if size != "7B":
                part = recomputed(MODELS[training.model], training.length, hfu * peak / tokens)
                training = replace(training, again="full", part=part, strategy="FULL_SHARD")
            rows.append((training, tokens))
        return rows

    per_op = ["its recomputation of every second product is ours of as many operations in some blocks"]
    counted = [
        every_node,
        "which part of the blocks is recomputed follows from HFU, as published",
        "the hybrid adds copies in bfloat16",
    ]
    kempner = partial(Training, "8B", batch=4, length=4096, again="full", part=1.0, micro_batches=2)
    return [
        Source("torchtitan 2024-12, H100 500 W", slow, [(titan(8), 5762), (titan(128), 5605)], per_op),
        Source("the same, compiled", slow, [(titan(8), 6667), (titan(128), 6514)], per_op),
        Source(
            "torchtitan 2024, A100",
            a100,
            [
                (Training("8B", 64, 1, 8192, "matmul", _every_second("8B", 8192)), 2973),
                (Training("70B", 64, 1, 8192, "full", 1.0), 331),
            ],
            per_op,
        ),
        Source(
            "fms-fsdp, A100, compiled",
            vela,
            fms(128, (4550, 0.68), (2150, 0.69), (820, 0.74), (410, 0.74)),
            counted,
        ),
        Source(
            "fms-fsdp, H100, compiled",
            vela2,
            fms(96, (9600, 0.46), (4850, 0.46), (1830, 0.49), (890, 0.47)),
            counted,
        ),
        Source(
            "KempnerForge, H200, compiled",
            h200,
            [
                (kempner(1, strategy="NO_SHARD"), 10471),
                (kempner(2), 18728 / 2),
                (kempner(4), 38983 / 4),
            ],
            ["a node's board of 4 has no switch, and 6 of a GPU's 18 links go to each of the others"],
            {2: replace(h200, node=replace(h200.node, bandwidth=h200.node.bandwidth * 6 / 18))},
        ),
    ]


def _every_second(model: str, length: int) -> float:
    """Which part of the blocks has as many operations as every second product of all: k, o, and up."""
    config = MODELS[model]
    kept = config.n_embd // config.n_head * config.n_kv_head
    some = config.n_embd * (kept + config.n_embd + config.n_hidden)
    every = config.n_embd * (2 * kept + 2 * config.n_embd + 3 * config.n_hidden)
    return some / (every + config.n_embd * length)


def recomputed(config: LlamaConfig, length: int, operations: float) -> float:
    """Which part of the blocks is recomputed, by the operations for a token that PyTorch's counter finds.

    Those of products and, for attention, of all pairs: 4 L C T in forward and 10 in backward.
    """
    head = config.n_embd * config.vocab_size
    kept = config.n_embd * config.n_embd // config.n_head * config.n_kv_head
    blocks = config.n_layer * (2 * config.n_embd**2 + 2 * kept + 3 * config.n_embd * config.n_hidden)
    attention = config.n_layer * config.n_embd * length
    return (operations - 6 * (blocks + head) - 14 * attention) / (2 * blocks + 4 * attention)


def compare() -> None:
    """Print each row: published, simulated, and with kernels as fast as its source's first row says."""
    recorded: dict[Training, list[Program]] = {}
    errors = []
    print(f"{'':34}{'tokens/s and GPU':>18}{'simulated':>11}{'kernels':>9}{'with it':>9}{'error':>8}")
    for source in sources():
        print(f"{source.name} ({'; '.join(source.assumed)})")
        factor = 0.0
        for training, published in source.rows:
            if training not in recorded:
                recorded[training] = training.recorded(source.machine)
            machine = source.among.get(training.ranks, source.machine)
            seconds = partial(_seconds, recorded[training], machine)
            tokens = training.batch * training.length * training.micro_batches
            given = not factor
            factor = factor or _factor(seconds, tokens / published)
            fitted = tokens / seconds(factor)
            error = fitted / published - 1
            errors += [] if given else [abs(error)]
            row = f"  {training.model}, {training.strategy}, {training.ranks} ranks"
            shown = "       -" if given else f"{100 * error:+7.1f}%"
            print(
                f"{row:34}{published:18,.0f}{tokens / seconds(1.0):11,.0f}{factor:9.3f}{fitted:9,.0f}{shown}"
            )
    errors.sort()
    print(
        f"{len(errors)} rows: median {100 * errors[len(errors) // 2]:.1f} %, worst {100 * errors[-1]:.1f} %"
    )


def _seconds(programs: list[Program], machine: Machine, factor: float) -> float:
    """Of the last step, where kernels compute and move bytes by a factor faster."""
    device = machine.device
    flops = {dtype: peak * factor for dtype, peak in device.flops.items()}
    device = replace(device, flops=flops, bandwidth=device.bandwidth * factor)
    return price(programs, replace(machine, device=device)).steps[0][-1]


_SLOWEST = 0.1


def _factor(seconds: Callable[[float], float], wanted: float) -> float:
    """With which kernels a step takes as long as it has taken."""
    slow, fast = _SLOWEST, 4.0
    for _ in range(24):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if seconds(middle) > wanted else (slow, middle)
    return middle


def cost() -> None:
    """Print what two large models cost to simulate: one step, from the call to the report."""
    for training in (
        Training("8B", 128, 1, 8192, "full", 1.0, loss_chunk=2048),
        Training("405B", 16384, 1, 8192, "full", 1.0, loss_chunk=2048),
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


PLANNED = [
    *("--architecture", "llama", "--size", "llama-3.1-8b", "--text.window", "8192"),
    *("--batch-size", "64", "--precision.param", "bfloat16"),
]
VARIED = {
    "fsdp.strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"],
    "fsdp.prefetch": ["1", "2"],
    "memory.recompute": ["none", "full"],
}


def plan(arguments: Sequence[str] = PLANNED) -> None:
    """Print what 20 plans of the training command cost, none of them dropped."""
    machine, ranks = Machine.load("h100-8"), 64
    began = time.perf_counter(), time.process_time()
    varied = candidates(train.parse(arguments), given=(), ranks=ranks, node=8, vary=VARIED, only=True)

    def one(candidate: Candidate) -> Simulated:
        return step.simulated(["models.train", *arguments, *candidate.words], ranks, machine)

    found = search(varied, one, {"device": inf}, best=len(varied))
    took, busy = time.perf_counter() - began[0], time.process_time() - began[1]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{found.tried} plans on {ranks} ranks: {took:.2f} s ({busy:.2f} of the processor), at most "
        f"{most:.0f} MB; the best {found.best[0].report.ms:,.0f} ms, the last {found.best[-1].report.ms:,.0f}"
    )


def main(arguments: Sequence[str]) -> int:
    """Compare, or tell the cost; gives the exit code."""
    parser = argparse.ArgumentParser(prog="bench.simulated", description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("rows", "cost", "plan"), default="rows")
    {"rows": compare, "cost": cost, "plan": plan}[parser.parse_args(arguments).what]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
