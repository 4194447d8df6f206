"""The same weights, bit by bit, for every strategy, placement, recomputation and way of making gradients.

With kernels and sizes as they are: `python -m tests.processors` asks for it in each class of processor, whose
libraries all cut sums into other blocks. The vocabulary, tied to the head, is no multiple of a block.
"""

import hashlib
from functools import cache

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, units
from shardrt.fsdp.options import chunks
from shardrt.recompute import checkpoint
from tests import lab

RANKS, WORDS, STEPS, LENGTH = 4, 5003, 2, 256
BATCHES = np.random.default_rng(0).integers(0, WORDS, (STEPS, RANKS, 2, LENGTH + 1))
# What differs from FULL_SHARD with whole gradients: settings of fully_shard, what each block is wrapped in,
# whether gradients are made in pieces.
WAYS = {
    **{name: {"strategy": name} for name in ("SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD", "HYBRID_SHARD")},
    "in pieces": {"pieces": True},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "recomputed": {"wrap": checkpoint},
    "recomputed but for matmuls": {"wrap": lambda block: checkpoint(block, "matmul")},
}


def trained(low, wrap=lambda block: None, **settings):
    """(the hash of the weights after STEPS steps, on rank 0; whether the root's gradient was in pieces)."""
    shardrt.manual_seed(1)
    mesh = lab.mesh_for(settings.get("strategy"))
    if low:
        settings["mp_policy"] = MixedPrecisionPolicy("bfloat16")
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=LENGTH, vocab_size=WORDS, dropout=0.1))
    for block in model.blocks:
        wrap(block)
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(BATCHES):
        shardrt.manual_seed(1, step)
        tokens = batch[mesh.world.rank]
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        lab.update(optimizer)
    weights = full_state_dict(model)
    root, block = (unit.groups[0].arenas["gradients"] for unit in units(model)[:2])
    return hashlib.sha256(b"".join(array.tobytes() for array in weights.values())).hexdigest(), root is block


@cache
def fully_sharded(low):
    return lab.first(RANKS, trained, low)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_training_has_the_bits_of_full_shard(way, low, monkeypatch):
    (expected, _), settings = fully_sharded(low), dict(WAYS[way])
    in_pieces = settings.pop("pieces", False)
    if in_pieces:
        monkeypatch.setattr(chunks, "IN_CHUNKS", 0)
        monkeypatch.setattr(chunks, "SHORTEST", 0)
    assert lab.first(RANKS, trained, low, **settings) == (expected, in_pieces)
