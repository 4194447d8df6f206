"""Trains a small GPT on Python, then adapts it to another text by LoRA.

    python train_lora.py                 # one rank
    mpirun -n 2 python train_lora.py     # two ranks: the same losses, but for rounding

A copy of this file is a place to begin: it needs shardrt, an MPI and nothing of the repository.
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.comm.objects import all_gather_object
from shardrt.fsdp import by_class, full_parameters, wrap
from shardrt.models.gpt import GPT, Block, GPTConfig

STEPS, BATCH, CONTEXT = 60, 8, 32  # BATCH: sequences per step, over all ranks
SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=CONTEXT, vocab_size=256)


def main() -> None:
    mesh = init_device_mesh("auto")
    program = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int64)
    poem = np.frombuffer(b"to be, or not to be, that is the question. " * 200, np.uint8).astype(np.int64)

    shardrt.manual_seed(0)
    base = wrap(GPT(SHAPE), by_class(Block), mesh=mesh)  # a unit for each block, and one for the rest
    train("base", base, list(base.parameters()), 3e-3, program, mesh)
    with full_parameters(base):  # whole arrays, lent; a program of your own reads them from a file
        weights = {name: parameter.data.copy() for name, parameter in base.named_parameters()}

    shardrt.manual_seed(1)
    model = GPT(SHAPE)
    model.load_state_dict(weights)  # before the adapters, which the weights do not have
    nn.add_lora(model, rank=8, alpha=32.0)  # of all linear layers; freezes all else
    wrap(model, by_class(Block), mesh=mesh)  # after the adapters; frozen shards are never reduced
    train("lora", model, nn.lora_parameters(model), 1e-2, poem, mesh)

    state = full_state_dict(model)  # every rank calls it, rank 0 gets it
    adapters = {name: values for name, values in state.items() if ".lora_" in name}
    with full_parameters(model, writeback=True):
        nn.merge_lora(model)  # into the weights: the model computes the same without adapters
    if mesh.rank == 0:
        save_file(adapters, "adapters.safetensors")
        part = sum(values.size for values in adapters.values()) / sum(v.size for v in state.values())
        print(f"wrote adapters.safetensors: {part:.1%} of the parameters")


def train(
    name: str, model: nn.Module, trained: list[nn.Parameter], lr: float, text: np.ndarray, mesh: DeviceMesh
) -> None:
    """STEPS steps on windows of `text`, which are functions of the step. Only `trained` is updated."""
    optimizer = optim.AdamW(trained, lr=lr)
    for step in range(STEPS):
        starts = np.random.default_rng(step).integers(0, text.size - CONTEXT, BATCH)
        windows = np.stack([text[start : start + CONTEXT + 1] for start in starts])[mesh.rank :: mesh.size]
        loss = F.cross_entropy(model(windows[:, :-1]), windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % 10 == 0:
            mean = np.mean(all_gather_object(mesh.communicator("control"), loss.item()))
            if mesh.rank == 0:
                print(f"{name}: step {step + 1}/{STEPS}  loss {mean:.4f}", flush=True)


if __name__ == "__main__":
    main()
