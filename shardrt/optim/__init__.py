"""Optimizers over flat shards, and learning-rate schedules."""

from typing import Any

from shardrt.nn import elsewhere
from shardrt.optim.adamw import AdamW
from shardrt.optim.lion import Lion
from shardrt.optim.muon import Muon, muon_groups
from shardrt.optim.optimizer import Optimizer, decay_groups
from shardrt.optim.scaler import GradScaler
from shardrt.optim.schedule import warmup_cosine, warmup_linear, warmup_stable_decay
from shardrt.optim.sgd import SGD

__all__ = [
    "AdamW",
    "GradScaler",
    "Lion",
    "Muon",
    "Optimizer",
    "SGD",
    "decay_groups",
    "muon_groups",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]


def __getattr__(name: str) -> Any:
    raise elsewhere.missing_from(__name__, name, elsewhere.OPTIM)
