"""Trains a small GPT in stages: each rank has some of the layers, and passes activations on.

    python train_pipeline.py                 # one stage
    mpirun -n 2 python train_pipeline.py     # two stages: the same losses, but for rounding; or 4

A copy of this file is a place to begin: it needs shardrt, an MPI and nothing of the repository.
"""

import argparse
from pathlib import Path

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.models.gpt import GPT, GPTConfig
from shardrt.parallel import Pipeline

STEPS, BATCH, CONTEXT, PARTS = 60, 8, 32, 4  # PARTS: micro-batches, which fill the pipeline


def main() -> None:
    ranks = init_device_mesh("auto").size
    mesh = init_device_mesh("auto", (ranks, 1), mesh_dim_names=("pp", "dp_shard"))
    shardrt.manual_seed(0)
    model = GPT(GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=CONTEXT, vocab_size=256))
    pipeline = Pipeline(model, mesh["pp"], schedule="1F1B", micro_batches=PARTS)
    for stage in pipeline.stages:  # of this rank: one with 1F1B
        for block in stage.blocks:
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(stage, mesh=mesh["dp_shard"])
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)  # of all parameters; updates this rank's

    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int64)
    losses: list[float] = []  # of a step's parts; [] where the last stage is another rank's

    def loss_of(logits, part):  # the last stage alone calls it
        loss = F.cross_entropy(logits, part[:, 1:]) * (1 / PARTS)  # gradients add up over parts
        losses.append(loss.item())
        return loss

    for step in range(STEPS):
        losses.clear()
        parts = np.split(samples(text, step), PARTS)
        pipeline.step(loss_of, parts, inputs=lambda part: (part[:, :-1],))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all stages
        optimizer.step()
        optimizer.zero_grad()
        if losses and (step == 0 or (step + 1) % 10 == 0):
            print(f"step {step + 1}/{STEPS}  loss {sum(losses)!r}", flush=True)


def samples(text: np.ndarray, step: int) -> np.ndarray:
    """The windows of a step, (BATCH, CONTEXT + 1): a function of the step."""
    starts = np.random.default_rng(step).integers(0, text.size - CONTEXT, BATCH)
    return np.stack([text[start : start + CONTEXT + 1] for start in starts])


if __name__ == "__main__":
    main()
