"""Trains the jobs of pipeline.py with PyTorch: by one process, and by torch.distributed.pipelining on gloo.

python -m tests.parity.pipeline_torch FOLDER, in 2 processes. FOLDER/torch.npz is what they made of
FOLDER/JOB.npz: "JOB, VARIANT/losses", .../gradient/..., .../parameter/....
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.peers.torch_pipeline import Pipeline, loss_of
from bench.peers.torch_step import leave, network
from tests.parity import pipeline
from tests.parity.job import Notes

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Alone(nn.Module):
    """A whole model that takes a step as a pipeline does."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.model = whole

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        count, total = pipeline.MICRO_BATCHES, 0.0
        for rows, wanted in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = loss_of(self.model(rows), wanted) / count
            loss.backward()
            total += loss.detach()
        return total

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for job in pipeline.JOBS:
        weights = dict(np.load(f"{folder}/{job}.npz"))
        for variant in (pipeline.ACCUMULATED, *pipeline.STAGES):
            result = train(job, variant, weights)
            found |= {f"{job}, {variant}/{key}": values for key, values in result.items()}
    if dist.get_rank() == 0:
        np.savez(f"{folder}/torch.npz", **found)
    leave(dist)


def train(name: str, variant: str, weights: dict) -> dict:
    """Of both ranks together."""
    job, kind = pipeline.JOBS[name], pipeline.OPTIMIZER[name]
    whole = network(job)
    whole.load_state_dict({key: torch.from_numpy(values) for key, values in weights.items()})
    if variant == pipeline.ACCUMULATED:
        model = Alone(whole)
    else:
        model = Pipeline(whole, variant, pipeline.MICRO_BATCHES, pipeline.STAGES[variant])
    optimizer, notes = OPTIMIZERS[kind](model.parameters(), **pipeline.OPTIMIZERS[kind]), Notes()
    for step in range(pipeline.STEPS):
        inputs, targets = (torch.from_numpy(array) for array in job.batch_of(step, 0))
        notes.losses.append(model.step(inputs, targets).item())
        notes.add("gradient", {key: p.grad for key, p in model.named().items()})
        optimizer.step()
        optimizer.zero_grad()
        notes.add("parameter", {key: p.detach() for key, p in model.named().items()})
    ranks = [None, None]
    dist.all_gather_object(ranks, notes.result())
    return ranks[0] | ranks[1]  # the losses are those of the last stage


if __name__ == "__main__":
    main(*sys.argv[1:])
