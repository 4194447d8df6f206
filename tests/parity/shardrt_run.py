"""Runs a job with shardrt: `run` on every rank of a thread world, or as a program under mpirun.

mpirun -n N python -m tests.parity.shardrt_run JOB.npz RESULT.npz
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import sys

import numpy as np

from models.gpt import GPT, GPTConfig
from shardrt import device, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.fsdp import fully_shard
from tests.fsdp.nets import gradients
from tests.parity.job import Job, Notes, load, piece


def run(path, strategy: str = "FULL_SHARD") -> dict[str, np.ndarray]:
    """Train as the job says; the notes (rank 0's hold the parameters)."""
    job, weights, tokens, targets = load(path)
    mesh = init_device_mesh("auto")
    model = build(job, weights, mesh, strategy)
    if job.optimizer == "sgd":
        optimizer = optim.SGD(model.parameters(), lr=job.lr, weight_decay=job.weight_decay, momentum=0.9)
    else:
        optimizer = optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay)

    notes = Notes()
    for step in range(len(tokens)):
        x, y = (piece(batch[step], mesh.rank, mesh.size) for batch in (tokens, targets))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if job.detailed:
            notes.add("gradient", gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        if job.detailed:
            notes.add("parameter", full_state_dict(model))
        notes.losses.append(mean(loss.item(), mesh))
    return notes.result()


def config_of(job: Job) -> GPTConfig:
    return GPTConfig(
        n_layer=job.layers,
        n_head=job.heads,
        n_embd=job.width,
        block_size=job.time,
        vocab_size=job.vocab,
    )


def build(job: Job, weights: dict, mesh: DeviceMesh, strategy: str) -> GPT:
    """The model with these weights, every block and the whole a unit."""
    model = GPT(config_of(job))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy=strategy)
    model.load_state_dict(weights)
    return model


def mean(value: float, mesh: DeviceMesh) -> float:
    """The mean over ranks."""
    total = np.array([value])
    stream = device.current().current_stream
    mesh.communicator("control").all_reduce(total, op="sum", stream=stream)
    stream.synchronize()
    return float(total[0]) / mesh.size


if __name__ == "__main__":
    result = run(sys.argv[1])
    if init_device_mesh("auto").rank == 0:
        np.savez(sys.argv[2], **result)
