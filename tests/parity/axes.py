"""What both sides of test_axes.py do, in numbers and names; knows neither shardrt nor PyTorch."""

import numpy as np

from bench.workload import LlamaWorkload, ViTWorkload, Workload

RANKS = 2
JOBS = {
    "gpt": Workload(layers=2, dim=32, heads=4, seq=16, batch=8, vocab=64),
    "llama": LlamaWorkload(layers=2, dim=32, heads=4, seq=16, batch=8, vocab=64, kv_heads=2, hidden=48),
    "vit": ViTWorkload(layers=2, dim=32, heads=4, hidden=48, image=8, patch=4, batch=8, classes=5),
}
# AdamW makes of rounding steps of full size: the gradient of a bias of keys is nothing else.
OPTIMIZER = {"gpt": "sgd", "llama": "adamw", "vit": "sgd"}
MICRO_BATCHES = 4  # of a pipeline, and of one process that accumulates

# PyTorch's ways.
ALONE, PIPELINE = "alone", "1F1B"
TENSOR = ("tp", "tp, sequence, loss")  # loss: of logits that stay cut
VARIANTS = {"gpt": (ALONE, PIPELINE, *TENSOR), "llama": (ALONE, PIPELINE, *TENSOR), "vit": (ALONE, PIPELINE)}


def save_weights(path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Values that are nowhere 0 or 1."""
    generator = np.random.default_rng(0)
    named = {}
    for name, shape in shapes.items():
        center = float("norm" in name and name.endswith("weight"))
        named[name] = generator.normal(center, 0.1, shape).astype(np.float32)
    np.savez(path, **named)
