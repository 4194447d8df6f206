"""What a step on the GPU promises, beside what tests/gpu and tests/softgpu train: bits and copies.

Whatever reads device memory from the host, or mixes the two, is an error of CuPy's.
"""

from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.gpt import GPT
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, set_world_invariant
from tests.cuda.small_gpt import CONFIG


def train_invariant(name):
    """Weights after a step of four micro-batches, and its norm."""
    mesh = init_device_mesh(name, reduction="tree")  # NCCL adds in an order of its own
    shardrt.manual_seed(0)
    model = GPT(replace(CONFIG, dropout=0.2))
    fully_shard(model, mesh=mesh)
    set_world_invariant(model, 4)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(mesh.rank, 4, mesh.size):
        text = np.random.default_rng(number).integers(0, CONFIG.vocab_size, (2, CONFIG.block_size + 1))
        (F.cross_entropy(model(text[:, :-1]), text[:, 1:]) * 0.25).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm, full_state_dict(model)


def test_one_rank_and_two_train_to_the_same_bits(gpu):
    (norm, weights), (norm_of_two, weights_of_two) = (
        thread.run(ranks, train_invariant, "cuda")[0] for ranks in (1, 2)
    )
    assert norm == norm_of_two > 0.1
    for key, values in weights.items():
        np.testing.assert_array_equal(weights_of_two[key], values, err_msg=key)
    assert norm == pytest.approx(thread.run(1, train_invariant, "cpu")[0][0], rel=1e-5)


def test_the_norm_of_all_gradients_is_read_in_one_copy(software, gpu):
    """The host waits once, however many pieces there are."""
    layers = [nn.LayerNorm(5) for _ in range(3)]
    x = shardrt.Tensor(gpu.asarray(np.arange(10, dtype=np.float32).reshape(2, 5)))
    for layer in layers:
        x = layer(x)
    x.backward(gpu.asarray(np.ones((2, 5), np.float32)))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    software.log.clear()
    assert nn.utils.clip_grad_norm_(parameters, 1.0) > 1
    assert len(parameters) == 6 and [what for what, *_ in software.log].count("copy") == 1
