"""A small GPT and what it is trained with: the variants of tests/gpu, tests/cuda and tests/softgpu."""

from dataclasses import replace

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.activation_offload import offload_activations
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    set_find_unused_parameters,
)
from shardrt.parallel import parallelize_module
from shardrt.recompute import checkpoint

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=29)
STEPS = 2


def made(
    name,
    *,
    config=CONFIG,
    sharded=True,
    prepare=None,
    dropout=0.0,
    communicator="auto",
    reduction="nccl",
    layers=None,
    shape=None,
    tp=False,
    sequence=False,
    outermost=None,
    **settings,
):
    """(mesh of the data, model): every block and the whole are units, if it is sharded.

    tp: the second axis of `shape` cuts them; sequence: and what is between them. outermost: other settings of
    the outermost unit.
    """
    names = ("dp_shard", "tp") if tp else None
    mesh = init_device_mesh(name, shape, names, communicator=communicator, reduction=reduction)
    shardrt.manual_seed(0)
    model = GPT(replace(config, dropout=dropout, n_layer=layers or config.n_layer))
    if tp:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
        mesh = mesh["dp_shard"]
    for block in model.blocks:
        if prepare is not None:
            prepare(block)
        if sharded:
            fully_shard(block, mesh=mesh, **settings)
    if not sharded:
        return mesh, model
    if "mp_policy" in settings:
        settings["mp_policy"] = replace(settings["mp_policy"], output_dtype="float32")  # the logits
    return mesh, fully_shard(model, mesh=mesh, **settings | (outermost or {}))


def train(name, directory=None, *, scaled=False, parts=1, in_backward=False, freeze=False, **settings):
    """[(loss, norm)] of every step and the parameters at the end."""
    mesh, model = made(name, **settings)
    if freeze:
        set_find_unused_parameters(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
    scaler = optim.GradScaler(init_scale=8.0, enabled=scaled)
    random, seen = np.random.default_rng(0), []
    for step in range(STEPS):
        shardrt.manual_seed(0, step)
        text = random.integers(0, CONFIG.vocab_size, (4, CONFIG.block_size + 1))
        rows = len(text) // mesh.size
        mine = text[mesh.rank * rows : (mesh.rank + 1) * rows]
        for parameter in model.parameters() if freeze else ():
            parameter.requires_grad = step == 0 or parameter.ndim == 1
        total = 0.0
        for part in np.split(mine, parts):
            loss = F.cross_entropy(model(part[:, :-1]), part[:, 1:])
            scaler.scale(loss).backward()
            total += loss.item()
        norm = 0.0
        if not in_backward:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((total, norm))
    return seen, full_state_dict(model)


def agree(found, expected, tolerance):
    for (losses, weights), (other_losses, other_weights) in zip(found, expected, strict=True):
        np.testing.assert_allclose(losses, other_losses, rtol=tolerance)
        for key, values in (other_weights or {}).items():
            np.testing.assert_allclose(weights[key], values, rtol=0, atol=10 * tolerance, err_msg=key)


VARIANTS = {
    "float32": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32", full_precision=(nn.LayerNorm,))},
    "bfloat16 on the wire": {"mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")},
    "float16, scaled": {"mp_policy": MixedPrecisionPolicy("float16", "float32"), "scaled": True},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "accumulation": {"parts": 2},
    "dropout": {"dropout": 0.2},
    "recomputation": {"prepare": checkpoint, "dropout": 0.2},
    "activations on the host": {"prepare": offload_activations},
    "all on the host": {"offload_policy": CPUOffloadPolicy()},
    "updates on the host": {"offload_policy": CPUOffloadPolicy(step="host")},
    "frozen late": {"freeze": True},
    "frozen late, bfloat16": {"freeze": True, "mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")},
    "updates in backward": {"in_backward": True},
    "updates in backward, on the host": {"offload_policy": CPUOffloadPolicy(), "in_backward": True},
}
# With what else tensor parallelism trains, and on how many ranks.
TENSOR = {
    "tp 2, bfloat16": (2, {"shape": (1, 2), **VARIANTS["bfloat16"]}),
    "tp 2, sequence, float16, scaled": (
        2,
        {"shape": (1, 2), "sequence": True, **VARIANTS["float16, scaled"]},
    ),
    "tp 2, sequence, activations on the host, accumulation": (
        2,
        {"shape": (1, 2), "sequence": True, "prepare": offload_activations, "parts": 2},
    ),
    "dp 2, tp 2, recomputation": (4, {"shape": (2, 2), **VARIANTS["recomputation"]}),
    "dp 2, tp 2, sequence, all on the host": (
        4,
        {"shape": (2, 2), "sequence": True, **VARIANTS["all on the host"]},
    ),
    "dp 2, tp 2, updates in backward": (4, {"shape": (2, 2), **VARIANTS["updates in backward"]}),
}
TENSOR = {name: (ranks, {"tp": True, **settings}) for name, (ranks, settings) in TENSOR.items()}
