"""Trains a small GPT whose heads, hidden units and vocabulary are split over the ranks.

    python train_tensor_parallel.py                 # one rank
    mpirun -n 2 python train_tensor_parallel.py     # two ranks: bitwise identical losses; or 4

A copy of this file is a place to begin: it needs shardrt, an MPI and nothing of the repository.
"""

import argparse
from pathlib import Path

import numpy as np

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.models.gpt import GPT, GPTConfig
from shardrt.models.plans import plan_of
from shardrt.parallel import parallelize_module, set_tensor_invariant

STEPS, BATCH, CONTEXT = 60, 8, 32


def main() -> None:
    ranks = init_device_mesh("auto").size
    # Data parallelism is an axis of its own: with 8 ranks, (2, 4) has two groups of four.
    mesh = init_device_mesh("auto", (1, ranks), mesh_dim_names=("dp_shard", "tp"))
    shardrt.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=CONTEXT, vocab_size=256))
    # Which layers are split, and how: {"blocks.*.mlp.up": ColwiseParallel(), ...}.
    parallelize_module(model, mesh["tp"], plan_of(model))
    set_tensor_invariant(model, parts=4)  # bitwise identical on 1, 2 and 4 ranks; costs time
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp_shard"])  # shards what is left of each parameter
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)

    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int64)
    data = mesh["dp_shard"]  # ranks along "tp" compute the same part of the batch
    for step in range(STEPS):
        windows = samples(text, step)[data.rank :: data.size]
        loss = model(windows[:, :-1], windows[:, 1:])  # by the model: no rank has all logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over both axes, each element once
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % 10 == 0:
            value = loss.item()
            if data.root.rank == 0:
                print(f"step {step + 1}/{STEPS}  loss {value!r}", flush=True)


def samples(text: np.ndarray, step: int) -> np.ndarray:
    """The windows of a step, (BATCH, CONTEXT + 1): a function of the step."""
    starts = np.random.default_rng(step).integers(0, text.size - CONTEXT, BATCH)
    return np.stack([text[start : start + CONTEXT + 1] for start in starts])


if __name__ == "__main__":
    main()
