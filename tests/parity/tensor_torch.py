"""Trains the jobs of tensor.py with PyTorch's parallelize_module, on gloo, one process per rank.

python -m tests.parity.tensor_torch FOLDER, in N processes. FOLDER/torch-N.npz is what they made of
FOLDER/JOB.npz: "JOB, VARIANT/losses", .../gradient/..., .../parameter/....
"""

import sys
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
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
    for job, variant in tensor.twins(mesh.size()):
        weights = dict(np.load(f"{folder}/{job}.npz"))
        result = train(mesh, job, weights, "sequence" in variant, "loss" in variant)
        found |= {f"{job}, {variant}/{key}": values for key, values in result.items()}
    if mesh.get_rank() == 0:
        np.savez(f"{folder}/torch-{mesh.size()}.npz", **found)
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
        notes.losses.append(whole(loss.detach()).item())
        notes.add("gradient", collected({key: p.grad for key, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
        notes.add("parameter", collected({key: p.detach() for key, p in model.named_parameters()}))
    return notes.result()


def collected(named: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in fused({k: whole(t) for k, t in named.items()}).items()}


def whole(values: torch.Tensor) -> torch.Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


if __name__ == "__main__":
    main(*sys.argv[1:])
