"""Small GPTs and Llamas, and one function that trains them on any axes: copies, shards, tensor."""

from contextlib import nullcontext
from functools import cache

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt.activation_offload import offload_activations
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, fully_shard, no_sync
from shardrt.parallel import parallelize_module
from shardrt.recompute import checkpoint
from tests import lab

VOCAB, BATCH, TIME = 37, 4, 16  # no number of ranks divides the vocabulary
AXES = ("dp_replicate", "dp_shard", "tp")


MOVES = {  # what only moves things, and changes no bit
    "recompute": {"before": checkpoint},
    "recompute but matmul": {"before": lambda block: checkpoint(block, "matmul")},
    "offload activations": {"before": offload_activations},
    "both": {"before": lambda block: offload_activations(checkpoint(block))},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "step on the host": {"offload_policy": CPUOffloadPolicy(step="host")},
    "nothing kept": {"reshard_after_forward": True, "prefetch": 0},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
}


SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": TIME, "vocab_size": VOCAB, "init_std": 0.1}
EXPERTS = {"n_embd": 16, "n_hidden": 12, "init_std": 0.2}
EXPERTS |= {"experts": 8, "experts_per_token": 2, "balance_loss": 0.3}


def make(kind, **changes):
    """Four heads, "llama 1" with one of keys and values, "llama" and "experts" with two."""
    shardrt.manual_seed(3)
    if kind == "gpt":
        return GPT(GPTConfig(**{**SIZES, "dropout": 0.1, **changes}))
    own = {"n_kv_head": int(kind.split()[1]) if " " in kind else 2, "n_hidden": 48}
    return Llama(LlamaConfig(**SIZES | own | (EXPERTS if kind == "experts" else {}) | changes))


def mesh_of(copies, shards, tp):
    return init_device_mesh("cpu", (copies, shards, tp), AXES)


def data_of(mesh):
    """The axes of the data."""
    return mesh["dp_replicate", "dp_shard"] if mesh.size_of("dp_replicate") > 1 else mesh["dp_shard"]


def build(kind, mesh, sequence=False, sharded=True, before=None, changes=None, **settings):
    """The model, cut along tp and then, if `sharded`, over the axes of the data. before: of each block."""
    model = make(kind, **(changes or {}))
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    for block in model.blocks:
        if before is not None:
            before(block)
        if sharded:
            fully_shard(block, mesh=data_of(mesh), **settings)
    return fully_shard(model, mesh=data_of(mesh), **settings) if sharded else model


def batch_of(step, mesh=None):
    """(tokens, targets) of a step: all of them, or this rank's."""
    rows = np.random.default_rng(step).integers(0, VOCAB, (BATCH, TIME + 1))
    if mesh is not None:
        data = data_of(mesh)
        rows = np.split(rows, data.size)[data.rank]
    return rows[:, :-1], rows[:, 1:]


def train(kind, axes, sequence=False, steps=10, micro_batches=1, synced=True, **how):
    """What lab.learn gives on this rank."""
    mesh = mesh_of(*axes)
    model = build(kind, mesh, sequence, **how)

    def step(number):
        parts = zip(*(np.split(array, micro_batches) for array in batch_of(number, mesh)), strict=True)
        total = 0.0
        for turn, (tokens, targets) in enumerate(parts, start=1):
            with nullcontext() if synced or turn == micro_batches else no_sync(model):
                loss = model(tokens, targets) * (1 / micro_batches)
                loss.backward()
            total += float(loss.item())
        return total

    return lab.learn(model, step, steps=steps)


def trained(kind, axes, *args, **how):
    """What rank 0 has of `train` on all ranks, with the mean of the losses and all ranks' norms."""
    ranks = thread.run(int(np.prod(axes)), train, kind, axes, *args, **how)
    losses = np.mean([message["losses"] for message in ranks], 0)
    return ranks[0] | {"losses": losses, "all norms": [message["norms"] for message in ranks]}


@cache
def alone(kind, **how):
    """On one rank, with the whole batch."""
    return trained(kind, (1, 1, 1), **how)


def same_to_1e5(found, expected):
    for what in ("losses", "norms", "gradients", "final"):
        lab.assert_close(found[what], expected[what], what, atol=1e-5)


def same_bits(found, expected):
    for what in ("losses", "norms", "gradients", "final"):
        lab.assert_equal(found[what], expected[what], what)
