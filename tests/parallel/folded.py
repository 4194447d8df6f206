"""A small Llama whose experts lie along a fold of the axes of any mesh, and one function that trains it."""

from functools import cache

import numpy as np

import shardrt
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import nn
from shardrt.comm import objects
from shardrt.fsdp import fully_shard, set_gradient_divide_factor
from shardrt.parallel import expert_plan, parallelize_module
from tests import lab
from tests.parallel.sequences import (
    AXES,
    BATCH,
    PLAN,
    TIME,
    VOCAB,
    batch_of,
    data_of,
    mesh_of,
)
from tests.ranks import run_ranks

SHAPE = {
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 16,
    "n_hidden": 12,
    "block_size": TIME,
    "vocab_size": VOCAB,
    "init_std": 0.2,
    "experts": 8,
    "experts_per_token": 2,
    "balance_loss": 0.3,
}


def make(**changes):
    shardrt.manual_seed(3)
    return Llama(LlamaConfig(**{**SHAPE, **changes}))


def build(
    mesh,
    ep=1,
    over=AXES[1:],
    sequence=False,
    experts_first=False,
    balanced=True,
    before=None,
    model=None,
    **settings,
):
    """The model, cut along tp, cp and ep, and sharded over what is left. balanced: over the data as well."""
    model = make() if model is None else model
    fold = mesh.fold("ep", ep, over=over)
    plans = [(mesh["tp"], plan_of(model, sequence_parallel=sequence)), (mesh["cp"], PLAN)]
    plans.insert(0 if experts_first else 2, (fold["ep"], expert_plan(model)))
    for axis, plan in plans:
        parallelize_module(model, axis, plan)
    if balanced:
        nn.balance_over(model, data_of(mesh))
    for block in model.blocks:
        if before is not None:
            before(block)
        fully_shard(block.mlp.experts, mesh=fold["efsdp"], **settings)
        fully_shard(block, mesh=data_of(mesh), **settings)
    return fully_shard(model, mesh=data_of(mesh), **settings)


def train(axes, ep=1, steps=2, documents=False, mean=False, ignoring=False, **how):
    """What lab.learn gives on this rank, with the losses of all.

    mean: gradients are divided by the number of ranks with losses of their own. ignoring: some targets.
    """
    mesh = mesh_of(**axes)
    model = build(mesh, ep, **how)
    if not mean:
        set_gradient_divide_factor(model, 1.0)
    scale = (data_of(mesh).size if mean else 1) / (BATCH * TIME)

    def step(number):
        batch = batch_of(number, mesh, documents)
        if ignoring:
            batch["targets"][batch["targets"] < 15] = -100
        loss = model(**batch) * scale
        loss.backward()
        return loss.item() / scale / (BATCH * TIME)

    found = lab.learn(model, step, steps=steps, after=lambda: nn.update_expert_bias(model, rate=0.01))
    everyone = objects.all_gather_object(mesh.communicator("control"), found["losses"])
    return found | {"losses": np.sum(everyone, 0) / mesh.size_of("tp")}


def trained(axes, *args, **how):
    """What rank 0 has of `train` on all ranks."""
    return run_ranks(int(np.prod([*axes.values()])), train, axes, *args, **how)[0]


@cache
def alone(documents=False, ignoring=False, **changes):
    return run_ranks(1, lambda: train({}, documents=documents, ignoring=ignoring, model=make(**changes)))[0]
