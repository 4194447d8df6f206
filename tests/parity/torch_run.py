"""Runs a job with PyTorch FSDP2 on gloo, one process per rank.

python -m tests.parity.torch_run JOB.npz RESULT.npz
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.peers.torch_gpt import GPT
from bench.peers.torch_step import leave
from tests.parity.job import Job, Notes, load, piece


def main(source: str, destination: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    job, weights, tokens, targets = load(source)
    model = build(job, weights, size)
    if job.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=job.lr, weight_decay=job.weight_decay, momentum=0.9
        )
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=job.lr, weight_decay=job.weight_decay, fused=True
        )

    notes = Notes()
    for step in range(len(tokens)):
        x, y = (torch.from_numpy(piece(batch[step], rank, size)) for batch in (tokens, targets))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if job.detailed:
            notes.add(
                "gradient", {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
            )
        optimizer.step()
        optimizer.zero_grad()
        if job.detailed:
            whole = {name: p.detach().full_tensor().numpy() for name, p in model.named_parameters()}
            notes.add("parameter", whole)
        total = loss.detach().double()
        dist.all_reduce(total)
        notes.losses.append(total.item() / size)
    if rank == 0:
        np.savez(destination, **notes.result())
    leave(dist)


def build(job: Job, weights: dict, size: int) -> GPT:
    """The model with these weights, every block and the whole a unit."""
    model = GPT(layers=job.layers, heads=job.heads, width=job.width, time=job.time, vocab=job.vocab)
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main(*sys.argv[1:])
