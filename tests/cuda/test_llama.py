"""A Llama on the GPU emulator: read from files, trained in chunks, continued; as on the CPU."""

from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.hub import load_pretrained, save_pretrained
from models.llama import Llama, LlamaConfig
from models.sampling import continued, greedy
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from tests.cuda.small_gpt import agree

CONFIG = LlamaConfig(
    n_layer=1, n_head=2, n_kv_head=1, n_embd=8, n_hidden=12, block_size=8, vocab_size=29, loss_chunk=3
)
BIASES = replace(CONFIG, qkv_bias=True)
EXPERTS = replace(CONFIG, experts=3, qk_norm="head", head_size=6, balance_loss=0.1)
BFLOAT16 = MixedPrecisionPolicy("bfloat16", "float32", full_precision=(nn.RMSNorm,))


def run(name, folder, policy):
    """Losses of two steps, weights after them, and what greedily follows."""
    mesh = init_device_mesh(name)
    model = load_pretrained(folder, loss_chunk=3)
    settings = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    tokens = np.random.default_rng(mesh.rank).integers(0, 29, (2, 6))
    losses = []
    for _ in range(2):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    text = continued(model.eval(), tokens[:, :3], 3, greedy, block_size=8)
    return losses, full_state_dict(model), text


@pytest.mark.parametrize(
    ("config", "policy", "tolerance"),
    [(CONFIG, None, 2e-5), (CONFIG, BFLOAT16, 2e-2), (EXPERTS, None, 2e-5), (BIASES, None, 2e-5)],
    ids=["float32", "bfloat16", "experts", "biases"],
)
def test_it_is_read_trained_and_continued_as_on_the_cpu(gpu, tmp_path, config, policy, tolerance):
    shardrt.manual_seed(0)
    save_pretrained(Llama(config), tmp_path / "llama")
    expected = thread.run(1, run, "cpu", tmp_path / "llama", policy)
    found = thread.run(1, run, "cuda", tmp_path / "llama", policy)
    agree([each[:2] for each in found], [each[:2] for each in expected], tolerance)
    if policy is None:
        np.testing.assert_array_equal(found[0][2], expected[0][2])
