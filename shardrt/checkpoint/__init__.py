"""Checkpoints of a run, and whole weights in and out.

Read in this order: disk, pieces, manifest, rankfile, store, checkpoints. weights, state and
optimizer_state handle only files and dicts of whole arrays.
"""

from shardrt.checkpoint.checkpoints import CheckpointError, CheckpointManager, NonfiniteWeights
from shardrt.checkpoint.manifest import Damaged
from shardrt.checkpoint.optimizer_state import get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.checkpoint.state import full_state_dict
from shardrt.checkpoint.store import Store, read_manifest, verify
from shardrt.checkpoint.weights import load, save

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Damaged",
    "NonfiniteWeights",
    "Store",
    "full_state_dict",
    "get_optimizer_state_dict",
    "load",
    "read_manifest",
    "save",
    "set_optimizer_state_dict",
    "verify",
]
