"""Trains a vision transformer to tell stripes of four directions apart, fully sharded.

    python train_images.py                 # one rank
    mpirun -n 2 python train_images.py     # two ranks: the same losses, but for rounding

A copy of this file is a place to begin: it needs shardrt, an MPI and nothing of the repository.
"""

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp import fully_shard
from shardrt.models.vit import ViT, ViTConfig

STEPS, BATCH, SIZE, CLASSES = 60, 32, 16, 4  # BATCH: images per step, over all ranks


def main() -> None:
    mesh = init_device_mesh("auto")  # all ranks that mpirun started
    shardrt.manual_seed(0)  # the same initial weights at every number of ranks
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_hidden": 128, "image_size": SIZE, "patch_size": 4}
    model = ViT(ViTConfig(**shape, channels=1, classes=CLASSES, pool="mean", init_std=0.1))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # each block a unit: gathered and released as one
    fully_shard(model, mesh=mesh)  # and the rest: patches, positions, the head
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(STEPS):
        images, labels = samples(step)
        mine = slice(mesh.rank, None, mesh.size)  # of the batch
        logits = model(images[mine])
        loss = F.cross_entropy(logits, labels[mine])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all ranks
        optimizer.step()
        optimizer.zero_grad()
        right = float((np.argmax(logits.data, axis=1) == labels[mine]).mean())
        # The mean over ranks. A loss is read here, so every tenth step alone: reading waits for the device.
        if step == 0 or (step + 1) % 10 == 0:
            means = np.mean(all_gather_object(mesh.communicator("control"), [loss.item(), right]), axis=0)
            if mesh.rank == 0:
                print(f"step {step + 1}/{STEPS}  loss {means[0]:.4f}  right {means[1]:.0%}", flush=True)


def samples(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The images of a step, float32 (BATCH, 1, SIZE, SIZE), and their labels: a function of the step."""
    random = np.random.default_rng(step)
    labels = random.integers(0, CLASSES, BATCH)
    angles = np.pi * labels / CLASSES
    y, x = np.mgrid[:SIZE, :SIZE]
    across = np.multiply.outer(np.cos(angles), x) + np.multiply.outer(np.sin(angles), y)
    phase, noise = random.uniform(0, 2 * np.pi, (BATCH, 1, 1)), random.normal(size=(BATCH, SIZE, SIZE))
    return (np.sin(across + phase) + 0.5 * noise).astype(np.float32)[:, None], labels


if __name__ == "__main__":
    main()
