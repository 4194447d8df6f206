"""What both sides of test_features.py do, in numbers and names; knows neither shardrt nor PyTorch."""

from fnmatch import fnmatch
from math import inf

import numpy as np

from tests.parity.job import Job, piece

JOB = Job(layers=2, heads=2, width=32, time=16, vocab=61)
STEPS = 10
ROWS = 12  # of a micro-batch: 1, 2, 3 and 4 ranks share them equally
MICRO_BATCHES = 4  # where a variant accumulates; the others take the first

OPTIMIZERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"lr": 1e-3, "weight_decay": 0.1},
}
MAX_NORM = {1.0: 5.0, 2.0: 0.1, 3.0: 0.05, inf: 0.01}  # by type of norm; small enough to clip at every step
CLIP_VALUE = 5e-3
SCALER = {"init_scale": 256.0, "growth_interval": 3}
OVERFLOW = 4  # the step at which the last rank's loss is infinite, where a variant scales its loss

FROZEN = {  # patterns of parameter names
    "layers": ("wpe.*", "blocks.1.*"),
    "parts of units": ("blocks.0.*.bias", "blocks.1.norm1.*", "blocks.1.mlp.up.weight", "norm.weight"),
}
LORA_RANK, LORA_ALPHA, LORA_LAYERS = 4, 6.0, ("*.qkv", "*.up")


def parts_of(tokens: np.ndarray, targets: np.ndarray, count: int, rank: int, size: int) -> list[tuple]:
    """A rank's (tokens, targets) of the first `count` micro-batches of a step."""
    rows = [slice(part * ROWS, (part + 1) * ROWS) for part in range(count)]
    return [(piece(tokens[some], rank, size), piece(targets[some], rank, size)) for some in rows]


def overflows(step: int, rank: int, size: int) -> bool:
    """Whether a scaled loss is infinite."""
    return step == OVERFLOW and rank == size - 1


def picked(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name fits one of the patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)
