"""The longest sequence that trains in so much memory per rank, by memory plans: nothing is computed.

One sequence a step for all ranks of cp, float32, FULL_SHARD over them, AdamW, all blocks recomputed, the loss
in 1024 rows at a time. What a step takes grows by the same bytes for every position, so two plans say how
many fit; a third, for that many, confirms it. Tables of angles are counted, what the process, libraries and
compiled kernels take is not.
"""

import shardrt  # isort: skip  before NumPy

import argparse
from dataclasses import replace

import numpy as np

from models.llama import SIZES, Llama
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, memory_plan
from shardrt.parallel import context_plan, parallelize_module, shard_sequence
from shardrt.recompute import checkpoint_blocks

STEP = 1024  # positions: what the result is a multiple of
PROBES = 16 * STEP, 32 * STEP


def bytes_of(size: str, ranks: int, time: int) -> int:
    """Planned for rank 0 of `ranks`, for a sequence of `time`."""

    def plan() -> int:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        shardrt.manual_seed(0)
        config = replace(SIZES[size], block_size=time, loss_chunk=STEP)
        model = Llama(config)
        parallelize_module(model, mesh, context_plan(model))
        checkpoint_blocks(model.blocks)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        text = np.zeros((1, time), np.int64)
        part = shard_sequence(text, text, mesh=mesh)
        given = {name: value for name, value in part._asdict().items() if value is not None}
        planned = memory_plan(model, step=lambda: model(**given).backward())
        return planned.device_bytes + 4 * config.head_dim * time // ranks

    return thread.run(ranks, plan)[0]


def longest(size: str, ranks: int, limits: list[int]) -> list[int]:
    """The positions that fit into each number of bytes, a multiple of STEP; 0 where none do."""
    low, high = (bytes_of(size, ranks, time) for time in PROBES)
    each = (high - low) / (PROBES[1] - PROBES[0])
    found = []
    for limit in limits:
        time = int((limit - low) / each + PROBES[0]) // STEP * STEP
        while time > 0 and bytes_of(size, ranks, time) > limit:
            time -= STEP
        found.append(max(time, 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.longest_context", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="llama-100m")
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks")
    parser.add_argument("--gb", type=float, nargs="+", default=[2, 4, 8, 16], help="1e9 bytes per rank")
    given = parser.parse_args()
    print("cp", *(f"{gb:g} GB" for gb in given.gb), sep="\t")
    for ranks in given.cp:
        times = longest(given.size, ranks, [int(gb * 1e9) for gb in given.gb])
        print(ranks, *(f"{time:,}" if time else "-" for time in times), sep="\t", flush=True)


if __name__ == "__main__":
    main()
