"""A GPT and a longer Llama whose sequences lie on several ranks: what is trained, and what memory is taken.

mpirun -n 2 python -m tests.parallel.sequences FILE trains, and measures what activations take beside the
plan; rank 0 writes both to FILE.npz.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import gc
import sys

import numpy as np

from models.llama import Llama, LlamaConfig
from shardrt import device, optim
from shardrt.fsdp import fully_shard, memory_plan
from shardrt.parallel import parallelize_module, shard_sequence
from tests.parallel.nets import PLAN, data_of, mesh_of, train
from tests.ranks import run_ranks


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
