"""Pipelines on the GPU, as on the CPU. Ranks are threads that share it."""

import numpy as np
import pytest

import shardrt
from models.llama import Llama, LlamaConfig
from shardrt import optim
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import Pipeline

pytestmark = pytest.mark.gpu

CONFIG = LlamaConfig(
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    n_embd=16,
    n_hidden=16,
    block_size=8,
    vocab_size=19,
    init_std=0.1,
    tied=False,
)


def train(name, schedule, shards, v=None, communicator="auto", **settings):
    """Losses and norms of two steps of four micro-batches."""
    mesh = init_device_mesh(name, (2, shards), ("pp", "dp_shard"), communicator=communicator)
    shardrt.manual_seed(3)
    model = Llama(CONFIG)
    pipeline = Pipeline(model, mesh["pp"], schedule=schedule, micro_batches=4, stages_per_rank=v)
    for stage in pipeline.stages:
        fully_shard(stage, mesh=mesh["dp_shard"], **settings)
    optimizer, message = optim.AdamW(model.parameters(), lr=1e-2), []

    def inputs(rows):
        return rows[:, :-1], rows[:, 1:]

    def loss(output, rows):
        found = output * 0.25
        message.append(found.item())
        return found

    for step in range(2):
        shardrt.manual_seed(3, step=step)
        rows = np.random.default_rng(step).integers(0, 19, (8, 9))
        batches = np.split(np.split(rows, shards)[mesh.rank_of("dp_shard")], 4)
        pipeline.step(loss, batches, inputs=inputs)
        message.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    message.append(float(pipeline(rows[:2, :-1], rows[:2, 1:])))
    return message


@pytest.mark.parametrize(
    ("schedule", "v", "shards"), [("1F1B", 1, 2), ("ZB-H1", 1, 1), ("ZBVZeroBubble", 2, 1)]
)
def test_losses_and_norms_are_those_of_the_cpu(gpu, schedule, v, shards):
    found, expected = (thread.run(2 * shards, train, name, schedule, shards, v) for name in ("cuda", "cpu"))
    assert [len(message) for message in found] == [len(message) for message in expected]
    for message, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(message, wanted, rtol=0, atol=1e-4)


def test_bfloat16_goes_over_links(gpu):
    policy = MixedPrecisionPolicy("bfloat16", "float32")
    found, expected = (thread.run(2, train, name, "ZB-H1", 1, mp_policy=policy) for name in ("cuda", "cpu"))
    for message, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(message, wanted, rtol=3e-2)
