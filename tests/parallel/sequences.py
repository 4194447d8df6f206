"""Small models whose sequences and experts lie on several ranks, beside other axes, and on one.

mpirun -n 2 python -m tests.parallel.sequences FILE trains, and measures what activations take beside the
plan; rank 0 writes both to FILE.npz.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import gc
import sys
from functools import cache

import numpy as np

from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh, objects
from shardrt.fsdp import fully_shard, memory_plan, set_gradient_divide_factor
from shardrt.parallel import ContextParallel, expert_plan, parallelize_module, shard_sequence
from tests import lab
from tests.parallel.nets import BATCH, TIME, VOCAB, make
from tests.ranks import run_ranks

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
PLAN = {"blocks.*.attention": ContextParallel()}


def mesh_of(copies=1, shards=1, cp=1, tp=1):
    return init_device_mesh("cpu", (copies, shards, cp, tp), AXES)


def data_of(mesh):
    """The ranks over which gradients are summed."""
    if mesh.size_of("dp_replicate") == 1:
        return mesh.flat("dp_shard", "cp")
    each = mesh.size_of("dp_shard") * mesh.size_of("cp")
    return mesh.fold("shards", each, over=AXES[:3], rest="dp_replicate")


def build(
    kind,
    mesh,
    ep=1,
    over=AXES[1:],
    sequence=False,
    first="tp",
    balanced=True,
    before=None,
    changes=None,
    mean=False,
    **settings,
):
    """The model, cut along tp and cp and its experts along ep, and sharded over what is left.

    first: the axis along which it is cut first. balanced: experts, over the data as well. mean: gradients are
    divided by the number of ranks with losses of their own.
    """
    model = make(kind, **(changes or {}))
    plans = {"tp": (mesh["tp"], plan_of(model, sequence_parallel=sequence)), "cp": (mesh["cp"], PLAN)}
    if kind == "experts":
        fold = mesh.fold("ep", ep, over=over)
        plans["ep"] = fold["ep"], expert_plan(model)
    for name in sorted(plans, key=lambda name: name != first):
        parallelize_module(model, *plans[name])
    if kind == "experts" and balanced:
        nn.balance_over(model, data_of(mesh))
    for block in model.blocks:
        if before is not None:
            before(block)
        if kind == "experts":
            fully_shard(block.mlp.experts, mesh=fold["efsdp"], **settings)
        fully_shard(block, mesh=data_of(mesh), **settings)
    fully_shard(model, mesh=data_of(mesh), **settings)
    if not mean:
        set_gradient_divide_factor(model, 1.0)
    return model


def batch_of(step, mesh, documents):
    """This rank's part of a step's sequences, as arguments of the model."""
    random = np.random.default_rng(step)
    rows = random.integers(0, VOCAB, (BATCH, TIME + 1))
    numbers = np.sort(random.integers(0, 3, (BATCH, TIME)), axis=1)
    parts = mesh.size_of("dp_replicate") * mesh.size_of("dp_shard")
    place = mesh.rank_of("dp_replicate") * mesh.size_of("dp_shard") + mesh.rank_of("dp_shard")
    rows, numbers = (np.split(array, parts)[place] for array in (rows, numbers))
    starts = F.document_starts(numbers) if documents else None
    part = shard_sequence(rows[:, :-1], rows[:, 1:], mesh=mesh["cp"], starts=starts)
    return {**part._asdict(), "reduction": "sum"}


def train(kind, axes, documents=False, steps=2, mean=False, ignoring=False, **how):
    """What lab.learn gives on this rank, with the losses of all. ignoring: some targets."""
    mesh = mesh_of(**axes)
    model = build(kind, mesh, mean=mean, **how)
    scale = (data_of(mesh).size if mean else 1) / (BATCH * TIME)

    def step(number):
        batch = batch_of(number, mesh, documents)
        if ignoring:
            batch["targets"][batch["targets"] < 15] = -100
        loss = model(**batch) * scale
        loss.backward()
        return loss.item() / scale / (BATCH * TIME)

    def after():
        if kind == "experts":
            nn.update_expert_bias(model, rate=0.01)

    found = lab.learn(model, step, steps=steps, after=after)
    everyone = objects.all_gather_object(mesh.communicator("control"), found["losses"])
    return found | {"losses": np.sum(everyone, 0) / mesh.size_of("tp")}


def trained(kind, axes, *args, **how):
    """What rank 0 has of `train` on all ranks."""
    return run_ranks(int(np.prod([*axes.values()])), train, kind, axes, *args, **how)[0]


@cache
def alone(kind, documents=False, steps=2, ignoring=False, **changes):
    """On one rank, with whole sequences."""
    return trained(kind, {}, documents, steps, ignoring=ignoring, changes=changes)


def long_model(mesh):
    """One of which activations are most, at 512 positions; and what runs a step of it."""
    shardrt.manual_seed(3)
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 128, "n_hidden": 256}
    model = Llama(LlamaConfig(**shape, block_size=512, vocab_size=64, loss_chunk=128))
    parallelize_module(model, mesh["cp"], PLAN)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_of(mesh))
    part = shard_sequence(*np.random.default_rng(0).integers(0, 64, (2, 2, 512)), mesh=mesh["cp"])
    return model, lambda: model(**part._asdict()).backward()


def planned(cp):
    """Bytes of activations that the plan says, on each rank."""

    def plan():
        model, step = long_model(mesh_of(cp=cp))
        return memory_plan(model, step=step).device["activations"]

    return run_ranks(cp, plan)


def main(path):
    message = train("gpt", {"cp": 2}, documents=True)
    model, step = long_model(mesh_of(cp=2))
    activations = memory_plan(model, step=step).device["activations"]
    gc.collect()
    here = device.get("cpu")
    optimizer, before = optim.SGD(model.parameters(), lr=0.1), here._pool.held_bytes
    here.reset_peak()
    for _ in range(2):
        step()
        optimizer.zero_grad()
    kept = {f"final/{name}": values for name, values in message["final"].items()}
    figures = {"losses": message["losses"], "planned": activations, "taken": here.peak_bytes() - before}
    if kept:
        np.savez(path, **kept, **figures)


if __name__ == "__main__":
    main(*sys.argv[1:])
