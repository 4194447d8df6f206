"""What both sides of test_tensor.py do, in numbers and names; knows neither shardrt nor PyTorch."""

import numpy as np

from bench.workload import LlamaWorkload, Workload
from tests.parity.features import OPTIMIZERS, STEPS  # noqa: F401  the same for all parity

JOBS = {
    "gpt": Workload(layers=2, dim=32, heads=4, seq=16, batch=4, vocab=64),
    "llama": LlamaWorkload(layers=2, dim=32, heads=4, seq=16, batch=4, vocab=64, kv_heads=4, hidden=48),
    "llama with groups": LlamaWorkload(2, 32, 4, 16, 4, 64, kv_heads=2, hidden=48),
}
# AdamW makes of rounding steps of full size: the gradient of a GPT's bias of keys is nothing else.
OPTIMIZER = {"gpt": "sgd", "llama": "adamw", "llama with groups": "adamw"}
RANKS = 2  # of PyTorch's: it can't cut 2 heads of keys and values over 4
VARIANTS = ("tp", "tp, sequence, loss")  # loss: of logits that stay cut


def save_weights(path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Values that are nowhere 0 or 1."""
    generator = np.random.default_rng(0)
    named = {}
    for name, shape in shapes.items():
        center = float("norm" in name and name.endswith("weight"))
        named[name] = generator.normal(center, 0.1, shape).astype(np.float32)
    np.savez(path, **named)
