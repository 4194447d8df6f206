"""Experts beside tensor and context parallelism on the GPU, as on the CPU. Ranks are threads on it."""

import numpy as np
import pytest

import shardrt
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import nn, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, memory_plan, set_gradient_divide_factor
from shardrt.parallel import context_plan, expert_plan, parallelize_module, shard_sequence

pytestmark = pytest.mark.gpu

AXES = ("dp_shard", "cp", "tp")
SHAPE = LlamaConfig(1, 2, 1, 16, 16, 8, 19, init_std=0.1, qk_norm="head", experts=4, balance_loss=0.1)


def train(name, sizes, sequence):
    """Losses and norms of two steps, experts over all ranks."""
    mesh = init_device_mesh(name, sizes, AXES)
    shardrt.manual_seed(3)
    model = Llama(SHAPE)
    fold, data = mesh.fold("ep", mesh.size, over=AXES), mesh.flat("dp_shard", "cp")
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    parallelize_module(model, mesh["cp"], context_plan(model))
    parallelize_module(model, fold["ep"], expert_plan(model))
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=fold["efsdp"])
    fully_shard(model, mesh=data)
    set_gradient_divide_factor(model, 1.0)
    optimizer, message = None, []
    for step in range(2):
        rows = np.random.default_rng(step).integers(0, 19, (2, 9))
        part = shard_sequence(rows[:, :-1], rows[:, 1:], mesh=mesh["cp"])._asdict()
        if optimizer is None:
            memory_plan(model, step=lambda part=part: model(**part).backward())
            optimizer = optim.SGD(model.parameters(), lr=0.1)
        loss = model(**part, reduction="sum") * (1 / 16)
        loss.backward()
        message.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return message


@pytest.mark.parametrize(("sizes", "sequence"), [((1, 1, 2), False), ((1, 2, 2), True)], ids=str)
def test_losses_and_norms_are_those_of_the_cpu(gpu, sizes, sequence):
    ranks = int(np.prod(sizes))
    found, expected = (thread.run(ranks, train, name, sizes, sequence) for name in ("cuda", "cpu"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
