"""Draws the memory plan of Llama 3.2 1B for each strategy: a picture of docs/learn/strategies.md.

python docs/figures/memory.py docs/figures/memory.svg

The bytes are those that memory_plan gives rank 0 of 8 ranks that share no memory, float32, AdamW.
"""

from drawing import DARK, GRADIENTS, GREY, OPTIMIZER, PARAMETERS, Drawing, write

from shardrt import device
from shardrt.comm import init_device_mesh
from shardrt.comm import world as worlds
from shardrt.comm.simulated import world_of
from shardrt.device.cpu import CPUDevice
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import ShardingStrategy, fully_shard, memory_plan
from shardrt.models.llama import SIZES, Llama

N, COPIES = 8, 2
CATEGORIES = {
    "sharded parameters": PARAMETERS,
    "gathered parameters": "#9ecae9",
    "sharded gradients": GRADIENTS,
    "full gradients": "#ffbf79",
    "optimizer state": OPTIMIZER,
}


def planned(strategy: str) -> dict[str, int]:
    """Bytes on the device of rank 0, by category."""
    here = SimulatedDevice(CPUDevice)
    with device.use(device.current()), worlds.use(world_of(N, here)):
        mesh = init_device_mesh("auto", (COPIES, N // COPIES) if strategy.startswith("HYBRID") else None)
        model = Llama(SIZES["llama-3.2-1b"])
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, strategy=strategy)
        return memory_plan(model).device


def picture() -> Drawing:
    """One bar for each strategy."""
    plans = {strategy: planned(strategy) for strategy in ShardingStrategy.__members__}
    most = max(sum(plan.values()) for plan in plans.values())
    left, height, scale = 196, 26, 480 / most
    drawing = Drawing(760, 300, "Memory of a rank for each strategy, Llama 3.2 1B on 8 ranks")
    drawing.text(
        12, 26, f"Llama 3.2 1B in float32 on {N} ranks: GB of each rank, without activations", bold=True
    )
    for number, (strategy, plan) in enumerate(plans.items()):
        y, x = 46 + number * (height + 8), float(left)
        drawing.text(12, y + 17, strategy)
        for category, fill in CATEGORIES.items():
            if plan.get(category):
                width = plan[category] * scale
                text = f"{plan[category] / 1e9:.1f}" if width > 24 else ""
                drawing.box(x, y, width, height, fill, text, ink=DARK if fill[1] in "9f" else "")
                x += width
        drawing.text(x + 8, y + 17, f"{sum(plan.values()) / 1e9:.1f}", bold=True)
    y = 46 + len(plans) * (height + 8) + 20
    drawing.key(12, y, [*CATEGORIES.items()][:0] or [(fill, name) for name, fill in CATEGORIES.items()])
    drawing.text(12, y + 24, f"HYBRID: {COPIES} copies of {N // COPIES} shards.", GREY)
    return drawing


if __name__ == "__main__":
    write(picture)
