"""A job trained with shardrt, with any of its features, on each rank of a world; see test_features.py.

mpirun -n N python -m tests.parity.features_shardrt JOB.npz RESULT.npz trains with AdamW.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import inf

import numpy as np

from models.gpt import GPT, Block, GPTConfig
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp import by_class, fully_shard, no_sync, wrap
from shardrt.optim import GradScaler
from tests.lab import gradients
from tests.parity import features
from tests.parity.job import Job, Notes, load

OPTIMIZERS = {"sgd": optim.SGD, "adamw": optim.AdamW}
BY_BLOCK = by_class(Block)


def run(
    path,
    *,
    prepare: Callable[[GPT], object] = lambda model: None,
    wrapped=BY_BLOCK,
    shape: tuple[int, ...] | None = None,
    optimizer: str = "sgd",
    micro_batches: int = 1,
    reduce_each: bool = True,
    clip: Callable[[GPT], float] | None = None,
    scaled: bool = False,
    **settings,
) -> dict[str, np.ndarray]:
    """Train; this rank's notes, whose arrays are whole and losses the means over ranks.

    prepare: what is done to the model before it is sharded. wrapped: a policy for `wrap`; None: one unit.
    shape: of the mesh. clip: gives what it clipped. settings: of every unit.
    """
    job, weights, tokens, targets = load(path)
    mesh = init_device_mesh("auto", shape)
    model = build(job, weights, prepare, wrapped, mesh=mesh, **settings)
    updates = OPTIMIZERS[optimizer](model.parameters(), **features.OPTIMIZERS[optimizer])
    scaler = GradScaler(**features.SCALER, enabled=scaled)

    notes = Notes()
    for step in range(len(tokens)):
        parts = features.parts_of(tokens[step], targets[step], micro_batches, mesh.rank, mesh.size)
        factor = inf if scaled and features.overflows(step, mesh.rank, mesh.size) else 1.0
        notes.losses.append(backward(model, scaler, parts, reduce_each, factor))
        if scaled:
            scaler.unscale_(updates)
        if clip is not None:
            notes.add("number", {"clipped": clip(model)})
        if job.detailed:
            notes.add("gradient", gradients(model))
        scaler.step(updates)
        scaler.update()
        updates.zero_grad()
        if job.detailed:
            notes.add("parameter", full_state_dict(model))
        notes.add("number", {"scale": scaler.get_scale()})
    notes.losses = np.mean(all_gather_object(mesh.communicator("control"), notes.losses), axis=0)
    return notes.result()


def config_of(job: Job) -> GPTConfig:
    return GPTConfig(
        n_layer=job.layers,
        n_head=job.heads,
        n_embd=job.width,
        block_size=job.time,
        vocab_size=job.vocab,
    )


def build(
    job: Job, weights: dict, prepare: Callable[[GPT], object], wrapped, mesh: DeviceMesh, **settings
) -> GPT:
    """The model with these weights, in units."""
    model = GPT(config_of(job))
    prepare(model)
    if wrapped is None:
        fully_shard(model, mesh=mesh, **settings)
    else:
        wrap(model, wrapped, mesh=mesh, **settings)
    model.load_state_dict({name: weights[name] for name, _ in model.named_parameters()})
    return model


def backward(model: GPT, scaler: GradScaler, parts: list, reduce_each: bool, factor: float) -> float:
    """Accumulate the gradients of the loss times `factor`; gives this rank's loss."""
    total = 0.0
    for index, (tokens, targets) in enumerate(parts):
        with nullcontext() if reduce_each or index == len(parts) - 1 else no_sync(model):
            loss = F.cross_entropy(model(tokens), targets) * (1 / len(parts))
            scaler.scale(loss * factor).backward()
        total += loss.item()
    return total


def freeze(model: GPT, patterns: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not features.picked(name, patterns)


def add_adapters(model: GPT) -> None:
    nn.add_lora(model, features.LORA_RANK, alpha=features.LORA_ALPHA, targets=features.LORA_LAYERS)


def clip_norm(model: GPT, norm_type: float) -> float:
    return nn.utils.clip_grad_norm_(model.parameters(), features.MAX_NORM[norm_type], norm_type)


def clip_value(model: GPT) -> float:
    """What there is to clip: the largest value."""
    largest = nn.utils.grad_norm(model.parameters(), inf)
    nn.utils.clip_grad_value_(model.parameters(), features.CLIP_VALUE)
    return largest


if __name__ == "__main__":
    result = run(sys.argv[1], optimizer="adamw")
    if init_device_mesh("auto").rank == 0:
        np.savez(sys.argv[2], **result)
