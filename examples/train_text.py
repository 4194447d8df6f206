"""Trains a small GPT on the bytes of a file, fully sharded, and goes on from its last checkpoint.

    python train_text.py                            # one rank, on a module of Python's library
    mpirun -n 2 python train_text.py FILE           # two ranks, on a file of yours
    mpirun -n 4 python train_text.py FILE --steps 300    # goes on at another number of ranks

A copy of this file is a place to begin: it needs shardrt, an MPI and nothing of the repository.
"""

import argparse
from pathlib import Path

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager
from shardrt.comm import init_device_mesh
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp import fully_shard
from shardrt.models.gpt import GPT, GPTConfig

BATCH = 8  # sequences per step, over all ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    own = Path(argparse.__file__)  # some text that is there
    parser.add_argument("file", type=Path, nargs="?", default=own, help="text, or any other bytes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=64, help="bytes that a prediction looks back")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()

    text = np.fromfile(arguments.file, np.uint8).astype(np.int64)
    if text.size <= arguments.context:
        parser.error(f"{arguments.file} has {text.size} bytes, and a sample {arguments.context + 1}")
    mesh = init_device_mesh("auto")
    if BATCH % mesh.size:
        parser.error(f"{BATCH} sequences can't be shared equally by {mesh.size} ranks")
    shardrt.manual_seed(0)
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=arguments.context, vocab_size=256)
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    checkpoints = CheckpointManager(arguments.checkpoints, model, optimizer, mesh, keep_last=2)
    first, _ = checkpoints.restore()  # 0 where there is none
    for step in range(first, arguments.steps):
        windows = samples(text, arguments.context + 1, step)[mesh.rank :: mesh.size]
        loss = F.cross_entropy(model(windows[:, :-1]), windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            mean = np.mean(all_gather_object(mesh.communicator("control"), loss.item()))
            if mesh.rank == 0:
                print(f"step {step + 1}/{arguments.steps}  loss {mean:.4f}", flush=True)
    if first < arguments.steps:
        checkpoints.save(arguments.steps)


def samples(text: np.ndarray, length: int, step: int) -> np.ndarray:
    """The windows of a step, (BATCH, length): a function of the step, so nothing of it needs saving."""
    starts = np.random.default_rng(step).integers(0, text.size - length + 1, BATCH)
    return np.stack([text[start : start + length] for start in starts])


if __name__ == "__main__":
    main()
