"""Trains the jobs of axes.py with PyTorch on gloo: by one process, cut over two, and in stages on two.

python -m tests.parity.axes_torch FOLDER, in 2 processes. FOLDER/torch.npz is what they made of
FOLDER/JOB.npz: "JOB, VARIANT/losses", .../gradient/..., .../parameter/....
"""

import sys
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from bench.peers.torch_pipeline import Pipeline, loss_of
from bench.peers.torch_step import leave, network
from bench.peers.torch_tensor import cut, fused, parameters_of
from tests.parity import axes
from tests.parity.features import OPTIMIZERS, STEPS
from tests.parity.job import Notes

KINDS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Alone(nn.Module):
    """A whole model that accumulates over the micro-batches of a pipeline."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.model = whole

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count, total = axes.MICRO_BATCHES, 0.0
        for rows, wanted in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = loss_of(self.model(rows), wanted) / count
            loss.backward()
            total += loss.detach()
        return total

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class Cut(Alone):
    """A model whose modules are cut, by parallelize_module."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh, variant: str) -> None:
        super().__init__(whole)
        self.vocabulary = "loss" in variant
        cut(whole, mesh, sequence="sequence" in variant, loss_parallel=self.vocabulary)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel() if self.vocabulary else nullcontext():
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for job, variants in axes.VARIANTS.items():
        weights = {key: torch.from_numpy(values) for key, values in np.load(f"{folder}/{job}.npz").items()}
        for variant in variants:
            result = train(mesh, job, variant, weights)
            found |= {f"{job}, {variant}/{key}": values for key, values in result.items()}
    if mesh.get_rank() == 0:
        np.savez(f"{folder}/torch.npz", **found)
    leave(dist)


def train(mesh: DeviceMesh, name: str, variant: str, weights: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """What ranks have noted, of both together."""
    whole, kind = network(axes.JOBS[name]), axes.OPTIMIZER[name]
    whole.load_state_dict(weights)
    if variant == axes.ALONE:
        model, parameters = Alone(whole), whole.parameters()
    elif variant == axes.PIPELINE:
        model = Pipeline(whole, variant, axes.MICRO_BATCHES)
        parameters = model.parameters()
    else:
        model, parameters = Cut(whole, mesh, variant), parameters_of(whole)
    optimizer, notes = KINDS[kind](parameters, **OPTIMIZERS[kind]), Notes()
    for step in range(STEPS):
        inputs, targets = (torch.from_numpy(array) for array in axes.JOBS[name].batch_of(step, 0))
        notes.losses.append(model.step(inputs, targets).item())
        notes.add("gradient", {key: held(p.grad) for key, p in model.named().items()})
        optimizer.step()
        optimizer.zero_grad()
        notes.add("parameter", {key: held(p.detach()) for key, p in model.named().items()})
    ranks = [None] * mesh.size()
    dist.all_gather_object(ranks, notes.result())
    if isinstance(model, Cut):
        return together(ranks, {key: cut_along(p) for key, p in model.named().items()})
    return ranks[0] | ranks[-1]  # the losses are those of the last stage


def cut_along(values: Tensor) -> int | None:
    """The axis along which ranks hold slices of it; None: each has the whole."""
    (placement,) = values.placements if isinstance(values, DTensor) else (None,)
    return placement.dim if isinstance(placement, Shard) else None


def held(values: Tensor) -> np.ndarray:
    """What this rank has of it, or the sum where each has a summand."""
    if not isinstance(values, DTensor):
        return values.numpy()
    return (values.full_tensor() if values.placements[0].is_partial() else values.to_local()).numpy()


def together(ranks: list[dict], cuts: dict[str, int | None]) -> dict[str, np.ndarray]:
    """The notes of ranks with slices as those of a whole model, whose names are shardrt's."""
    found = {"losses": ranks[0]["losses"]}
    for kind in ("gradient", "parameter"):
        whole = {}
        for name, axis in cuts.items():
            parts = [torch.from_numpy(rank[f"{kind}/{name}"]) for rank in ranks]
            whole[name] = parts[0] if axis is None else torch.cat(parts, 1 + axis)  # behind that of steps
        steps = [fused({name: values[step] for name, values in whole.items()}) for step in range(STEPS)]
        found |= {f"{kind}/{name}": np.stack([step[name] for step in steps]) for name in steps[0]}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
