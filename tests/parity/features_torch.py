"""Runs jobs in every way that test_features.py compares with, in PyTorch on gloo, one process per rank.

python -m tests.parity.features_torch FOLDER, in two processes. FOLDER/torch.npz is what they made of
FOLDER/job.npz: NAME/losses, NAME/gradient/..., for each name in TWINS; and curve/losses and
curve bfloat16/losses of FOLDER/curve.npz.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.peers.torch_models import GPT
from bench.peers.torch_step import leave
from tests.parity import features
from tests.parity.job import Job, Notes, load

Group = dist.ProcessGroup


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = dist.new_group(range(1))  # made by all
    results = {name: run(twin, dist.group.WORLD, *load(f"{folder}/job.npz")) for name, twin in TWINS.items()}
    if dist.get_rank() == 0:
        # The whole batch: two ranks would take ten times as long, and the steps above are theirs.
        curve = load(f"{folder}/curve.npz")
        results["curve"] = run(Twin(lambda model, _: model, optimizer=adamw), alone, *curve)
        low = partial(low_precision, policy=MixedPrecisionPolicy(BF16, torch.float32))
        results["curve bfloat16"] = run(Twin(low, optimizer=adamw), alone, *curve)
        named = {f"{name}/{key}": v for name, result in results.items() for key, v in result.items()}
        np.savez(f"{folder}/torch.npz", **named)
    leave(dist)


# -- how a model is cut over the ranks of a group: each gives what is called


def ddp(model: GPT, group: Group) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def fsdp2(model: GPT, group: Group, by_block: bool = True, **settings) -> nn.Module:
    """Each block and the whole are units, or the whole alone."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks if by_block else ():
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def low_precision(model: GPT, group: Group, policy: MixedPrecisionPolicy) -> nn.Module:
    """The logits are cast to float32, blocks hand on what they compute."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))


# -- what is done to a model before


def freeze(model: GPT, patterns: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not features.picked(name, patterns))


def add_adapters(model: GPT) -> None:
    """LoRA, written by hand."""
    freeze(model, ("*",))
    for path, layer in model.named_modules():
        if features.picked(path, features.LORA_LAYERS):
            outputs, inputs = layer.weight.shape
            layer.lora_a = nn.Parameter(torch.empty(features.LORA_RANK, inputs))
            layer.lora_b = nn.Parameter(torch.empty(outputs, features.LORA_RANK))
            layer.forward = partial(adapted, layer)


def adapted(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    beside = F.linear(F.linear(x, layer.lora_a), layer.lora_b)
    return F.linear(x, layer.weight, layer.bias) + features.LORA_ALPHA / features.LORA_RANK * beside


# -- the rest of a step


def sgd(parameters, group: Group):
    return torch.optim.SGD(parameters, **features.OPTIMIZERS["sgd"], foreach=True)


def adamw(parameters, group: Group):
    return torch.optim.AdamW(parameters, **features.OPTIMIZERS["adamw"], foreach=True)


def zero(parameters, group: Group):
    """SGD whose state is cut."""
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, process_group=group, **features.OPTIMIZERS["sgd"]
    )


def clip_norm(model: GPT, group: Group, norm_type: float) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), features.MAX_NORM[norm_type], norm_type)
    return norm.full_tensor().item()


def clip_value(model: GPT, group: Group) -> float:
    """What there is to clip: the largest value."""
    largest = torch.stack([p.grad.to_local().abs().max() for p in model.parameters()]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    nn.utils.clip_grad_value_(model.parameters(), features.CLIP_VALUE)
    return largest.item()


@dataclass(frozen=True)
class Twin:
    """One way to train; what is not said is FSDP2 by block, SGD with momentum, one batch per step."""

    shard: Callable[[GPT, Group], nn.Module] = fsdp2
    prepare: Callable[[GPT], None] = lambda model: None
    optimizer: Callable = sgd
    micro_batches: int = 1
    reduce_each: bool = True
    clip: Callable[[GPT, Group], float] | None = None
    scaled: bool = False


# Collectives between processes are what a run takes time for, so where the cut is not the point there is one.
one_unit = partial(fsdp2, by_block=False)
BF16, FP16 = torch.bfloat16, torch.float16
TWINS = {
    "fsdp2": Twin(),
    "fsdp2 adamw": Twin(optimizer=adamw),
    "fsdp2 kept": Twin(partial(fsdp2, reshard_after_forward=False)),
    "ddp": Twin(ddp),
    "zero": Twin(ddp, optimizer=zero),
    "reduced each": Twin(one_unit, micro_batches=features.MICRO_BATCHES),
    "reduced last": Twin(one_unit, micro_batches=features.MICRO_BATCHES, reduce_each=False),
    **{f"clipped {p}": Twin(one_unit, clip=partial(clip_norm, norm_type=p)) for p in features.MAX_NORM},
    "clipped values": Twin(one_unit, clip=clip_value),
    **{f"frozen {key}": Twin(prepare=partial(freeze, patterns=p)) for key, p in features.FROZEN.items()},
    "lora": Twin(prepare=add_adapters),
    "bfloat16 float32": Twin(partial(low_precision, policy=MixedPrecisionPolicy(BF16, torch.float32))),
    "bfloat16 bfloat16": Twin(partial(low_precision, policy=MixedPrecisionPolicy(BF16, BF16))),
    "float32 scaled": Twin(one_unit, scaled=True),
    "float16 float32": Twin(
        partial(low_precision, policy=MixedPrecisionPolicy(FP16, torch.float32)), scaled=True
    ),
    "float16 float16": Twin(partial(low_precision, policy=MixedPrecisionPolicy(FP16, FP16)), scaled=True),
}


def run(twin: Twin, group: Group, job: Job, weights: dict, tokens: np.ndarray, targets: np.ndarray) -> dict:
    """Train as the twin says; the notes of all ranks together, on rank 0."""
    model = GPT(layers=job.layers, heads=job.heads, width=job.width, time=job.time, vocab=job.vocab)
    twin.prepare(model)
    model.load_state_dict(
        {name: torch.from_numpy(weights[name].copy()) for name, _ in model.named_parameters()}
    )
    called = twin.shard(model, group)
    optimizer = twin.optimizer(model.parameters(), group)
    scaler = torch.amp.GradScaler("cpu", **features.SCALER, enabled=twin.scaled)

    rank, size = group.rank(), group.size()
    notes = Notes()
    for step in range(len(tokens)):
        parts = features.parts_of(tokens[step], targets[step], twin.micro_batches, rank, size)
        factor = inf if twin.scaled and features.overflows(step, rank, size) else 1.0
        notes.losses.append(backward(twin, called, scaler, parts, factor))
        if twin.scaled:
            scaler.unscale_(optimizer)
        if twin.clip is not None:
            notes.add("number", {"clipped": twin.clip(model, group)})
        if job.detailed:
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            notes.add("gradient", {name: held(gradient) for name, gradient in gradients.items()})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if job.detailed:
            notes.add("parameter", {n: held(p.detach()) for n, p in model.named_parameters()})
        notes.add("number", {"scale": scaler.get_scale()})
    return together(notes, group, model.wte.weight)


def backward(
    twin: Twin, called: nn.Module, scaler: torch.amp.GradScaler, parts: list, factor: float
) -> float:
    """Accumulate the gradients of the loss times `factor`; gives this rank's loss."""
    total = 0.0
    for index, (tokens, targets) in enumerate(parts):
        x, y = torch.from_numpy(tokens), torch.from_numpy(targets)
        with synchronized(called, twin.reduce_each or index == len(parts) - 1):
            loss = F.cross_entropy(called(x).flatten(0, 1), y.flatten()) / len(parts)
            scaler.scale(loss * factor).backward()
        total += loss.item()
    return total


def synchronized(called: nn.Module, now: bool):
    """A context in which backward reduces, or does not."""
    if isinstance(called, FSDPModule):
        called.set_requires_gradient_sync(now)
        return nullcontext()
    return nullcontext() if now else called.no_sync()


def held(tensor: torch.Tensor) -> np.ndarray:
    """What this rank has of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numpy()


def together(notes: Notes, group: Group, parameter: torch.Tensor) -> dict[str, np.ndarray]:
    """One result of all ranks' notes, on rank 0: FSDP2 cuts along the first axis, in the order of ranks."""
    results = [None] * group.size()
    dist.gather_object(notes.result(), results if group.rank() == 0 else None, group=group)
    if group.rank() != 0:
        return {}
    shards = parameter.device_mesh.size(-1) if isinstance(parameter, DTensor) else 1
    whole = dict(results[0], losses=np.mean([result["losses"] for result in results], axis=0))
    for key in whole:
        if key.startswith(("gradient/", "parameter/")):
            whole[key] = np.concatenate([result[key] for result in results[:shards]], axis=1)
    return whole


if __name__ == "__main__":
    main(*sys.argv[1:])
