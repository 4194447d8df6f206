"""The experiment of Accelerate's FSDP announcement (2022), simulated: GPT-2 Large and XL on two TITAN RTX.

    python -m bench.announced [--window 128] [--node GB/s]

For each row of its two tables: the largest batch of a rank that fits, and a step's time with it. No GPU runs.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from models.gpt import GPT, SIZES
from shardrt import optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, by_size, fully_shard, wrap
from shardrt.simulate.machine import Machine
from shardrt.simulate.report import Report, report
from shardrt.simulate.script import record_of

MEMORY = 23.65 * 2**30  # bytes of a card, by the announcement's message of an allocation that failed
LIBRARIES = 1.2e9  # CUDA's context, NCCL's and cuBLAS's buffers: assumed


@dataclass(frozen=True)
class Row:
    """A row: what is published, and how it is run here. minutes: 0 where it did not fit."""

    size: str
    title: str
    batch: int
    minutes: float
    strategy: str = "FULL_SHARD"
    least: int = 0  # min_num_params
    float16: bool = False
    offload: bool = False
    ranks: int = 2


LARGE, XL = "gpt2-large", "gpt2-xl"
ROWS = [
    Row(LARGE, "DDP", 7, 15, "NO_SHARD"),
    Row(LARGE, "DDP, FP16", 7, 8, "NO_SHARD", float16=True),
    Row(LARGE, "SHARD_GRAD_OP", 11, 11, "SHARD_GRAD_OP", 10**6),
    Row(LARGE, "FULL_SHARD, 1M", 15, 12, least=10**6),
    Row(LARGE, "FULL_SHARD, 2K", 15, 13, least=2000),
    Row(LARGE, "FULL_SHARD, 1M, offload", 20, 23, least=10**6, offload=True),
    Row(LARGE, "FULL_SHARD, 2K, offload", 22, 24, least=2000, offload=True),
    Row(XL, "DDP, 1 GPU", 0, 0, "NO_SHARD", ranks=1),
    Row(XL, "DDP", 0, 0, "NO_SHARD"),
    Row(XL, "DDP, FP16, 1 GPU", 0, 0, "NO_SHARD", float16=True, ranks=1),
    Row(XL, "FULL_SHARD, 2K", 5, 36, least=2000),
    Row(XL, "FULL_SHARD, 2K, offload, 1 GPU", 10, 180, least=2000, offload=True, ranks=1),
    Row(XL, "FULL_SHARD, 2K, offload", 14, 70, least=2000, offload=True),
]


def step(row: Row, batch: int, window: int, machine: Machine) -> Report:
    """A step of a row with so many sequences on each rank."""

    def train() -> None:
        mesh = init_device_mesh("auto")
        model = GPT(replace(SIZES[row.size], block_size=1024))
        policy = MixedPrecisionPolicy("float16", "float32") if row.float16 else None
        offload = CPUOffloadPolicy(step="host") if row.offload else None
        how = {"mesh": mesh, "strategy": row.strategy, "mp_policy": policy, "offload_policy": offload}
        if row.least:
            wrap(model, by_size(row.least), **how)
        else:
            for module in (*model.blocks, model):
                fully_shard(module, **how)
        optimizer = optim.AdamW(model.parameters(), lr=5e-5)
        tokens = np.zeros((batch, window), np.int64)
        for _ in range(2):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    return report(record_of(train, row.ranks), machine)


def largest(row: Row, window: int, machine: Machine) -> tuple[int, Report | None, Report]:
    """The largest batch that fits, its step (None for no batch), and the step of one sequence."""
    one = step(row, 1, window, machine)
    fits, too_large, found = 0, 1, None
    tried = one
    while max(tried.device_bytes.values()) + LIBRARIES <= MEMORY:
        fits, found, too_large = too_large, tried, 2 * too_large
        tried = step(row, too_large, window, machine)
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        tried = step(row, middle, window, machine)
        if max(tried.device_bytes.values()) + LIBRARIES <= MEMORY:
            fits, found = middle, tried
        else:
            too_large = middle
    return fits, found, one


def main() -> None:
    """Print the table of the announcement next to what shardrt predicts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--window", type=int, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--node", type=float, help="GB/s between the cards (those of titan-rtx-2)")
    parser.add_argument("--only", default="", help="rows whose title has this")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    machine = Machine.load("titan-rtx-2")
    if options.node:
        machine = replace(machine, node=replace(machine.node, bandwidth=1e9 * options.node))
    kept = []
    for row in (row for row in ROWS if options.only in f"{row.size} {row.title}"):
        batch, found, one = largest(row, options.window, machine)
        least = max(one.device_bytes.values()) / 1e9
        table = {"size": row.size, "row": row.title, "published": row.batch, "minutes": row.minutes}
        table |= {"batch": batch, "GB with 1": round(least, 2)}
        if found is not None:
            table |= {"ms": round(found.ms, 1), "tokens_per_s": round(found.tokens_per_s)}
            at = step(row, row.batch, options.window, machine) if row.batch else found
            table["GB published"] = round(max(at.device_bytes.values()) / 1e9, 2)
            table["tokens_per_s published"] = round(at.tokens_per_s)
        kept.append(table)
        print(json.dumps(table), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"window": options.window, "rows": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
