"""One hash of the weights for every strategy, placement, recomputation and way of making gradients.

`python -m tests.processors` asks for it in each class of processor: libraries block their sums differently in
each. The vocabulary is no multiple of a block, and larger than what a matmul makes at once.
"""

import hashlib
from functools import cache

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, buffers, fully_shard, units
from shardrt.recompute import checkpoint_wrapper
from tests.fsdp.nets import shard  # noqa: F401

RANKS, WORDS, STEPS = 4, 5003, 2
BATCHES = np.random.default_rng(0).integers(0, WORDS, (STEPS, RANKS, 2, 24))
