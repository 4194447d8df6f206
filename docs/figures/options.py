"""Draws the memory plan of GPT-2 with options that save memory: the picture of docs/explanation/memory.md.

python docs/figures/options.py docs/figures/options.svg

The bytes are those that memory_plan gives rank 0 of 4 ranks that share no memory.
"""

from collections.abc import Callable

import numpy as np
from drawing import DARK, GRADIENTS, GREY, OPTIMIZER, PARAMETERS, Drawing, write

from shardrt import device
from shardrt.comm import init_device_mesh
from shardrt.comm import world as worlds
from shardrt.comm.simulated import world_of
from shardrt.device.cpu import CPUDevice
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import CPUOffloadPolicy, MemoryPlan, fully_shard, memory_plan
from shardrt.models.gpt import GPT, GPTConfig
from shardrt.recompute import checkpoint_blocks

RANKS = 4
CATEGORIES = {
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "optimizer state": OPTIMIZER,
    "activations": "#e45756",
}
ROWS = (
    "NO_SHARD",
    "FULL_SHARD",
    "and blocks recomputed",
    "and the loss in chunks",
    "and optimizer state on the host",
)
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}


def planned(number: int) -> MemoryPlan:
    """The plan of rank 0 with the options of one row."""
    here = SimulatedDevice(CPUDevice)
    with device.use(device.current()), worlds.use(world_of(RANKS, here)):
        mesh = init_device_mesh("auto")
        model = GPT(GPTConfig(**SHAPE, loss_chunk=1024 if number >= 3 else 0))
        if number > 1:
            checkpoint_blocks(model.blocks)
        policy = CPUOffloadPolicy(parameters=False, gradients=False) if number == 4 else None
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, strategy=None if number else "NO_SHARD", offload_policy=policy)
        tokens = np.zeros((4, 1024), np.int64)
        return memory_plan(model, step=lambda: model(tokens, tokens).backward())


def picture(plan_of: Callable[[int], MemoryPlan] = planned) -> Drawing:
    """One bar for each row."""
    plans = [plan_of(number).device for number in range(len(ROWS))]
    left, height, scale = 212, 26, 470 / max(sum(plan.values()) for plan in plans)
    drawing = Drawing(760, 262, "Memory of a rank of GPT-2 with options that save memory")
    drawing.text(
        12, 26, f"GPT-2 124M in float32 on {RANKS} ranks, 4 x 1,024 tokens on each: GB of a rank", bold=True
    )
    for number, (name, plan) in enumerate(zip(ROWS, plans, strict=True)):
        y, x = 46 + number * (height + 8), float(left)
        drawing.text(12, y + 17, name)
        rest = sum(plan.values())
        for category, fill in CATEGORIES.items():
            nbytes = sum(size for key, size in plan.items() if category in key)
            rest -= nbytes
            if nbytes:
                drawing.box(
                    x, y, nbytes * scale, height, fill, f"{nbytes / 1e9:.2f}" if nbytes * scale > 32 else ""
                )
                x += nbytes * scale
        if rest:
            drawing.box(x, y, rest * scale, height, GREY)
            x += rest * scale
        drawing.text(x + 8, y + 17, f"{sum(plan.values()) / 1e9:.2f}", DARK, bold=True)
    drawing.key(
        12,
        46 + len(ROWS) * (height + 8) + 24,
        [(fill, name) for name, fill in CATEGORIES.items()] + [(GREY, "staging")],
    )
    return drawing


if __name__ == "__main__":
    write(picture)
