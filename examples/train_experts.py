"""Trains a mixture of experts: each rank has some of the experts, and tokens travel to theirs.

    python train_experts.py                 # all 8 experts on one rank
    mpirun -n 2 python train_experts.py     # 4 on each of two ranks: the same losses, until rounding
                                            # sends a token to another expert

A copy of this file is a place to begin: it needs shardrt, an MPI and nothing of the repository.
"""

import argparse
from pathlib import Path

import numpy as np

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp import fully_shard
from shardrt.models.llama import Llama, LlamaConfig
from shardrt.parallel import expert_plan, parallelize_module

STEPS, BATCH, CONTEXT, EXPERTS = 60, 8, 32, 8  # BATCH: sequences per step, over all ranks


def main() -> None:
    ranks = init_device_mesh("auto").size
    mesh = init_device_mesh("auto", (ranks,), mesh_dim_names=("dp_shard",))
    # The same ranks once more: along "ep" they have other experts, along "efsdp" shards of the same.
    fold = mesh.fold("ep", ranks, over=("dp_shard",))
    shardrt.manual_seed(0)
    config = LlamaConfig(
        n_layer=2,
        n_head=4,
        n_kv_head=2,
        n_embd=64,
        n_hidden=64,
        block_size=CONTEXT,
        vocab_size=256,
        experts=EXPERTS,
        experts_per_token=2,
        balance_loss=0.01,
    )
    model = Llama(config)
    parallelize_module(model, fold["ep"], expert_plan(model))
    nn.balance_over(model, mesh)  # the balance loss is of all ranks' tokens
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=fold["efsdp"])  # a unit of its own
        fully_shard(block, mesh=mesh)  # the rest of the block
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)

    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int64)
    for step in range(STEPS):
        windows = samples(text, step)[mesh.rank :: mesh.size]
        loss = model(windows[:, :-1], windows[:, 1:])  # with the balance loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # each element once
        optimizer.step()
        load = nn.expert_load(model)["blocks.0.mlp.router"]  # tokens of this rank for each expert
        nn.update_expert_bias(model)  # ends the count
        optimizer.zero_grad()
        if step == 0 or (step + 1) % 10 == 0:
            control = mesh.communicator("control")
            mean = np.mean(all_gather_object(control, loss.item()))
            loads = np.sum(all_gather_object(control, load.tolist()), axis=0)
            if mesh.rank == 0:
                print(f"step {step + 1}/{STEPS}  loss {mean:.4f}  tokens of each expert {loads}", flush=True)


def samples(text: np.ndarray, step: int) -> np.ndarray:
    """The windows of a step, (BATCH, CONTEXT + 1): a function of the step."""
    starts = np.random.default_rng(step).integers(0, text.size - CONTEXT, BATCH)
    return np.stack([text[start : start + CONTEXT + 1] for start in starts])


if __name__ == "__main__":
    main()
