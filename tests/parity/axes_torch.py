"""Trains the jobs of tensor.py with PyTorch's parallelize_module, on gloo, one process per rank.

python -m tests.parity.tensor_torch FOLDER, in 2 processes. FOLDER/torch.npz is what they made of
FOLDER/JOB.npz: "JOB, VARIANT/losses", .../gradient/..., .../parameter/....
"""

import sys
from contextlib import nullcontext
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from bench.peers.torch_step import leave, network
from bench.peers.torch_tensor import cut, fused, parameters_of
from tests.parity import tensor
from tests.parity.job import Notes

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for job, variant in product(tensor.JOBS, tensor.VARIANTS):
        weights = dict(np.load(f"{folder}/{job}.npz"))
        result = train(mesh, job, weights, "sequence" in variant, "loss" in variant)
        found |= {f"{job}, {variant}/{key}": values for key, values in result.items()}
    if mesh.get_rank() == 0:
        np.savez(f"{folder}/torch.npz", **found)
    leave(dist)


def train(mesh: DeviceMesh, name: str, weights: dict, sequence: bool, vocabulary: bool) -> dict:
    job, kind = tensor.JOBS[name], tensor.OPTIMIZER[name]
    model = network(job)
    model.load_state_dict({key: torch.from_numpy(values) for key, values in weights.items()})
    cut(model, mesh, sequence=sequence, loss_parallel=vocabulary)
    optimizer = OPTIMIZERS[kind](parameters_of(model), **tensor.OPTIMIZERS[kind])
    notes = Notes()
    for step in range(tensor.STEPS):
        inputs, targets = (torch.from_numpy(array) for array in job.batch_of(step, 0))
        with loss_parallel() if vocabulary else nullcontext():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        notes.losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
        notes.add("gradient", {key: held(p.grad) for key, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        notes.add("parameter", {key: held(p.detach()) for key, p in model.named_parameters()})
    return together(mesh, notes, {key: cut_along(p) for key, p in model.named_parameters()})


def cut_along(values: torch.Tensor) -> int | None:
    """The axis along which ranks hold slices of it; None: each has the whole."""
    (placement,) = values.placements if isinstance(values, DTensor) else (None,)
    return placement.dim if isinstance(placement, Shard) else None


def held(values: torch.Tensor) -> np.ndarray:
    """What this rank has of it, or the sum where each has a summand."""
    if not isinstance(values, DTensor):
        return values.numpy()
    return (values.full_tensor() if values.placements[0].is_partial() else values.to_local()).numpy()


def together(mesh: DeviceMesh, notes: Notes, axes: dict[str, int | None]) -> dict[str, np.ndarray]:
    """All ranks' notes as one, at once: a gather for each tensor of each step would take most of the time."""
    ranks = [None] * mesh.size()
    dist.all_gather_object(ranks, notes.result())
    found = {"losses": ranks[0]["losses"]}
    for kind in ("gradient", "parameter"):
        whole = {}
        for name, axis in axes.items():
            parts = [rank[f"{kind}/{name}"] for rank in ranks]
            whole[name] = (
                parts[0] if axis is None else np.concatenate(parts, 1 + axis)
            )  # behind that of steps
        steps = [
            {name: torch.from_numpy(values[step]) for name, values in whole.items()}
            for step in range(tensor.STEPS)
        ]
        made = [fused(named) for named in steps]
        found |= {f"{kind}/{name}": np.stack([step[name] for step in made]) for name in made[0]}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
