"""Small GPTs and Llamas, and one function that trains them on any axes: copies, shards, tensor."""

from contextlib import ExitStack, nullcontext
from functools import cache

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import full_gradients, fully_shard, no_sync
from shardrt.nn.share import joined
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import parallelize_module

VOCAB, BATCH, TIME = 37, 4, 16  # no number of ranks divides the vocabulary
AXES = ("dp_replicate", "dp_shard", "tp")


def make(kind, **changes):
    """Four heads; a Llama has two of keys and values."""
    sizes = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": TIME,
        "vocab_size": VOCAB,
        "init_std": 0.1,
    }
    shardrt.manual_seed(3)
    if kind == "gpt":
        return GPT(GPTConfig(**{**sizes, "dropout": 0.1, **changes}))
    return Llama(LlamaConfig(**{**sizes, "n_kv_head": 2, "n_hidden": 48, **changes}))


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


def whole_gradients(model):
    """Name -> whole gradient on rank 0; elsewhere None or a part. Collective."""
    found, parameters = {}, dict(model.named_parameters())
    for name, gradient in full_gradients(model):
        whole = joined(parameters[name].share, np.array(gradient))
        found[name] = None if whole is None else whole.copy()
    return found


def train(kind, axes, sequence=False, steps=10, micro_batches=1, synced=True, **how):
    """{"initial", "losses", "norms", "gradients" of the first step, "final"} as this rank has them."""
    mesh = mesh_of(*axes)
    model = build(kind, mesh, sequence, **how)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = {"initial": full_state_dict(model), "losses": [], "norms": []}
    for step in range(steps):
        shardrt.manual_seed(3, step=step)
        parts = zip(*(np.split(array, micro_batches) for array in batch_of(step, mesh)), strict=True)
        total = 0.0
        for number, (tokens, targets) in enumerate(parts, start=1):
            with ExitStack() as stack:
                stack.enter_context(nullcontext() if synced or number == micro_batches else no_sync(model))
                loss = model(tokens, targets) * (1 / micro_batches)
                loss.backward()
            total += float(loss.item())
        told.setdefault("gradients", whole_gradients(model))
        told["losses"].append(total)
        told["norms"].append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return told | {"final": full_state_dict(model)}


def trained(kind, axes, *args, **how):
    """What rank 0 has of `train` on all ranks, with the mean of the losses and all ranks' norms."""
    ranks = thread.run(int(np.prod(axes)), train, kind, axes, *args, **how)
    losses = np.mean([told["losses"] for told in ranks], 0)
    return ranks[0] | {"losses": losses, "all norms": [told["norms"] for told in ranks]}


@cache
def alone(kind, **how):
    """On one rank, with the whole batch."""
    return trained(kind, (1, 1, 1), **how)


def same_to_1e5(found, expected):
    assert np.allclose(found["losses"], expected["losses"], rtol=0, atol=1e-5)
    assert np.allclose(found["norms"], expected["norms"], rtol=0, atol=1e-5)
    for what in ("gradients", "final"):
        assert found[what].keys() == expected[what].keys()
        for name, values in expected[what].items():
            np.testing.assert_allclose(found[what][name], values, rtol=0, atol=1e-5, err_msg=name)


def same_bits(found, expected):
    for what in ("losses", "norms"):
        assert np.array_equal(found[what], expected[what]), what
    for what in ("gradients", "final"):
        for name, values in expected[what].items():
            np.testing.assert_array_equal(found[what][name], values, err_msg=name)
