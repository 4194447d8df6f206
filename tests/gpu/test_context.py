"""Context parallelism on the GPU, as on the CPU. Ranks are threads that share it."""

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, memory_plan, set_gradient_divide_factor
from shardrt.parallel import ContextParallel, parallelize_module, shard_sequence
from tests.gpu.test_tensor_parallel import MODELS

pytestmark = pytest.mark.gpu

DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8])


def train(name, kind, precision):
    """Losses and norms of two steps, with documents."""
    mesh = init_device_mesh(name, (2,), ("cp",))
    shardrt.manual_seed(3)
    model = MODELS[kind]()
    parallelize_module(model, mesh, {"blocks.*.attention": ContextParallel()})
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(precision, "float32"))
    set_gradient_divide_factor(model, 1.0)
    optimizer, message = None, []
    for step in range(2):
        shardrt.manual_seed(3, step=step)
        rows = np.random.default_rng(step).integers(0, 19, (2, 9))
        starts = F.document_starts(DOCUMENTS)
        part = shard_sequence(rows[:, :-1], rows[:, 1:], mesh=mesh, starts=starts)._asdict()
        if optimizer is None:
            memory_plan(model, step=lambda part=part: model(**part).backward())
            optimizer = optim.SGD(model.parameters(), lr=0.1)
        loss = model(**part, reduction="sum") * (1 / 16)
        loss.backward()
        message.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return message


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance"),
    [("gpt", "float32", 1e-4), ("llama", "float32", 1e-4), ("llama", "bfloat16", 3e-2)],
)
def test_losses_and_norms_are_those_of_the_cpu(gpu, kind, precision, tolerance):
    found, expected = (thread.run(2, train, name, kind, precision) for name in ("cuda", "cpu"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
